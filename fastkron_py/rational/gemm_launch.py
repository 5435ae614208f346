"""The launcher of linear layers with a rational function on their result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastkron_py.rational.config_linear import linear_tile
from fastkron_py.rational.kernels.gemm_epilogue import epilogue_rational, value_rational
from fastkron_py.rational.launches import is_approximate
from fastkron_py.runtime.device import multiprocessor_count
from fastkron_py.tiling.gemm import epilogue_plain
from fastkron_py.tiling.gemm_config import GemmSizes, GemmTile
from fastkron_py.tiling.gemm_launch import gemm
from fastkron_py.tiling.gemm_problem import Gemm, is_describable, rowwise


def params(a: Tensor, b: Tensor, columns: int, version: str) -> tuple[Any, ...]:
    """What the epilogues of `rational/kernels/gemm_epilogue.py` are told of the coefficients and of a result's columns."""
    groups = max(a.shape[0], b.shape[0])
    strides = [c.shape[1] if c.shape[0] > 1 else 0 for c in (a, b)]
    return version, a.shape[1], b.shape[1], columns // groups, is_approximate(a.dtype, a.device), *strides


def _tile(x: Tensor, weight: Tensor, precision: str, keep: bool) -> GemmTile:
    size = x.element_size()
    passes = 3 if x.dtype == torch.float32 and precision == "highest" else 1
    stored = 2 * size if keep else size
    described = is_describable(x) and is_describable(weight)
    sizes = GemmSizes(x.shape[0], weight.shape[0], x.shape[1], size, passes, stored, False, multiprocessor_count(x.device), described)
    return linear_tile(sizes, described)


def linear_rational(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    version: str,
    precision: str,
    keep: bool,
    tile: GemmTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(P(z) / Q(z), z)`` with ``z = x @ weight.T + bias``, which is kept, or not: then it never is in memory.

    Args:
        x: ``[M, K]``, float16, bfloat16 or float32, not empty.
        weight: ``[N, K]``, like x.
        bias: ``[N]`` or None.
        a: ``[G, m + 1]`` or ``[1, m + 1]``, G dividing N.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        version: "A", "B", "C" or "N".
        precision: of float32 products, "highest" (three-pass TF32) or less (TF32).
        keep: also store z.
        tile: of the product; None lets the closed form choose.
    """
    shape = x.shape[0], weight.shape[0]
    x, weight = rowwise(x), rowwise(weight)
    tile = tile or _tile(x, weight, precision, keep)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if keep else None
    call = Gemm(epilogue_rational if keep else epilogue_plain, value=value_rational, params=params(a, b, shape[1], version))
    gemm(x, weight, bias, call, y, pair=z, tensors=(a.contiguous(), b.contiguous()), precision=precision, tile=tile)
    return y, z
