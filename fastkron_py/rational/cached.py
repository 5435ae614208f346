"""Rational calls that were made before, and their backward passes, recognised in the fewest steps: see `records`.

A backward pass is recorded when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.rational.derivatives import taken
from fastkron_py.runtime import torch_internals as guards
from fastkron_py.runtime.backend import choose_backend, requested_backend
from fastkron_py.runtime.call_cache import MOST_TRIES, Guarded, Records, is_recordable, may_be_triton, may_repeat_backward
from fastkron_py.runtime.eager import KINDS
from fastkron_py.runtime.operator import batchable, undecorated

# Gradients (dx, da, db), by operations that can be derived further; arguments as of the operator `rational_backward`.
Gradients = Callable[..., Sequence[Tensor]]


class _Pass(NamedTuple):
    """A recorded backward pass."""

    check: guards.Guard  # of dy, x, a and b
    needs: tuple[bool, bool]
    replay: Any


class Call(Guarded):
    """A recorded forward pass, and the backward passes after it."""

    def __init__(self, tensors: Sequence[Tensor], replay: Any, version: str, backend: str, gradients: Gradients) -> None:
        super().__init__(tensors)
        self.replay = replay
        self._version, self._backend, self._long_way = version, backend, gradients
        self._passes: list[_Pass] = []
        self._tries = 0

    def gradients(self, dy: Tensor, operands: Sequence[Tensor], need_x: bool, need_coefficients: bool) -> Sequence[Tensor]:
        """[dx] + [da, db], those that are needed."""
        if may_repeat_backward():
            for one in self._passes:
                if one.needs == (need_x, need_coefficients) and one.check(dy, *operands):
                    if not one.replay.is_here():
                        break
                    found: list[Tensor] = one.replay((dy, *operands), 1.0)
                    return found
            else:
                self._record((dy, *operands), need_x, need_coefficients)
        return self._long_way(dy, *operands, need_x, need_coefficients, self._version, self._backend)

    def _record(self, tensors: tuple[Tensor, ...], need_x: bool, need_coefficients: bool) -> None:
        """Record the pass that is about to go the long way, if it can be repeated."""
        if self._tries >= MOST_TRIES or not is_recordable(tensors, in_autocast=True):
            return
        self._tries += 1
        from fastkron_py.rational import launches as triton_rational

        dy, x, a, b = tensors
        replay = triton_rational.replay_backward(dy, x, a, b, self._version, need_x, need_coefficients)
        if replay is not None:
            self._passes.append(_Pass(guards.guard(tensors), (need_x, need_coefficients), replay))


class _Recorded(torch.autograd.Function):
    """A recorded call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.call = call
        y: Tensor = call.replay(operands, 1.0)[0]
        return y

    @staticmethod
    @batchable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        _, need_x, need_a, need_b = ctx.needs_input_grad
        found = ctx.call.gradients(dy, ctx.saved_tensors, need_x, need_a or need_b)
        return None, *taken(found, need_x, need_a, need_b)


_differentiable: Any = undecorated(_Recorded)

RECORDS: Final[Records[Call]] = Records()


def forget() -> None:
    """Forget every call."""
    RECORDS.forget()


def replay(x: Any, a: Any, b: Any, version: str, autocast: torch.dtype | None) -> Tensor | None:
    """The result of a call, if one like it was recorded; else None. Nothing of the tensors has been checked yet.

    Args:
        x: as in `functional.rational`.
        a: the numerator.
        b: the denominator.
        version: "A", "B", "C" or "N".
        autocast: its dtype, where it is on.
    """
    if type(x) not in KINDS or type(a) not in KINDS or type(b) not in KINDS:
        return None
    try:
        shape = x.shape
    except RuntimeError:  # of a nested tensor
        return None
    tensors = (x, a, b)
    call = RECORDS.find((shape, version, autocast, requested_backend()), tensors)
    if call is None or not call.replay.is_here():
        return None
    y: Tensor = _differentiable(call, *tensors) if call.with_gradient else call.replay(tensors, 1.0)[0]
    return y


def record(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype, autocast: torch.dtype | None, gradients: Gradients) -> None:
    """Record a call that has just returned a result of this dtype, if it can be repeated as it is."""
    tensors = (x, a, b)
    if not may_be_triton(x) or not is_recordable(tensors, in_autocast=True) or x.numel() == 0 or choose_backend("", x) != "triton":
        return
    requested = requested_backend()
    slot = RECORDS.grant((x.shape, version, autocast, requested))
    if slot is None:
        return
    from fastkron_py.rational import launches as triton_rational

    found = triton_rational.replay(x, a, b, version, dtype)
    if found is not None:
        slot.records.append(Call(tensors, found, version, requested, gradients))
