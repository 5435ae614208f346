"""Torch's own guards, those of torch.compile: are these tensors of the kind of those?

One call into C++ compares the type, dtype, device, sizes, strides, requires_grad and dispatch keys of every tensor. Dispatch keys are
taken with what is in force in the thread: they tell of autocast, of torch.func's transforms, of modes and of tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Guard = Callable[..., bool]


def find_guards() -> Any:
    """An inner part of torch: without it every call goes the long way."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards


GUARDS = find_guards()


def guard(tensors: Sequence[Tensor]) -> Guard:
    """The question whether other tensors, as arguments, are like these."""
    # One guard for all refuses a tensor that comes twice; then there is one for each.
    if len({id(t) for t in tensors}) == len(tensors):
        return _check(*tensors)
    checks = [_check(t) for t in tensors]
    return lambda *given: all([check(t) for check, t in zip(checks, given, strict=True)])


def _check(*tensors: Tensor) -> Guard:
    check: Guard = GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
