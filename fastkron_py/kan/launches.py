"""Launchers of the polynomial KAN kernels: plain Triton's, and those for Hopper GPUs."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kan import plan
from fastkron_py.kan.kernels.forward import _poly_kan_fwd_kernel
from fastkron_py.kan.kernels.gradients import _poly_kan_gradients_kernel
from fastkron_py.kan.kernels.operands import _sum_segments_kernel
from fastkron_py.kan.layer_config import LayerConfig
from fastkron_py.kan.plan import GROUP, Pipelined, Sizes, Split, Tile
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.precision import wide_dtype
from fastkron_py.runtime.program import bits
from fastkron_py.tiling.products import _sum_partials_kernel, arithmetic

ALIGNED: Final = 16  # elements: more makes no load wider
_SUM_BLOCK: Final = 256
_ONE: Final = bits(1.0)


class Problem(NamedTuple):
    """Everything that a layer's launches depend on, as plain values; strides are of rows."""

    rows: int
    num_in: int
    num_out: int
    stride_x: int
    stride_g: int  # of dy; 0 in the forward pass
    has_bias: bool
    layer: LayerConfig
    precision: str
    dtype: torch.dtype
    device: torch.device

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return wide_dtype(self.dtype)

    @property
    def is_split(self) -> bool:
        """Whether float32 products take three passes."""
        return self.dtype == torch.float32 and self.precision == "highest"

    @property
    def is_large(self) -> bool:
        """Whether operands are prepared."""
        return plan.is_large(self.sizes())

    def sizes(self) -> Sizes:
        """The sizes that the closed form chooses by."""
        passes = 3 if self.is_split else 1
        return Sizes(self.rows, self.num_in, self.num_out, self.layer.terms, self.dtype.itemsize, passes, devices.gpu_of(self.device))


class Stored(NamedTuple):
    """Where a kernel stores a result, and the second stage that adds up partial sums.

    Attributes:
        partial: shape of the partial sums; None for the result itself.
        launcher: of the second stage, on partial sums and the result.
        scalars: of its launch.
    """

    partial: tuple[int, ...] | None = None
    launcher: Launcher | None = None
    scalars: tuple[int, ...] = ()


def stored(splits: int, shape: tuple[int, ...]) -> Stored:
    """The result, or partial sums ``[splits, ...]`` that are added in order."""
    if splits == 1:
        return Stored()
    size = math.prod(shape)
    # stride_b is of a batch of sums; there is one here.
    strides = {"stride_b": 0, "stride_r": size}
    arguments = {**strides, "programs": splits, "SIZE": size, "BLOCK_R": 4, "BLOCK": _SUM_BLOCK, "COLUMNS": 0, "num_warps": 4}
    return Stored((splits, *shape), Launcher([LaunchConfig(_sum_partials_kernel, (-(-size // _SUM_BLOCK),), arguments)]), (_ONE,))


class Boxes(NamedTuple):
    """Block shape of a TMA descriptor of matrices; beyond the first columns there is nothing."""

    shape: list[int]
    columns: int
    layout: Any

    def describe(self, t: Tensor) -> Any:
        """The descriptor of a matrix whose rows begin on boundaries of 16 bytes, or of contiguous matrices, one below the other."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        t = t.view(-1, t.shape[-1])[:, : self.columns]
        return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], self.shape, self.layout)


class Product(NamedTuple):
    """The launch of one of a layer's products, or of both gradients, and the operands it wants.

    Attributes:
        launcher: on the operands, then the results or their partial sums.
        first: degree in the product; that before is added apart.
        transposed: whether an operand runs along the reduction: TF32 in shared memory has to, 16-bit types need not.
        with_low: whether its low halves are operands too.
        rounds: whether TF32, which cuts, is given numbers that cutting rounds.
        results: how each of the results is stored.
        pipelined: whether the kernel is one for Hopper GPUs.
        boxes: of the operand with its low halves, where descriptors of these are given; of dx's two, the coefficients.
        boxes_of_dy: of dx's other one.
    """

    launcher: Launcher
    first: int
    transposed: bool
    with_low: bool
    rounds: bool
    results: tuple[Stored, ...]
    pipelined: bool = False
    boxes: Boxes | None = None
    boxes_of_dy: Boxes | None = None


def whole_vectors(count: int) -> int:
    """The least number from count on of float32 numbers that are vectors of 16 bytes."""
    return -(-count // 4) * 4


# ---- the kernels for Hopper GPUs -------------------------------------------------------------------

_PASSES: Final = (("forward", "fwd"), ("dx", "dx"), ("dcoef", "dcoef"))  # modules and kernels


def pipelined_kernels() -> Any:
    """(forward, dx, dC) of polynomial KAN layers, or None where this Triton cannot compile them."""
    modules = "kan.kernels.hopper"
    kernels = [devices.gluon_kernel(f"{modules}.{module}", f"_poly_kan_pipelined_{name}_kernel") for module, name in _PASSES]
    return None if any([kernel is None for kernel in kernels]) else tuple(kernels)


def has_pipelined(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether they can run here."""
    return dtype != torch.float64 and devices.gpu_of(device).has_wgmma and pipelined_kernels() is not None


_SUM_ROWS: Final = 32
_DOWN: Final = 1 << 16  # rows of tiles in a group: all of them, which is the order in which the second kernel finds their shares


def takes_pipelined(problem: Problem, backward: bool) -> bool:
    """Whether these kernels can do a layer's products on its device, and are better than plain Triton's."""
    if not problem.layer.found.any_dialect or not has_pipelined(problem.device, problem.dtype):
        return False
    # Float32 is prepared, with rows that TMA takes.
    copies = problem.dtype == torch.float32 or (problem.stride_x % 8 == 0 and problem.stride_g % 8 == 0)
    return copies and plan.takes_pipelined(problem.sizes(), backward)


def _pipelined_sizes(problem: Problem) -> Sizes:
    """The sizes that the closed form chooses by."""
    return problem.sizes()._replace(terms=max(1, problem.layer.terms - problem.layer.first))


def _precision(problem: Problem) -> str:
    if problem.dtype != torch.float32:
        return "half"
    return "split" if problem.is_split else "cut"


def _pipelined_constants(problem: Problem, choice: Pipelined, derivative: bool) -> dict[str, Any]:
    """The arguments that all three kernels take."""
    start, step, value = problem.layer.prologue(derivative)
    return {
        "rows": problem.rows,
        "num_in": problem.num_in,
        "num_out": problem.num_out,
        "stride_xm": problem.stride_x,
        "TERMS": problem.layer.terms,
        "FIRST": problem.layer.first,
        "PARAMS": problem.layer.constants,
        "START": start,
        "STEP": step,
        "VALUE": value,
        "NORM": problem.layer.normalizer.device_functions(True)[0],
        "BLOCK_N": choice.block_n,
        "BLOCK_K": choice.block_k,
        "STAGES": choice.stages,
        "FLUSH": choice.flush,
        "PRECISION": _precision(problem),
        "ALIGN_IN": math.gcd(problem.num_in, problem.stride_x, ALIGNED),
        "num_warps": 4 if choice.registers else 8,
    }


def _pipelined_product(
    problem: Problem, kernel: Any, choice: Pipelined, arguments: dict[str, Any], result: Stored, boxes: Boxes | None
) -> Product:
    launcher = Launcher([LaunchConfig(kernel, (choice.programs,), arguments)])
    transposed = problem.dtype == torch.float32
    rounds = transposed and not problem.is_split
    return Product(launcher, problem.layer.first, transposed, problem.is_split, rounds, (result,), True, boxes)


def _boxes(shape: list[int], columns: int, dtype: torch.dtype) -> Boxes:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, str(dtype).removeprefix("torch.")))
    return Boxes(shape, columns, layout)


def pipelined_forward(problem: Problem) -> Product:
    """The launch of y, on (x, C, its low halves, table, bias)."""
    choice = plan.pipelined_forward(_pipelined_sizes(problem))
    kernel, _, _ = pipelined_kernels()
    arguments = {
        **_pipelined_constants(problem, choice, False),
        "blocks_per_split": choice.blocks,
        "items": choice.work_items,
        "HAS_BIAS": problem.has_bias or problem.layer.first == 1,
        "BLOCK_M": plan.BLOCK_M,
        "GROUP": GROUP,
        "REGISTERS": choice.registers,
        "ALIGN_OUT": math.gcd(problem.num_out, ALIGNED),
    }
    result = stored(choice.splits, (problem.rows, problem.num_out))
    boxes = _boxes([choice.block_n, choice.block_k], problem.num_in, problem.dtype)
    return _pipelined_product(problem, kernel, choice, arguments, result, boxes)


def pipelined_input_gradient(problem: Problem) -> Product | None:
    """The launch of dx, on (dy, its low halves, x, C, its low halves, table), where this kernel is best."""
    choice = plan.pipelined_input_gradient(_pipelined_sizes(problem))
    if choice is None:
        return None
    _, kernel, _ = pipelined_kernels()
    units = -(-problem.num_out // choice.block_k) * -(-_pipelined_sizes(problem).terms // choice.degrees)
    tiles = -(-problem.rows // plan.BLOCK_M) * -(-problem.num_in // choice.block_n)
    segments = plan.segments_of(tiles, units, choice.work_items)
    arguments = {
        **_pipelined_constants(problem, choice, True),
        "parts": choice.work_items,
        "SLOPE": problem.layer.normalizer.device_functions(True)[1],
        "DEGREES": choice.degrees,
        "GROUP": GROUP if segments == 1 else _DOWN,
        "REGISTERS": choice.registers,
    }
    result = Stored()
    if segments > 1:
        shape = (1, problem.rows, problem.num_in)
        result = _segments(shape, 0, 1, choice, units, segments)
    boxes = _boxes([choice.block_n, choice.block_k], problem.num_out, problem.dtype)
    product = _pipelined_product(problem, kernel, choice, arguments, result, boxes)
    return product._replace(boxes_of_dy=_boxes([plan.BLOCK_M, choice.block_k], problem.num_out, problem.dtype))


def pipelined_coefficient_gradient(problem: Problem) -> Product:
    """The launch of dC, on (dy, its low halves, x, table)."""
    sizes = _pipelined_sizes(problem)
    choice = plan.pipelined_coefficient_gradient(sizes)
    _, _, kernel = pipelined_kernels()
    transposed = problem.dtype == torch.float32
    blocks = -(-problem.rows // choice.block_k)
    arguments = {
        **_pipelined_constants(problem, choice, False),
        "blocks": blocks,
        "parts": choice.work_items,
        "DEGREES": choice.degrees,
        "REGISTERS": choice.registers,
    }
    box = [plan.BLOCK_M, choice.block_k] if transposed else [choice.block_k, plan.BLOCK_M]
    boxes = _boxes(box, problem.rows if transposed else problem.num_out, problem.dtype)
    tiles = -(-problem.num_out // plan.BLOCK_M) * -(-problem.num_in // choice.block_n) * -(-sizes.terms // choice.degrees)
    segments = plan.segments_of(tiles, blocks, choice.work_items)
    result = Stored()
    if segments > 1:
        shape = (problem.layer.terms, problem.num_out, problem.num_in)
        result = _segments(shape, problem.layer.first, choice.degrees, choice, blocks, segments)
    return _pipelined_product(problem, kernel, choice, arguments, result, boxes)


def _segments(shape: tuple[int, int, int], first: int, degrees: int, choice: Pipelined, units: int, segments: int) -> Stored:
    """Partial sums of a result [terms, rows, columns], from term first on; a second kernel adds those of each tile."""
    terms, rows, columns = shape
    arguments = {
        "num_in": columns,
        "num_out": rows,
        "blocks": units,
        "programs": choice.work_items,
        "segments": segments,
        "TERMS": terms,
        "FIRST": first,
        "DEGREES": degrees,
        "BLOCK_M": plan.BLOCK_M,
        "BLOCK_N": choice.block_n,
        "ROWS": _SUM_ROWS,
        "num_warps": 4,
    }
    programs = -(-columns // choice.block_n) * -(-rows // _SUM_ROWS) * (terms - first)
    launcher = Launcher([LaunchConfig(_sum_segments_kernel, (programs,), arguments)])
    return Stored((segments, *shape), launcher)


# ---- plain Triton's kernels ------------------------------------------------------------------------


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
    if takes_pipelined(problem, False):
        return pipelined_forward(problem)
    blocks = _blocks(problem, plan.forward, False)
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
    blocks = _blocks(problem, plan.input_gradient, True)
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
    blocks = _blocks(problem, plan.coefficient_gradient, False)
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


_TENSORS: Final = 8  # that the kernel takes
_UNUSED_SCALARS: Final = (
    "stride_go",
    "stride_co",
    "stride_ci",
    "blocks_x",
    "blocks_c",
    "ALIGN_CO",
)  # integers of the gradient that is not made


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
    arguments |= {name: 1 if name in _UNUSED_SCALARS else None for name in absent}
    programs = sum([gradient.programs for gradient in made])
    return _product(_poly_kan_gradients_kernel, programs, arguments, blocks, tuple([gradient.stored for gradient in made]))


def input_gradient(problem: Problem) -> Product:
    """The launch of dx alone, on (dy, its low halves, x, C, its low halves, table).

    See `triton_backend.gemm_choice` for another one.
    """
    found = pipelined_input_gradient(problem) if takes_pipelined(problem, True) else None
    return found or _gradients(problem, _of_input(problem), None)


def coefficient_gradient(problem: Problem) -> Product:
    """The launch of dC alone, on (dy, its low halves, x, table), between which plain Triton's kernel takes C and its low halves."""
    return (
        pipelined_coefficient_gradient(problem) if takes_pipelined(problem, True) else _gradients(problem, None, _of_coefficients(problem))
    )


def takes_both(problem: Problem) -> bool:
    """Whether one launch makes both gradients: of small layers, for which nothing is prepared."""
    return not problem.is_large and not takes_pipelined(problem, True)


def both_gradients(problem: Problem) -> Product:
    """The launch of dx and dC of a small layer, for which nothing is prepared, on (dy, dy, x, C, C, table)."""
    return _gradients(problem, _of_input(problem), _of_coefficients(problem))
