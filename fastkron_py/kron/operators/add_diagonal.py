"""The operators that `KroneckerProduct.add_diagonal` makes from its argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastkron_py.kron.checks import broadcast_batch, shape_of
from fastkron_py.kron.operators.lazy import LazyOperator, check_arrays
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal
from fastkron_py.kron.operators.shifted import EQUAL, KRONECKER, VECTOR
from fastkron_py.runtime.errors import value_error


def plus_diagonal(product: LazyOperator, s: Any) -> KroneckerPlusDiagonal:
    """``K + D`` for each kind of argument that `KroneckerProduct.add_diagonal` takes, but for operators."""
    factors, n = product._arrays, product.shape[-1]
    label, first = product._first
    if isinstance(s, Sequence) and not isinstance(s, str | bytes):
        given, labels, form = list(s), [f"s[{i}]" for i in range(len(s))], KRONECKER
        if len(given) != len(factors):
            raise value_error("s", f"{len(factors)} vectors, one for each factor", len(given))
    elif getattr(s, "ndim", 0) == 0:
        number = product._scalar(s, "s")
        if not isinstance(number, Tensor):
            return KroneckerPlusDiagonal(factors, (), EQUAL, number, product.shape)
        return KroneckerPlusDiagonal(factors, [number.to(first.device, first.dtype)], EQUAL, None, product.shape)
    else:
        given, labels, form = [s], ["s"], EQUAL if s.shape[-1] == 1 else VECTOR
    check_arrays([first, *given], [label, *labels])
    for i, (label, t) in enumerate(zip(labels, given, strict=True)):
        size = shape_of(factors[i])[-2:] if form == KRONECKER else (n, n)
        if t.ndim == 0 or ((t.shape[-1], t.shape[-1]) != size and not (form == EQUAL and t.shape[-1] == 1)):
            more = f", the diagonal that is added to factors[{i}]" if form == KRONECKER else " or [*batch, 1]"
            expected = f"a vector [{size[0]}]" + more
            raise value_error(label, expected, f"shape {tuple(t.shape)}")
    batch = broadcast_batch([product.shape[:-2], *[tuple(t.shape[:-1]) for t in given]], "factors, s")
    return KroneckerPlusDiagonal(factors, given, form, None, (*batch, n, n))
