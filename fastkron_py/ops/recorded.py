"""Calls that were made before, recognised in the fewest steps: what was found out then is used again.

A small problem's eager call is all overhead, and most of that is finding out that its arguments are right and ordinary. A record of
a call holds guards on its tensors (`guards`) and a replay of its launches. Whatever differs goes the long way, where every check is
made and every error raised.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.kernels.precision import resolved
from fastkron_py.ops import guards
from fastkron_py.ops.backend import choose_backend, logger, requested_backend
from fastkron_py.ops.canonical import canonical
from fastkron_py.ops.plain import is_ordinary, transforms_active
from fastkron_py.ops.recorded_gradient import Multiply, differentiable

MOST_KEYS: Final = 1024  # of calls that differ in more than strides; beyond, all are forgotten
MOST_TRIES: Final = 16  # records, or failures to make one, that a key is granted

_KINDS: Final = (Tensor, torch.nn.Parameter)
_ADDS_NOTHING: Final = (float, int)


class _Record:
    """A call, by guards on its tensors, and the way to repeat it."""

    def __init__(self, tensors: Sequence[Tensor], multiply: Multiply) -> None:
        self.multiply = multiply
        # Guards know which tensors require a gradient, but not whether gradients are recorded.
        self._indifferent = not any([t.requires_grad for t in tensors])
        self._enabled = torch.is_grad_enabled()
        self.with_gradient = self._enabled and not self._indifferent
        self._check = guards.guard(tensors)

    def fits(self, x: Tensor, factors: Sequence[Tensor]) -> bool:
        """Whether the call would do with these tensors what it did when it was recorded."""
        return self._check(x, *factors) and (self._indifferent or self._enabled == torch.is_grad_enabled())


class _Slot:
    """Records of one key, and how many attempts to make one there were."""

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.tries = 0


_slots: dict[tuple[Any, ...], _Slot] = {}


def forget() -> None:
    """Forget every call: to be called when the backends would now plan or launch one differently."""
    _slots.clear()


def _key(x: Any, factors: Any, alpha: Any, beta: Any, precision: Any, left: bool) -> tuple[Any, ...] | None:
    """What a call is looked up by; None for calls that are not recorded. Nothing has been checked yet."""
    if type(x) not in _KINDS or type(factors) not in (list, tuple) or type(alpha) is not float or not -math.inf < alpha < math.inf:
        return None
    if beta != 0 or type(beta) not in _ADDS_NOTHING or not (precision is None or type(precision) is str):
        return None
    try:
        shape = x.shape
    except RuntimeError:  # of a nested tensor
        return None
    return (shape, len(factors), left, alpha == 1.0, resolved(precision), requested_backend())


def replay(x: Any, factors: Any, alpha: Any, beta: Any, precision: Any, left: bool) -> Tensor | None:
    """The result of a call without z, if one like it was recorded; else None. Not for a graph that is being compiled."""
    key = _key(x, factors, alpha, beta, precision, left)
    slot = None if key is None else _slots.get(key)
    if slot is None or torch._C._len_torch_function_stack() or forward_ad._current_level >= 0 or logger.isEnabledFor(logging.DEBUG):
        return None
    for record in slot.records:
        if record.fits(x, factors):
            multiply = record.multiply
            if not multiply.replay.is_here():
                return None
            y: Tensor = (
                differentiable(multiply, alpha, precision, x, *factors)
                if record.with_gradient
                else multiply.replay((x, *factors), alpha)[0]
            )
            return y
    return None


def record(x: Any, factors: Any, alpha: Any, beta: Any, precision: Any, left: bool, shape: Sequence[int]) -> None:
    """Record a call without z that has just returned a result of this shape, if it can be repeated as it is."""
    key = None if guards.GUARDS is None else _key(x, factors, alpha, beta, precision, left)
    if key is None or not _may_be_triton(x):
        return
    tensors = (x, *factors)
    if transforms_active() or not is_ordinary(tensors) or torch.is_autocast_enabled(x.device.type):
        return
    if choose_backend("", x) != "triton" or math.prod(shape) == 0 or x.numel() == 0:
        return
    slot = _slots.get(key)
    if slot is None:
        if len(_slots) >= MOST_KEYS:
            forget()
        slot = _slots[key] = _Slot()
    if slot.tries >= MOST_TRIES:
        return
    slot.tries += 1
    replay = _prepare(x, factors, alpha, resolved(precision), left, shape)
    if replay is not None:
        slot.records.append(_Record(tensors, Multiply(replay, left, requested_backend())))


def _may_be_triton(x: Tensor) -> bool:
    """Whether the Triton backend is likely to have multiplied; asked after every call that no record fits."""
    requested = requested_backend()
    return requested == "triton" or (requested == "auto" and x.is_cuda)


def _prepare(x: Tensor, factors: Sequence[Tensor], alpha: float, precision: str, left: bool, shape: Sequence[int]) -> Any:
    """What repeats the call on the operands as they come; None where their canonical form is a copy."""
    from fastkron_py.kernels import triton_backend

    matrix = x if x.ndim > 1 else x.unsqueeze(-1 if left else 0)
    problem = canonical(matrix, factors, left)
    given, used = (x, *factors), (problem.x, *problem.factors)
    if any([a.data_ptr() != b.data_ptr() for a, b in zip(given, used, strict=True)]):
        return None
    return triton_backend.replay(problem.x, problem.factors, precision, alpha != 1.0, shape)
