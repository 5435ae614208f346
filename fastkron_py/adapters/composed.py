"""LoKr products composed of Kronecker multiplies: for compilers, transforms, derivatives of gradients, and autograd on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.adapters.factor import Factor
from fastkron_py.adapters.plan import CPU_COSTS, GPU_COSTS, Plan, best_plan, is_second_first
from fastkron_py.kron import operator
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.errors import value_error

_EXPORTED: Final = 4096  # rows that an exported program's plan is for


def add_product(
    x: Tensor, w1: Factor, w2: Factor, base: Tensor | None, scale: Any, precision: str | None, backend: str | None = None
) -> Tensor:
    """``base + scale * x @ kron(w1, w2).T`` of tensors that have been checked.

    With w2 of low rank, ``kron(w1, a @ b)`` is ``kron(I, a) @ kron(w1, b)``: w1 multiplies modes of the rank's size.

    Args:
        x: ``[*, M, in1 * in2]``.
        w1: ``[out1, in1]``, of x's dtype or float32.
        w2: ``[out2, in2]``, of x's dtype or float32.
        base: ``[*, M, out1 * out2]`` or None.
        scale: a number.
        precision: of float32 products.
        backend: of the multiplies; None for the one in force.
    """
    w1, w2 = prepared(w1, w2, math.prod(x.shape[:-1]), x, precision, backend)
    if w1.right is None and w2.right is None:
        return multiply(x, [w1.left.mT, w2.left.mT], base, scale, precision, False, backend)
    inner = [(w.left if w.right is None else w.right).mT for w in (w1, w2)]
    hidden = multiply(x, inner, None, 1.0, precision, False, backend)
    if w1.right is not None and w2.right is not None:
        return multiply(hidden, [w1.left.mT, w2.left.mT], base, scale, precision, False, backend)
    # One mode is finished: the other one alone is multiplied, on [*, out1 or rank, out2 or rank].
    modes = hidden.unflatten(-1, (inner[0].shape[1], inner[1].shape[1]))
    z = None if base is None else base.unflatten(-1, (w1.size.rows, w2.size.rows))
    left = w1.right is not None
    y = multiply(modes, [w1.left if left else w2.left.mT], z, scale, precision, left, backend)
    return y.flatten(-2)


def multiply(
    x: Tensor,
    factors: Sequence[Tensor],
    base: Tensor | None = None,
    scale: float = 1.0,
    precision: str | None = None,
    left: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``base + scale * x @ (F1 (x) ... (x) FN)``, or in the left form, of tensors that have been checked.

    Unlike `kron_matmul` it takes factors of float32 beside an x of a half dtype, whose gradients are then float32's.
    """
    backend = backend_of_call() if backend is None else backend
    beta = 0.0 if base is None else 1.0
    return operator.kron_matmul(x, list(factors), base, float(scale), beta, precision, backend, left)


def plan_of(w1: Factor, w2: Factor, tokens: int, device: torch.device) -> Plan:
    """Which factors are one matrix in the product; a pair may be multiplied out. Exported programs have one plan for any number of rows."""
    if torch.compiler.is_exporting():
        tokens = _EXPORTED
    return best_plan(w1.size, w2.size, tokens, CPU_COSTS if device.type == "cpu" else GPU_COSTS)


def prepared(
    w1: Factor, w2: Factor, tokens: int, x: Tensor, precision: str | None = None, backend: str | None = None
) -> tuple[Factor, Factor]:
    """The factors, each as a matrix or as the pair that it was, by the plan."""
    plan = plan_of(w1, w2, tokens, x.device)
    w1, w2 = (expanded(w, precision, backend) if is_dense else w for w, is_dense in zip((w1, w2), plan, strict=True))
    return w1, w2


def expanded(w: Factor, precision: str | None, backend: str | None) -> Factor:
    """The factor as one matrix; in a precision that is asked for by the multiply, whose derivatives have it too."""
    if w.right is None or precision is None:
        return w.expanded()
    left, right = (t.to(torch.promote_types(w.left.dtype, w.right.dtype)) for t in (w.left, w.right))
    return Factor(multiply(left, [right], None, 1.0, precision, False, backend))


# ---- sums of Kronecker products: two multiplies, however many terms there are ----------------------


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
    multiplied out. Arguments are those of `add_product`, but w1 ``[terms, out1, in1]`` and w2 ``[terms, out2, in2]``.
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
