"""Kernel of two steps on one slice at a time, in half precision, with tensor cores that multiply its dtype.

A slice ``[PA, PB]`` lies in memory as a matrix X, so that ``y = (A^T X) B`` needs no transposition: X and the factors are
taken as they lie in shared memory, A^T X stays in registers, and the result is stored as it is. While a program multiplies one slice,
the next one is loaded. Transposed, it is ``y^T = (B^T X^T) A``: tensor cores take 64 or 128 rows at a time of the factor on the left,
but any number of columns, and the plan (`families.slice_pair`) puts that factor left which wastes fewer rows.

X's columns come in parts, each a power of two: 86 of them are 64 and 32, where one part would be 128.

A slice ``[PA, R, PB]`` with a factor R x R in the middle is R such matrices, one after the other: each
is multiplied by A and added to sums in registers, which are multiplied by B after the last one. Where the registers hold fewer than R
sums, the slice is read once more for the others, from L2.
"""

import triton
import triton.language as tl

from fastkron_py.kron.kernels.quantize import clips, column_of, largest_by_row, scale_of, store_values
from fastkron_py.tiling.addresses import dot, factor_tile


@triton.jit
def _largest(t, BY_ROW: tl.constexpr):
    """The largest absolute value of each row, or of all finite elements.

    By row an infinity may replace the largest element, which takes fewer instructions: its row of the product is infinite or NaN
    whatever the other elements are.
    """
    counted = t if BY_ROW else tl.where(tl.abs(t) < float("inf"), t, 0.0)
    largest = tl.max(tl.abs(counted), 1, keep_dims=True)
    return largest if BY_ROW else tl.max(largest)


@triton.jit
def in_half(t, HALF: tl.constexpr, BY_ROW: tl.constexpr):
    """(t / scale in half precision, scale), scale a power of two: 1 in bfloat16, which has float32's range, and of a t that is in HALF.

    In float16 it is that of t's largest finite element, so that nothing between two steps overflows, and large ones have all bits.
    By row it is that of each row's: a row lies within a warp, so no warp waits for another.
    """
    found, scale = _in_halves((t,), 1, HALF, BY_ROW)
    return found[0], scale


@triton.jit
def _in_halves(parts, COUNT: tl.constexpr, HALF: tl.constexpr, BY_ROW: tl.constexpr):
    """`in_half` of tiles side by side, which have the same rows and one scale, or one for each row."""
    found = ()
    if tl.bfloat16 == HALF or parts[0].dtype == HALF:
        for i in tl.static_range(COUNT):
            found = found + (parts[i].to(HALF),)  # type: ignore[assignment]  # noqa: RUF005 - the compiler takes no *found
        return found, 1.0
    else:
        largest = _largest(parts[0], BY_ROW)
        for i in tl.static_range(1, COUNT):
            largest = tl.maximum(largest, _largest(parts[i], BY_ROW))
        exponent = tl.maximum(tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253), 1)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        for i in tl.static_range(COUNT):
            found = found + ((parts[i] * inverse).to(HALF),)  # type: ignore[assignment]  # noqa: RUF005
        return found, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _columns(PARTS: tl.constexpr, AT: tl.constexpr):
    """The columns of a part."""
    return PARTS[AT][0] + tl.arange(0, PARTS[AT][1])[None, :]


@triton.jit
def _in_memory(PARTS: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """(rows, columns) in memory of a part with this number of rows."""
    if TRANSPOSED:
        return PARTS[AT][0] + tl.arange(0, PARTS[AT][1])[:, None], tl.arange(0, ROWS)[None, :]
    else:
        return tl.arange(0, ROWS)[:, None], _columns(PARTS, AT)


@triton.constexpr_function
def _is_inside(part, rows, transposed, sizes):
    """Whether a part with this number of rows has no padding; sizes are (rows, columns) in memory."""
    most_rows, most_columns = (sizes[1], sizes[0]) if transposed else (sizes[0], sizes[1])
    return rows == most_rows and part[0] + part[1] <= most_columns


@triton.jit
def _load_part(
    ptr, PARTS: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, STEP: tl.constexpr, SIZES: tl.constexpr
):
    """Load a part of a matrix of these SIZES in memory, whose rows are STEP apart; 0 in the padding."""
    row, column = _in_memory(PARTS, AT, ROWS, TRANSPOSED)
    if _is_inside(PARTS[AT], ROWS, TRANSPOSED, SIZES):
        part = tl.load(ptr + (row * STEP + column))
    else:
        part = tl.load(ptr + (row * STEP + column), mask=(row < SIZES[0]) & (column < SIZES[1]), other=0.0)
    return part.T if TRANSPOSED else part


@triton.jit
def _load_parts(ptr, PARTS: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, STEP: tl.constexpr, SIZES: tl.constexpr):
    """`_load_part` of each part."""
    found = ()
    for i in tl.static_range(len(PARTS)):
        part = _load_part(ptr, PARTS, i, ROWS, TRANSPOSED, STEP, SIZES)
        found = found + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _rows(COUNT: tl.constexpr, PAIRED: tl.constexpr):
    """The columns of the factor on the left in a tile's rows."""
    row = tl.arange(0, COUNT)
    return column_of(row) if PAIRED else row


@triton.jit
def _factor(ptrs, strides, batch, p, q, SHAPES: tl.constexpr, FACTORS: tl.constexpr):
    """A tile of the product of factors, in float32; of one factor as it is, which needs no scale.

    Loaded as it is, a factor on the left stays in shared memory, where products take it. Triton keeps a computed one in registers.
    """
    if FACTORS[1] - FACTORS[0] == 1:
        ptr = ptrs[FACTORS[0]] + batch * strides[FACTORS[0]][0]
        at = p.to(tl.int64) * strides[FACTORS[0]][1] + q.to(tl.int64) * strides[FACTORS[0]][2]
        return tl.load(ptr + at, mask=(p < SHAPES[FACTORS[0]][0]) & (q < SHAPES[FACTORS[0]][1]), other=0.0)
    else:
        return factor_tile(ptrs, strides, batch, p, q, SHAPES, FACTORS[0], FACTORS[1], tl.float32)


@triton.jit
def _left_factor(
    ptrs, strides, batch, SHAPES: tl.constexpr, FACTORS: tl.constexpr, PADS: tl.constexpr, PAIRED: tl.constexpr, HALF: tl.constexpr
):
    """(the factor on the left, transposed, its scale)."""
    p, q = tl.arange(0, PADS[0])[None, :], _rows(PADS[1], PAIRED)[:, None]
    return in_half(_factor(ptrs, strides, batch, p, q, SHAPES, FACTORS), HALF, False)


@triton.jit
def _right_factor(
    ptrs, strides, batch, SHAPES: tl.constexpr, FACTORS: tl.constexpr, P_PARTS: tl.constexpr, Q_PARTS: tl.constexpr, HALF: tl.constexpr
):
    """(the parts of the factor on the right, those of its first columns before others, their scale)."""
    found = ()
    for j in tl.static_range(len(Q_PARTS)):
        for i in tl.static_range(len(P_PARTS)):
            p = P_PARTS[i][0] + tl.arange(0, P_PARTS[i][1])[:, None]
            f = _factor(ptrs, strides, batch, p, _columns(Q_PARTS, j), SHAPES, FACTORS)
            found = found + (f,)  # type: ignore[assignment]  # noqa: RUF005
    return _in_halves(found, len(P_PARTS) * len(Q_PARTS), HALF, False)


@triton.jit
def _first_product(left, xs, COUNT: tl.constexpr, PRECISION: tl.constexpr):
    """The left factor times each part of X."""
    found = ()
    for i in tl.static_range(COUNT):
        product = dot(left, xs[i], tl.zeros((left.shape[0], xs[i].shape[1]), tl.float32), PRECISION)
        found = found + (product,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _sum_of_products(ts, factors, FIRST: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr):
    """``[rows, columns]`` of parts of t times parts of a factor, from number FIRST on."""
    product = tl.zeros((ts[0].shape[0], factors[FIRST].shape[1]), tl.float32)
    for i in tl.static_range(COUNT):
        product = dot(ts[i], factors[FIRST + i], product, PRECISION)
    return product


@triton.jit
def _second_product(ts, factors, scale, HALF: tl.constexpr, P_COUNT: tl.constexpr, Q_COUNT: tl.constexpr, PRECISION: tl.constexpr):
    """The parts of the result."""
    found = ()
    for j in tl.static_range(Q_COUNT):
        product = _sum_of_products(ts, factors, j * P_COUNT, P_COUNT, PRECISION)
        if tl.bfloat16 != HALF:
            product *= scale
        found = found + (product,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _zero(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def _zeros(ROWS: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """Matrices of zeros, each in parts."""
    found = ()
    for _ in tl.static_range(COUNT):
        for i in tl.static_range(len(PARTS)):
            found = found + (_zero(ROWS, PARTS[i][1]),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _mixed(mixed, ts, factor_ptr, stride, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """The matrices, each plus t times an element of a factor's row."""
    found = ()
    for k in tl.static_range(COUNT):
        f = tl.load(factor_ptr + k * stride).to(tl.float32)
        for i in tl.static_range(len(PARTS)):
            found = found + (mixed[k * len(PARTS) + i] + ts[i] * f,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _without_padding(mixed, FIRST: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """The parts from number FIRST on, 0 in padded columns: an infinity of a factor makes NaN of them, which 0 does not cancel."""
    found = ()
    for i in tl.static_range(len(PARTS)):
        part = mixed[FIRST + i]
        if PARTS[i][0] + PARTS[i][1] > SIZE:
            part = tl.where(_columns(PARTS, i) < SIZE, part, 0.0)
        found = found + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _store_part(
    y,
    y_ptr,
    addend,
    PARTS: tl.constexpr,
    AT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    STEP: tl.constexpr,
    SIZES: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Store a part of a matrix of the result, with an addend (z_ptr, z_stride, alpha, beta); as in `_load_part`."""
    z_ptr, z_stride, alpha, beta = addend
    INSIDE: tl.constexpr = _is_inside(PARTS[AT], y.shape[0], TRANSPOSED, SIZES)
    row, column = _in_memory(PARTS, AT, y.shape[0], TRANSPOSED)
    mask = (row < SIZES[0]) & (column < SIZES[1])
    n = row * STEP + column
    y = EPILOGUE(y.T if TRANSPOSED else y, alpha, beta, z_ptr, n.to(tl.int64) * z_stride, mask).to(y_ptr.dtype.element_ty)
    if INSIDE:
        tl.store(y_ptr + n, y)
    else:
        tl.store(y_ptr + n, y, mask=mask)


@triton.jit
def store_product(
    ys, y_ptr, addend, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, STEP: tl.constexpr, SIZES: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Store the parts of a matrix of the result, with an addend as in `_store_part`."""
    for j in tl.static_range(len(PARTS)):
        _store_part(ys[j], y_ptr, addend, PARTS, j, TRANSPOSED, STEP, SIZES, EPILOGUE)


@triton.jit
def _store_values(ys, scale, y_ptr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, SIZES: tl.constexpr, CLIPPED: tl.constexpr):
    """Store the parts of a slice as small numbers."""
    for j in tl.static_range(len(PARTS)):
        row, column = (PARTS[j][0], 0) if TRANSPOSED else (0, PARTS[j][0])
        inside = _is_inside(PARTS[j], ys[j].shape[0], TRANSPOSED, SIZES)
        store_values(ys[j], scale, y_ptr, row, column, TRANSPOSED, SIZES[0], SIZES[1], inside, CLIPPED, y_ptr.dtype.element_ty)


@triton.jit
def store_quantized(
    ys, y_ptr, addend, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, STEP: tl.constexpr, SIZES: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Store a slice, which is a row of the result, as small numbers, and its scale in z's place.

    Elements in the padding are 0, or not finite where elements of the row are not either.
    """
    scale_ptr, _z_stride, alpha, _beta = addend
    largest = largest_by_row(ys[0])
    for j in tl.static_range(1, len(PARTS)):
        largest = tl.maximum(largest, largest_by_row(ys[j]))
    scale = scale_of(tl.max(largest, 0), alpha)
    tl.store(scale_ptr, scale)
    if clips(alpha, tl.float32, y_ptr.dtype.element_ty):
        _store_values(ys, scale, y_ptr, PARTS, TRANSPOSED, SIZES, True)
    else:  # limits would take as many instructions as all the rest of rounding
        _store_values(ys, scale, y_ptr, PARTS, TRANSPOSED, SIZES, False)


@triton.jit(do_not_specialize=["alpha", "beta", "num_slices", "programs"], do_not_specialize_on_alignment=["before"])
def _row_pair_fwd_kernel(
    x_ptr,  # [B, L, before, PA * PB]
    factor_ptrs,  # each [B, P_i, Q_i]
    z_ptr,  # [B, L, before, QA * QB], or scales [B, L, before] that are stored
    y_ptr,  # [B, L, before, QA * QB]
    x_strides,  # (B, L, before, P, after)
    factor_strides,  # (B, P_i, Q_i) each
    z_strides,  # (B, L, before, Q, after)
    y_strides,  # (B, L, before, Q, after)
    alpha: tl.int64,  # float64 pattern
    beta: tl.int64,
    num_slices,
    programs,  # of each batch
    before,
    after,  # 1
    SHAPES: tl.constexpr,
    LEFT: tl.constexpr,  # (first, one past the last) of the factors on the left,
    RIGHT: tl.constexpr,  # and on the right
    MIDDLE: tl.constexpr,  # rows and columns of the one after those on the left, where A is left; else 1
    SUMS: tl.constexpr,  # of MIDDLE's columns, in registers at once
    PADS: tl.constexpr,  # (rows, columns) of the factor on the left in tiles
    P_PARTS: tl.constexpr,  # (first, number) of X's columns in each part,
    Q_PARTS: tl.constexpr,  # and of the result's
    TRANSPOSED: tl.constexpr,  # B is on the left, else A
    PAIRED: tl.constexpr,  # rows of transposed tiles are in the order of `column_of`
    X_SIZES: tl.constexpr,  # rows and columns of X in memory
    Y_SIZES: tl.constexpr,  # and of the result
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,  # slices that are loaded ahead, and the present one
    PRECISION: tl.constexpr,
    STORE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    COUNT: tl.constexpr = len(P_PARTS)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    right, scale_right = _right_factor(factor_ptrs, factor_strides, batch, SHAPES, RIGHT, P_PARTS, Q_PARTS, HALF)
    left, scale_left = _left_factor(factor_ptrs, factor_strides, batch, SHAPES, LEFT, PADS, PAIRED, HALF)
    P: tl.constexpr = X_SIZES[0] if TRANSPOSED else X_SIZES[1]
    first = tl.program_id(0) % programs
    TURNS: tl.constexpr = MIDDLE // SUMS
    mixed = _zeros(PADS[1], P_PARTS, SUMS)
    for i in tl.range(MIDDLE * TURNS * tl.cdiv(num_slices - first, programs), num_stages=STAGES):
        row, j = tl.cast(first + i // (MIDDLE * TURNS) * programs, tl.int64), tl.cast(0, tl.int64)
        h, turn = i % MIDDLE, i // MIDDLE % TURNS * SUMS
        if HEAD:
            row, j = row // before, row % before
        x_slice = x_ptr + batch * x_strides[0] + row * x_strides[1] + j * x_strides[2]
        z_slice = z_ptr + batch * z_strides[0] + row * z_strides[1] + j * z_strides[2]
        y_slice = y_ptr + batch * y_strides[0] + row * y_strides[1] + j * y_strides[2]
        xs = _load_parts(x_slice + h * X_SIZES[1], P_PARTS, PADS[0], TRANSPOSED, X_SIZES[1] * MIDDLE, X_SIZES)
        ts = _first_product(left, xs, COUNT, PRECISION)
        if MIDDLE > 1:
            strides = factor_strides[LEFT[1]]
            f = factor_ptrs[LEFT[1]] + batch * strides[0] + h * strides[1] + turn * strides[2]
            mixed = _mixed(mixed, ts, f, strides[2], SUMS, P_PARTS)
        else:
            mixed = ts
        if h == MIDDLE - 1:
            for k in tl.static_range(SUMS):
                us = _without_padding(mixed, k * COUNT, P_PARTS, P)
                us, scale = _in_halves(us, COUNT, HALF, True)
                ys = _second_product(us, right, scale * (scale_left * scale_right), HALF, COUNT, len(Q_PARTS), PRECISION)
                at = (turn + k) * Y_SIZES[1]
                addend = (z_slice + at * z_strides[3], z_strides[3], alpha, beta)
                STORE(ys, y_slice + at, addend, Q_PARTS, TRANSPOSED, Y_SIZES[1] * MIDDLE, Y_SIZES, EPILOGUE)
            mixed = _zeros(PADS[1], P_PARTS, SUMS)
