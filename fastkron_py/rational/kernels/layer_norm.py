"""Layer normalisation and the rational function of its result in one pass over memory, and their derivatives in another.

A program takes some rows at a time. Of every column it keeps the normalisation's scale and shift, the coefficients of the column's
group, and, in the backward pass, this program's part of the gradients of all of them; the parts are added in a fixed order by a
second kernel, over programs, and by `_rational_coefficients_kernel`, over the columns of a group.
"""

import triton
import triton.language as tl

from fastkron_py.rational.denominators.device import unchanged
from fastkron_py.rational.kernels.function import _add_coefficients, _load_coefficients, _rational, _rational_slopes
from fastkron_py.tiling.products import zeros

_NUMBERS = ("rows", "stride_ag", "stride_ai", "stride_bg", "stride_bj")


@triton.jit(do_not_specialize=_NUMBERS)
def _layer_norm_rational_fwd_kernel(
    x_ptr,  # [rows, CHANNELS]
    weight_ptr,  # [CHANNELS]
    bias_ptr,  # [CHANNELS]
    a_ptr,  # [groups, A_COUNT]
    b_ptr,  # [groups, B_COUNT]
    y_ptr,  # [rows, CHANNELS]
    mean_ptr,  # [rows]
    rstd_ptr,  # [rows]
    rows: tl.int64,
    stride_ag: tl.int64,
    stride_ai: tl.int64,
    stride_bg: tl.int64,
    stride_bj: tl.int64,
    DENOMINATOR,  # jit functions: see `DeviceFunctions`
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    A_COUNT: tl.constexpr,
    B_COUNT: tl.constexpr,
    EPS: tl.constexpr,  # which an argument would round to float32
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``y = R(layer_norm(x))``, with each row's mean and reciprocal deviation."""
    column = tl.arange(0, BLOCK)
    inside = column < CHANNELS
    group = column // WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(DTYPE)[None, :]
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(DTYPE)[None, :]
    a = _load_coefficients(a_ptr + group * stride_ag, stride_ai, unchanged, A_COUNT, DTYPE, inside)
    b = _load_coefficients(b_ptr + group * stride_bg, stride_bj, DENOMINATOR.coefficient, B_COUNT, DTYPE, inside)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        tile = row[:, None] * CHANNELS + column[None, :]
        x = tl.load(x_ptr + tile, mask=mask, other=0.0).to(DTYPE)
        mean = tl.sum(x, 1) / CHANNELS
        centred = tl.where(mask, x - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / CHANNELS + EPS)
        h = centred * rstd[:, None] * weight + bias
        y = _rational(a, b, h, DENOMINATOR, A_COUNT, B_COUNT, APPROXIMATE)
        tl.store(y_ptr + tile, y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=_NUMBERS)
def _layer_norm_rational_bwd_kernel(
    x_ptr,  # [rows, CHANNELS]
    dy_ptr,  # [rows, CHANNELS]
    mean_ptr,  # [rows]
    rstd_ptr,  # [rows]
    weight_ptr,  # [CHANNELS]
    bias_ptr,  # [CHANNELS]
    a_ptr,  # [groups, A_COUNT]
    b_ptr,  # [groups, B_COUNT]
    dx_ptr,  # [rows, CHANNELS]
    partial_ptr,  # [2 + A_COUNT + B_COUNT, programs, CHANNELS]: of weight, bias, a, b
    rows: tl.int64,
    stride_ag: tl.int64,
    stride_ai: tl.int64,
    stride_bg: tl.int64,
    stride_bj: tl.int64,
    DENOMINATOR,  # jit functions: see `DeviceFunctions`
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    A_COUNT: tl.constexpr,
    B_COUNT: tl.constexpr,
    B_FIRST: tl.constexpr,
    HAS_POLES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """dx, and this program's part of the gradients of weight, bias and coefficients (see `_rational_bwd_kernel`)."""
    column = tl.arange(0, BLOCK)
    inside = column < CHANNELS
    group = column // WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(DTYPE)[None, :]
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(DTYPE)[None, :]
    a = _load_coefficients(a_ptr + group * stride_ag, stride_ai, unchanged, A_COUNT, DTYPE, inside)
    b = _load_coefficients(b_ptr + group * stride_bg, stride_bj, DENOMINATOR.coefficient, B_COUNT, DTYPE, inside)
    sum_norm = zeros((ROWS, BLOCK), 2, DTYPE)
    sum_a = zeros((ROWS, BLOCK), A_COUNT, DTYPE)
    sum_b = zeros((ROWS, BLOCK), B_COUNT, DTYPE)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        tile = row[:, None] * CHANNELS + column[None, :]
        x = tl.load(x_ptr + tile, mask=mask, other=0.0).to(DTYPE)
        dy = tl.load(dy_ptr + tile, mask=mask, other=0.0).to(DTYPE)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normal = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        h = normal * weight + bias
        if HAS_POLES:
            h = tl.where(mask, h, 0.0)  # where S is zero: a pole in rows that are not there would make NaN of their zeros
        dh, u, even, odd = _rational_slopes(a, b, h, dy, DENOMINATOR, A_COUNT, B_COUNT, APPROXIMATE)
        sum_norm = (sum_norm[0] + dh * normal, sum_norm[1] + dh)
        sum_a, sum_b = _add_coefficients((sum_a, sum_b), h, (u, even, odd), A_COUNT, B_COUNT, B_FIRST, False)
        scaled = dh * weight
        along = tl.sum(scaled * normal, 1) / CHANNELS
        level = tl.sum(scaled, 1) / CHANNELS
        dx = (scaled - level[:, None] - normal * along[:, None]) * rstd[:, None]
        tl.store(dx_ptr + tile, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    size = tl.num_programs(0).to(tl.int64) * CHANNELS
    out = partial_ptr + tl.program_id(0).to(tl.int64) * CHANNELS + column
    for k in tl.static_range(2):
        tl.store(out + k * size, tl.sum(sum_norm[k], 0), mask=inside)
    for k in tl.static_range(A_COUNT):
        tl.store(out + (2 + k) * size, tl.sum(sum_a[k], 0), mask=inside)
    for k in tl.static_range(B_COUNT):
        tl.store(out + (2 + A_COUNT + k) * size, tl.sum(sum_b[k], 0), mask=inside)


@triton.jit(do_not_specialize=["programs"])
def _columns_kernel(
    partial_ptr,  # [2 + coefficients, programs, CHANNELS]
    dweight_ptr,  # [CHANNELS]
    dbias_ptr,  # [CHANNELS]
    sums_ptr,  # [coefficients, CHANNELS]
    programs: tl.int64,
    CHANNELS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums over programs, in a fixed order and in float64; one program for some columns of one gradient."""
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    which = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < CHANNELS
    source = partial_ptr + which * programs * CHANNELS
    acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float64)
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)
        mask = (program < programs)[:, None] & inside[None, :]
        acc += tl.load(source + program[:, None] * CHANNELS + column[None, :], mask=mask, other=0.0).to(tl.float64)
    total = tl.sum(acc, 0)
    rounded = total
    if dweight_ptr.dtype.element_ty != tl.float64:
        rounded = total.to(tl.float32)  # float64 to bfloat16 is not a step that every compiler knows
    if which == 0:
        tl.store(dweight_ptr + column, rounded.to(dweight_ptr.dtype.element_ty), mask=inside)
    elif which == 1:
        tl.store(dbias_ptr + column, rounded.to(dbias_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(sums_ptr + (which - 2) * CHANNELS + column, total, mask=inside)
