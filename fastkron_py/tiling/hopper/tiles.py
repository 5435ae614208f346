"""Device functions of the polynomial KAN kernels for Hopper GPUs: layouts, copies, products in parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from fastkron_py.runtime.gluon_names import begin_copy
from fastkron_py.tiling.addresses import round_to_tf32
from fastkron_py.tiling.products import high_half, rounded


@gluon.constexpr_function
def sums_layout(width, dtype, warps=8):
    """The layout of an accumulator ``[16 * warps, width]`` of one warpgroup, or two, one above the other."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 256 // dtype.primitive_bitwidth])


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
def copy_layout(width, dtype):
    """For copies: 16 bytes a thread, along rows of this width."""
    vector = 128 // dtype.primitive_bitwidth
    lanes = min(32, width // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [8, 1], [1, 0])


@gluon.constexpr_function
def made_layout(width, dtype):
    """For values that a warpgroup makes, rows of a left operand: 16 bytes a thread, 16 neighbouring rows a warp, as products read them."""
    vector = 128 // dtype.primitive_bitwidth
    lanes = width // vector
    return gl.BlockedLayout([16 * lanes // 32, vector], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def transposed_layout(dtype):
    """For values ``[j, m]`` that a warpgroup makes, whose vectors of 16 bytes run along m, while lanes run along j, as x does."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [32, 1], [1, 4], [1, 0])


@gluon.constexpr_function
def upright_layout(width):
    """For 16-bit values ``[m, j]``, 64 by width, that a warpgroup makes: 16 bytes along j a thread, as x has them.

    Eight neighbouring lanes store into all of shared memory's banks: in a row of 64 columns at once; of 32, in halves of rows m and m + 4,
    which the operand's layout keeps apart.
    """
    rows = [[1 << bit, 0] for bit in range(6)]
    columns = [[0, 1 << bit] for bit in range(3, width.bit_length() - 1)]
    first = columns[:3] if width >= 64 else [*columns, rows.pop(2)]
    lanes = [*first, *rows[:2]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *rows[4:], *columns[3:]], lanes, rows[2:4], [], [64, width])


@gluon.constexpr_function
def shared_layout(height, width, dtype):
    """The layout of a tile that tensor cores read."""
    return gl.NVMMASharedLayout.get_default_for([height, width], dtype)


@gluon.jit
def store_made(buffer, low_buffer, a, PRECISION: gl.constexpr):
    """Values as an operand in shared memory: rounded to its type, or, for "split", in both halves; a tensor core truncates the high one."""
    if PRECISION == "split":
        buffer.store(a)
        low_buffer.store(rounded(a - high_half(a)))
    elif PRECISION == "cut":
        buffer.store(round_to_tf32(a))
    else:
        buffer.store(a.to(buffer.dtype))


@gluon.jit
def begin_product(a, a_low, b, b_low, acc, keep, PRECISION: gl.constexpr):
    """``acc + a @ b``, or without acc where it is not to be kept, begun."""
    if PRECISION == "split":
        acc = warpgroup_mma(a_low, b, acc, use_acc=keep, is_async=True)
        acc = warpgroup_mma(a, b_low, acc, is_async=True)
        return warpgroup_mma(a, b, acc, is_async=True)
    else:
        return warpgroup_mma(a, b, acc, use_acc=keep, is_async=True)


@gluon.constexpr_function
def product_groups(count, precision):
    """Number of groups of products that the hardware counts in this many steps."""
    return count * (3 if precision == "split" else 1)


@gluon.jit
def fetch(buffer, low_buffer, ptr, low_ptr, offsets, mask, stage, PRECISION: gl.constexpr):
    """Begin to copy an operand's tile, and, for "split", that of its low halves. Where the mask is false there is 0."""
    begin_copy(buffer.index(stage), ptr + offsets, mask=mask)
    if PRECISION == "split":
        begin_copy(low_buffer.index(stage), low_ptr + offsets, mask=mask)
