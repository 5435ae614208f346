"""Polynomial KAN layers that were computed before, recognised in the fewest steps: see `records`.

A layer's launches are watched once, forward and backward, and made again. That is all that is done for it, large or small: sums of
coefficients and of gradients are launches too, and descriptors of large operands are made of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kan import operator
from fastkron_py.kan.config import LARGE_PRODUCTS
from fastkron_py.runtime import torch_internals as guards
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.call_cache import MOST_TRIES, Guarded, Records, is_here, is_recordable, may_be_triton, may_repeat_backward
from fastkron_py.runtime.eager import KINDS, unseen_by_autograd, wants_gradient
from fastkron_py.runtime.operator import asked_for, batchable_one_by_one, take, undecorated
from fastkron_py.runtime.precision import resolved

Needs = tuple[bool, bool, bool]  # gradients of x, of the coefficients, of the bias


class _Layer(Guarded):
    """A recorded layer: the replay of its launches, and those of its backward passes."""

    def __init__(self, tensors: Sequence[Tensor], replay: Any, options: tuple[Any, ...], work: int) -> None:
        super().__init__(tensors)
        self.replay = replay
        self.options = options
        self.work = work
        self._passes: list[tuple[Needs, guards.Guard, Any]] = []
        self._tries = 0

    def gradients(self, dy: Tensor, x: Tensor, coefficients: Tensor, needs: Needs) -> list[Tensor]:
        """Gradients of x, of the coefficients and of the bias, those that are needed."""
        if may_repeat_backward():
            tensors = (dy, x, coefficients)
            for needed, check, replay in self._passes:
                if needed == needs and check(*tensors) and replay.takes(tensors):
                    found: list[Tensor] = replay(tensors, 1.0)
                    return found
            if self._tries < MOST_TRIES and is_recordable(tensors) and is_here(tensors):
                self._tries += 1
                return self._record(dy, x, coefficients, needs)
        return operator.differentiable_gradients(dy, x, coefficients, needs, self.options)

    def _record(self, dy: Tensor, x: Tensor, coefficients: Tensor, needs: Needs) -> list[Tensor]:
        """Run a backward pass and keep it, where it can be repeated."""
        from fastkron_py.runtime.device import on_device
        from fastkron_py.runtime.recorder import Recorder

        tensors = (dy, x, coefficients)
        if len({t.data_ptr() for t in tensors}) < len(tensors):
            return operator.differentiable_gradients(dy, x, coefficients, needs, self.options)
        check = guards.guard(tensors)
        *described, precision, _ = self.options
        spec = operator.spec_of(coefficients, *described)
        with unseen_by_autograd(x), on_device(x), Recorder(tensors, 1.0) as recorder:
            dy2, x2 = (t.reshape(-1, t.shape[-1]) for t in (dy, x))
            found = operator.launched_gradients(dy2, x2, coefficients, needs[0], needs[1], spec, precision)
            if needs[2]:
                found.append(operator.launched_bias_gradient(dy2))
            shapes = [s for s, need in zip((x.shape, coefficients.shape, dy.shape[-1:]), needs, strict=True) if need]
            replay = recorder.replay(found, shapes, _most_shared(self.work))
            found = [t.reshape(s) for t, s in zip(found, shapes, strict=True)]
        if replay is not None:
            self._passes.append((needs, check, replay))
        return found


RECORDS: Final[Records[_Layer]] = Records()
_SHARED: Final = 1 << 20


def _most_shared(work: int) -> int | None:
    """Bytes of a buffer that stays for as long as all launches take: of large layers no more than the smallest, which cost more in turn."""
    return None if work < LARGE_PRODUCTS else _SHARED


def forget() -> None:
    """Forget every call: to be called when the backends would now plan or launch one differently."""
    RECORDS.forget()


def _key(x: Any, coefficients: Any, bias: Any, described: tuple[Any, ...], precision: Any) -> tuple[Any, ...] | None:
    """What a call is looked up by; None for calls that are not recorded. Nothing has been checked yet."""
    if type(x) not in KINDS or type(coefficients) not in KINDS or not (bias is None or type(bias) in KINDS):
        return None
    if not (precision is None or type(precision) is str) or not all([type(d) in (str, int) for d in described]):
        return None
    from fastkron_py.kan.bases.registry import find_basis

    try:
        return (x.shape, coefficients.shape, bias is None, find_basis(described[0]), described, resolved(precision), requested_backend())
    except RuntimeError:  # of a nested tensor
        return None


def replay(x: Any, coefficients: Any, bias: Any, described: tuple[Any, ...], precision: Any) -> Tensor | None:
    """The result of a call, if one like it was recorded; else None. Not for a graph that is being compiled."""
    key = _key(x, coefficients, bias, described, precision)
    if key is None:
        return None
    tensors = (x, coefficients) if bias is None else (x, coefficients, bias)
    layer = RECORDS.find(key, tensors)
    if layer is None or not layer.replay.takes(tensors):
        return None
    y: Tensor = _apply(layer, *tensors) if layer.with_gradient else layer.replay(tensors, 1.0)[0]
    return y


def record(x: Any, coefficients: Any, bias: Any, described: tuple[Any, ...], precision: Any, options: tuple[Any, ...]) -> Tensor | None:
    """The result of a call, whose arguments were checked, recorded; None, if it cannot be repeated as it is.

    Args:
        x: the call's.
        coefficients: the call's.
        bias: the call's.
        described: the call's basis, normalisation and evaluation, as `replay` gets them.
        precision: the call's.
        options: as in the operator's schema.
    """
    key = _key(x, coefficients, bias, described, precision)
    if key is None or not may_be_triton(x):
        return None
    tensors = (x, coefficients) if bias is None else (x, coefficients, bias)
    work = x.numel() * coefficients.shape[0] * coefficients.shape[1]
    *about, _, backend = options
    spec = operator.spec_of(coefficients, *about)
    if work == 0 or not is_recordable(tensors) or operator.backend_of(backend, x, spec) != "triton":
        return None
    if not is_here(tensors):  # nor would the replay take them
        return None
    slot = RECORDS.grant(key) if len({t.data_ptr() for t in tensors}) == len(tensors) else None
    if slot is None:
        return None
    from fastkron_py.runtime.device import on_device
    from fastkron_py.runtime.recorder import Recorder

    shape = (*x.shape[:-1], coefficients.shape[1])
    with unseen_by_autograd(x), on_device(x), torch.no_grad(), Recorder(tensors, 1.0) as recorder:
        y = operator.launched(x.reshape(-1, x.shape[-1]), coefficients, bias, spec, precision)
        found = recorder.replay([y], [shape], _most_shared(work))
        y = y.reshape(shape)
    if found is None:  # nor would it be found another time
        slot.close()
        return None if wants_gradient(tensors) else y
    layer = _Layer(tensors, found, options, work)
    slot.records.append(layer)
    first: Tensor = _apply_first((layer, y), *tensors) if layer.with_gradient else y
    return first


class _Recorded(torch.autograd.Function):
    """A recorded layer."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, coefficients: Tensor, *bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, coefficients)
        ctx.layer = layer
        y: Tensor = layer.replay((x, coefficients, *bias), 1.0)[0]
        return y

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, coefficients = ctx.saved_tensors
        asked = asked_for(ctx, ctx.needs_input_grad[1:])
        needs = (asked[0], asked[1], len(asked) > 2 and asked[2])
        found = ctx.layer.gradients(dy, x, coefficients, needs) if any(needs) else ()
        return None, *take(found, needs)[: len(asked)]


class _First(torch.autograd.Function):
    """A layer that was just recorded, with its result."""

    @staticmethod
    def forward(ctx: Any, made: tuple[_Layer, Tensor], x: Tensor, coefficients: Tensor, *bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, coefficients)
        ctx.layer, y = made
        return y

    backward = staticmethod(_Recorded.backward)


_apply: Any = undecorated(_Recorded)
_apply_first: Any = undecorated(_First)
