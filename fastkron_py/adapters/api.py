"""`lokr_linear`: a linear layer's result plus that of a low-rank Kronecker adapter (LoKr)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastkron_py.adapters.factor import Factor, check_factor, labelled, loaded
from fastkron_py.adapters.plan import CPU_COSTS, GPU_COSTS, best_plan
from fastkron_py.kron import operator
from fastkron_py.runtime.arrays import find_bridge
from fastkron_py.runtime.autocast import autocast_dtype, cast
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.checks import check_precision, check_scalar, check_tensor
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import value_error

ArrayT = TypeVar("ArrayT")


def lokr_linear(
    x: ArrayT,
    w1: ArrayT | tuple[ArrayT, ArrayT],
    w2: ArrayT | tuple[ArrayT, ArrayT],
    *,
    base: ArrayT | None = None,
    scale: float | complex | Tensor = 1.0,
    precision: str | None = None,
) -> ArrayT:
    """Add a LoKr adapter to a linear layer's result: ``base + scale * x @ kron(w1, w2).T``.

    The matrix ``[out, in]`` is never built: x is multiplied by w2 and w1, and base is added in the last product. A pair of low rank
    is multiplied out where that takes less time than two products with x. Several adapters are added one after the other, the result
    of one as the base of the next. LoKr: Yeh et al., "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model
    Evaluation", ICLR 2024.

    Args:
        x: ``[*, in]`` with ``in = in1 * in2``. A torch tensor, or a NumPy or CuPy array, of a dtype of `kron_matmul`.
        w1: ``[out1, in1]``, or a pair ``[out1, rank]`` and ``[rank, in1]``. Of x's dtype, or float32 beside an x of float16
            or bfloat16: then it is cast once, and its gradient is summed and returned in float32.
        w2: ``[out2, in2]``, or a pair; dtypes as of w1.
        base: ``[*, out]`` with ``out = out1 * out2``, of x's dtype; None adds nothing.
        scale: a finite number, or a 0-dimensional tensor (which gets a gradient).
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        ``[*, out]``, contiguous, of x's array type and dtype (under autocast, of autocast's dtype).

    Raises:
        TypeError: an argument of the wrong type or dtype, or array types that differ.
        ValueError: sizes that do not fit, devices that differ, a scale that is not finite, an unknown precision.

    Example:
        >>> x, base = torch.randn(10, 8 * 16), torch.randn(10, 4 * 32)
        >>> w1, w2 = torch.randn(4, 8), (torch.randn(32, 2), torch.randn(2, 16))
        >>> lokr_linear(x, w1, w2, base=base, scale=0.5).shape
        torch.Size([10, 128])
    """
    parts1, parts2 = labelled("w1", w1), labelled("w2", w2)
    if isinstance(x, Tensor):
        f1, f2 = (Factor(*[t for _, t in parts]) for parts in (parts1, parts2))
        return adapted_linear(x, f1, f2, base, scale, precision)  # type: ignore[arg-type, return-value]
    named = [("x", x), *parts1, *parts2, *([] if base is None else [("base", base)])]
    bridge = find_bridge([array for _, array in named], [label for label, _ in named])
    with bridge.context():
        loaded_base = None if base is None else bridge.load(base, "base")
        f1, f2 = (loaded(bridge, parts) for parts in (parts1, parts2))
        return bridge.give_back(adapted_linear(bridge.load(x, "x"), f1, f2, loaded_base, scale, precision))  # type: ignore[no-any-return]


def adapted_linear(x: Tensor, w1: Factor, w2: Factor, base: Tensor | None, scale: Any, precision: str | None = None) -> Tensor:
    """`lokr_linear` of tensors."""
    check_precision(precision)
    check_tensor("x", x, x, "x")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, base = cast(x, dtype), cast(base, dtype)
        w1, w2 = (Factor(*[cast_factor(t, dtype) for t in w]) for w in (w1, w2))
        with without_autocast(x.device):  # of a pair that is multiplied out
            return _checked_product(x, w1, w2, base, scale, precision)
    return _checked_product(x, w1, w2, base, scale, precision)


def cast_factor(t: Any, dtype: torch.dtype) -> Any:
    """A factor under autocast: in its dtype, or in float32, which the product casts: the gradient stays in float32."""
    return t if t is None or t.dtype == torch.float32 else cast(t, dtype)


def _checked_product(x: Tensor, w1: Factor, w2: Factor, base: Tensor | None, scale: Any, precision: str | None) -> Tensor:
    for name, factor in (("w1", w1), ("w2", w2)):
        check_factor(name, factor, x)
    _check_sizes(x, w1, w2, base)
    scale = check_scalar("scale", scale, x)
    if x.ndim == 1:
        return add_product(x.unsqueeze(0), w1, w2, None if base is None else base.unsqueeze(0), scale, precision).squeeze(0)
    return add_product(x, w1, w2, base, scale, precision)


def _check_sizes(x: Tensor, w1: Factor, w2: Factor, base: Tensor | None) -> None:
    columns = w1.size.columns * w2.size.columns
    if x.ndim == 0 or x.shape[-1] != columns:
        expected = f"a last dimension of {columns} = {w1.size.columns} * {w2.size.columns}, the columns of w1 and w2"
        raise value_error("x", expected, f"shape {tuple(x.shape)}")
    if base is None:
        return
    check_tensor("base", base, x, "x")
    shape = (*x.shape[:-1], math.prod((w1.size.rows, w2.size.rows)))
    if tuple(base.shape) != shape:
        raise value_error("base", f"the result's shape {shape}", f"shape {tuple(base.shape)}")


def add_product(x: Tensor, w1: Factor, w2: Factor, base: Tensor | None, scale: Any, precision: str | None) -> Tensor:
    """``base + scale * x @ kron(w1, w2).T`` of tensors that have been checked, composed of Kronecker multiplies.

    With w2 of low rank, ``kron(w1, a @ b)`` is ``kron(I, a) @ kron(w1, b)``: w1 multiplies modes of the rank's size.

    Args:
        x: ``[*, M, in1 * in2]``.
        w1: ``[out1, in1]``, of x's dtype or float32.
        w2: ``[out2, in2]``, of x's dtype or float32.
        base: ``[*, M, out1 * out2]`` or None.
        scale: a number, or a 0-dimensional tensor.
        precision: of float32 products.
    """
    w1, scale = _with_scale(w1, scale)
    w1, w2 = prepared(w1, w2, math.prod(x.shape[:-1]), x)
    if w1.right is None and w2.right is None:
        return multiply(x, [w1.left.mT, w2.left.mT], base, scale, precision)
    inner = [(w.left if w.right is None else w.right).mT for w in (w1, w2)]
    hidden = multiply(x, inner, precision=precision)
    if w1.right is not None and w2.right is not None:
        return multiply(hidden, [w1.left.mT, w2.left.mT], base, scale, precision)
    # One mode is finished: the other one alone is multiplied, on [*, out1 or rank, out2 or rank].
    modes = hidden.unflatten(-1, (inner[0].shape[1], inner[1].shape[1]))
    z = None if base is None else base.unflatten(-1, (w1.size.rows, w2.size.rows))
    if w1.right is None:
        y = multiply(modes, [w2.left.mT], z, scale, precision)
    else:
        y = multiply(modes, [w1.left], z, scale, precision, left=True)
    return y.flatten(-2)


def multiply(
    x: Tensor, factors: Sequence[Tensor], base: Tensor | None = None, scale: float = 1.0, precision: str | None = None, left: bool = False
) -> Tensor:
    """``base + scale * x @ (F1 (x) ... (x) FN)``, or in the left form, of tensors that have been checked.

    Unlike `kron_matmul` it takes factors of float32 beside an x of a half dtype, whose gradients are then float32's.
    """
    backend = "" if torch.compiler.is_compiling() else requested_backend()
    beta = 0.0 if base is None else 1.0
    y: Tensor = operator.kron_matmul(x, list(factors), base, float(scale), beta, precision, backend, left)
    return y


def prepared(w1: Factor, w2: Factor, tokens: int, x: Tensor) -> tuple[Factor, Factor]:
    """The factors, each as a matrix or as the pair that it was, by the plan."""
    plan = best_plan(w1.size, w2.size, tokens, CPU_COSTS if x.device.type == "cpu" else GPU_COSTS)
    w1, w2 = (w.expanded() if is_dense else w for w, is_dense in zip((w1, w2), plan, strict=True))
    return w1, w2


def _with_scale(w1: Factor, scale: Any) -> tuple[Factor, Any]:
    """A tensor's or a complex number's scale as part of w1, the smaller factor; the scale that is left."""
    if isinstance(scale, Tensor | complex):
        return w1.scaled(scale), 1.0
    return w1, scale
