"""Epilogues on the pairs of a gated linear layer's sums: ``y = up * act(gate)``, or the gradients of both from dy.

Epilogues of `tiling/gemm.py`, and one elementwise kernel for pairs that were stored. VALUE and SLOPE are the activation and its
derivative, PARAMS a `launches.Params`: with constants, all functions take them as a second argument.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.gemm import load_tile, store_tile


@triton.jit
def _store_pair(first, second, place, pair, pair2, stride, INTERLEAVED: tl.constexpr):
    """Store two tiles in the order of the weight's rows: to every other column of ``pair [M, 2 H]``, or to pair and pair2 ``[M, H]``."""
    row, column, rows, columns = place
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))
        store_tile(pair, both, row, 2 * column, rows, 2 * columns, stride)
    else:
        store_tile(pair, first, row, column, rows, columns, stride)
        store_tile(pair2, second, row, column, rows, columns, stride)


@triton.jit
def _gate(first, second, VALUE: tl.constexpr, PARAMS: tl.constexpr):
    C: tl.constexpr = PARAMS.constants
    UP: tl.constexpr = PARAMS.up
    if len(C) == 0:
        return first * VALUE(second)
    elif len(UP) == 0:
        return first * VALUE(second, C)
    else:
        return UP[0](first, C) * VALUE(second, C)


@triton.jit
def _gradients(first, second, dy, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """The gradients of both of each pair."""
    C: tl.constexpr = PARAMS.constants
    UP: tl.constexpr = PARAMS.up
    if len(C) == 0:
        return dy * VALUE(second), dy * first * SLOPE(second)
    elif len(UP) == 0:
        return dy * VALUE(second, C), dy * first * SLOPE(second, C)
    else:
        return dy * VALUE(second, C) * UP[1](first, C), dy * UP[0](first, C) * SLOPE(second, C)


@triton.jit
def epilogue_gate(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """``out [M, H] = first * VALUE(second)``, with its function of first if there is one."""
    row, column, rows, columns = place
    store_tile(targets[0], _gate(first, second, VALUE, PARAMS), row, column, rows, columns, strides[0])


@triton.jit
def epilogue_gate_and_pair(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """The same, and both of each pair, which backward may read again."""
    _store_pair(first, second, place, targets[1], targets[2], strides[1], PARAMS.interleaved)
    epilogue_gate(first, second, place, targets, tensors, strides, VALUE, SLOPE, PARAMS)


@triton.jit
def _epilogue_gradients(first, second, dy, place, targets, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    dfirst, dsecond = _gradients(first, second, dy, VALUE, SLOPE, PARAMS)
    _store_pair(dfirst, dsecond, place, targets[1], targets[2], strides[1], PARAMS.interleaved)


@triton.jit
def epilogue_gradients(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """From ``side [M, H]``, dy: the gradients of each pair."""
    row, column, rows, columns = place
    dy = load_tile(targets[3], row, column, rows, columns, strides[2], first.shape[0], first.shape[1]).to(tl.float32)
    _epilogue_gradients(first, second, dy, place, targets, strides, VALUE, SLOPE, PARAMS)


@triton.jit
def epilogue_gradients_and_gate(
    first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr
):
    """The same, and `epilogue_gate`'s ``out [M, H]``; it may be dy's own memory where both have descriptors.

    Without descriptors, threads could overwrite elements that others have not loaded yet. A barrier would keep the main loop from
    being pipelined.
    """
    row, column, rows, columns = place
    dy = load_tile(targets[3], row, column, rows, columns, strides[2], first.shape[0], first.shape[1]).to(tl.float32)
    epilogue_gate(first, second, place, targets, tensors, strides, VALUE, SLOPE, PARAMS)
    _epilogue_gradients(first, second, dy, place, targets, strides, VALUE, SLOPE, PARAMS)


@triton.jit
def _gate_gradients_kernel(
    dy,  # [M, H]
    pairs,  # [M, 2 H]
    out,  # [M, 2 H], which may be pairs itself
    y,  # [M, H], which may be dy itself
    M,
    columns,
    stride_dy,
    VALUE: tl.constexpr,
    SLOPE: tl.constexpr,
    PARAMS: tl.constexpr,
    GATE: tl.constexpr,  # y is wanted
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradients of pairs that were stored, and the result once more; all are contiguous, but for dy."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M
    column = tl.program_id(0) % tiles_n * BLOCK_N
    stride = 2 * columns
    g = load_tile(dy, row, column, M, columns, stride_dy, BLOCK_M, BLOCK_N).to(ACC)
    if PARAMS.interleaved:
        both = load_tile(pairs, row, 2 * column, M, stride, stride, BLOCK_M, 2 * BLOCK_N).to(ACC)
        first, second = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    else:
        first = load_tile(pairs, row, column, M, columns, stride, BLOCK_M, BLOCK_N).to(ACC)
        second = load_tile(pairs + columns, row, column, M, columns, stride, BLOCK_M, BLOCK_N).to(ACC)
    # In place, no thread may store before all have loaded: loads and stores can have layouts of their own.
    tl.debug_barrier()
    place = (row, column, M, columns)
    if GATE:
        store_tile(y, _gate(first, second, VALUE, PARAMS), row, column, M, columns, columns)
    dfirst, dsecond = _gradients(first, second, g, VALUE, SLOPE, PARAMS)
    _store_pair(dfirst, dsecond, place, out, out + columns, stride, PARAMS.interleaved)
