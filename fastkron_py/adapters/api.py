"""`lokr_linear`: a linear layer's result plus that of a low-rank Kronecker adapter (LoKr)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastkron_py.adapters import operator
from fastkron_py.adapters.batched import add_indexed, check_index
from fastkron_py.adapters.composed import add_product, add_terms, has_terms
from fastkron_py.adapters.factor import Factor, Operands, check_factor, labelled
from fastkron_py.runtime.arrays import through_bridge
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import are_apart, can_write, check_out, check_precision, check_scalar, check_tensor, check_type
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.precision import autocast_dtype, cast

ArrayT = TypeVar("ArrayT")


def lokr_linear(
    x: ArrayT,
    w1: ArrayT | tuple[ArrayT, ArrayT],
    w2: ArrayT | tuple[ArrayT, ArrayT],
    *,
    base: ArrayT | None = None,
    index: ArrayT | None = None,
    out: ArrayT | None = None,
    scale: float | complex | Tensor = 1.0,
    precision: str | None = None,
) -> ArrayT:
    """Add a LoKr adapter to a linear layer's result: ``base + scale * x @ kron(w1, w2).T``.

    The matrix ``[out, in]`` is never built: x is multiplied by w2 and w1, and base is added in the last product. If it is faster, a
    low-rank pair is multiplied first. To add several adapters, pass the result of one as the base of the next. Factors with
    a leading dimension are the terms of a sum, ``sum_t kron(w1[t], w2[t])``. Two products compute it for any number of terms. LoKr: Yeh
    et al., "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model Evaluation", ICLR 2024.

    Args:
        x: ``[*, in]`` with ``in = in1 * in2``. A torch tensor, or a NumPy or CuPy array, of a dtype of `kron_matmul`.
        w1: ``[out1, in1]``, or a pair ``[out1, rank]`` and ``[rank, in1]``, or terms ``[terms, ...]`` of either. Of x's dtype, or
            float32 if x is float16 or bfloat16: then it is cast once, and its gradient is summed and returned in float32.
        w2: ``[out2, in2]``, or a pair, or as many terms; dtypes as of w1.
        base: ``[*, out]`` with ``out = out1 * out2``, of x's dtype; None adds nothing.
        index: ``[*]``, integers: factors with a leading dimension are several adapters. Each row of x has the adapter of its number, or
            none if that is below 0. Numbers are not checked: on a GPU the host does not see them. Torch tensors only, without out.
        out: ``[*, out]``, of the result's dtype: the result is written there. It may be base, which saves the memory of a result. No
            gradient can be recorded, as with every ``out=`` of torch.
        scale: a finite number, or a 0-dimensional tensor (which gets a gradient).
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        ``[*, out]``, contiguous or out itself, of x's array type and dtype (under autocast, of autocast's dtype).

    Raises:
        TypeError: an argument of the wrong type or dtype, or array types that differ.
        ValueError: sizes that do not fit, devices that differ, a scale that is not finite, an unknown precision, or an out while another
            argument requires a gradient.

    Example:
        >>> x, base = torch.randn(10, 8 * 16), torch.randn(10, 4 * 32)
        >>> w1, w2 = torch.randn(4, 8), (torch.randn(32, 2), torch.randn(2, 16))
        >>> lokr_linear(x, w1, w2, base=base, scale=0.5).shape
        torch.Size([10, 128])
    """
    if out is None and index is None and not torch.compiler.is_compiling():
        pair1, pair2 = type(w1) is tuple, type(w2) is tuple
        key = _key(pair1, pair2, base is None, scale, precision)
        if key is not None:
            of1: Any = w1 if pair1 else (w1,)
            of2: Any = w2 if pair2 else (w2,)
            tensors = (x, *of1, *of2) if base is None else (x, *of1, *of2, base)
            entry = CACHE.find(key, tensors)
            if entry is not None:
                return entry.call(tensors, (scale, *entry.options[1:]))
    if isinstance(x, Tensor):
        given = Operands(x, _factor("w1", w1), _factor("w2", w2), base)  # type: ignore[arg-type]
        if index is not None:
            return _indexed_linear(given, index, scale, precision, out)  # type: ignore[return-value]
        return adapted_linear(given, scale, precision, out)  # type: ignore[arg-type, return-value]
    for name, value in (("index", index), ("out", out)):
        check_type(name, value, type(None), "None, since x is not a torch tensor")
    parts1, parts2 = labelled("w1", w1), labelled("w2", w2)
    arrays = dict([("x", x), *parts1, *parts2, *([] if base is None else [("base", base)])])

    def call(loaded: dict[str, Tensor]) -> Tensor:
        f1, f2 = (Factor(*[loaded[label] for label, _ in parts]) for parts in (parts1, parts2))
        return adapted_linear(Operands(loaded["x"], f1, f2, loaded.get("base")), scale, precision)

    return through_bridge(arrays, call)


def _factor(name: str, given: Any) -> Factor:
    return Factor(given) if isinstance(given, Tensor) else Factor(*[t for _, t in labelled(name, given)])


def adapted_linear(given: Operands, scale: Any, precision: str | None = None, out: Tensor | None = None) -> Tensor:
    """`lokr_linear` of tensors."""
    dtype = autocast_dtype(given.x)
    given = given if dtype is None else _under_autocast(given, dtype)
    is_kept = not torch.compiler.is_compiling() and (out is None or out is given.base)
    pairs = given.w1.right is not None, given.w2.right is not None
    key = _key(*pairs, given.base is None, scale, precision, dtype, out is not None) if is_kept else None
    if key is not None:
        tensors = given.present
        entry = CACHE.find(key, tensors)
        if entry is not None and (out is None or are_apart(tensors[:-1], out)):
            return entry.call(tensors, (scale, *entry.options[1:]))
    return _checked_product(given, scale, precision, key, out)


def _under_autocast(given: Operands, dtype: torch.dtype) -> Operands:
    """The operands in autocast's dtype."""
    x, w1, w2, base = given
    check_tensor("x", x, x, "x")
    w1, w2 = (Factor(*[cast_factor(t, dtype) for t in w]) for w in (w1, w2))
    return Operands(cast(x, dtype), w1, w2, cast(base, dtype))


def _indexed_linear(given: Operands, index: Any, scale: Any, precision: str | None, out: Any) -> Tensor:
    """`lokr_linear` with an adapter for each row."""
    if out is not None:
        raise type_error("out", "None, since index is given", type_name(out))
    dtype = autocast_dtype(given.x)
    given = given if dtype is None else _under_autocast(given, dtype)
    check_index(index, given)
    scale = _check(given, scale, precision)[0]
    with without_autocast(given.x.device):
        return add_indexed(given, index, scale, precision)


def _key(
    pair1: bool, pair2: bool, is_alone: bool, scale: Any, precision: Any, dtype: torch.dtype | None = None, in_place: bool = False
) -> tuple[Any, ...] | None:
    """The key of a call in the cache; None for calls that are not kept. Nothing has been checked yet."""
    if type(scale) is not float or not -math.inf < scale < math.inf or not (precision is None or type(precision) is str):
        return None
    # Guards tell of autocast, but not of its dtype.
    return "lokr_linear", pair1, pair2, is_alone, scale == 1, precision, dtype, in_place


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the result for an x: its own, or autocast's."""
    dtype = autocast_dtype(x)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype


def cast_factor(t: Any, dtype: torch.dtype) -> Any:
    """A factor under autocast: in its dtype, or in float32, which the product casts: the gradient stays in float32."""
    return t if isinstance(t, Tensor) and t.dtype == torch.float32 else cast(t, dtype)


def _checked_product(given: Operands, scale: Any, precision: str | None, key: Hashable, out: Tensor | None) -> Tensor:
    """The product of tensors, kept by this key if there is one."""
    x, w1 = given.x, given.w1
    scale, is_sum = _check(given, scale, precision)
    if out is not None:
        check_out(out, given.result_shape, x, [*given.listed, scale if isinstance(scale, Tensor) else None])
    if isinstance(scale, Tensor | complex):  # part of the smaller factor
        given, scale = given._replace(w1=w1.scaled(scale)), 1.0
    is_vector, target = x.ndim == 1, out
    if is_vector:
        base, target = (None if t is None else t.unsqueeze(0) for t in (given.base, out))
        given = given._replace(x=x.unsqueeze(0), base=base)
    if target is not None and not is_sum and can_write(given.present, target, given.base is not None):
        operator.write(given, scale, precision, target, None if is_vector else key)
        return out  # type: ignore[return-value]
    # The key of a call with out is that of a program that writes there; this one does not.
    y = product(given, scale, precision, key if out is None and not is_vector else None)
    y = y.squeeze(0) if is_vector else y
    return y if out is None else out.copy_(y)


def _check(given: Operands, scale: Any, precision: str | None) -> tuple[Any, bool]:
    """Check the operands; the scale, and whether the factors have a leading dimension."""
    x, w1, w2, _ = given
    check_precision(precision)
    check_tensor("x", x, x, "x")
    for name, factor in (("w1", w1), ("w2", w2)):
        check_factor(name, factor, x)
    is_sum = has_terms(w1, w2)
    _check_sizes(given)
    return check_scalar("scale", scale, x), is_sum


def _check_sizes(given: Operands) -> None:
    x, w1, w2, base = given
    columns = w1.size.columns * w2.size.columns
    if x.ndim == 0 or x.shape[-1] != columns:
        expected = f"a last dimension of {columns} = {w1.size.columns} * {w2.size.columns}, the columns of w1 and w2"
        raise value_error("x", expected, f"shape {tuple(x.shape)}")
    if base is None:
        return
    check_tensor("base", base, x, "x")
    if tuple(base.shape) != given.result_shape:
        raise value_error("base", f"the result's shape {given.result_shape}", f"shape {tuple(base.shape)}")


def product(given: Operands, scale: float, precision: str | None, key: Hashable = None) -> Tensor:
    """``base + scale * x @ kron(w1, w2).T`` of tensors that have been checked, by the operator; compilers see its parts.

    X is ``[*, M, in1 * in2]``; the key is that of the call in the cache, if it has been looked up without success.
    """
    x, w1, w2, base = given
    if w1.left.ndim == 3:
        with without_autocast(x.device):
            return add_terms(x, w1, w2, base, scale, precision)
    if torch.compiler.is_compiling():
        with without_autocast(x.device):  # of a pair that is multiplied out
            return add_product(x, w1, w2, base, scale, precision)
    beta = 0.0 if base is None else 1.0
    return operator.lokr_linear(*given.listed, float(scale), beta, precision, requested_backend(), key=key)
