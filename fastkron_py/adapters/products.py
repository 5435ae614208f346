"""LoKr products of tensors, composed of Kronecker multiplies. Arguments have been checked."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fastkron_py.adapters.factor import Factor
from fastkron_py.adapters.plan import CPU_PASS_COST, GPU_PASS_COST, best_plan
from fastkron_py.kron.api import kron_matmul, kron_matmul_left


def add_product(x: Tensor, w1: Factor, w2: Factor, base: Tensor | None, scale: Any, precision: str | None) -> Tensor:
    """``base + scale * x @ kron(w1, w2).T``.

    With w2 of low rank, ``kron(w1, a @ b)`` is ``kron(I, a) @ kron(w1, b)``: w1 multiplies modes of the rank's size.

    Args:
        x: ``[*, in1 * in2]``.
        w1: ``[out1, in1]``, of x's dtype or float32.
        w2: ``[out2, in2]``, of x's dtype or float32.
        base: ``[*, out1 * out2]`` or None.
        scale: a number, or a 0-dimensional tensor.
        precision: of float32 products.
    """
    w1, scale = _with_scale(w1, scale)
    w1, w2 = prepared(w1, w2, math.prod(x.shape[:-1]), x)
    epilogue: dict[str, Any] = {"alpha": scale, "beta": 0.0 if base is None else 1.0, "precision": precision}
    if w1.right is None and w2.right is None:
        return kron_matmul(x, [w1.left.mT, w2.left.mT], z=base, **epilogue)
    inner = [(w.left if w.right is None else w.right).mT for w in (w1, w2)]
    hidden = kron_matmul(x, inner, precision=precision)
    if w1.right is not None and w2.right is not None:
        return kron_matmul(hidden, [w1.left.mT, w2.left.mT], z=base, **epilogue)
    # One mode is finished: the other one alone is multiplied, on [*, out1 or rank, out2 or rank].
    modes = hidden.unflatten(-1, (inner[0].shape[1], inner[1].shape[1]))
    z = None if base is None else base.unflatten(-1, (w1.size.rows, w2.size.rows))
    if w1.right is None:
        y: Tensor = kron_matmul(modes, [w2.left.mT], z=z, **epilogue)
    else:
        y = kron_matmul_left([w1.left], modes, z=z, **epilogue)
    return y.flatten(-2)


def prepared(w1: Factor, w2: Factor, tokens: int, x: Tensor) -> tuple[Factor, Factor]:
    """The factors in x's dtype, each as a matrix or as the pair that it was, by the plan."""
    pass_cost = CPU_PASS_COST if x.device.type == "cpu" else GPU_PASS_COST
    plan = best_plan(w1.size, w2.size, tokens, pass_cost)
    w1, w2 = ((w.expanded() if is_dense else w).to(x.dtype) for w, is_dense in zip((w1, w2), plan, strict=True))
    return w1, w2


def _with_scale(w1: Factor, scale: Any) -> tuple[Factor, Any]:
    """A tensor's or a complex number's scale as part of w1, the smaller factor; the scale that is left."""
    if isinstance(scale, Tensor | complex):
        return w1.scaled(scale), 1.0
    return w1, scale
