"""The rational function in a linear layer's main loop (`kernels/gemm.py`): of its sums, and its derivatives of the next layer's.

Tensors are (numerator, denominator), or with the partial sums behind them, all contiguous; PARAMS is

    (version, numerator's count, denominator's count, channels of a group, 1-instruction reciprocal?, stride of the numerator's
    groups, stride of the denominator's groups)

where the stride of shared coefficients is 0.
"""

import triton
import triton.language as tl

from fastkron_py.kernels.gemm import load_tile, store_tile
from fastkron_py.kernels.rational_function import _load_coefficients, _rational, _rational_slopes


@triton.jit
def _group(column, columns, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """The group of a tile's columns: one number where tiles never cross groups, else ``[1, COLUMNS]``; beyond the last column the last."""
    if ((COLUMNS - 1) & WIDTH) == 0:
        return tl.minimum(column, columns - 1) // WIDTH
    else:
        return (tl.minimum(column + tl.arange(0, COLUMNS), columns - 1) // WIDTH)[None, :]


@triton.jit
def value_rational(t, column, columns, tensors, PARAMS: tl.constexpr):
    """``P(t) / Q(t)``, with coefficients of each column's group."""
    VERSION: tl.constexpr = PARAMS[0]
    group = _group(column, columns, t.shape[1], PARAMS[3])
    a = _load_coefficients(tensors[0] + group * PARAMS[5], 1, PARAMS[1], tl.float32, False)
    b = _load_coefficients(tensors[1] + group * PARAMS[6], 1, PARAMS[2], tl.float32, VERSION == "A")
    return _rational(a, b, t, PARAMS[1], PARAMS[2], VERSION, PARAMS[4])


@triton.jit
def finish_rational(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """Store ``out [M, N] = VALUE(sums)``, and the sums to ``pair [M, N]``, which backward reads again."""
    row, column, rows, columns = place
    store_tile(targets[1], first, row, column, rows, columns, strides[1])
    store_tile(targets[0], VALUE(first, column, columns, tensors, PARAMS), row, column, rows, columns, strides[0])


@triton.jit
def _store_sum(out, values, inside):
    tl.store(out, tl.sum(tl.sum(values, 1), 0), mask=inside)


@triton.jit
def finish_rational_gradients(
    first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr
):
    """Sums are dy; from ``side [M, N]``, x: ``out = dx``, and this piece's sums for the coefficients' gradients.

    ``tensors[2]`` takes those: ``[numerator's count + denominator's, groups, pieces of a group]``. No piece crosses groups.
    """
    row, column, rows, columns = place
    VERSION: tl.constexpr = PARAMS[0]
    A_COUNT: tl.constexpr = PARAMS[1]
    B_COUNT: tl.constexpr = PARAMS[2]
    WIDTH: tl.constexpr = PARAMS[3]
    B_FIRST: tl.constexpr = 0 if VERSION == "C" else 1
    tl.static_assert(((first.shape[1] - 1) & WIDTH) == 0)
    group = tl.minimum(column, columns - 1) // WIDTH
    a = _load_coefficients(tensors[0] + group * PARAMS[5], 1, A_COUNT, tl.float32, False)
    b = _load_coefficients(tensors[1] + group * PARAMS[6], 1, B_COUNT, tl.float32, VERSION == "A")
    x = load_tile(targets[3], row, column, rows, columns, strides[2], first.shape[0], first.shape[1]).to(tl.float32)
    is_row = (row + tl.arange(0, first.shape[0]) < rows)[:, None]
    dy = tl.where(is_row, first, 0.0)
    dx, u, even, odd = _rational_slopes(a, b, x, dy, A_COUNT, B_COUNT, VERSION, PARAMS[4])
    store_tile(targets[0], dx, row, column, rows, columns, strides[0])
    pieces: tl.constexpr = WIDTH // first.shape[1]
    per_group = tl.cdiv(rows, first.shape[0]) * pieces
    stride = (columns // WIDTH).to(tl.int64) * per_group
    out = tensors[2] + (group * per_group + row // first.shape[0] * pieces + column % WIDTH // first.shape[1])
    inside = column < columns
    term = u
    for i in tl.static_range(A_COUNT):
        if i > 0:
            term = term * x
        _store_sum(out + i * stride, term, inside)
    even_power = even
    odd_power = odd
    for j in tl.static_range(B_FIRST + B_COUNT):
        if j > 0:
            even_power = even_power * x
            odd_power = odd_power * x
        if j >= B_FIRST:
            _store_sum(out + (A_COUNT + j - B_FIRST) * stride, even_power if j % 2 == 0 else odd_power, inside)
