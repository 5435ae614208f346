"""The rational function of the sums of a linear layer's main loop (`tiling/gemm.py`).

Tensors are (numerator, denominator, denominator's jit functions), the first two contiguous; PARAMS is

    (numerator's count, denominator's count, channels of a group, 1-instruction reciprocal?, stride of the numerator's groups,
    stride of the denominator's groups)

where the stride of shared coefficients is 0.
"""

import triton
import triton.language as tl

from fastkron_py.rational.denominators.device import unchanged
from fastkron_py.rational.kernels.function import COEFFICIENT, _load_coefficients, _rational
from fastkron_py.tiling.gemm import store_tile


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
    group = _group(column, columns, t.shape[1], PARAMS[2])
    a = _load_coefficients(tensors[0] + group * PARAMS[4], 1, unchanged, PARAMS[0], tl.float32)
    b = _load_coefficients(tensors[1] + group * PARAMS[5], 1, tensors[2][COEFFICIENT], PARAMS[1], tl.float32)
    return _rational(a, b, t, tensors[2], PARAMS[0], PARAMS[1], PARAMS[3])


@triton.jit
def epilogue_rational(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """Store ``out [M, N] = VALUE(sums)``, and the sums to ``pair [M, N]``, which backward reads again."""
    row, column, rows, columns = place
    store_tile(targets[1], first, row, column, rows, columns, strides[1])
    store_tile(targets[0], VALUE(first, column, columns, tensors, PARAMS), row, column, rows, columns, strides[0])
