"""Phases of a tile in registers (`plan.phases`): layouts, orders of dimensions, and addresses.

A tile is a vector ``[2^TILE]``. Seen bit by bit, as ``[2, 2, ..., 2]``, dimension i is bit ``TILE - 1 - i`` of an index.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

REGISTERS, LANES, WARPS, MODES = (gl.constexpr(i) for i in range(4))  # fields of a phase


@gluon.constexpr_function
def item(values, i):
    """One of several constants."""
    return values[i]


@gluon.constexpr_function
def layout(phase, tile):
    """The layout of a tile in a phase."""
    return gl.DistributedLinearLayout(*[[[1 << bit] for bit in phase[i]] for i in (REGISTERS, LANES, WARPS)], [], [1 << tile])


@gluon.constexpr_function
def count(phase):
    """The number of modes of a phase."""
    return len(phase[MODES])


@gluon.constexpr_function
def bits_last(tile, bits):
    """The order of dimensions that has these bits last, in their order."""
    last = [tile - 1 - bit for bit in bits]
    return [i for i in range(tile) if i not in last] + last


@gluon.constexpr_function
def inverse(order):
    """The order that undoes another one."""
    return [list(order).index(i) for i in range(len(order))]


@gluon.jit
def place(first, rows, stride, LAYOUT: gl.constexpr, TILE: gl.constexpr, ROW: gl.constexpr, M: gl.constexpr, BITS: gl.constexpr):
    """(offsets from the first row on, mask) of a tile's elements; of a row of ROW elements, the first M times 2^BITS exist."""
    i = gl.arange(0, 1 << TILE, LAYOUT)
    row = i // ROW
    mask = (first + row < rows) & (i // (1 << BITS) % (ROW >> BITS) < M)
    if ROW == 1 << TILE:
        return i, mask
    else:
        return row.to(gl.int64) * stride + i % ROW, mask
