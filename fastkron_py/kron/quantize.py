"""`kron_quantize`: a product with a Kronecker product, rounded to small numbers with a scale for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.checks import check_tensors, factor_list
from fastkron_py.kron.quantize_program import INT4, LARGEST, STORED, program, values_shape
from fastkron_py.kron.shapes import result_shape
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.checks import check_precision, check_scalar
from fastkron_py.runtime.errors import type_error, value_error
from fastkron_py.runtime.operator import Operator
from fastkron_py.runtime.precision import autocasted

_MATRIX = 2  # dimensions
_NIBBLE = 4  # bits


class Quantized(NamedTuple):
    """Rows of small numbers: ``scales * values`` is about the product.

    Attributes:
        values: ``[*, N]`` of int8 or float8_e4m3fn; of int4 ``[*, N / 2]`` of uint8, an even column's value in the low four bits and
            the next one's in the high four, in two's complement.
        scales: ``[*, 1]`` of float32.
    """

    values: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """The product again, ``[*, N]`` of float32, with an error of at most half a step of the format."""
        if self.values.dtype != torch.uint8:
            return self.values.float() * self.scales
        signed = self.values.view(torch.int8)
        pairs = torch.stack([(signed << _NIBBLE) >> _NIBBLE, signed >> _NIBBLE], -1)
        return pairs.flatten(-2).float() * self.scales


def kron_quantize(
    x: Tensor, factors: Sequence[Tensor], dtype: torch.dtype | str, *, clip_ratio: float = 1.0, precision: str | None = None
) -> Quantized:
    """Multiply with a Kronecker product and round each row: ``x @ (F1 (x) ... (x) FN)`` as ``scales * values``.

    This is the transform and the per-token quantisation in front of a linear layer with weights in four or eight bits (FlatQuant:
    Sun et al., 2025). A row's scale is ``clip_ratio * max|y| / largest``, with the largest number of the format: 127 of int8, 448 of
    float8_e4m3fn, 7 of int4. Values beyond are clipped; ties are rounded to even. Two factors of up to 256 and 128 rows and columns
    in half types are multiplied, and their rows rounded, in one launch on GPUs with warpgroup products (Hopper); elsewhere rounding takes
    a launch of its own. A row of zeros has scale 1. A row with an infinity or a NaN has a scale of NaN, and undefined values; so does a
    row of float64 whose scale is too large for float32. There are no gradients.

    Args:
        x: ``[*, K]``, a torch tensor of float16, bfloat16, float32 or float64; under autocast of its dtype, as in `kron_matmul`.
        factors: matrices ``[P_i, Q_i]`` of x's dtype and device; ``K = prod P_i``, ``N = prod Q_i``.
        dtype: torch.int8, torch.float8_e4m3fn or "int4".
        clip_ratio: a number above 0, at most 1: the share of a row's largest absolute value that is the format's largest number.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        `Quantized`: values and scales, and `Quantized.dequantize`.

    Raises:
        TypeError: x or a factor is no torch tensor, dtypes that differ or are complex, or another format.
        ValueError: shapes that do not chain, factors that are no matrices, an odd N with "int4", or a clip_ratio out of range.

    Example:
        >>> x, factors = torch.randn(16, 4096), [torch.randn(64, 64) / 8 for _ in range(2)]
        >>> y = kron_quantize(x, factors, "int4")
        >>> y.values.shape, y.scales.shape
        (torch.Size([16, 2048]), torch.Size([16, 1]))
        >>> bool((y.dequantize() - kron_matmul(x, factors)).abs().max() <= 0.5 * y.scales.max() + 1e-3)
        True
    """
    kind = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if kind not in LARGEST or (kind == INT4) is not isinstance(dtype, str):
        raise type_error("dtype", 'torch.int8, torch.float8_e4m3fn or "int4"', dtype)
    listed = factor_list(factors)
    if isinstance(x, Tensor):
        x, listed, _ = autocasted(x, listed, None)
    check_tensors(x, listed, None, ("x", "factors", ""))
    if x.is_complex():
        raise type_error("x", "a real dtype", x.dtype)
    check_precision(precision)
    for i, f in enumerate(listed):
        if f.ndim != _MATRIX:
            raise value_error(f"factors[{i}]", "a matrix", f"shape {tuple(f.shape)}")
    shape = result_shape(tuple(x.shape), [tuple(f.shape) for f in listed])
    if kind == INT4 and shape[-1] % 2:
        raise value_error("factors", 'an even number of columns in all for "int4", which has two in a byte', shape[-1])
    ratio = check_scalar("clip_ratio", clip_ratio, x)
    if isinstance(ratio, Tensor | complex):
        raise type_error("clip_ratio", "a number", clip_ratio)
    if not 0 < ratio <= 1:
        raise value_error("clip_ratio", "a number above 0, at most 1", clip_ratio)
    backend = "" if torch.compiler.is_compiling() else requested_backend()
    with torch.no_grad():
        found = operator(x.detach(), [f.detach() for f in listed], float(ratio) / LARGEST[kind], kind, precision, backend)
    return Quantized(*found)


def _fake(x: Tensor, factors: Sequence[Tensor], step: float, kind: str, precision: Any, backend: str) -> tuple[Tensor, Tensor]:
    n = math.prod([f.shape[1] for f in factors])
    return x.new_empty(values_shape(x.shape, n, kind), dtype=STORED[kind]), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    if dims[0] is None or any([dim is not None for dim in dims[1:]]):
        raise value_error("factors", "factors without a batch dimension inside vmap, and an x with one", f"in_dims {tuple(dims)}")
    return tuple(operator(tensors[0].movedim(dims[0], 0), list(tensors[1:]), *options)), (0, 0)


operator = Operator(
    "kron_quantize(Tensor x, Tensor[] factors, float step, str kind, str? precision, str backend) -> (Tensor, Tensor)",
    program=program,
    fake=_fake,
    vmap=_vmap,
    scalars=(0,),
)
