"""Kronecker products that were computed before, recognised in the fewest steps: see `records`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from fastkron_py.kron.cached_gradient import Multiply, differentiable
from fastkron_py.kron.canonical import canonical
from fastkron_py.runtime.backend import choose_backend, requested_backend
from fastkron_py.runtime.call_cache import Records, is_recordable, may_be_triton
from fastkron_py.runtime.eager import KINDS
from fastkron_py.runtime.precision import resolved

_ADDS_NOTHING: Final = (float, int)

RECORDS: Final[Records[Multiply]] = Records()


def forget() -> None:
    """Forget every call: to be called when the backends would now plan or launch one differently."""
    RECORDS.forget()


def _key(x: Any, factors: Any, alpha: Any, beta: Any, precision: Any, left: bool) -> tuple[Any, ...] | None:
    """What a call is looked up by; None for calls that are not recorded. Nothing has been checked yet."""
    if type(x) not in KINDS or type(factors) not in (list, tuple) or type(alpha) is not float or not -math.inf < alpha < math.inf:
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
    if key is None:
        return None
    operands = (x, *factors)
    multiply = RECORDS.find(key, operands)
    if multiply is None or not multiply.replay.is_here():
        return None
    y: Tensor = differentiable(multiply, alpha, precision, *operands) if multiply.with_gradient else multiply.replay(operands, alpha)[0]
    return y


def record(x: Any, factors: Any, alpha: Any, beta: Any, precision: Any, left: bool, shape: Sequence[int]) -> None:
    """Record a call without z that has just returned a result of this shape, if it can be repeated as it is."""
    key = _key(x, factors, alpha, beta, precision, left)
    if key is None or not may_be_triton(x):
        return
    operands = (x, *factors)
    if not is_recordable(operands) or choose_backend("", x) != "triton" or math.prod(shape) == 0 or x.numel() == 0:
        return
    slot = RECORDS.grant(key)
    if slot is None:
        return
    replay = _prepare(x, factors, alpha, resolved(precision), left, shape)
    if replay is not None:
        slot.records.append(Multiply(operands, replay, left, requested_backend()))


def _prepare(x: Tensor, factors: Sequence[Tensor], alpha: float, precision: str, left: bool, shape: Sequence[int]) -> Any:
    """What repeats the call on the operands as they come; None where their canonical form is a copy."""
    from fastkron_py.kron import triton_backend

    matrix = x if x.ndim > 1 else x.unsqueeze(-1 if left else 0)
    problem = canonical(matrix, factors, left)
    given, used = (x, *factors), (problem.x, *problem.factors)
    if any([a.data_ptr() != b.data_ptr() for a, b in zip(given, used, strict=True)]):
        return None
    return triton_backend.replay(problem.x, problem.factors, precision, alpha != 1.0, shape)
