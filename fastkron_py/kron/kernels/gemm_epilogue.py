"""The epilogue of a multiply's last step in the main loop of linear layers (`tiling/gemm.py`): scale, and add z."""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import scalar
from fastkron_py.tiling.gemm import load_tile, store_tile


@triton.jit
def epilogue_axpby(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """Store ``alpha * sums + beta * z`` to ``out [M, N]``; z is the side."""
    row, column, rows, columns = place
    ALPHA: tl.constexpr = len(tensors) - 2
    z = load_tile(targets[3], row, column, rows, columns, strides[2], first.shape[0], first.shape[1]).to(tl.float32)
    y = first * scalar(tensors[ALPHA], tl.float32) + z * scalar(tensors[ALPHA + 1], tl.float32)
    store_tile(targets[0], y, row, column, rows, columns, strides[0])
