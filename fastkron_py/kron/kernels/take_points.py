"""Kernels that take points of a grid by a table, and write zeros where the table has none.

A table says for each point of the result y which point of x it is: ``bases[i // SPAN] + offsets[i]``, or none where the offset is
negative. Points of x that are in no table are not read.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import words


@triton.jit
def _entries(offsets_ptr, bases_ptr, start, left, points, BLOCK: tl.constexpr, STEPS: tl.constexpr, SPAN: tl.constexpr, LONG: tl.constexpr):
    """(row after the first one, offset, base) of each step's elements behind the first row's start."""
    found = ()
    i = tl.arange(0, BLOCK)
    for step in tl.static_range(STEPS):
        exists = i + step * BLOCK < left
        if LONG:  # constants are last, where they are part of an instruction
            after = 0
            offset = tl.load(offsets_ptr + start + i + step * BLOCK, mask=exists, other=-1)
            base = tl.load(bases_ptr + start // SPAN + i // SPAN + step * (BLOCK // SPAN), mask=exists, other=0)
        else:
            p = start.to(tl.int32) + step * BLOCK + i
            after, p = p // points, p % points
            offset = tl.load(offsets_ptr + p, mask=exists, other=-1)
            base = tl.load(bases_ptr + p // SPAN, mask=exists, other=0)
        found = found + ((after, offset, base),)  # type: ignore[assignment]  # noqa: RUF005 - the compiler takes no *found
    return found


@triton.jit
def _taken(x_ptr, entries, row_stride, point_stride, INDEX: tl.constexpr, LONG: tl.constexpr):
    """The elements of x that entries name, zeros where an offset is negative."""
    found = ()
    for step in tl.static_range(len(entries)):
        after, offset, base = entries[step]
        at = (offset.to(INDEX) + base.to(INDEX)) * tl.cast(point_stride, INDEX)
        if not LONG:
            at += after * tl.cast(row_stride, INDEX)
        found = found + (tl.load(x_ptr + at, mask=offset >= 0, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _take_points_kernel(
    x_ptr,  # [B, n, points of x]
    offsets_ptr,  # [P]
    bases_ptr,  # [P / SPAN] of int64
    y_ptr,  # [B, n, P], contiguous
    sizes,  # (n, P)
    x_strides,  # (B, n, points), in words
    BLOCK: tl.constexpr,  # threads of a program
    STEPS: tl.constexpr,  # elements of a thread
    SPAN: tl.constexpr,  # divides BLOCK
    LONG: tl.constexpr,  # a program has elements of one row, else of several
    INDEX: tl.constexpr,  # type that holds an offset of x
    PARTS: tl.constexpr,  # real numbers of an element
):
    """``y[:, :, i] = x[:, :, table[i]]``: neighbouring threads have neighbouring points.

    A tile of one element a thread is all that a warp reads and writes in whole lines, whatever the table says. A program has several, and
    all of their loads are in flight before it stores.
    """
    x_ptr, y_ptr = words(x_ptr, PARTS), words(y_ptr, PARTS)
    TILE: tl.constexpr = BLOCK * STEPS
    rows, points = sizes[0], sizes[1]
    if LONG:
        tiles = tl.cdiv(points, TILE)
        row, start = tl.program_id(0) // tiles, (tl.program_id(0) % tiles).to(tl.int64) * TILE
        batch, row = (row // rows).to(tl.int64), (row % rows).to(tl.int64)
        left = tl.minimum(points - start, TILE).to(tl.int32)
    else:
        tiles = tl.cdiv(tl.cast(rows, tl.int64) * points, TILE)
        batch, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * TILE
        row, start = first // points, first % points
        left = tl.minimum((rows - row) * points - start, TILE).to(tl.int32)
    x_ptr += batch * x_strides[0] + row * x_strides[1]
    y_ptr += (batch * rows + row) * points + start
    entries = _entries(offsets_ptr, bases_ptr, start, left, points, BLOCK, STEPS, SPAN, LONG)
    found = _taken(x_ptr, entries, x_strides[1], x_strides[2], INDEX, LONG)
    i = tl.arange(0, BLOCK)
    for step in tl.static_range(STEPS):
        tl.store(y_ptr + i + step * BLOCK, found[step], mask=i + step * BLOCK < left)


@triton.jit
def _take_runs_kernel(
    x_ptr,  # [B, n, points of x, I]
    offsets_ptr,  # [P]
    bases_ptr,  # [P / SPAN] of int64
    y_ptr,  # [B, n, P, I], contiguous
    sizes,  # (n, P, I), I in words
    x_strides,  # (B, n, points), in words; those of I are neighbours
    BLOCK_P: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPAN: tl.constexpr,
    INDEX: tl.constexpr,  # type that holds an offset of x, and one of a tile of y
    PARTS: tl.constexpr,
):
    """``y[:, :, i, :] = x[:, :, table[i], :]``: neighbouring threads have neighbours of one point."""
    x_ptr, y_ptr = words(x_ptr, PARTS), words(y_ptr, PARTS)
    tiles_p, tiles_i = tl.cdiv(sizes[1], BLOCK_P), tl.cdiv(sizes[2], BLOCK_I)
    tile = tl.program_id(0)
    first_i, tile = tile % tiles_i * BLOCK_I, tile // tiles_i
    first_p, rows = (tile % tiles_p).to(tl.int64) * BLOCK_P, (tile // tiles_p).to(tl.int64)
    i = first_i + tl.arange(0, BLOCK_I)[None, :]
    p = tl.arange(0, BLOCK_P)
    exists = p < tl.minimum(sizes[1] - first_p, BLOCK_P).to(tl.int32)
    offset = tl.load(offsets_ptr + first_p + p, mask=exists, other=-1)
    base = tl.load(bases_ptr + (first_p + p) // SPAN, mask=exists, other=0)
    position = offset.to(INDEX) + base.to(INDEX)
    x_start = x_ptr + rows // sizes[0] * x_strides[0] + rows % sizes[0] * x_strides[1]
    pointers = x_start + position[:, None] * tl.cast(x_strides[2], INDEX) + i
    found = tl.load(pointers, mask=(offset >= 0)[:, None] & (i < sizes[2]), other=0)
    y_start = y_ptr + (rows * sizes[1] + first_p) * sizes[2]
    tl.store(y_start + p[:, None] * tl.cast(sizes[2], INDEX) + i, found, mask=exists[:, None] & (i < sizes[2]))
