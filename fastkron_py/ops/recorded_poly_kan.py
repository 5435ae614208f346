"""Polynomial KAN layers that were computed before, recognised in the fewest steps, as `recorded` does it for Kronecker products.

A small layer's eager call is all overhead. Its launches are watched once, forward and backward, and made again for tensors that pass
guards like the first call's. Whatever differs goes the long way, where every check is made and every error raised.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.kernels.precision import resolved
from fastkron_py.ops import guards
from fastkron_py.ops import poly_kan as operator
from fastkron_py.ops.backend import logger, requested_backend
from fastkron_py.ops.implementation import unseen_by_autograd
from fastkron_py.ops.plain import is_ordinary, transforms_active
from fastkron_py.tuning.poly_kan import LARGE_PRODUCTS

MOST_KEYS: Final = 1024  # beyond, all are forgotten
MOST_TRIES: Final = 16  # records, or failures to make one, that a key is granted

_KINDS: Final = (Tensor, torch.nn.Parameter)


def _is_watched() -> bool:
    """Whether something in this thread that guards do not tell of wants to see every call."""
    return bool(torch._C._len_torch_function_stack()) or forward_ad._current_level >= 0 or logger.isEnabledFor(logging.DEBUG)


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    device = tensors[0].device
    return (
        not transforms_active() and is_ordinary(tensors) and not torch.is_autocast_enabled(device.type) and device.type in ("cpu", "cuda")
    )


class _Layer:
    """A recorded layer: the replay of its launches, and those of its backward passes."""

    def __init__(self, replay: Any, options: tuple[Any, ...]) -> None:
        self.replay = replay
        self.options = options
        self._passes: list[tuple[tuple[bool, bool], guards.Guard, Any]] = []
        self._tries = 0

    def gradients(self, dy: Tensor, x: Tensor, coefficients: Tensor, needs: tuple[bool, bool]) -> Sequence[Tensor]:
        """Gradients of x and of the coefficients, those that are needed."""
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or _is_watched()):
            tensors = (dy, x, coefficients)
            for needed, check, replay in self._passes:
                if needed == needs and check(*tensors) and replay.is_here():
                    found: list[Tensor] = replay(tensors, 1.0)
                    return found
            if self._tries < MOST_TRIES and _is_plain(tensors):
                self._tries += 1
                return self._record(dy, x, coefficients, needs)
        return operator.differentiable_gradients(dy, x, coefficients, *needs, self.options)  # type: ignore[no-any-return]

    def _record(self, dy: Tensor, x: Tensor, coefficients: Tensor, needs: tuple[bool, bool]) -> list[Tensor]:
        """Run a backward pass and keep it, where it can be repeated."""
        from fastkron_py.kernels.recorder import Recorder
        from fastkron_py.kernels.triton_backend import on_device

        tensors = (dy, x, coefficients)
        if len({t.data_ptr() for t in tensors}) < len(tensors):
            return operator.gradients(*tensors, *needs, *self.options)
        check = guards.guard(tensors)
        *described, precision, _ = self.options
        spec = operator.spec_of(coefficients, *described)
        with unseen_by_autograd(x), on_device(x), Recorder(tensors, 1.0) as recorder:
            dy2, x2 = (t.reshape(-1, t.shape[-1]) for t in (dy, x))
            found = operator.launched_gradients(dy2, x2, coefficients, *needs, spec, precision)
            wanted = ([x] if needs[0] else []) + ([coefficients] if needs[1] else [])
            replay = recorder.replay(found, [t.shape for t in wanted])
            found = [t.reshape(w.shape) for t, w in zip(found, wanted, strict=True)]
        if replay is not None:
            self._passes.append((needs, check, replay))
        return found


class _Record:
    """A call, by guards on its tensors."""

    def __init__(self, tensors: Sequence[Tensor], layer: _Layer) -> None:
        self.layer = layer
        self._enabled = torch.is_grad_enabled()
        self._indifferent = not any([t.requires_grad for t in tensors])
        self.with_gradient = self._enabled and not self._indifferent
        self._check = guards.guard(tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the call would do with these tensors what it did when it was recorded."""
        return self._check(*tensors) and (self._indifferent or self._enabled == torch.is_grad_enabled())


_records: dict[Hashable, tuple[list[_Record], list[int]]] = {}


def forget() -> None:
    """Forget every call: to be called when the backends would now plan or launch one differently."""
    _records.clear()


def _key(x: Any, coefficients: Any, bias: Any, described: tuple[Any, ...], precision: Any) -> tuple[Any, ...] | None:
    """What a call is looked up by; None for calls that are not recorded. Nothing has been checked yet."""
    if type(x) not in _KINDS or type(coefficients) not in _KINDS or not (bias is None or type(bias) in _KINDS):
        return None
    if not (precision is None or type(precision) is str) or not all([type(d) in (str, int) for d in described]):
        return None
    from fastkron_py.kernels.poly_kan_bases import find_basis

    try:
        return (x.shape, coefficients.shape, bias is None, find_basis(described[0]), described, resolved(precision), requested_backend())
    except RuntimeError:  # of a nested tensor
        return None


def replay(x: Any, coefficients: Any, bias: Any, described: tuple[Any, ...], precision: Any) -> Tensor | None:
    """The result of a call, if one like it was recorded; else None. Not for a graph that is being compiled."""
    key = _key(x, coefficients, bias, described, precision)
    known = None if key is None else _records.get(key)
    if known is None or _is_watched():
        return None
    tensors = (x, coefficients) if bias is None else (x, coefficients, bias)
    for record in known[0]:
        if record.fits(tensors):
            layer = record.layer
            if not layer.replay.is_here():
                return None
            y: Tensor = _apply(layer, *tensors) if record.with_gradient else layer.replay(tensors, 1.0)[0]
            return y
    return None


def record(x: Any, coefficients: Any, bias: Any, described: tuple[Any, ...], precision: Any, options: tuple[Any, ...]) -> None:
    """Record a call that has just returned a result, if it can be repeated as it is; options as in the operator's schema."""
    key = None if guards.GUARDS is None else _key(x, coefficients, bias, described, precision)
    if key is None or not (requested_backend() == "triton" or (requested_backend() == "auto" and x.is_cuda)):
        return
    tensors = (x, coefficients) if bias is None else (x, coefficients, bias)
    work = x.numel() * coefficients.shape[0] * coefficients.shape[1]
    *about, _, backend = options
    spec = operator.spec_of(coefficients, *about)
    if not _is_plain(tensors) or operator.backend_of(backend, x, spec) != "triton" or not 0 < work < LARGE_PRODUCTS:
        return
    if key not in _records and len(_records) >= MOST_KEYS:
        forget()
    records, tries = _records.setdefault(key, ([], [0]))
    if tries[0] >= MOST_TRIES or len({t.data_ptr() for t in tensors}) < len(tensors):
        return
    tries[0] += 1
    from fastkron_py.kernels.recorder import Recorder
    from fastkron_py.kernels.triton_backend import on_device

    with unseen_by_autograd(x), on_device(x), torch.no_grad(), Recorder(tensors, 1.0) as recorder:
        matrix = x.reshape(-1, x.shape[-1])
        y = operator.launched(matrix, coefficients, bias, spec, precision)
        found = recorder.replay([y], [(*x.shape[:-1], coefficients.shape[1])])
    if found is None:  # nor would it be found another time
        tries[0] = MOST_TRIES
    else:
        records.append(_Record(tensors, _Layer(found, options)))


class _Recorded(torch.autograd.Function):
    """A recorded layer."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, coefficients: Tensor, *bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, coefficients)
        ctx.layer = layer
        y: Tensor = layer.replay((x, coefficients, *bias), 1.0)[0]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, coefficients = ctx.saved_tensors
        _, need_x, need_coefficients, *need_bias = ctx.needs_input_grad
        dx = dc = None
        if need_x or need_coefficients:
            dx, dc = operator.take(ctx.layer.gradients(dy, x, coefficients, (need_x, need_coefficients)), need_x, need_coefficients)
        return None, dx, dc, *[operator.bias_gradient(dy) if need else None for need in need_bias]


# `apply` without what torch.autograd.Function adds for torch.func's transforms, in which nothing is replayed.
_apply: Any = super(torch.autograd.Function, _Recorded).apply
