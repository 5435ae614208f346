"""Products of LoKr adapters of which each row has its own: one launch sorts the rows by adapter, one multiplies them.

A program has a few rows of one adapter, and for each of the in1 groups of their elements the same columns of ``x w2^T``: a tensor core
makes the sums of all groups in one product. The groups' sums lie in the same places of a thread's registers, where w1 mixes them. So
nothing is stored between both factors, and an infinity or a NaN stays in its row.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import dot, scalar
from fastkron_py.tiling.gemm import halves


@triton.jit
def _adapters_of(index_ptr, i, rows, adapters):
    """Each row's adapter; those without one have a number behind all, and there are no further rows."""
    index = tl.load(index_ptr + i, mask=i < rows, other=0)
    number = tl.where((index >= 0) & (index < adapters), index, adapters).to(tl.int32)
    return tl.where(i < rows, number, adapters + 1)


@triton.jit(do_not_specialize=["rows", "adapters"])
def _sort_rows_kernel(
    index_ptr,  # [rows]
    order_ptr,  # [rows], rows by adapter, those of one in order
    ends_ptr,  # [adapters + 1], of each adapter's rows in the order; the last are those without one
    rows,
    adapters,
    BLOCK: tl.constexpr,
):
    """A program for each adapter counts the rows of those before it, and then numbers its own."""
    adapter = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, BLOCK):
        before += (_adapters_of(index_ptr, first + tl.arange(0, BLOCK), rows, adapters) < adapter).to(tl.int32)
    end = tl.sum(before)
    for first in range(0, rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        is_own = (_adapters_of(index_ptr, i, rows, adapters) == adapter).to(tl.int32)
        tl.store(order_ptr + end + tl.cumsum(is_own) - 1, i, mask=is_own > 0)
        end += tl.sum(is_own)
    tl.store(ends_ptr + adapter, end)


@triton.jit
def _rows_of(ends_ptr, tile, groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """(adapter, first, end): the rows of a tile in their order, none of a tile beyond the last."""
    number = tl.arange(0, GROUPS)
    end = tl.load(ends_ptr + number, mask=number < groups, other=0)
    start = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < groups), other=0)
    tiles = tl.where(number < groups, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    is_before = tl.cumsum(tiles) <= tile
    group = tl.sum(is_before.to(tl.int32))
    inside = tile - tl.sum(tl.where(is_before, tiles, 0))
    first = tl.sum(tl.where(number == group, start, 0)) + inside * BLOCK_M
    return group, first, tl.sum(tl.where(number == group, end, 0))


@triton.jit
def _pieces(t, COUNT: tl.constexpr):
    """The columns of ``t [R, C]`` in COUNT tensors."""
    if COUNT == 1:
        return (t,)
    else:
        left, right = halves(t)
        return _pieces(left, COUNT // 2) + _pieces(right, COUNT // 2)


@triton.jit(do_not_specialize=["alpha", "adapters"])
def _indexed_lokr_kernel(
    x_ptr,  # [rows, IN1 * IN2]
    w1_ptr,  # [adapters, OUT1, IN1]
    right_ptr,  # [adapters, WIDTH, IN2]: w2, or its right matrices
    left_ptr,  # [adapters, OUT2, WIDTH], of a w2 of low rank
    base_ptr,  # [rows, OUT1 * OUT2]
    order_ptr,
    ends_ptr,
    y_ptr,  # [rows, OUT1 * OUT2]
    alpha: tl.int64,  # float64 pattern
    adapters,
    OUT1: tl.constexpr,
    IN1: tl.constexpr,
    OUT2: tl.constexpr,
    IN2: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_PAIR: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows
    BLOCK_I: tl.constexpr,  # groups of a row, a power of two
    BLOCK_N: tl.constexpr,  # columns of the first product
    BLOCK_O: tl.constexpr,  # columns of w2's that are stored at a time
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,  # at least one more than there are adapters, a power of two
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = 1 if IS_PAIR else (WIDTH + BLOCK_N - 1) // BLOCK_N
    adapter, first, end = _rows_of(ends_ptr, tl.program_id(0) // BLOCKS, adapters + 1, BLOCK_M, GROUPS)
    column = tl.program_id(0) % BLOCKS * BLOCK_N
    if first < end:
        n, k = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        j = tl.arange(0, BLOCK_I * BLOCK_M)  # all rows of the first group, then of the second one
        is_inside = (first + j % BLOCK_M < end) & (j // BLOCK_M < IN1)
        row = tl.load(order_ptr + first + j % BLOCK_M, mask=is_inside, other=0).to(tl.int64)
        x_ptrs = x_ptr + (row * (IN1 * IN2) + j // BLOCK_M * IN2)[:, None] + k[None, :]
        right_ptrs = right_ptr + adapter.to(tl.int64) * (WIDTH * IN2) + n[:, None] * IN2 + k[None, :]
        # Rows without an adapter have nothing to sum.
        depth = tl.where(adapter < adapters, IN2, 0)
        width = tl.where(adapter < adapters, WIDTH, 0)  # of the left matrices
        sums = tl.zeros((BLOCK_N, BLOCK_I * BLOCK_M), ACC)
        for step in range(0, depth, BLOCK_K):
            in_row = (step + k < IN2)[None, :]
            x = tl.load(x_ptrs + step, mask=is_inside[:, None] & in_row, other=0.0)
            w = tl.load(right_ptrs + step, mask=(n < WIDTH)[:, None] & in_row, other=0.0)
            sums = dot(w.to(COMPUTE), x.to(COMPUTE).T, sums, PRECISION)
        groups = _pieces(sums, BLOCK_I)

        m = first + tl.arange(0, BLOCK_M)
        row = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
        places = (row * (OUT1 * OUT2))[None, :]
        for out in tl.range(OUT1, num_stages=3):
            mixed = tl.zeros((BLOCK_N, BLOCK_M), ACC)
            for i in tl.static_range(IN1):
                weight = tl.load(w1_ptr + (adapter.to(tl.int64) * OUT1 + out) * IN1 + i, mask=adapter < adapters, other=0.0)
                mixed += groups[i] * weight.to(ACC)
            if IS_PAIR:
                z = mixed.to(COMPUTE)
                for start in range(0, OUT2, BLOCK_O):
                    o = start + tl.arange(0, BLOCK_O)
                    mask = (o < OUT2)[:, None] & (n < width)[None, :]
                    at = adapter.to(tl.int64) * (OUT2 * WIDTH) + o[:, None] * WIDTH + n[None, :]
                    a = tl.load(left_ptr + at, mask=mask, other=0.0).to(COMPUTE)
                    y = dot(a, z, tl.zeros((BLOCK_O, BLOCK_M), ACC), PRECISION)
                    _store(
                        y, y_ptr, base_ptr, places + (out * OUT2 + o)[:, None], (o < OUT2)[:, None] & (m < end)[None, :], alpha, HAS_BASE
                    )
            else:
                _store(
                    mixed, y_ptr, base_ptr, places + (out * OUT2 + n)[:, None], (n < OUT2)[:, None] & (m < end)[None, :], alpha, HAS_BASE
                )


@triton.jit
def _store(y, y_ptr, base_ptr, at, mask, alpha, HAS_BASE: tl.constexpr):
    """Store ``base + alpha * y``."""
    y *= scalar(alpha, y.dtype)
    if HAS_BASE:
        y += tl.load(base_ptr + at, mask=mask, other=0.0).to(y.dtype)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
