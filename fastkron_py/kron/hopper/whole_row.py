"""A full row in one launch, in half precision: it is read once and written once, and all between its steps stays on chip.

A row ``[PA, B, PM, PC]`` (B may be 1) is cut into matrices ``[PM, PC]``. Warps multiply one each, ``(M^T X) C``, whose first product
stays in registers, and leave it in shared memory, in t. When all matrices of a row are there, B's factor multiplies its mode of t in
place, and A multiplies its own and stores the result. Parts of the next row are loaded meanwhile, into a ring of buffers.

Every product takes its right operand from shared memory as eight rows of eight elements at a time. The lowest three bits of each mode
of t swap vectors of eight elements, so that eight rows are in different banks, whichever mode they belong to. Bits that swap nothing
tell slices of t apart: the fourth bit of a mode, and higher ones (`families.whole_row` says where each bit lies).

Gluon has no interpreter: `sliced_multiply` holds the same computation in plain Triton, for every other device and for tests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fastkron_py.kron.families import whole_row as plan
from fastkron_py.kron.hopper.tile import item, linear_layout, reordered, seen_as
from fastkron_py.kron.kernels.row_pair import in_half
from fastkron_py.tiling.addresses import factor_tile
from fastkron_py.tiling.hopper import barrier, begin_copy

LINE: gl.constexpr = gl.constexpr(64)  # elements of 128 bytes
VECTOR: gl.constexpr = gl.constexpr(8)  # of 16 bytes
# Fields of LAYOUTS.
X, T_BY_ROWS, T_FOR_B, T_FOR_A, SLICES_B, SLICES_A, RESULT_ORDER, RESULT_RUN, RESULT = (gl.constexpr(i) for i in range(9))
TILE: gl.constexpr = gl.constexpr(plan.TILE)
LOW: gl.constexpr = gl.constexpr(plan.LOW)


@gluon.constexpr_function
def _products(warps, side_by_side):
    """Of single warps, side by side or one below the other."""
    return gl.NVMMADistributedLayout([2, 0], [1, warps] if side_by_side else [warps, 1], [16, 8])


@gluon.constexpr_function
def _copied(warps):
    """Sixteen bytes a lane."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _shared(layouts, field):
    return gl.SharedLinearLayout([list(b) for b in layouts[field]])


@gluon.jit
def _row_offset(at, strides, before, HEAD: gl.constexpr):
    """Where row number ``at`` of a batch begins."""
    row = at.to(gl.int64)
    if HEAD:
        return row // before * strides[1] + row % before * strides[2]
    else:
        return row * strides[1]


@gluon.jit
def _begin(
    buffer, x_ptr, at, part, x_strides, before, SIZES: gl.constexpr, MATRICES: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr
):
    """Begin to copy a part of row number ``at``, in which vectors begin at multiples of 16 bytes."""
    LAYOUT: gl.constexpr = _copied(WARPS)
    MATRIX: gl.constexpr = max(TILE, SIZES[3]) * SIZES[5]
    B: gl.constexpr = SIZES[2]
    line = gl.arange(0, MATRICES * MATRIX // LINE, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, LINE, gl.SliceLayout(0, LAYOUT))[None, :]
    base = gl.multiple_of(_row_offset(at, x_strides, before, HEAD), VECTOR)
    if B == 1:
        base += part * (MATRICES * MATRIX)
        offsets = line * LINE
    else:  # eight matrices of eight indices of A each
        RUN: gl.constexpr = LOW * MATRIX
        base += part % (B // LOW) * RUN + part // (B // LOW) * (B * RUN)
        offsets = line % (RUN // LINE) * LINE + line // (RUN // LINE) * (B * MATRIX)
    begin_copy(buffer, x_ptr + base + (offsets + column))


@gluon.jit
def _column(k, QC: gl.constexpr):
    """The column of C whose product stands at k: four lanes of a product have QC / 4 neighbours each, which are stored at once."""
    return (k & 1) + ((k >> 3) << 1) + ((k >> 1) & 3) * (QC // 4)


@gluon.jit
def _left_factor(
    factors, batch, P: gl.constexpr, Q: gl.constexpr, SHAPES: gl.constexpr, START: gl.constexpr, STOP: gl.constexpr, WARPS: gl.constexpr
):
    """(a left operand ``[Q, P]``, its scale) of factors START to STOP, merged."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, _products(WARPS, True), 2)
    ptrs, strides = factors
    q = gl.arange(0, Q, gl.SliceLayout(1, LAYOUT))[:, None]
    p = gl.arange(0, P, gl.SliceLayout(0, LAYOUT))[None, :]
    f = factor_tile(ptrs, strides, batch, p, q, SHAPES, START, STOP, gl.float32)
    return in_half(f, ptrs[0].dtype.element_ty, False)


@gluon.jit
def _paired_factor(factors, batch, SHAPES: gl.constexpr, START: gl.constexpr, STOP: gl.constexpr, WARPS: gl.constexpr):
    """(a left operand ``[16, 16]``, its scale) of an 8 x 8 factor that multiplies two matrices at once, as a block-diagonal one.

    Rows of the product are those of both matrices in turns of four: see `families.whole_row`.
    """
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, _products(WARPS, True), 2)
    ptrs, strides = factors
    row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    p = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    f = factor_tile(ptrs, strides, batch, p & 7, (row & 3) + ((row >> 3) << 2), SHAPES, START, STOP, gl.float32)
    f = gl.where((p >> 3) == ((row >> 2) & 1), f, 0.0)
    return in_half(f, ptrs[0].dtype.element_ty, False)


@gluon.jit
def _right_factor(
    factors, batch, P: gl.constexpr, Q: gl.constexpr, SHAPES: gl.constexpr, START: gl.constexpr, STOP: gl.constexpr, WARPS: gl.constexpr
):
    """(a right operand ``[P, Q]`` with its columns in the order of `_column`, its scale) of factors START to STOP."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(1, _products(WARPS, False), 2)
    ptrs, strides = factors
    p = gl.arange(0, P, gl.SliceLayout(1, LAYOUT))[:, None]
    q = _column(gl.arange(0, Q, gl.SliceLayout(0, LAYOUT)), Q)[None, :]
    f = factor_tile(ptrs, strides, batch, p, q, SHAPES, START, STOP, gl.float32)
    return in_half(f, ptrs[0].dtype.element_ty, False)


@gluon.jit
def _multiply_matrices(x, m, c, scale, LAYOUTS: gl.constexpr, SIZES: gl.constexpr, MATRICES: gl.constexpr, WARPS: gl.constexpr):
    """``(M^T X) C`` of each matrix of a part of a row, ``[MATRICES, QM * QC]``; two narrow matrices are one."""
    PM: gl.constexpr = max(TILE, SIZES[3])
    QM: gl.constexpr = max(TILE, SIZES[4])
    PC: gl.constexpr = SIZES[5]
    QC: gl.constexpr = SIZES[6]
    HALF: gl.constexpr = m.dtype
    BY_ROW: gl.constexpr = _products(WARPS, True)
    BY_COLUMN: gl.constexpr = _products(WARPS, False)
    x = seen_as(x, [PM, MATRICES * PC], _shared(LAYOUTS, X)).load(gl.DotOperandLayout(1, BY_ROW, 2))
    u = mma_v2(m, x, gl.zeros([QM, MATRICES * PC], gl.float32, BY_ROW))
    u = gl.permute(gl.reshape(u, [QM // 16, 16, MATRICES // WARPS, PC // 8, WARPS, 8]), (2, 0, 4, 1, 3, 5))
    u, row_scale = in_half(gl.reshape(u, [MATRICES * QM, PC]), HALF, True)
    u = gl.convert_layout(u, gl.DotOperandLayout(0, BY_COLUMN, 2))
    v = mma_v2(u, c, gl.zeros([MATRICES * QM, QC], gl.float32, BY_COLUMN))
    if gl.float16 == HALF:
        v *= gl.convert_layout(row_scale, BY_COLUMN) * scale
    v = gl.permute(gl.reshape(v.to(HALF), [MATRICES // WARPS, QM // 16, WARPS, 16, QC]), (0, 2, 1, 3, 4))
    return gl.reshape(v, [MATRICES, QM * QC])


@gluon.jit
def _multiply_mode(f, scale, t, Q: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """``F^T t`` of a slice of t, in float32."""
    BY_ROW: gl.constexpr = _products(WARPS, True)
    y = mma_v2(f, t.load(gl.DotOperandLayout(1, BY_ROW, 2)), gl.zeros([Q, COLUMNS], gl.float32, BY_ROW))
    if f.dtype == gl.float16:
        y *= scale
    return y


@gluon.jit
def _store(
    y, y_row, addend, SLICE: gl.constexpr, LAYOUTS: gl.constexpr, SIZES: gl.constexpr, COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr
):
    """Epilogue a slice of the result's columns, with an addend (z_row, z_stride, alpha, beta), and store it."""
    z_row, z_stride, alpha, beta = addend
    QA: gl.constexpr = SIZES[1]
    B: gl.constexpr = SIZES[2]
    QM: gl.constexpr = SIZES[4]
    QC: gl.constexpr = SIZES[6]
    LAYOUT: gl.constexpr = linear_layout(item(LAYOUTS, RESULT), [QA, COLUMNS])
    ORDER: gl.constexpr = item(LAYOUTS, RESULT_ORDER)
    RUN: gl.constexpr = item(LAYOUTS, RESULT_RUN)
    RUNS: gl.constexpr = QM * QC // RUN
    y = gl.convert_layout(reordered(y, ORDER, (QA, COLUMNS), QA), LAYOUT)  # the same registers under their last names
    i = gl.arange(0, QA, gl.SliceLayout(1, LAYOUT))[:, None]
    k = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    FIRST: gl.constexpr = SLICE % RUNS * RUN + SLICE // RUNS * (LOW * QM * QC)
    n = i * (B * QM * QC) + (k // RUN * (QM * QC) + k % RUN + FIRST)
    y = EPILOGUE(y, alpha, beta, z_row, n.to(gl.int64) * z_stride, n >= 0).to(y_row.dtype.element_ty)
    gl.store(y_row + n, y)


@gluon.jit(do_not_specialize=["alpha", "beta", "num_slices", "programs"], do_not_specialize_on_alignment=["before"])
def _whole_row_fwd_kernel(
    x_ptr,  # [B, L, before, P], P the product of all P_i
    factor_ptrs,  # each [B, P_i, Q_i]
    z_ptr,  # [B, L, before, Q]
    y_ptr,  # [B, L, before, Q]
    x_strides,  # (B, L, before, P, after)
    factor_strides,  # (B, P_i, Q_i) each
    z_strides,
    y_strides,
    alpha: gl.int64,  # float64 pattern
    beta: gl.int64,
    num_slices,
    programs,  # of each batch
    before,
    after,  # 1
    SHAPES: gl.constexpr,
    STOPS: gl.constexpr,  # one past the last factor of A, of B and of M
    SIZES: gl.constexpr,  # (PA, QA, B, PM, QM, PC, QC)
    MATRICES: gl.constexpr,  # in a part of a row
    RING: gl.constexpr,  # parts in shared memory
    LAYOUTS: gl.constexpr,  # the fields of `families.whole_row.Layouts`
    WARPS: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    PA: gl.constexpr = SIZES[0]
    QA: gl.constexpr = SIZES[1]
    B: gl.constexpr = SIZES[2]
    HALF: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = max(TILE, SIZES[3])
    PARTS: gl.constexpr = PA * B * SIZES[3] // (MATRICES * ROWS)
    batch = (gl.program_id(0) // programs).to(gl.int64)
    first = gl.program_id(0) % programs
    count = gl.cdiv(num_slices - first, programs) * PARTS
    x_ptr += gl.multiple_of(batch * x_strides[0], VECTOR)
    y_ptr += batch * y_strides[0]
    z_ptr += batch * z_strides[0]

    ring = gl.allocate_shared_memory(HALF, [RING, MATRICES * ROWS * SIZES[5] // LINE, LINE], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    for part in gl.static_range(RING - 1):
        if part < count:
            _begin(ring.index(part), x_ptr, first + part // PARTS * programs, part % PARTS, x_strides, before, SIZES, MATRICES, HEAD, WARPS)
        async_copy.commit_group()
    factors = (factor_ptrs, factor_strides)
    a, scale_a = _left_factor(factors, batch, PA, QA, SHAPES, 0, STOPS[0], WARPS)
    b, scale_b = _left_factor(factors, batch, B, B, SHAPES, STOPS[0], STOPS[1], WARPS) if B > 1 else (a, scale_a)
    if SIZES[3] < TILE:
        m, scale_m = _paired_factor(factors, batch, SHAPES, STOPS[1], STOPS[2], WARPS)
    else:
        m, scale_m = _left_factor(factors, batch, SIZES[3], SIZES[4], SHAPES, STOPS[1], STOPS[2], WARPS)
    c, scale_c = _right_factor(factors, batch, SIZES[5], SIZES[6], SHAPES, STOPS[2], len(SHAPES), WARPS)

    WIDTH: gl.constexpr = SIZES[4] * SIZES[6]
    t = gl.allocate_shared_memory(HALF, [PARTS * MATRICES, max(TILE, SIZES[4]) * SIZES[6]], _shared(LAYOUTS, T_BY_ROWS))
    SLICES: gl.constexpr = item(LAYOUTS, SLICES_A)
    COLUMNS: gl.constexpr = B * WIDTH // SLICES
    slot = first * 0
    ahead = first * 0 + (RING - 1)  # the part that is loaded next, and
    ahead_slot = first * 0 + (RING - 1)
    for at in range(first, num_slices, programs):
        for part in gl.static_range(PARTS):
            async_copy.wait_group(RING - 2)
            barrier()
            if ahead < count:
                ahead_at = first + ahead // PARTS * programs
                _begin(ring.index(ahead_slot), x_ptr, ahead_at, ahead % PARTS, x_strides, before, SIZES, MATRICES, HEAD, WARPS)
            async_copy.commit_group()
            ahead += 1
            ahead_slot = gl.where(ahead_slot == RING - 1, 0, ahead_slot + 1)
            v = _multiply_matrices(ring.index(slot), m, c, scale_m * scale_c, LAYOUTS, SIZES, MATRICES, WARPS)
            t.slice(part * MATRICES, MATRICES).store(v)
            slot = gl.where(slot == RING - 1, 0, slot + 1)
        barrier()
        if B > 1:
            COLUMNS_B: gl.constexpr = PA * WIDTH // item(LAYOUTS, SLICES_B)
            seen = seen_as(t, [B, PA * WIDTH], _shared(LAYOUTS, T_FOR_B))
            for k in gl.static_range(item(LAYOUTS, SLICES_B)):
                part_of_t = seen.slice(k * COLUMNS_B, COLUMNS_B, dim=1)
                part_of_t.store(_multiply_mode(b, scale_b, part_of_t, B, COLUMNS_B, WARPS).to(HALF))
            barrier()
        y_row = y_ptr + _row_offset(at, y_strides, before, HEAD)
        z_row = z_ptr + _row_offset(at, z_strides, before, HEAD)
        seen = seen_as(t, [PA, B * WIDTH], _shared(LAYOUTS, T_FOR_A))
        for k in gl.static_range(SLICES):
            y = _multiply_mode(a, scale_a, seen.slice(k * COLUMNS, COLUMNS, dim=1), QA, COLUMNS, WARPS)
            _store(y, y_row, (z_row, z_strides[3], alpha, beta), k, LAYOUTS, SIZES, COLUMNS, EPILOGUE)
