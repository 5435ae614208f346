"""`gated_linear`: two projections and their gate, the wide half of a gated MLP."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fastkron_py.gated import operator
from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.runtime.arrays import through_bridge
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import check_choice, check_precision, check_real_dtype, check_tensor, check_type
from fastkron_py.runtime.eager import is_tracing, wants_gradient
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.precision import autocast_dtype, cast

ArrayT = TypeVar("ArrayT")

LAYOUTS: Final = ("interleaved", "stacked")
BACKWARDS: Final = ("save", "recompute")


def gated_linear(
    x: ArrayT,
    weight: ArrayT | tuple[ArrayT, ArrayT],
    *,
    bias: ArrayT | tuple[ArrayT, ArrayT] | None = None,
    activation: str = "silu",
    layout: str = "interleaved",
    backward: str = "save",
    precision: str | None = None,
) -> ArrayT:
    """Project x twice and gate one projection with the other: ``up * act(gate)``, ``up = x @ up_weight.T``, ``gate = x @ gate_weight.T``.

    On a GPU this is one matrix product that gates its sums before it stores them. Neither projection is written to memory (Shazeer, "GLU
    Variants Improve Transformer", 2020; "Towards Fused Kernels for Gated MLP").

    Args:
        x: ``[..., in]``. A torch tensor, or a NumPy or CuPy array; float16, bfloat16, float32 or float64.
        weight: both projections' weights, of x's array type, dtype and device: packed, see layout, or a pair (up, gate), each
            ``[hidden, in]``, anywhere in memory. Neither form is copied.
        bias: ``[2 * hidden]`` for "interleaved", ``[2, hidden]`` for "stacked", in the order of the weight's rows; for a pair of
            weights a pair of ``[hidden]``. Except with "interleaved" it may also be a tensor for each of x's rows, such as an adapter's
            result: ``[..., 2, hidden]``, up then gate.
        activation: ``"silu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"quick_gelu"``, ``"relu"``, ``"relu2"``, ``"sigmoid"``, ``"mish"``,
            ``"identity"``, ``"clamped_swiglu"`` (of GPT-OSS; other constants, as in ``"clamped_swiglu(7, 1.702, 1)"``), or one that was
            registered (see docs/guides/gated_mlp.md).
        layout: ``"interleaved"``, weight ``[2 * hidden, in]`` whose row 2 i projects up_i and row 2 i + 1 gate_i; or ``"stacked"``,
            weight ``[2, hidden, in]``, up then gate. An interleaved weight and two concatenated ones have the same shape, so name the
            layout. A pair of weights has none.
        backward: ``"save"`` saves both projections for the backward pass, which overwrites them with their gradients; ``"recompute"``
            saves x alone and computes one product again.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        ``[..., hidden]``, of x's array type and dtype (under autocast, of autocast's dtype).

    Raises:
        TypeError: an argument of the wrong type or dtype, or array types or dtypes that differ.
        ValueError: shapes that do not fit each other or the layout; an unknown activation, layout, backward or precision.

    Example:
        >>> x, weight = torch.randn(100, 8), torch.randn(2, 24, 8)
        >>> gated_linear(x, weight, layout="stacked").shape
        torch.Size([100, 24])
    """
    return _call(x, weight, bias, (None, None), activation, layout, backward, precision)


def gated_mlp(
    x: ArrayT,
    weight: ArrayT | tuple[ArrayT, ArrayT],
    down: ArrayT,
    *,
    bias: ArrayT | tuple[ArrayT, ArrayT] | None = None,
    down_bias: ArrayT | None = None,
    activation: str = "silu",
    layout: str = "interleaved",
    backward: str = "save",
    precision: str | None = None,
) -> ArrayT:
    """A whole gated MLP, ``gated_linear(x, weight) @ down.T + down_bias``, whose backward pass needs less memory than the two steps' own.

    The gated result is not kept for the backward pass: the kernel that makes the gradients of both projections makes it again. With
    "recompute" x alone is kept.

    Args:
        x: as in `gated_linear`, like all arguments that are not named here.
        weight: as in `gated_linear`.
        down: ``[out, hidden]``.
        bias: as in `gated_linear`.
        down_bias: ``[out]``.
        activation: as in `gated_linear`.
        layout: as in `gated_linear`.
        backward: as in `gated_linear`.
        precision: as in `gated_linear`, for all products.

    Returns:
        ``[..., out]``, of x's array type and dtype (under autocast, of autocast's dtype).

    Raises:
        TypeError: as in `gated_linear`.
        ValueError: as in `gated_linear`.

    Example:
        >>> x, weight, down = torch.randn(100, 8), torch.randn(48, 8), torch.randn(8, 24)
        >>> gated_mlp(x, weight, down).shape
        torch.Size([100, 8])
    """
    return _call(x, weight, bias, (down, down_bias), activation, layout, backward, precision)


_PACKED: Final = ("x", "weight", "gate", "bias", "down", "down_bias")
_PAIR: Final = ("x", "weight[0]", "weight[1]", "bias", "down", "down_bias")


def _call(x: Any, weight: Any, bias: Any, after: tuple[Any, Any], activation: Any, layout: Any, backward: Any, precision: Any) -> Any:
    """Check that these are tensors, and load arrays of other libraries."""
    gate, labels = None, _PACKED
    if isinstance(weight, tuple | list):
        check_choice("layout", layout, LAYOUTS)
        (weight, gate), bias, layout, labels = _pair("weight", weight), _stacked_bias(x, bias), "stacked", _PAIR
    tensors = (x, weight, gate, bias, *after)
    key = None
    if not torch.compiler.is_compiling():
        given = [t for t in tensors if t is not None]
        absent = [i for i, t in enumerate(tensors) if t is None]
        key = "gated", activation, layout, backward, precision, operator.order(weight, gate), *absent
        entry = CACHE.find(key, given)
        if entry is not None:
            return entry.call(given, entry.options)
    check_precision(precision)
    check_choice("layout", layout, LAYOUTS)
    check_choice("backward", backward, BACKWARDS)
    options = (find_activation(activation).name, layout, precision)
    if isinstance(x, Tensor):
        return _gated_linear(tensors, labels, backward, options, key)
    arrays = {label: a for label, a in zip(labels, tensors, strict=True) if a is not None or label == "x"}
    return through_bridge(arrays, lambda loaded: _gated_linear(tuple(map(loaded.get, labels)), labels, backward, options, None))


def _pair(name: str, given: Any) -> Any:
    check_type(name, given, tuple | list, "a pair (up, gate), since weight is one")
    if len(given) != 2 or any(t is None for t in given):
        raise value_error(name, "a pair (up, gate)", f"{len(given)} tensors, {sum(t is None for t in given)} of them None")
    return given


def _stacked_bias(x: Any, bias: Any) -> Any:
    """A pair of biases ``[hidden]`` as one, ``[2, hidden]``, through which gradients pass."""
    if bias is None or getattr(bias, "ndim", 0) > min(2, getattr(x, "ndim", 2)):  # of each row of x
        return bias
    pair = _pair("bias", bias)
    if isinstance(x, Tensor):
        return _stack(*pair)
    return through_bridge({"x": x, "bias[0]": pair[0], "bias[1]": pair[1]}, lambda loaded: _stack(loaded["bias[0]"], loaded["bias[1]"]))


def _stack(up: Any, gate: Any) -> Tensor:
    for i, t in enumerate((up, gate)):
        check_tensor(f"bias[{i}]", t, up, "bias[0]")
    if up.ndim != 1 or up.shape != gate.shape:
        raise value_error("bias", "a pair of shape (hidden,)", f"shapes {tuple(up.shape)} and {tuple(gate.shape)}")
    return torch.stack([up, gate])


def pack_gated(up: Tensor, gate: Tensor, layout: str = "interleaved") -> Tensor:
    """Two projections' weights, or biases, in one tensor as `gated_linear` takes it; a copy, bit for bit.

    Args:
        up: ``[hidden, in]``, or ``[hidden]``.
        gate: like up.
        layout: as in `gated_linear`.

    Returns:
        ``[2 * hidden, in]`` or ``[2, hidden, in]``; of biases without the last dimension.

    Raises:
        TypeError: an argument of the wrong type, or dtypes that differ.
        ValueError: shapes or devices that differ, more than two dimensions, or an unknown layout.

    Example:
        >>> pack_gated(torch.randn(256, 64), torch.randn(256, 64), "stacked").shape
        torch.Size([2, 256, 64])
    """
    check_choice("layout", layout, LAYOUTS)
    check_tensor("up", up, up, "up")
    check_tensor("gate", gate, up, "up")
    if up.ndim not in (1, 2):
        raise value_error("up", "a weight [hidden, in] or a bias [hidden]", f"shape {tuple(up.shape)}")
    if gate.shape != up.shape:
        raise value_error("gate", f"up's shape {tuple(up.shape)}", f"shape {tuple(gate.shape)}")
    return torch.stack([up, gate], 1).flatten(0, 1) if layout == "interleaved" else torch.stack([up, gate])


def unpack_gated(packed: Tensor, layout: str = "interleaved") -> tuple[Tensor, Tensor]:
    """(up, gate), views of a weight that `pack_gated` packed.

    Raises:
        TypeError: not a tensor.
        ValueError: a shape that the layout does not have, or an unknown layout.

    Example:
        >>> up, gate = unpack_gated(torch.randn(2, 256, 64), "stacked")
        >>> up.shape
        torch.Size([256, 64])
    """
    check_choice("layout", layout, LAYOUTS)
    check_tensor("packed", packed, packed, "packed")
    if layout == "interleaved":
        if packed.ndim not in (1, 2) or packed.shape[0] % 2:
            raise value_error("packed", "[2 * hidden, in] or [2 * hidden], since layout is 'interleaved'", f"shape {tuple(packed.shape)}")
        return packed[0::2], packed[1::2]
    if packed.ndim not in (2, 3) or packed.shape[0] != 2:
        raise value_error("packed", "[2, hidden, in] or [2, hidden], since layout is 'stacked'", f"shape {tuple(packed.shape)}")
    return packed[0], packed[1]


def _gated_linear(tensors: Any, labels: tuple[str, ...], backward: str, options: tuple[str, str, str | None], key: Any) -> Tensor:
    """The result on unchecked torch tensors; the cache keeps the call under the key, unless that is None."""
    dtype = autocast_dtype(tensors[0])
    if dtype is not None:
        tensors = tuple([cast(t, dtype) for t in tensors])
    _check_tensors(tensors, labels, options[1])
    saves = backward == "save" and wants_gradient(tensors) and not is_tracing()
    call = operator.gated_linear_saving if saves else operator.gated_linear
    return call(*tensors, *options, backend_of_call(), key=key if dtype is None else None)  # under autocast of other tensors


def _check_tensors(tensors: Any, labels: tuple[str, ...], layout: str) -> None:
    x, weight, gate, bias, down, down_bias = tensors
    check_tensor("x", x, x, "x")
    check_real_dtype("x", x.dtype, "a real dtype among")
    check_tensor(labels[1], weight, x, "x")
    if x.ndim == 0:
        raise value_error("x", "at least one dimension [..., in]", "a 0-dimensional tensor")
    shape = tuple(weight.shape)
    if gate is not None:
        check_tensor(labels[2], gate, x, "x")
        if weight.ndim != 2:
            raise value_error(labels[1], "[hidden, in]", f"shape {shape}")
        if gate.shape != weight.shape:
            raise value_error(labels[2], f"weight[0]'s shape {shape}", f"shape {tuple(gate.shape)}")
        shape = (2, *shape)
    elif layout == "interleaved":
        if weight.ndim != 2 or shape[0] % 2:
            raise value_error("weight", "[2 * hidden, in], since layout is 'interleaved'", f"shape {shape}")
    elif weight.ndim != 3 or shape[0] != 2:
        raise value_error("weight", "[2, hidden, in], since layout is 'stacked'", f"shape {shape}")
    if shape[-1] != x.shape[-1]:
        raise value_error(labels[1], f"a last dimension of x's {x.shape[-1]} inputs", f"shape {tuple(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias, x, "x")
        of_rows = (*x.shape[:-1], *shape[:-1]) if layout == "stacked" else shape[:-1]
        if tuple(bias.shape) not in (shape[:-1], of_rows):
            raise value_error("bias", f"shape {shape[:-1]}, that of the weight's rows", f"shape {tuple(bias.shape)}")
    if down is not None:
        _check_down(x, down, down_bias, shape[1] if layout == "stacked" else shape[0] // 2)


def _check_down(x: Tensor, down: Any, down_bias: Any, hidden: int) -> None:
    check_tensor("down", down, x, "x")
    if down.ndim != 2 or down.shape[1] != hidden:
        raise value_error("down", f"[out, {hidden}], the weight's hidden size", f"shape {tuple(down.shape)}")
    if down_bias is not None:
        check_tensor("down_bias", down_bias, x, "x")
        if tuple(down_bias.shape) != (down.shape[0],):
            raise value_error("down_bias", f"shape ({down.shape[0]},), that of down's rows", f"shape {tuple(down_bias.shape)}")
