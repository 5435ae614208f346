"""The gradient of a polynomial KAN layer's inputs, made of the sums of the linear layers' main loop (`tiling/gemm.py`).

The product is of dy with coefficients whose rows are in the order (block of inputs, degree, input of the block): a part of a tile holds all
degrees of a few inputs, and a thread has all of those of an input. targets are (dx, ., ., x), which have descriptors; tensors are (table,
x, start, step and value of the basis's derivatives); VALUE and SLOPE are the normaliser and its derivative; PARAMS is

    (TERMS, first degree in the product, degrees in a part, the basis's parameters)
"""

import triton
import triton.language as tl

from fastkron_py.kan.kernels.gradients import _add_degrees
from fastkron_py.tiling.gemm import load_tile, store_tile


@triton.jit
def fetch_input(row, tile_n, tensors, strides, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARAMS: tl.constexpr):
    """Have the lines in which a tile's rows of x begin brought to the L2 cache while its product is done."""
    r = tl.minimum(row + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)
    address = (tensors[1] + r * strides[2] + tile_n * (BLOCK_N // PARAMS[2])).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def epilogue_input_gradient(
    first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr
):
    """``dx [M, I] = SLOPE(x) * sum over d of B_d'(VALUE(x)) * sums``; sums beyond the last degree are not looked at, whatever they are."""
    tl.static_assert(isinstance(targets[0], tl.tensor_descriptor) and isinstance(targets[3], tl.tensor_descriptor))
    TERMS: tl.constexpr = PARAMS[0]
    FIRST: tl.constexpr = PARAMS[1]
    DEGREES: tl.constexpr = PARAMS[2]
    CONSTANTS: tl.constexpr = PARAMS[3]
    BLOCK_M: tl.constexpr = first.shape[0]
    BLOCK_N: tl.constexpr = first.shape[1] // DEGREES
    row, column, rows, columns = place
    column = column // DEGREES
    x = load_tile(targets[3], row, column, rows, columns, strides[2], BLOCK_M, BLOCK_N).to(tl.float32)
    state = tensors[2](VALUE(x), TERMS, CONSTANTS)
    for skipped in tl.static_range(FIRST):
        state = tensors[3](state, tl.full((), skipped, tl.int32), TERMS, CONSTANTS)
    d = tl.full((), FIRST, tl.int32)
    dx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dx, _ = _add_degrees(
        dx, state, d, first, tensors[0], DEGREES, TERMS - FIRST, BLOCK_M, BLOCK_N, TERMS, CONSTANTS, tensors[3], tensors[4]
    )
    store_tile(targets[0], dx * SLOPE(x), row, column, rows, columns, strides[0])
