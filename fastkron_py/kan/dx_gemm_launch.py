"""A large polynomial KAN layer's dx on Hopper GPUs, by the linear layers' main loop."""

from __future__ import annotations

from torch import Tensor
from triton import knobs

from fastkron_py.kan import config as tuning
from fastkron_py.kan import operands
from fastkron_py.kan.kernels.dx_gemm import epilogue_input_gradient, fetch_input
from fastkron_py.kan.problem import Problem
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.tiling.gemm import begin_nothing
from fastkron_py.tiling.gemm_config import GemmTile
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm


def choose(problem: Problem) -> tuple[GemmTile, int] | None:
    """Blocks, and how many degrees a tile has side by side; None where another kernel takes less time, or this one cannot be."""
    sizes = problem.sizes()
    return tuning.input_gradient_gemm(sizes._replace(terms=sizes.terms - problem.layer.first)) if _can_copy(problem) else None


def add(
    build: Builder, problem: Problem, choice: tuple[GemmTile, int], dy: Tensor, x: Tensor, coefficients: Tensor, table: Tensor
) -> Tensor:
    """``dx [M, I]``; rows of dy and x are runs of memory, from boundaries of 16 bytes."""
    tile, degrees = choice
    layer, first = problem.layer, problem.layer.first
    value, slope = layer.normalizer.device_functions(not knobs.runtime.interpret)
    call = Gemm(
        epilogue_input_gradient,
        value=value,
        slope=slope,
        params=(layer.terms, first, degrees, layer.constants),
        functions=layer.prologue(True),
        begin=begin_nothing if knobs.runtime.interpret else fetch_input,
        sums=degrees,
    )
    width = tile.block_n // tile.parts // degrees
    b = operands.transposed_in_blocks(build, coefficients, first, width, degrees, problem.dtype.itemsize == 4)
    dx = build.empty(x.shape, x.dtype)
    add_gemm(build, dy, b, None, call, dx, side=x, tensors=(table, x), precision=problem.precision, tile=tile)
    return dx


def _can_copy(problem: Problem) -> bool:
    """Whether the device's copy engine takes every operand."""
    itemsize = problem.dtype.itemsize
    sizes = (problem.num_in, problem.num_out, problem.stride_x, problem.stride_g)
    return itemsize < 8 and devices.gpu_of(problem.device).has_wgmma and all([size * itemsize % 16 == 0 for size in sizes])
