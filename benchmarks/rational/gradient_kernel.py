"""The rational function's derivatives as the epilogue of the next linear layer's gradient: the trial that the library does not use.

``dy @ weight`` is the gradient of ``P(z) / Q(z)``; here its sums become dz and this tile's part of the coefficients' gradients while
they are in registers. See docs/rational.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkron_py.rational.gemm_launch import params
from fastkron_py.rational.kernels.elementwise import _rational_coefficients_kernel
from fastkron_py.rational.kernels.function import _load_coefficients, _rational_slopes
from fastkron_py.rational.launches import SUM_BLOCK
from fastkron_py.runtime.device import on_device
from fastkron_py.tiling.gemm import load_tile, store_tile
from fastkron_py.tiling.gemm_config import GemmTile
from fastkron_py.tiling.gemm_launch import gemm
from fastkron_py.tiling.gemm_problem import Gemm

TILE = GemmTile(128, 64, 64, 8, 3, parts=2, programs=2)


@triton.jit
def _store_sum(out, values, inside):
    tl.store(out, tl.sum(tl.sum(values, 1), 0), mask=inside)


@triton.jit
def epilogue_rational_gradients(
    first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr
):
    """Sums are dy; from ``side [M, N]``, x: ``out = dx``, and this piece's sums for the coefficients' gradients.

    ``tensors[2]`` takes those: ``[numerator's count + denominator's, groups, pieces of a group]``. No piece crosses groups.
    """
    row, column, rows, columns = place
    VERSION: tl.constexpr = PARAMS[0]
    A_COUNT: tl.constexpr = PARAMS[1]
    B_COUNT: tl.constexpr = PARAMS[2]
    WIDTH: tl.constexpr = PARAMS[3]
    B_FIRST: tl.constexpr = 0 if VERSION == "C" else 1
    tl.static_assert(((first.shape[1] - 1) & WIDTH) == 0)
    group = tl.minimum(column, columns - 1) // WIDTH
    a = _load_coefficients(tensors[0] + group * PARAMS[5], 1, A_COUNT, tl.float32, False)
    b = _load_coefficients(tensors[1] + group * PARAMS[6], 1, B_COUNT, tl.float32, VERSION == "A")
    x = load_tile(targets[3], row, column, rows, columns, strides[2], first.shape[0], first.shape[1]).to(tl.float32)
    is_row = (row + tl.arange(0, first.shape[0]) < rows)[:, None]
    dy = tl.where(is_row, first, 0.0)
    dx, u, even, odd = _rational_slopes(a, b, x, dy, A_COUNT, B_COUNT, VERSION, PARAMS[4])
    store_tile(targets[0], dx, row, column, rows, columns, strides[0])
    pieces: tl.constexpr = WIDTH // first.shape[1]
    per_group = tl.cdiv(rows, first.shape[0]) * pieces
    stride = (columns // WIDTH).to(tl.int64) * per_group
    out = tensors[2] + (group * per_group + row // first.shape[0] * pieces + column % WIDTH // first.shape[1])
    inside = column < columns
    term = u
    for i in tl.static_range(A_COUNT):
        if i > 0:
            term = term * x
        _store_sum(out + i * stride, term, inside)
    even_power = even
    odd_power = odd
    for j in tl.static_range(B_FIRST + B_COUNT):
        if j > 0:
            even_power = even_power * x
            odd_power = odd_power * x
        if j >= B_FIRST:
            _store_sum(out + (A_COUNT + j - B_FIRST) * stride, even_power if j % 2 == 0 else odd_power, inside)


def piece(tile: GemmTile) -> int:
    """Columns that are finished together."""
    return tile.block_n // tile.parts


def rational_gradients(
    dy: Tensor, weight: Tensor, z: Tensor, a: Tensor, b: Tensor, version: str, precision: str, tile: GemmTile = TILE
) -> tuple[Tensor, Tensor, Tensor]:
    """(dz, da, db) of ``y = (P(z) / Q(z)) @ weight.T``: the gradient of ``P(z) / Q(z)`` never is in memory.

    Args:
        dy: ``[M, N]``, float16, bfloat16 or float32, not empty.
        weight: ``[N, H]``, like dy.
        z: ``[M, H]``, like dy.
        a: ``[G, m + 1]`` or ``[1, m + 1]``, G dividing H.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        version: "A", "B", "C" or "N".
        precision: of float32 products.
        tile: of the product, whose `piece` divides the channels of a group.
    """
    rows, columns = z.shape
    count = a.shape[1] + b.shape[1]
    sums = triton.cdiv(rows, tile.block_m) * columns // piece(tile)
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    partial = torch.empty(count * sums, dtype=torch.float32, device=z.device)
    call = Gemm(epilogue_rational_gradients, params=params(a, b, columns, version))
    a, b = a.contiguous(), b.contiguous()
    # The product is with the weight's transpose, whose rows have to be runs of memory.
    gemm(dy, weight.mT, None, call, dz, side=z, tensors=(a, b, partial), precision=precision, tile=tile)
    da, db = torch.empty_like(a), torch.empty_like(b)
    grid = (a.shape[0] * a.shape[1] + b.shape[0] * b.shape[1],)
    with on_device(z):
        _rational_coefficients_kernel[grid](
            *(partial, b, da, db, b.shape[1], 1, sums, a.shape[0], b.shape[0], a.shape[1], b.shape[1], version, SUM_BLOCK), num_warps=8
        )
    return dz, da, db
