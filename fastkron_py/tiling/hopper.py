"""Device code that large products on Hopper GPUs share, in Gluon: layouts, copies, products in parts, and a ring of operands.

The ring lies between warpgroups with one trade each: a producer, and two that multiply.
The producer computes one operand and starts TMA copies of the other. The two that multiply hold 64 rows of a tile of sums each, and do
nothing but products of tiles that are ready. Each of the ring's buffers has two barriers in shared memory: products wait for
"full", the producer for "empty"; nobody waits for all others. There is no fourth trade, for copies:
each thread of 16 warps would begin with 128 registers, which a sum of 64 x 256 alone takes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fastkron_py.tiling.addresses import round_to_tf32
from fastkron_py.tiling.products import high_half, rounded

# What Triton 3.6 and 3.9 call differently.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
begin_described_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.constexpr_function
def sums_layout(width, dtype, warps=8):
    """The layout of an accumulator ``[16 * warps, width]`` of one warpgroup, or two, one above the other."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 256 // dtype.primitive_bitwidth])


@gluon.constexpr_function
def made_layout(width, dtype):
    """For values that a warpgroup makes, rows of a left operand: 16 bytes a thread, 16 neighbouring rows a warp, as products read them."""
    vector = 128 // dtype.primitive_bitwidth
    lanes = width // vector
    return gl.BlockedLayout([16 * lanes // 32, vector], [32 // lanes, lanes], [4, 1], [1, 0])


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


# ---- the ring -------------------------------------------------------------------------------------

ROWS = gl.constexpr(64)  # of a tile, that a warpgroup sums up
THREADS = gl.constexpr(128)  # of a warpgroup
# Left operands: stored by a producer as tensor cores read them, or copied as they lie, along rows or along the reduction.
MADE = gl.constexpr(0)
COPIED_ALONG_ROWS = gl.constexpr(1)
COPIED_ALONG_K = gl.constexpr(2)
_STORED = gl.constexpr(64)  # columns of a result that are stored at a time


@gluon.jit
def _allocate(DTYPE: gl.constexpr, SIZE: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, ALONG: gl.constexpr):
    HEIGHT: gl.constexpr = SIZE if ALONG else BLOCK_K
    WIDTH: gl.constexpr = BLOCK_K if ALONG else SIZE
    LAYOUT: gl.constexpr = shared_layout(HEIGHT, WIDTH, DTYPE)
    return gl.allocate_shared_memory(DTYPE, [STAGES, HEIGHT, WIDTH], LAYOUT)


@gluon.constexpr_function
def _copied_layout(left):
    """For 32-bit elements ``[rows, k]`` that warps take to registers as left operands: neither these loads nor copies have bank conflicts.

    A load takes eight rows and four k, which is all banks: swapped are runs of four k by the row, or of eight rows by k.
    """
    return gl.SwizzledSharedLayout(8, 1, 4, [0, 1]) if left == COPIED_ALONG_ROWS else gl.SwizzledSharedLayout(4, 1, 8, [1, 0])


@gluon.jit
def allocate_ring(
    DTYPE: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PRECISION: gl.constexpr,
    ALONG: gl.constexpr,  # whether rows of operands run along the reduction
    PRODUCERS: gl.constexpr,  # warpgroups that fill a buffer
    LEFT: gl.constexpr = MADE,  # how the left operand comes; each thread of a warpgroup that copies it arrives
):
    """(left and right operands and, for "split", their low halves; barriers, where they are full and empty).

    Operands are ``[STAGES, 128, BLOCK_K]`` and ``[STAGES, WIDTH, BLOCK_K]``, or with the last two sizes changed about.
    """
    if LEFT == MADE:
        left = _allocate(DTYPE, 2 * ROWS, BLOCK_K, STAGES, ALONG)
    else:
        left = gl.allocate_shared_memory(DTYPE, [STAGES, 2 * ROWS, BLOCK_K], _copied_layout(LEFT))
    right = _allocate(DTYPE, WIDTH, BLOCK_K, STAGES, ALONG)
    left_low = left
    right_low = right
    if PRECISION == "split":
        if LEFT == MADE:
            left_low = _allocate(DTYPE, 2 * ROWS, BLOCK_K, STAGES, ALONG)
        right_low = _allocate(DTYPE, WIDTH, BLOCK_K, STAGES, ALONG)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=PRODUCERS if LEFT == MADE else PRODUCERS - 1 + THREADS)
        mbarrier.init(empty.index(s), count=2)  # two warpgroups
    return left, left_low, right, right_low, full, empty


@gluon.jit
def sum_steps(
    ring,
    step,
    count,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,  # steps whose products are summed up in the tensor cores; 0: all
    PRECISION: gl.constexpr,
    ALONG: gl.constexpr,
    HALF: gl.constexpr,
):
    """(sums ``[64, WIDTH]`` of one half of the left operands' rows times right operands, over the given steps; the step after them)."""
    left, left_low, right, right_low, full, empty = ring
    acc = gl.zeros([ROWS, WIDTH], gl.float32, sums_layout(WIDTH, left.dtype, 4))
    total = acc
    end = step + count
    length = count if FLUSH == 0 else step * 0 + FLUSH
    for begin in range(step, end, length):
        for i in range(begin, gl.minimum(begin + length, end)):
            s = i % STAGES
            mbarrier.wait(full.index(s), i // STAGES & 1)
            if ALONG:
                a = left.index(s).slice(HALF * ROWS, ROWS)
                a_low = left_low.index(s).slice(HALF * ROWS, ROWS)
                b = right.index(s).permute((1, 0))
                b_low = right_low.index(s).permute((1, 0))
            else:
                a = left.index(s).slice(HALF * ROWS, ROWS, 1).permute((1, 0))
                a_low = a
                b = right.index(s)
                b_low = b
            acc = begin_product(a, a_low, b, b_low, acc, FLUSH == 0 or i > begin, PRECISION)
            # The product before it is done with its buffers.
            acc = warpgroup_mma_wait(product_groups(1, PRECISION), deps=(acc,))
            mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > begin)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((gl.minimum(begin + length, end) + STAGES - 1) % STAGES), count=1)
        if FLUSH > 0:
            total += acc
    if FLUSH == 0:
        total = acc
    return total, end


@gluon.jit
def sum_copied_steps(ring, step, count, WIDTH: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr):
    """The same for "split", of a left operand that was copied: its rows are split in registers, and each step is summed up in float32.

    Products of the other warpgroup hide this one's loads and sums.
    """
    left, _, right, right_low, full, empty = ring
    LAYOUT: gl.constexpr = sums_layout(WIDTH, left.dtype, 4)
    total = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    acc = total
    for _ in range(0, count):  # of range(step, step + count), Triton 3.6 takes each tile's first step for the first one's
        s = step % STAGES
        mbarrier.wait(full.index(s), step // STAGES & 1)
        a = left.index(s).slice(HALF * ROWS, ROWS).load(gl.DotOperandLayout(0, LAYOUT, 1))
        b = right.index(s).permute((1, 0))
        b_low = right_low.index(s).permute((1, 0))
        high = high_half(a)
        low = rounded(a - high)
        acc = begin_product(high, low, b, b_low, acc, False, "split")
        acc, high, low = warpgroup_mma_wait(0, deps=(acc, high, low))  # operands in registers are in use until then
        mbarrier.arrive(empty.index(s), count=1)
        total += acc
        step += 1
    return total, step


@gluon.jit
def store_sums(sums, first, place, STORE: gl.constexpr, OPTIONS: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr):
    """Sums of one warpgroup, a few columns at a time, for which there are registers: STORE takes them, the first one's number, place."""
    if WIDTH > _STORED:
        HALF: gl.constexpr = WIDTH // 2
        here, beyond = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, HALF]), (0, 2, 1)))
        store_sums(here, first, place, STORE, OPTIONS, HALF, DTYPE)
        store_sums(beyond, first + HALF, place, STORE, OPTIONS, HALF, DTYPE)
    else:
        SUMS: gl.constexpr = sums_layout(WIDTH, DTYPE, 4)
        STORE(gl.convert_layout(sums, SUMS, assert_trivial=True), first, place, OPTIONS, SUMS, WIDTH)
