"""Rational calls like one that was made before, and their backward passes: launched again, with nothing found out anew.

As `recorded` does it for Kronecker products: guards say whether tensors are of the kind of those that a record was made for, and whatever
differs goes the long way, where every check is made and every error raised. A backward pass is recorded when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.ops import guards
from fastkron_py.ops.backend import choose_backend, requested_backend
from fastkron_py.ops.plain import is_ordinary, transforms_active
from fastkron_py.ops.recorded import MOST_KEYS, MOST_TRIES
from fastkron_py.ops.recorded_gradient import _is_watched

# Gradients (dx, da, db), by operations that can be derived further; arguments as of the operator `rational_backward`.
Gradients = Callable[..., Sequence[Tensor]]

_KINDS: Final = (Tensor, torch.nn.Parameter)


class _Pass(NamedTuple):
    """A recorded backward pass."""

    check: guards.Guard  # of dy, x, a and b
    needs: tuple[bool, bool]
    replay: Any


class Call:
    """A recorded forward pass, and the backward passes after it."""

    def __init__(self, tensors: Sequence[Tensor], replay: Any, version: str, backend: str, gradients: Gradients) -> None:
        self.replay = replay
        # Guards know which tensors require a gradient, but not whether gradients are recorded.
        self._indifferent = not any([t.requires_grad for t in tensors])
        self._enabled = torch.is_grad_enabled()
        self.with_gradient = self._enabled and not self._indifferent
        self._check = guards.guard(tensors)
        self._version, self._backend, self._long_way = version, backend, gradients
        self._passes: list[_Pass] = []
        self._tries = 0

    def fits(self, x: Tensor, a: Tensor, b: Tensor) -> bool:
        """Whether the call would do with these tensors what it did when it was recorded."""
        return self._check(x, a, b) and (self._indifferent or self._enabled == torch.is_grad_enabled())

    def gradients(self, dy: Tensor, operands: Sequence[Tensor], need_x: bool, need_coefficients: bool) -> Sequence[Tensor]:
        """[dx] + [da, db], those that are needed."""
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or _is_watched()):
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
        if self._tries >= MOST_TRIES or transforms_active() or not is_ordinary(tensors):
            return
        self._tries += 1
        from fastkron_py.kernels import rational_triton

        dy, x, a, b = tensors
        replay = rational_triton.replay_backward(dy, x, a, b, self._version, need_x, need_coefficients)
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
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        _, need_x, need_a, need_b = ctx.needs_input_grad
        found = iter(ctx.call.gradients(dy, ctx.saved_tensors, need_x, need_a or need_b))
        dx = next(found) if need_x else None
        da, db = (next(found), next(found)) if need_a or need_b else (None, None)
        return None, dx, da if need_a else None, db if need_b else None


# `apply` without what torch.autograd.Function adds for torch.func's transforms, in which nothing is replayed.
_differentiable: Any = super(torch.autograd.Function, _Recorded).apply


class _Slot:
    """Calls of one key, and how many attempts to record one there were."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tries = 0


_slots: dict[tuple[Any, ...], _Slot] = {}


def forget() -> None:
    """Forget every call."""
    _slots.clear()


def replay(x: Any, a: Any, b: Any, version: str, autocast: torch.dtype | None) -> Tensor | None:
    """The result of a call, if one like it was recorded; else None. Nothing of the tensors has been checked yet.

    Args:
        x: as in `functional.rational`.
        a: the numerator.
        b: the denominator.
        version: "A", "B", "C" or "N".
        autocast: its dtype, where it is on.
    """
    if type(x) not in _KINDS or type(a) not in _KINDS or type(b) not in _KINDS:
        return None
    try:
        shape = x.shape
    except RuntimeError:  # of a nested tensor
        return None
    slot = _slots.get((shape, version, autocast, requested_backend()))
    if slot is None or _is_watched():
        return None
    for call in slot.calls:
        if call.fits(x, a, b):
            if not call.replay.is_here():
                return None
            y: Tensor = _differentiable(call, x, a, b) if call.with_gradient else call.replay((x, a, b), 1.0)[0]
            return y
    return None


def record(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype, autocast: torch.dtype | None, gradients: Gradients) -> None:
    """Record a call that has just returned a result of this dtype, if it can be repeated as it is."""
    requested = requested_backend()
    if guards.GUARDS is None or not (requested == "triton" or (requested == "auto" and x.is_cuda)):
        return
    tensors = (x, a, b)
    if transforms_active() or not is_ordinary(tensors) or x.numel() == 0 or choose_backend("", x) != "triton":
        return
    key = (x.shape, version, autocast, requested)
    slot = _slots.get(key)
    if slot is None:
        if len(_slots) >= MOST_KEYS:
            forget()
        slot = _slots[key] = _Slot()
    if slot.tries >= MOST_TRIES:
        return
    slot.tries += 1
    from fastkron_py.kernels import rational_triton

    found = rational_triton.replay(x, a, b, version, dtype)
    if found is not None:
        slot.calls.append(Call(tensors, found, version, requested, gradients))
