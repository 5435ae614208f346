"""The rational function's derivatives as the epilogue of the next linear layer's gradient: the trial that the library does not use.

``dy @ weight`` is the gradient of ``P(z) / Q(z)``; here its sums become dz and this tile's part of the coefficients' gradients while
they are in registers. See docs/how_it_works/rational.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkron_py.rational.denominators.device import unchanged
from fastkron_py.rational.denominators.registry import find_denominator
from fastkron_py.rational.kernels.function import COEFFICIENT, _load_coefficients, _rational_slopes
from fastkron_py.rational.launches import SUM_BLOCK, epilogue_params, function_of
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.gemm import load_tile, store_tile
from fastkron_py.tiling.gemm_config import GemmTile
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm

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
    ``tensors[3]`` are the denominator's jit functions.
    """
    row, column, rows, columns = place
    A_COUNT: tl.constexpr = PARAMS[0]
    B_COUNT: tl.constexpr = PARAMS[1]
    WIDTH: tl.constexpr = PARAMS[2]
    B_FIRST: tl.constexpr = PARAMS[6]
    tl.static_assert(((first.shape[1] - 1) & WIDTH) == 0)
    group = tl.minimum(column, columns - 1) // WIDTH
    a = _load_coefficients(tensors[0] + group * PARAMS[4], 1, unchanged, A_COUNT, tl.float32)
    b = _load_coefficients(tensors[1] + group * PARAMS[5], 1, tensors[3][COEFFICIENT], B_COUNT, tl.float32)
    x = load_tile(targets[3], row, column, rows, columns, strides[2], first.shape[0], first.shape[1]).to(tl.float32)
    is_row = (row + tl.arange(0, first.shape[0]) < rows)[:, None]
    dy = tl.where(is_row, first, 0.0)
    dx, u, even, odd = _rational_slopes(a, b, x, dy, tensors[3], A_COUNT, B_COUNT, PARAMS[3])
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
    even_power = -even
    odd_power = -odd
    for j in tl.static_range(B_FIRST + B_COUNT):
        if j > 0:
            even_power = even_power * x
            odd_power = odd_power * x
        if j >= B_FIRST:
            _store_sum(out + (A_COUNT + j - B_FIRST) * stride, even_power if j % 2 == 0 else odd_power, inside)


def piece(tile: GemmTile) -> int:
    """Columns that are finished together."""
    return tile.block_n // tile.parts


def gradients_program(
    dy: Tensor, weight: Tensor, z: Tensor, a: Tensor, b: Tensor, version: str, precision: str, tile: GemmTile = TILE
) -> Program:
    """(dz, da, db) of ``y = (P(z) / Q(z)) @ weight.T`` on tensors like these: the gradient of ``P(z) / Q(z)`` never is in memory.

    Args:
        dy: ``[M, N]``, float16, bfloat16 or float32, not empty.
        weight: ``[N, H]``, like dy.
        z: ``[M, H]``, like dy.
        a: ``[G, m + 1]`` or ``[1, m + 1]``, G dividing H.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        version: the denominator's name.
        precision: of float32 products.
        tile: of the product, whose `piece` divides the channels of a group.
    """
    rows, columns = z.shape
    build = Builder([dy, weight, z, a, b])
    dy, weight, z, a, b = build.inputs
    denominator = find_denominator(version)
    constants = (*epilogue_params(a, b, columns, build.device), denominator.first)
    call = Gemm(epilogue_rational_gradients, params=constants, functions=(denominator.device.complete(),))
    a, b = build.contiguous(a), build.contiguous(b)
    dz, da, db = build.empty(z.shape, z.dtype), build.empty(a.shape, a.dtype), build.empty(b.shape, b.dtype)
    sums = triton.cdiv(rows, tile.block_m) * columns // piece(tile)
    partial = build.empty(((a.shape[1] + b.shape[1]) * sums,), torch.float32)
    # The product is with the weight's transpose, whose rows have to be runs of memory.
    add_gemm(build, dy, weight.mT, None, call, dz, side=z, tensors=(a, b, partial), precision=precision, tile=tile)
    function_of(build, a, b, version, ()).add_sums(build, partial, (da, db), sums, SUM_BLOCK, 8)
    return build.program([dz, da, db])
