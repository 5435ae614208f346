"""Recorded multiplies whose gradients are wanted, and their backward passes, which are recorded as well.

A backward pass is recorded when it is first run: its launches are watched, and made again for tensors that pass guards like the
call's own. Tensors come from autograd, which has looked after versions and hooks. Gradients of gradients, and whatever is not
ordinary, go the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron import derivatives, functions
from fastkron_py.kron.canonical import canonical
from fastkron_py.kron.implementation import given_back
from fastkron_py.runtime import torch_internals as guards
from fastkron_py.runtime.call_cache import Guarded, is_recordable, may_repeat_backward
from fastkron_py.runtime.eager import unseen_by_autograd
from fastkron_py.runtime.operator import asked_for, batchable, take, undecorated
from fastkron_py.runtime.precision import resolved

MOST_TRIES: Final = 8  # backward passes recorded, or failures to, that a multiply is granted


class _Pass(NamedTuple):
    """A recorded backward pass."""

    check: guards.Guard  # of dy, x and the factors
    precision: str
    replay: Any
    dense: bool  # dy is made contiguous first
    turned: tuple[bool, ...]  # results that the launches leave transposed

    def run(self, dy: Tensor, operands: Sequence[Tensor], alpha: float) -> list[Tensor]:
        """The gradients wanted."""
        found: list[Tensor] = self.replay((dy.contiguous() if self.dense else dy, *operands), alpha)
        if True not in self.turned:
            return found
        return [t.mT.contiguous() if turned else t for t, turned in zip(found, self.turned, strict=True)]


class Multiply(Guarded):
    """A recorded multiply without z."""

    def __init__(self, tensors: Sequence[Tensor], replay: Any, left: bool, backend: str) -> None:
        super().__init__(tensors)
        self.replay = replay
        self.left, self.backend = left, backend
        self._passes: list[_Pass] = []
        self._tries = 0

    def gradients(
        self, dy: Tensor, operands: Sequence[Tensor], needs: Sequence[bool], alpha: float, precision: str | None
    ) -> Sequence[Tensor | None]:
        """Gradients of x and of the factors, which are the operands; those that are needed."""
        found = None
        if may_repeat_backward():
            found = self._replayed(dy, operands, needs, alpha, resolved(precision))
        if found is None:
            return self._differentiable(dy, operands, needs, alpha, precision)
        return take(found, needs) if False in needs else found

    def _replayed(self, dy: Tensor, operands: Sequence[Tensor], needs: Sequence[bool], alpha: float, precision: str) -> list[Tensor] | None:
        for one in self._passes:
            if one.precision == precision and one.check(dy, *operands):
                return one.run(dy, operands, alpha) if one.replay.is_here() else None
        tensors = (dy, *operands)
        if self._tries >= MOST_TRIES or not is_recordable(tensors):
            return None
        self._tries += 1
        return self._record(dy, operands, needs, alpha, precision)

    def _record(self, dy: Tensor, operands: Sequence[Tensor], needs: Sequence[bool], alpha: float, precision: str) -> list[Tensor] | None:
        """Run a backward pass and keep it, where it can be repeated; None where it was not run."""
        from fastkron_py.kron import triton_backend, triton_backward
        from fastkron_py.runtime.device import on_device
        from fastkron_py.runtime.recorder import Recorder

        check = guards.guard((dy, *operands))
        x, *factors = _apart(operands)
        need_x, *need_factors = needs
        with unseen_by_autograd(x):
            problem = canonical(self._matrix(x), factors, self.left)
            dy4 = problem.pack(self._matrix(dy))
            dense = dy4.data_ptr() != dy.data_ptr() or triton_backend.mergeable(dy4) is not dy4
            if dense:
                dy = dy.contiguous()
                dy4 = problem.pack(self._matrix(dy))
            given, used = (dy, x, *factors), (dy4, problem.x, *problem.factors)
            if any([a.data_ptr() != b.data_ptr() for a, b in zip(given, used, strict=True)]):
                return None
            with on_device(x):
                with Recorder(used, alpha) as recorder:
                    dx4, dfs = triton_backward.backward(dy4, problem.x, problem.factors, alpha, need_x, need_factors, precision)
                made = [t for t in (dx4, *dfs) if t is not None]
                wanted = [t for t, need in zip((x, *factors), needs, strict=True) if need]
                turned = tuple([self.left and need for need in needs[1:] if need])
                turned = (False, *turned) if need_x else turned
                if all([a.numel() == b.numel() for a, b in zip(made, wanted, strict=True)]):
                    shapes = [t.mT.shape if turn else t.shape for t, turn in zip(wanted, turned, strict=True)]
                    replay = recorder.replay(made, shapes)
                    if replay is not None:
                        self._passes.append(_Pass(check, precision, replay, dense, turned))
            results = given_back(problem, dx4, dfs, self._matrix(x), factors)
            if need_x:
                results[0] = results[0].reshape(x.shape)
            return results

    def _matrix(self, t: Tensor) -> Tensor:
        return t if t.ndim > 1 else t.unsqueeze(-1 if self.left else 0)

    def _differentiable(
        self, dy: Tensor, operands: Sequence[Tensor], needs: Sequence[bool], alpha: float, precision: str | None
    ) -> list[Tensor | None]:
        x, *factors = operands
        options = (alpha, precision, self.backend, self.left)
        dx, dfs = derivatives.reverse(functions.CALLS, self._matrix(dy), self._matrix(x), factors, needs[0], needs[1:], options)
        return [None if dx is None else dx.reshape(x.shape), *dfs]


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies instead of those that begin where another one does, as a factor that comes twice."""
    seen: set[int] = set()
    found = []
    for t in tensors:
        found.append(t.clone() if t.data_ptr() in seen else t)
        seen.add(t.data_ptr())
    return found


class _Recorded(torch.autograd.Function):
    """A recorded multiply."""

    @staticmethod
    def forward(ctx: Any, multiply: Multiply, alpha: float, precision: str | None, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.call = multiply, alpha, precision
        y: Tensor = multiply.replay(operands, alpha)[0]
        return y

    @staticmethod
    @batchable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        multiply, alpha, precision = ctx.call
        needs = tuple(asked_for(ctx, ctx.needs_input_grad[3:]))
        return None, None, None, *multiply.gradients(dy, ctx.saved_tensors, needs, alpha, precision)


differentiable: Any = undecorated(_Recorded)
