"""Sums of Kronecker products as the weight of an adapter: two multiplies, however many terms there are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastkron_py.adapters.composed import expanded, multiply
from fastkron_py.adapters.factor import Factor
from fastkron_py.adapters.plan import is_second_first
from fastkron_py.runtime.errors import value_error


def has_terms(w1: Factor, w2: Factor) -> bool:
    """Whether the factors are those of a sum.

    Raises:
        ValueError: one of them alone has terms, or they have different numbers of terms.
    """
    if w1.left.ndim == w2.left.ndim == 2:
        return False
    if w1.left.ndim != w2.left.ndim or w1.left.shape[0] != w2.left.shape[0]:
        got = f"shapes {tuple(w1.left.shape)} and {tuple(w2.left.shape)}"
        raise value_error("w1 and w2", "two matrices, or as many terms [terms, out, in] of each", got)
    return True


def add_terms(x: Tensor, w1: Factor, w2: Factor, base: Tensor | None, scale: Any, precision: str | None) -> Tensor:
    """``base + scale * x @ sum_t kron(w1[t], w2[t]).T`` of tensors that have been checked.

    The terms lie side by side in a mode of the first multiply's result, and the second multiply sums over them. Pairs of low rank are
    multiplied out.

    Args:
        x: ``[*, M, in1 * in2]``.
        w1: ``[terms, out1, in1]``, of x's dtype or float32.
        w2: ``[terms, out2, in2]``, of x's dtype or float32.
        base: ``[*, M, out1 * out2]`` or None.
        scale: a number.
        precision: of float32 products.
    """
    first, second = (expanded(w, precision, None).left for w in (w1, w2))
    terms, rows = first.shape[0], (first.shape[1], second.shape[1])
    modes = x.unflatten(-1, (first.shape[2], second.shape[2]))
    z = None if base is None else base.unflatten(-1, rows)
    if is_second_first(w1.size, w2.size):
        hidden = multiply(modes, [second.flatten(0, 1).mT], precision=precision)  # [*, in1, terms * out2]
        hidden = hidden.unflatten(-1, (terms, rows[1])).flatten(-3, -2)
        y = multiply(hidden, [first.permute(1, 2, 0).flatten(1)], z, scale, precision, left=True)
    else:
        hidden = multiply(modes, [first.transpose(0, 1).flatten(0, 1)], precision=precision, left=True)  # [*, out1 * terms, in2]
        hidden = hidden.unflatten(-2, (rows[0], terms)).flatten(-2)
        y = multiply(hidden, [second.transpose(1, 2).flatten(0, 1)], z, scale, precision)
    return y.flatten(-2)
