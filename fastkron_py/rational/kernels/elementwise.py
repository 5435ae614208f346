"""The group-wise rational function ``P(x) / Q(x)`` and its first derivatives, in Triton.

Tensors are walked over as runs of one group's elements (`rational/plan.py`): a program belongs to one group, whose coefficients
it keeps in registers. The arithmetic is float32, or float64 for float64 tensors.
"""

import triton
import triton.language as tl

from fastkron_py.rational.denominators.device import unchanged
from fastkron_py.rational.kernels.function import _add_coefficients, _load_coefficients, _rational, _rational_slopes
from fastkron_py.tiling.products import zeros

# Integers that kernels are not specialised for: constants give the layout of vectors, so nothing would be gained.
WALK = ("total", "per_run", "phases", "periods", "last_phases", "iterations", "short", "long_chunks", "rows_per_period")
_NUMBERS = (*WALK, "stride_ag", "stride_ai", "stride_bg", "stride_bj")


@triton.jit
def quick_float32(x):
    """bfloat16 as float32, exactly: an instruction for each of two neighbours in a register."""
    return tl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], tl.float32, True, 2)


@triton.jit
def _begin(walk, GROUPS: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """(first, row, column, step, count) of a program.

    That is the number of its first vector, its threads' first row and column in vectors, and its tiles, each step vectors after the last.
    walk is (per_run, phases, periods, last_phases, iterations, short, long_chunks, rows_per_period). The host divides: a division of 64-bit
    numbers takes as many instructions as a tile of a forward pass.
    """
    per_run, phases, periods, last_phases, iterations, short, long_chunks, rows_per_period = walk
    program = tl.program_id(0)
    phase = (program // GROUPS % phases.to(tl.int32)).to(tl.int64)
    chunk = (program // GROUPS // phases.to(tl.int32)).to(tl.int64)
    beyond = tl.maximum(chunk - long_chunks, 0)
    period = tl.minimum(chunk, long_chunks) * iterations + beyond * short
    most = tl.where(chunk < long_chunks, iterations, short)
    i = tl.arange(0, BLOCK)
    first = (period * phases + phase) * BLOCK
    if MODE == "rows":
        within = (phase * BLOCK).to(tl.int32) + i
        size = per_run.to(tl.int32)
        row = period * rows_per_period + within // size
        column = (within % size).to(tl.int64)
    elif MODE == "flat":
        row = (i * 0).to(tl.int64)
        column = first + i
    else:
        row = (first + i) // per_run
        column = (first + i) % per_run
    left = periods - period - (phase >= last_phases).to(tl.int64)
    return first, row, column, phases * BLOCK, tl.minimum(most, left).to(tl.int32)


@triton.jit
def _advance(offset, column, step, rows_per_period, per_run, stride_row, BLOCK: tl.constexpr, VECTOR: tl.constexpr, MODE: tl.constexpr):
    """(offset, column) of the next tile, which begins step vectors later."""
    if MODE == "rows":
        return offset + rows_per_period * stride_row, column
    elif MODE == "flat":
        return offset + step * VECTOR, column
    else:
        # rows_per_period: whole rows in a step, at most.
        column += step - rows_per_period * per_run
        over = column >= per_run
        jump = rows_per_period * stride_row + (step - rows_per_period * per_run) * VECTOR
        offset += tl.where(over, jump + stride_row - per_run * VECTOR, jump)
        return offset, tl.where(over, column - per_run, column)


@triton.jit
def _sums_of_warps(values, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """``[BLOCK]`` to ``[WARPS]``, by exchanges between lanes alone: warps need not wait for each other."""
    of_threads = tl.sum(tl.reshape(values, (BLOCK // (32 * WARPS), WARPS, 32)), 0)
    return tl.sum(of_threads, 1)


@triton.jit
def _elements(offset, VECTOR: tl.constexpr):
    """Offsets ``[BLOCK, VECTOR]`` of the vectors that begin at offset."""
    tile = offset[:, None] + tl.arange(0, VECTOR)[None, :]
    # Spelled out, since the compiler loses it over the division by a run's length, and with it the wide loads.
    return tl.max_contiguous(tl.multiple_of(tile, (1, VECTOR)), (1, VECTOR))


@triton.jit
def _load(ptr, tile, valid, DTYPE: tl.constexpr, MASKED: tl.constexpr, APPROXIMATE: tl.constexpr):
    x = tl.load(ptr + tile, mask=valid[:, None], other=0.0) if MASKED else tl.load(ptr + tile)
    if APPROXIMATE and x.dtype == tl.bfloat16 and tile.shape[1] % 2 == 0:
        return quick_float32(x)
    else:
        return x.to(DTYPE)


@triton.jit
def _store(ptr, tile, value, valid, MASKED: tl.constexpr):
    value = value.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(ptr + tile, value, mask=valid[:, None])
    else:
        tl.store(ptr + tile, value)


@triton.jit(do_not_specialize=[*_NUMBERS, "stride_x", "stride_y"])
def _rational_fwd_kernel(
    x_ptr,  # [outer, GROUPS, length] in these strides
    a_ptr,  # [GROUPS, A_COUNT]
    b_ptr,  # [GROUPS, B_COUNT]
    y_ptr,  # [outer, GROUPS, length]
    stride_x: tl.int64,
    stride_y: tl.int64,
    stride_ag: tl.int64,
    stride_ai: tl.int64,
    stride_bg: tl.int64,
    stride_bj: tl.int64,
    total: tl.int64,  # vectors of a group
    per_run: tl.int64,  # vectors of a run
    phases: tl.int64,
    periods: tl.int64,
    last_phases: tl.int64,  # tiles of the last period
    iterations: tl.int64,  # periods of a long chunk
    short: tl.int64,
    long_chunks: tl.int64,
    rows_per_period: tl.int64,
    DENOMINATOR,  # jit functions: see `DeviceFunctions`
    GROUPS: tl.constexpr,
    A_COUNT: tl.constexpr,
    B_COUNT: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    MASKED: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``y = P(x) / Q(x)``."""
    group = (tl.program_id(0) % GROUPS).to(tl.int64)
    a = _load_coefficients(a_ptr + group * stride_ag, stride_ai, unchanged, A_COUNT, DTYPE)
    b = _load_coefficients(b_ptr + group * stride_bg, stride_bj, DENOMINATOR.coefficient, B_COUNT, DTYPE)
    walk = (per_run, phases, periods, last_phases, iterations, short, long_chunks, rows_per_period)
    first, row, column_x, step, count = _begin(walk, GROUPS, BLOCK, MODE)
    column_y = column_x
    offset_x = row * stride_x + (group * per_run + column_x) * VECTOR
    offset_y = row * stride_y + (group * per_run + column_y) * VECTOR
    for _ in range(count):
        valid = first + tl.arange(0, BLOCK) < total
        x = _load(x_ptr, _elements(offset_x, VECTOR), valid, DTYPE, MASKED, APPROXIMATE)
        y = _rational(a, b, x, DENOMINATOR, A_COUNT, B_COUNT, APPROXIMATE)
        _store(y_ptr, _elements(offset_y, VECTOR), y, valid, MASKED)
        offset_x, column_x = _advance(offset_x, column_x, step, rows_per_period, per_run, stride_x, BLOCK, VECTOR, MODE)
        offset_y, column_y = _advance(offset_y, column_y, step, rows_per_period, per_run, stride_y, BLOCK, VECTOR, MODE)
        first += step


@triton.jit(do_not_specialize=[*_NUMBERS, "stride_x", "stride_dy", "stride_dx"])
def _rational_bwd_kernel(
    x_ptr,  # [outer, GROUPS, length] in these strides
    dy_ptr,  # [outer, GROUPS, length]
    a_ptr,  # [GROUPS, A_COUNT]
    b_ptr,  # [GROUPS, B_COUNT]
    dx_ptr,  # [outer, GROUPS, length]
    partial_ptr,  # [A_COUNT + B_COUNT, GROUPS, programs of a group, WARPS]
    stride_x: tl.int64,
    stride_dy: tl.int64,
    stride_dx: tl.int64,
    stride_ag: tl.int64,
    stride_ai: tl.int64,
    stride_bg: tl.int64,
    stride_bj: tl.int64,
    total: tl.int64,  # vectors of a group
    per_run: tl.int64,  # vectors of a run
    phases: tl.int64,
    periods: tl.int64,
    last_phases: tl.int64,  # tiles of the last period
    iterations: tl.int64,  # periods of a long chunk
    short: tl.int64,
    long_chunks: tl.int64,
    rows_per_period: tl.int64,
    DENOMINATOR,  # jit functions: see `DeviceFunctions`
    GROUPS: tl.constexpr,
    A_COUNT: tl.constexpr,
    B_COUNT: tl.constexpr,
    B_FIRST: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    MASKED: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    DTYPE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_COEFFICIENTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """dx, and this program's part of ``da_i = sum dy x^i / Q`` and ``db_j = -sum dy P / Q^2 dQ/db_j``.

    The vector of a thread is summed first, then vectors, a warp's threads and, by the kernel below, warps.
    """
    group = (tl.program_id(0) % GROUPS).to(tl.int64)
    a = _load_coefficients(a_ptr + group * stride_ag, stride_ai, unchanged, A_COUNT, DTYPE)
    b = _load_coefficients(b_ptr + group * stride_bg, stride_bj, DENOMINATOR.coefficient, B_COUNT, DTYPE)
    walk = (per_run, phases, periods, last_phases, iterations, short, long_chunks, rows_per_period)
    first, row, column, step, count = _begin(walk, GROUPS, BLOCK, MODE)
    column_dy = column
    column_dx = column
    offset = row * stride_x + (group * per_run + column) * VECTOR
    offset_dy = row * stride_dy + (group * per_run + column) * VECTOR
    offset_dx = row * stride_dx + (group * per_run + column) * VECTOR
    sum_a = zeros((BLOCK,), A_COUNT, DTYPE)
    sum_b = zeros((BLOCK,), B_COUNT, DTYPE)
    for _ in range(count):
        valid = first + tl.arange(0, BLOCK) < total
        tile = _elements(offset, VECTOR)
        x = _load(x_ptr, tile, valid, DTYPE, MASKED, APPROXIMATE)
        dy = _load(dy_ptr, tile if SAME_STRIDES else _elements(offset_dy, VECTOR), valid, DTYPE, MASKED, APPROXIMATE)
        dx, u, even, odd = _rational_slopes(a, b, x, dy, DENOMINATOR, A_COUNT, B_COUNT, APPROXIMATE)
        if NEED_X:
            _store(dx_ptr, tile if SAME_STRIDES else _elements(offset_dx, VECTOR), dx, valid, MASKED)
        if NEED_COEFFICIENTS:
            sum_a, sum_b = _add_coefficients((sum_a, sum_b), x, (u, even, odd), A_COUNT, B_COUNT, B_FIRST, True)
        offset, column = _advance(offset, column, step, rows_per_period, per_run, stride_x, BLOCK, VECTOR, MODE)
        if not SAME_STRIDES:
            offset_dy, column_dy = _advance(offset_dy, column_dy, step, rows_per_period, per_run, stride_dy, BLOCK, VECTOR, MODE)
            offset_dx, column_dx = _advance(offset_dx, column_dx, step, rows_per_period, per_run, stride_dx, BLOCK, VECTOR, MODE)
        first += step
    if NEED_COEFFICIENTS:
        partials = tl.num_programs(0).to(tl.int64) * WARPS
        out = partial_ptr + group * (partials // GROUPS) + (tl.program_id(0) // GROUPS) * WARPS + tl.arange(0, WARPS)
        for k in tl.static_range(A_COUNT):
            tl.store(out + k * partials, _sums_of_warps(sum_a[k], BLOCK, WARPS))
        for k in tl.static_range(B_COUNT):
            tl.store(out + (A_COUNT + k) * partials, _sums_of_warps(sum_b[k], BLOCK, WARPS))


@triton.jit(do_not_specialize=["stride_bg", "stride_bj", "count"])
def _rational_coefficients_kernel(
    partial_ptr,  # [A_COUNT + B_COUNT, groups, partial sums of a group]
    b_ptr,  # [B_GROUPS, B_COUNT]
    da_ptr,  # [A_GROUPS, A_COUNT]
    db_ptr,  # [B_GROUPS, B_COUNT]
    stride_bg: tl.int64,
    stride_bj: tl.int64,
    count: tl.int64,  # partial sums of each coefficient, over all groups
    DENOMINATOR,
    A_GROUPS: tl.constexpr,
    B_GROUPS: tl.constexpr,
    A_COUNT: tl.constexpr,
    B_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of the partial sums, in a fixed order and in float64: one program for each coefficient.

    Shared coefficients (A_GROUPS or B_GROUPS of 1) take those of all groups.
    """
    program = tl.program_id(0)
    is_a = program < A_COUNT * A_GROUPS
    within = tl.where(is_a, program, program - A_COUNT * A_GROUPS)
    groups = tl.where(is_a, A_GROUPS, B_GROUPS)
    coefficient = within // groups
    group = within % groups
    size = count // groups
    source = partial_ptr + tl.where(is_a, coefficient, A_COUNT + coefficient) * count + group * size
    acc = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        acc += tl.load(source + i, mask=i < size, other=0.0).to(tl.float64)
    total = tl.sum(acc, 0)
    if da_ptr.dtype.element_ty != tl.float64:
        total = total.to(tl.float32)  # float64 to bfloat16 is not a step that every compiler knows
    if is_a:
        tl.store(da_ptr + group * A_COUNT + coefficient, total.to(da_ptr.dtype.element_ty))
    else:
        b = tl.load(b_ptr + group * stride_bg + coefficient * stride_bj).to(total.dtype)
        total = DENOMINATOR.coefficient_slope(total, b)
        tl.store(db_ptr + group * B_COUNT + coefficient, total.to(db_ptr.dtype.element_ty))
