"""Launchers of the polynomial KAN kernels in plain Triton."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch

from fastkron_py.kan import config as tuning
from fastkron_py.kan.config import GROUP, Split, Tile
from fastkron_py.kan.hopper import launch as hopper
from fastkron_py.kan.kernels.forward import _poly_kan_fwd_kernel
from fastkron_py.kan.kernels.gradients import _poly_kan_gradients_kernel
from fastkron_py.kan.problem import ALIGNED, Problem, Product, Stored, stored, whole_vectors
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.tiling.products import arithmetic


class _Blocks(NamedTuple):
    """How one of the three products is divided among programs."""

    transposed: bool
    first: int  # degree in the product
    tile: Tile
    split: Split

    def even(self, width: int, depth: int) -> tuple[bool, bool]:
        """Whether blocks divide the product's width, as far as they go along it, and its depth."""
        return width % self.tile.block_n == 0, depth % self.tile.block_k == 0


def _blocks(problem: Problem, choose: Any, derivative: bool) -> _Blocks:
    """Tiles and splits by the closed form."""
    large = problem.is_large
    first = problem.layer.first if derivative or large else 0
    tile, split = choose(problem.sizes()._replace(terms=max(1, problem.layer.terms - first)))
    return _Blocks(large and problem.dtype == torch.float32, first, tile, split)


def _normalizer(problem: Problem) -> tuple[Any, Any]:
    """Value and derivative, of float32 sums by the device's own exponential and reciprocal."""
    return problem.layer.normalizer.device_functions(problem.wide == torch.float32 and devices.gpu_of(problem.device).has_approximations)


def _constants(problem: Problem) -> dict[str, Any]:
    """The arguments that all kernels take."""
    compute, acc, precision = arithmetic(problem.dtype, problem.precision, True)
    if problem.is_large and precision in ("tf32x3", "tf32"):
        precision = {"tf32x3": "split", "tf32": "cut"}[precision]
    return {
        "rows": problem.rows,
        "num_in": problem.num_in,
        "num_out": problem.num_out,
        "stride_xm": problem.stride_x,
        "TERMS": problem.layer.terms,
        "PARAMS": problem.layer.constants,
        "NORM": _normalizer(problem)[0],
        "GROUP": GROUP,
        "COMPUTE": compute,
        "ACC": acc,
        "PRECISION": precision,
        "ALIGN_IN": math.gcd(problem.num_in, problem.stride_x, ALIGNED),
        "ALIGN_OUT": math.gcd(problem.num_out, ALIGNED),
    }


def _product(kernel: Any, programs: int, arguments: dict[str, Any], blocks: _Blocks, results: tuple[Stored, ...]) -> Product:
    """The launch, and the same with fewer stages for devices with less shared memory."""
    stages = [s for s in (4, 3, 2, 1) if s <= arguments["num_stages"]]
    launcher = Launcher([LaunchConfig(kernel, (programs,), {**arguments, "num_stages": s}) for s in stages])
    precision = arguments["PRECISION"]
    return Product(launcher, blocks.first, blocks.transposed, precision == "split", precision == "cut", results)


# ---- y -------------------------------------------------------------------------------------------


def forward(problem: Problem) -> Product:
    """The launch of y, on (x, C, its low halves, table, bias)."""
    if hopper.takes(problem, False):
        return hopper.forward(problem)
    blocks = _blocks(problem, tuning.forward, False)
    tile, split = blocks.tile, blocks.split
    start, step, value = problem.layer.prologue(False)
    even_n, even_k = blocks.even(problem.num_out, problem.num_in)
    arguments = {
        **_constants(problem),
        "blocks_per_split": split.blocks,
        "FIRST": blocks.first,
        "DEGREES": max(1, problem.layer.terms - blocks.first) // split.groups,
        "START": start,
        "STEP": step,
        "VALUE": value,
        "HAS_BIAS": problem.has_bias or blocks.first == 1,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_N": even_n,
        "EVEN_K": even_k,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    tiles = -(-problem.rows // tile.block_m) * -(-problem.num_out // tile.block_n)
    sums = split.splits * split.groups
    return _product(_poly_kan_fwd_kernel, tiles * sums, arguments, blocks, (stored(sums, (problem.rows, problem.num_out)),))


# ---- gradients -----------------------------------------------------------------------------------


class _Gradient(NamedTuple):
    """One of the gradients in the gradients' kernel."""

    blocks: _Blocks
    arguments: dict[str, Any]
    programs: int
    stored: Stored


def _of_input(problem: Problem) -> _Gradient:
    """The arguments for dx."""
    blocks = _blocks(problem, tuning.input_gradient, True)
    tile, splits = blocks.tile, blocks.split.splits
    even_n, even_k = blocks.even(problem.num_in, problem.num_out)
    start, step, value = problem.layer.prologue(True)
    arguments = {
        "stride_co": 1 if blocks.transposed else problem.num_in,
        "stride_ci": problem.num_out if blocks.transposed else 1,
        "blocks_x": blocks.split.blocks,
        "SLOPE": _normalizer(problem)[1],
        "FIRST_X": blocks.first,
        "START_X": start,
        "STEP_X": step,
        "VALUE_X": value,
        "TILE_X": (tile.block_m, tile.block_n, tile.block_k, tile.degrees),
        "EVEN_X": (even_n and (problem.layer.terms - blocks.first) % tile.degrees == 0, even_k),
        "ALIGN_CO": 1 if blocks.transposed else math.gcd(problem.num_in, ALIGNED),
        "FLAT_X": not problem.is_large,
    }
    programs = splits * -(-problem.rows // tile.block_m) * -(-problem.num_in // tile.block_n)
    return _Gradient(blocks, arguments, programs, stored(splits, (problem.rows, problem.num_in)))


def _of_coefficients(problem: Problem) -> _Gradient:
    """The arguments for dC."""
    blocks = _blocks(problem, tuning.coefficient_gradient, False)
    tile, splits, terms = blocks.tile, blocks.split.splits, problem.layer.terms
    start, step, value = problem.layer.prologue(False)
    arguments = {
        "stride_go": whole_vectors(problem.rows) if blocks.transposed else 1,
        "blocks_c": blocks.split.blocks,
        "FIRST_C": blocks.first,
        "START_C": start,
        "STEP_C": step,
        "VALUE_C": value,
        "TILE_C": (tile.block_m, tile.block_n, tile.block_k, tile.degrees),
        "EVEN_C": blocks.even(problem.num_out, problem.rows),
    }
    groups = -(-(terms - blocks.first) // tile.degrees)
    programs = splits * groups * -(-problem.num_in // tile.block_m) * -(-problem.num_out // tile.block_n)
    return _Gradient(blocks, arguments, programs, stored(splits, (terms, problem.num_out, problem.num_in)))


_PREPARED_TOGETHER: Final = 1 << 23  # elements of dy and C
_TENSORS: Final = 8  # that the kernel takes
_UNREAD: Final = ("stride_go", "stride_co", "stride_ci", "blocks_x", "blocks_c", "ALIGN_CO")  # integers of the gradient that is not made


def _gradients(problem: Problem, of_x: _Gradient | None, of_coefficients: _Gradient | None) -> Product:
    """One of the gradients, or both in one launch."""
    made = [gradient for gradient in (of_x, of_coefficients) if gradient is not None]
    blocks = made[0].blocks
    transposed = blocks.transposed and of_x is None  # dy
    arguments = {
        "stride_gm": 1 if transposed else problem.stride_g,
        "ALIGN_GM": 1 if transposed else math.gcd(problem.stride_g, ALIGNED),
        "programs_x": 0 if of_x is None else of_x.programs,
        "HAS_X": of_x is not None,
        "HAS_C": of_coefficients is not None,
        "num_warps": blocks.tile.warps,
        "num_stages": min([gradient.blocks.tile.stages for gradient in made]),
    }
    for gradient in made:
        arguments |= gradient.arguments
    arguments |= _constants(problem)
    absent = [name for name in _poly_kan_gradients_kernel.arg_names[_TENSORS:] if name not in arguments]
    arguments |= {name: 1 if name in _UNREAD else None for name in absent}
    programs = sum([gradient.programs for gradient in made])
    return _product(_poly_kan_gradients_kernel, programs, arguments, blocks, tuple([gradient.stored for gradient in made]))


def input_gradient(problem: Problem) -> Product:
    """The launch of dx alone, on (dy, its low halves, x, C, its low halves, table).

    See `dx_gemm_launch` for another one.
    """
    found = hopper.input_gradient(problem) if hopper.takes(problem, True) else None
    return found or _gradients(problem, _of_input(problem), None)


def coefficient_gradient(problem: Problem) -> Product:
    """The launch of dC alone, on (dy, its low halves, x, table), between which plain Triton's kernel takes C and its low halves."""
    return hopper.coefficient_gradient(problem) if hopper.takes(problem, True) else _gradients(problem, None, _of_coefficients(problem))


def takes_both(problem: Problem) -> bool:
    """Whether one launch makes both gradients: of small layers, for which nothing is prepared."""
    return not problem.is_large and not hopper.takes(problem, True)


def prepares_both(problem: Problem) -> bool:
    """Whether both gradients' operands are prepared in one launch: where a launch counts, and memory for them at a time does not."""
    elements = problem.rows * problem.num_out + problem.layer.terms * problem.num_out * problem.num_in
    return hopper.takes(problem, True) and problem.is_split and elements <= _PREPARED_TOGETHER


def both_gradients(problem: Problem) -> Product:
    """The launch of dx and dC of a small layer, for which nothing is prepared, on (dy, dy, x, C, C, table)."""
    return _gradients(problem, _of_input(problem), _of_coefficients(problem))
