"""Device code that KAN layers' products on Hopper GPUs share, in Gluon: copies of operands into the ring of `tiling.hopper`, and shares.

Parts of a launch share out the units of all tiles' sums evenly ("stream-k").
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fastkron_py.tiling.hopper import begin_described_copy


@gluon.constexpr_function
def store_layout(width, sums, dtype):
    """For a result ``[64, width]`` of one warpgroup: of 16-bit numbers, which would fill half sectors, 16 bytes a thread.

    A thread changes places with three neighbours, which takes no shared memory.
    """
    if dtype.primitive_bitwidth != 16:
        return sums
    columns = [[0, n] for n in (1, 2, 4, *(1 << bit for bit in range(5, width.bit_length() - 1)))]
    return gl.DistributedLinearLayout(
        [*columns[:3], [8, 0], *columns[3:]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, width]
    )


@gluon.constexpr_function
def copied_bytes(desc, precision):
    """Bytes of an operand's tile and, for "split", of its low halves."""
    return desc.block_type.nbytes * (2 if precision == "split" else 1)


@gluon.jit
def begin_operand(desc, low_desc, row, column, buffer, low_buffer, full, PRECISION: gl.constexpr):
    """Begin to copy an operand's tile, and, for "split", that of its low halves; beyond the last row and column there is 0."""
    if PRECISION == "split":
        begin_described_copy(low_desc, [row, column], full, low_buffer)
    begin_described_copy(desc, [row, column], full, buffer)


@gluon.jit
def bring_operand(desc, low_desc, row, column, buffer, low_buffer, full, PRECISION: gl.constexpr):
    """Copy an operand, and tell the barrier of the copies' bytes, and that this warpgroup's stores are ready."""
    mbarrier.expect(full, copied_bytes(desc, PRECISION))
    begin_operand(desc, low_desc, row, column, buffer, low_buffer, full, PRECISION)


@gluon.jit
def share_of(part, parts, tiles, length):
    """(first unit and the one after the last; first tile and the one after the last; the first tile's segment) of a part.

    A unit is a step of a tile's sum, or several; a tile has `length` of them. A tile of several parts has a segment for each, in order.
    """
    units = (part * 0 + tiles).to(gl.int64) * length
    begin = part * units // parts
    end = (part + 1) * units // parts
    first = begin // length
    owner = ((first * length + 1) * parts - 1) // units  # the first part with a share of this tile
    return begin, end, first.to(gl.int32), gl.cdiv(end, length).to(gl.int32), part - owner


@gluon.jit
def units_of(tile, begin, end, length):
    """(first unit of a tile and the one after the last) of those from begin to end."""
    whole = begin * 0 + tile
    return gl.maximum(begin - whole * length, 0).to(gl.int32), gl.minimum(end - whole * length, length).to(gl.int32)
