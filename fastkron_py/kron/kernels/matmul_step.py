"""Kernels around the matrix products of one mode: matrices copied between memory orders, and the epilogue of their main loop.

Copies go in tiles that are read and written in whole sectors.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import load_elements, scalar, store_elements, words
from fastkron_py.tiling.gemm import load_tile, store_tile


@triton.jit
def _start(strides, batch, n, i, j):
    """Where a tile begins."""
    return batch * strides[0] + n * strides[1] + i * strides[2] + j * strides[3]


@triton.jit
def _offsets(strides, n, i, j, INDEX: tl.constexpr):
    """Offsets within a tile."""
    return n * tl.cast(strides[1], INDEX) + i * tl.cast(strides[2], INDEX) + j * tl.cast(strides[3], INDEX)


@triton.jit
def _valid_count(size, first, BLOCK: tl.constexpr):
    """The number of a tile's elements within a size, as 32 bits."""
    return tl.minimum(tl.maximum(size - first, 0), BLOCK).to(tl.int32)


@triton.jit(do_not_specialize=["alpha", "beta", "count"])
def _copy_matrices_kernel(
    x_ptr,  # [B, n, I, J]
    z_ptr,  # [B, n, I, J]
    y_ptr,  # [B, n, I, J]
    alpha: tl.int64,  # float64 pattern
    beta: tl.int64,
    x_strides,  # (B, n, I, J), in words, as of z and y
    z_strides,
    y_strides,
    count,  # n
    x_sizes,  # (I, J) that may be read; beyond are zeros
    y_sizes,  # (I, J) that are written
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    INDEX: tl.constexpr,  # type that holds offsets within a tile
    ACC: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr,  # real numbers of an element
):
    """``y = EPILOGUE(x, z)``, element by element."""
    x_ptr, z_ptr, y_ptr = words(x_ptr, PARTS), words(z_ptr, PARTS), words(y_ptr, PARTS)
    tiles_i, tiles_j, blocks = tl.cdiv(y_sizes[0], BLOCK_I), tl.cdiv(y_sizes[1], BLOCK_J), tl.cdiv(count, BLOCK_N)
    tile = tl.program_id(0)
    first_j, tile = (tile % tiles_j).to(tl.int64) * BLOCK_J, tile // tiles_j
    first_i, tile = (tile % tiles_i).to(tl.int64) * BLOCK_I, tile // tiles_i
    first_n, batch = (tile % blocks).to(tl.int64) * BLOCK_N, (tile // blocks).to(tl.int64)
    n = tl.arange(0, BLOCK_N)[:, None, None]
    i = tl.arange(0, BLOCK_I)[None, :, None]
    j = tl.arange(0, BLOCK_J)[None, None, :]
    readable = (i < _valid_count(x_sizes[0], first_i, BLOCK_I)) & (j < _valid_count(x_sizes[1], first_j, BLOCK_J))
    mask = (i < _valid_count(y_sizes[0], first_i, BLOCK_I)) & (j < _valid_count(y_sizes[1], first_j, BLOCK_J))
    if BLOCK_N > 1:
        exists = n < _valid_count(count, first_n, BLOCK_N)
        readable, mask = readable & exists, mask & exists
    x_start = x_ptr + _start(x_strides, batch, first_n, first_i, first_j)
    x = load_elements(x_start + _offsets(x_strides, n, i, j, INDEX), readable, PARTS, False)
    z_start = z_ptr + _start(z_strides, batch, first_n, first_i, first_j)
    y = EPILOGUE(x.to(ACC), alpha, beta, z_start, _offsets(z_strides, n, i, j, INDEX), mask)
    y_start = y_ptr + _start(y_strides, batch, first_n, first_i, first_j)
    store_elements(y_start + _offsets(y_strides, n, i, j, INDEX), y, mask, PARTS, False)


@triton.jit
def epilogue_axpby(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """Store ``alpha * sums + beta * z`` to ``out [M, N]``; z is the side: of the main loop of linear layers (`tiling/gemm.py`)."""
    row, column, rows, columns = place
    ALPHA: tl.constexpr = len(tensors) - 2
    z = load_tile(targets[3], row, column, rows, columns, strides[2], first.shape[0], first.shape[1]).to(tl.float32)
    y = first * scalar(tensors[ALPHA], tl.float32) + z * scalar(tensors[ALPHA + 1], tl.float32)
    store_tile(targets[0], y, row, column, rows, columns, strides[0])
