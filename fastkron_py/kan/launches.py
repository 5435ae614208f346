"""The launches of polynomial KAN layers: plain Triton's kernels, those for Hopper GPUs, and dx by the linear layers' main loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from fastkron_py.kan import operands, plan
from fastkron_py.kan.kernels.forward import _poly_kan_fwd_kernel
from fastkron_py.kan.kernels.gradients import _poly_kan_gradients_kernel, epilogue_input_gradient, fetch_input
from fastkron_py.kan.kernels.operands import _sum_segments_kernel
from fastkron_py.kan.layer_config import DeviceBasis, LayerConfig
from fastkron_py.kan.plan import Pipelined, Sizes, Tile
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.kernels import LaunchConfig, gluon_kernel
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.precision import wide_dtype
from fastkron_py.runtime.program import bits
from fastkron_py.tiling.gemm import begin_nothing
from fastkron_py.tiling.gemm_config import GemmTile
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm
from fastkron_py.tiling.products import arithmetic, sum_launcher
from fastkron_py.tiling.torch_products import column_sums

ALIGNED: Final = 16  # elements: more makes no load wider
_PREPARED_TOGETHER: Final = 1 << 23  # elements of dy and C


class Problem(NamedTuple):
    """Everything that a layer's launches depend on, as plain values; strides are of rows."""

    rows: int
    num_in: int
    num_out: int
    stride_x: int
    stride_g: int  # of dy; 0 in the forward pass
    layer: LayerConfig
    precision: str
    dtype: torch.dtype
    device: torch.device

    @property
    def is_split(self) -> bool:
        """Whether float32 products take three passes."""
        return self.dtype == torch.float32 and self.precision == "highest"

    @property
    def is_large(self) -> bool:
        """Whether operands are prepared."""
        return plan.is_large(self.sizes(0))

    @property
    def dot_precision(self) -> str:
        """The precision of plain Triton's products, as `product` takes it: "split" and "cut" of prepared operands."""
        found = arithmetic(self.dtype, self.precision, True).precision
        return {"tf32x3": "split", "tf32": "cut"}.get(found, found) if self.is_large else found

    @property
    def normalizer(self) -> tuple[Any, Any]:
        """Value and derivative, of float32 sums by the device's own exponential and reciprocal."""
        quick = self.dtype != torch.float64 and devices.gpu_of(self.device).has_approximations
        return self.layer.normalizer.device_functions(quick)

    def sizes(self, first: int) -> Sizes:
        """The sizes that the closed form chooses by, of products that begin with this degree."""
        passes = 3 if self.is_split else 1
        gpu = devices.gpu_of(self.device)
        return Sizes(self.rows, self.num_in, self.num_out, self.layer.terms - first, self.dtype.itemsize, passes, gpu)

    def arguments(self) -> dict[str, Any]:
        """The arguments that all kernels take."""
        return {
            "rows": self.rows,
            "num_in": self.num_in,
            "num_out": self.num_out,
            "stride_xm": self.stride_x,
            "ALIGN_IN": math.gcd(self.num_in, self.stride_x, ALIGNED),
        }

    def basis(self, derivative: bool, first: int) -> DeviceBasis:
        """The basis's values or derivatives, from a degree on, as an argument of a kernel."""
        layer, (start, step, value) = self.layer, self.layer.prologues[derivative]
        return DeviceBasis(layer.terms, first, layer.constants, start, step, value, *self.normalizer)


class _Call(NamedTuple):
    """A pass of a layer on matrices whose rows are runs of memory; table as of `_table`."""

    build: Builder
    problem: Problem
    x: Tensor
    coefficients: Tensor
    table: Tensor
    dy: Any = None


def add_forward(build: Builder, given: tuple[Any, ...], layer: LayerConfig, precision: str) -> Tensor:
    """``y [M, O]``.

    Args:
        build: of the program.
        given: ``x [..., I]``, M rows; coefficients ``[terms, O, I]``; bias ``[O]`` or None; none of them empty.
        layer: the other arguments.
        precision: "highest" or "high".
    """
    x, coefficients, bias = given
    x, coefficients = operands.matrix(build, x), build.contiguous(coefficients)
    bias = None if bias is None else build.contiguous(bias)
    problem = _problem(build, x, coefficients, None, layer, precision)
    pipelined = takes_pipelined(problem, False)
    if layer.first and (pipelined or problem.is_large):  # degree 0 is a bias
        bias = operands.constant(build, coefficients, bias, wide_dtype(x.dtype))
    with_low = problem.is_split if pipelined else problem.dot_precision == "split"
    coefficients, low = operands.halves(build, coefficients, with_low, pipelined)
    y = build.empty((problem.rows, problem.num_out), x.dtype)
    add = _add_pipelined_forward if pipelined else _add_plain_forward
    add(_Call(build, problem, x, coefficients, _table(build, x, layer)), low, bias, y)
    return y


def add_gradients(
    build: Builder, given: tuple[Any, ...], needs: tuple[bool, bool, bool], layer: LayerConfig, precision: str
) -> list[Tensor]:
    """[``dx [M, I]``] + [``dC [terms, O, I]``] + [``db [O]``], those that are needed; dx and dC of a small layer in one launch.

    Args:
        build: of the program.
        given: ``dy [..., O]``, ``x [..., I]``, coefficients ``[terms, O, I]``.
        needs: dx, dC and db.
        layer: the other arguments.
        precision: "highest" or "high".
    """
    dy, x, coefficients = given
    dy = operands.matrix(build, dy)
    found = []
    if needs[0] or needs[1]:
        x, coefficients = operands.matrix(build, x), build.contiguous(coefficients)
        problem = _problem(build, x, coefficients, dy, layer, precision)
        call = _Call(build, problem, x, coefficients, _table(build, x, layer), dy)
        pipelined = takes_pipelined(problem, True)
        if needs[0] and needs[1] and not pipelined and not problem.is_large:
            aligned = operands.aligned(build, coefficients)
            found = [build.empty(t.shape, t.dtype) for t in (x, aligned)]
            _add_plain_gradients(call, (dy, dy), (aligned, aligned), *found)
        else:
            # In one launch where a launch counts, and memory for both at a time does not.
            together = needs[0] and needs[1] and pipelined and problem.is_split and dy.numel() + coefficients.numel() <= _PREPARED_TOGETHER
            ready = operands.prepared(build, coefficients, dy, layer.first) if together else None
            found = [_add_input_gradient(call, pipelined, ready)] if needs[0] else []
            found += [_add_coefficient_gradient(call, pipelined, ready)] if needs[1] else []
    if needs[2]:
        found.append(build.call(column_sums, (dy,), describe(dy.shape[1:], dy.dtype)))
    return found


def _add_input_gradient(call: _Call, pipelined: bool, ready: operands.Prepared | None) -> Tensor:
    build, problem, coefficients = call.build, call.problem, call.coefficients
    by_gemm = gemm_choice(problem)
    if by_gemm is not None:
        return _add_input_gradient_by_gemm(call, by_gemm)
    choice = plan.pipelined_input_gradient(problem.sizes(problem.layer.first)) if pipelined else None
    if choice is not None:
        if ready is None:
            pair = operands.transposed(build, coefficients, problem.is_split, not problem.is_split, True, problem.layer.first)
            dys = operands.halves(build, build.contiguous(call.dy), problem.is_split, True)
        else:
            pair, dys = ready.coefficients, ready.dy
        dx = build.empty(call.x.shape, call.x.dtype)
        _add_pipelined_input_gradient(call, choice, dys, pair, dx)
        return dx
    if problem.is_large and problem.dtype == torch.float32:
        precision = problem.dot_precision
        pair = operands.transposed(build, coefficients, precision == "split", precision == "cut", False, 0)
    else:
        pair = (operands.aligned(build, coefficients),) * 2
    dx = build.empty(call.x.shape, call.x.dtype)
    _add_plain_gradients(call, (call.dy, call.dy), pair, dx, None)
    return dx


def _add_coefficient_gradient(call: _Call, pipelined: bool, ready: operands.Prepared | None) -> Tensor:
    build, problem = call.build, call.problem
    dcoef = build.empty(call.coefficients.shape, call.x.dtype)
    dys, sums = (call.dy, call.dy), None
    if ready is not None:
        dys, sums = ready.transposed_dy, ready.sums
    elif problem.dtype == torch.float32 and (pipelined or problem.is_large):
        precision = problem.dot_precision
        with_low, rounds = (problem.is_split, not problem.is_split) if pipelined else (precision == "split", precision == "cut")
        dys, sums = operands.transposed_gradient(build, call.dy, with_low, rounds)
    if pipelined:
        _add_pipelined_coefficient_gradient(call, dys, dcoef)
    else:
        _add_plain_gradients(call, dys, (call.x, call.x), None, dcoef)
    if problem.layer.first and (pipelined or problem.is_large):
        if sums is None:
            operands.store_column_sums(build, call.dy, dcoef)
        else:
            operands.spread_sums(build, sums, dcoef)
    return dcoef


def _problem(build: Builder, x: Tensor, coefficients: Tensor, dy: Tensor | None, layer: LayerConfig, precision: str) -> Problem:
    rows, num_in = x.shape
    stride_g = 0 if dy is None else dy.stride(0)
    return Problem(rows, num_in, coefficients.shape[1], x.stride(0), stride_g, layer, precision, x.dtype, build.device)


def _table(build: Builder, x: Tensor, layer: LayerConfig) -> Tensor:
    """The samples that the kernels' basis reads; of the recurrence none, for which x stands in."""
    if not layer.table_size:
        return x
    dtype, device = x.dtype, build.device
    return build.call(lambda: layer.table(dtype, device), (), describe((layer.terms, layer.table_size), wide_dtype(dtype)))


# ---- launches, and the second stage of their sums --------------------------------------------------

_SUM_ROWS: Final = 32


class _Partial(NamedTuple):
    """A kernel's result is partial sums."""

    parts: int  # of the sums
    second: Launcher  # the launch that adds them
    scalars: tuple[int, ...] = ()  # of that launch


def _in_splits(splits: int, out: Tensor) -> _Partial | None:
    """Partial sums ``[splits, ...]`` that are added in order; None for the result itself."""
    return None if splits == 1 else _Partial(splits, sum_launcher(out.numel(), splits), (bits(1.0),))


def _in_segments(shape: tuple[int, int, int], first: int, degrees: int, choice: Pipelined, units: int, segments: int) -> _Partial | None:
    """Partial sums of a result [terms, rows, columns], from term first on; a second kernel adds those of each tile."""
    if segments == 1:
        return None
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
    return _Partial(segments, Launcher([LaunchConfig(_sum_segments_kernel, (programs,), arguments)]))


def _add(build: Builder, configs: Sequence[LaunchConfig], given: tuple[Any, ...], results: Sequence[tuple[Any, _Partial | None]]) -> None:
    """Launch a kernel on operands and results, then the second stages; None for a result that the kernel leaves alone."""
    targets = [out if by is None else build.empty((by.parts, *out.shape), wide_dtype(out.dtype)) for out, by in results]
    build.launch(Launcher(configs), (*given, *[given[0] if t is None else t for t in targets]))
    for target, (out, by) in zip(targets, results, strict=True):
        if by is not None:
            build.launch(by.second, (target, out), by.scalars)


# ---- the kernels for Hopper GPUs -------------------------------------------------------------------

_DOWN: Final = 1 << 16  # rows of tiles in a group: all of them, which is the order in which the second kernel finds their shares


def _pipelined_kernel(name: str) -> Any:
    """One of the kernels, "fwd", "dx" or "dcoef"; None where this Triton cannot compile it."""
    module = "forward" if name == "fwd" else name
    return gluon_kernel(f"kan.kernels.hopper.{module}", f"_poly_kan_pipelined_{name}_kernel")


def has_pipelined(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels can run here."""
    if dtype == torch.float64 or not devices.gpu_of(device).has_wgmma:
        return False
    return all([_pipelined_kernel(name) is not None for name in ("fwd", "dx", "dcoef")])


def takes_pipelined(problem: Problem, backward: bool) -> bool:
    """Whether these kernels can do a layer's products on its device, and are better than plain Triton's."""
    if not problem.layer.found.any_dialect or not has_pipelined(problem.device, problem.dtype):
        return False
    # Float32 is prepared, with rows that TMA takes.
    copied = (problem.num_in, problem.num_out, problem.stride_x, problem.stride_g)
    copies = problem.dtype == torch.float32 or all([size % 8 == 0 for size in copied])
    return copies and plan.takes_pipelined(problem.sizes(0), backward)


def _described(pair: Sequence[Tensor], shape: list[int], columns: int) -> list[Any]:
    """TMA descriptors of an operand and its low halves: contiguous matrices, one below the other, whose rows begin on 16 bytes.

    Beyond the first columns there is nothing.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, str(pair[0].dtype).removeprefix("torch.")))
    matrices = [t.view(-1, t.shape[-1])[:, :columns] for t in pair]
    return [TensorDescriptor(t, list(t.shape), [t.stride(0), 1], shape, layout) for t in matrices]


def _pipelined_config(problem: Problem, name: str, choice: Pipelined, **arguments: Any) -> LaunchConfig:
    """The launch of one of the kernels, with the arguments that all three take."""
    precision = "half" if problem.dtype != torch.float32 else "split" if problem.is_split else "cut"
    common = {
        "BASIS": problem.basis(name == "dx", problem.layer.first),
        "BLOCK_N": choice.block_n,
        "BLOCK_K": choice.block_k,
        "STAGES": choice.stages,
        "FLUSH": choice.flush,
        "PRECISION": precision,
        "REGISTERS": choice.registers,
        "num_warps": 4,
    }
    arguments = {**problem.arguments(), **common, **arguments}
    return LaunchConfig(_pipelined_kernel(name), (choice.programs,), arguments)


def _add_pipelined_forward(call: _Call, low: Tensor, bias: Tensor | None, y: Tensor) -> None:
    problem = call.problem
    choice = plan.pipelined_forward(problem.sizes(problem.layer.first))
    config = _pipelined_config(
        problem,
        "fwd",
        choice,
        blocks_per_split=choice.blocks,
        items=choice.work_items,
        HAS_BIAS=bias is not None,
        BLOCK_M=plan.BLOCK_M,
        GROUP=plan.MEASURED.group,
        ALIGN_OUT=math.gcd(problem.num_out, ALIGNED),
    )
    described = _described((call.coefficients, low), [choice.block_n, choice.block_k], problem.num_in)
    _add(call.build, [config], (call.x, *described, call.table, call.x if bias is None else bias), [(y, _in_splits(choice.splits, y))])


def _add_pipelined_input_gradient(
    call: _Call, choice: Pipelined, dys: tuple[Tensor, Tensor], coefficients: tuple[Tensor, Tensor], dx: Tensor
) -> None:
    problem = call.problem
    units = -(-problem.num_out // choice.block_k) * -(-(problem.layer.terms - problem.layer.first) // choice.degrees)
    tiles = -(-problem.rows // plan.BLOCK_M) * -(-problem.num_in // choice.block_n)
    segments = plan.segments_of(tiles, units, choice.work_items)
    own = {"parts": choice.work_items, "DEGREES": choice.degrees, "GROUP": plan.MEASURED.group if segments == 1 else _DOWN}
    config = _pipelined_config(problem, "dx", choice, **own)
    stored = _in_segments((1, problem.rows, problem.num_in), 0, 1, choice, units, segments)
    of_dy = _described(dys, [plan.BLOCK_M, choice.block_k], problem.num_out)
    described = _described(coefficients, [choice.block_n, choice.block_k], problem.num_out)
    _add(call.build, [config], (*of_dy, call.x, *described, call.table), [(dx, stored)])


def _add_pipelined_coefficient_gradient(call: _Call, dys: tuple[Tensor, Tensor], dcoef: Tensor) -> None:
    problem, first = call.problem, call.problem.layer.first
    terms, num_out, num_in = call.coefficients.shape
    choice = plan.pipelined_coefficient_gradient(problem.sizes(first))
    blocks = -(-problem.rows // choice.block_k)
    config = _pipelined_config(problem, "dcoef", choice, blocks=blocks, parts=choice.work_items, DEGREES=choice.degrees)
    tiles = -(-num_out // plan.BLOCK_M) * -(-num_in // choice.block_n) * -(-(terms - first) // choice.degrees)
    segments = plan.segments_of(tiles, blocks, choice.work_items)
    stored = _in_segments((terms, num_out, num_in), first, choice.degrees, choice, blocks, segments)
    box = [plan.BLOCK_M, choice.block_k] if problem.dtype == torch.float32 else [choice.block_k, plan.BLOCK_M]
    described = _described(dys, box, problem.rows if problem.dtype == torch.float32 else num_out)
    _add(call.build, [config], (*described, call.x, call.table), [(dcoef, stored)])


# ---- plain Triton's kernels ------------------------------------------------------------------------


def _evenly(tile: Tile, width: int, depth: int) -> tuple[bool, bool]:
    """Whether blocks divide the product's width, as far as they go along it, and its depth."""
    return width % tile.block_n == 0, depth % tile.block_k == 0


def _plain_arguments(problem: Problem) -> dict[str, Any]:
    """The arguments that both kernels take."""
    compute, acc, _ = arithmetic(problem.dtype, problem.precision, True)
    own = {"GROUP": plan.MEASURED.group, "COMPUTE": compute, "ACC": acc, "PRECISION": problem.dot_precision}
    return {**problem.arguments(), **own, "ALIGN_OUT": math.gcd(problem.num_out, ALIGNED)}


def _plain_configs(kernel: Any, programs: int, stages: int, arguments: dict[str, Any]) -> list[LaunchConfig]:
    """A launch, and the same with fewer stages for devices with less shared memory."""
    return [LaunchConfig(kernel, (programs,), {**arguments, "num_stages": s}) for s in range(stages, 0, -1)]


def _add_plain_forward(call: _Call, low: Tensor, bias: Tensor | None, y: Tensor) -> None:
    problem = call.problem
    first = problem.layer.first if problem.is_large else 0
    sizes = problem.sizes(first)
    tile = plan.forward(sizes)
    even_n, even_k = _evenly(tile, problem.num_out, problem.num_in)
    arguments = {
        **_plain_arguments(problem),
        "blocks_per_split": tile.blocks,
        "BASIS": problem.basis(False, first),
        "DEGREES": sizes.terms // tile.groups,
        "HAS_BIAS": bias is not None,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_N": even_n,
        "EVEN_K": even_k,
        "num_warps": tile.warps,
    }
    tiles = -(-problem.rows // tile.block_m) * -(-problem.num_out // tile.block_n)
    sums = tile.splits * tile.groups
    configs = _plain_configs(_poly_kan_fwd_kernel, tiles * sums, tile.stages, arguments)
    given = (call.x, call.coefficients, low, call.table, call.x if bias is None else bias)
    _add(call.build, configs, given, [(y, _in_splits(sums, y))])


def _of_input(problem: Problem) -> tuple[Tile, int, dict[str, Any]]:
    """The tile, programs and arguments for dx in the kernel of gradients."""
    first, transposed = problem.layer.first, problem.is_large and problem.dtype == torch.float32
    sizes = problem.sizes(first)
    tile = plan.input_gradient(sizes)
    even_n, even_k = _evenly(tile, problem.num_in, problem.num_out)
    programs = tile.splits * -(-problem.rows // tile.block_m) * -(-problem.num_in // tile.block_n)
    arguments = {
        "stride_co": 1 if transposed else problem.num_in,
        "stride_ci": problem.num_out if transposed else 1,
        "programs_x": programs,
        "blocks_x": tile.blocks,
        "BASIS_X": problem.basis(True, first),
        "TILE_X": (tile.block_m, tile.block_n, tile.block_k, tile.degrees),
        "EVEN_X": (even_n and sizes.terms % tile.degrees == 0, even_k),
        "ALIGN_CO": 1 if transposed else math.gcd(problem.num_in, ALIGNED),
        "FLAT_X": not problem.is_large,
    }
    return tile, programs, arguments


def _of_coefficients(problem: Problem) -> tuple[Tile, int, dict[str, Any]]:
    """The tile, programs and arguments for dC in the kernel of gradients."""
    first, transposed = problem.layer.first if problem.is_large else 0, problem.is_large and problem.dtype == torch.float32
    sizes = problem.sizes(first)
    tile = plan.coefficient_gradient(sizes)
    groups = -(-sizes.terms // tile.degrees)
    programs = tile.splits * groups * -(-problem.num_in // tile.block_m) * -(-problem.num_out // tile.block_n)
    arguments = {
        "stride_gm": 1 if transposed else problem.stride_g,
        "stride_go": operands.whole_vectors(problem.rows) if transposed else 1,
        "blocks_c": tile.blocks,
        "BASIS_C": problem.basis(False, first),
        "TILE_C": (tile.block_m, tile.block_n, tile.block_k, tile.degrees),
        "EVEN_C": _evenly(tile, problem.num_out, problem.rows),
        "ALIGN_GM": 1 if transposed else math.gcd(problem.stride_g, ALIGNED),
    }
    return tile, programs, arguments


def _add_plain_gradients(
    call: _Call, dys: tuple[Tensor, Tensor], coefficients: tuple[Tensor, Tensor], dx: Tensor | None, dcoef: Tensor | None
) -> None:
    """One of the gradients, or both in one launch; dys and coefficients with their low halves, as the gradient's kernel reads them."""
    problem = call.problem
    made = [of(problem) for of, out in ((_of_input, dx), (_of_coefficients, dcoef)) if out is not None]
    # Of a gradient that is not made, numbers are 1 and constants None.
    names = [name for name in _poly_kan_gradients_kernel.arg_names if not name.endswith("_ptr")]
    arguments = {name: None if name.isupper() else 1 for name in names} | _plain_arguments(problem)
    arguments |= {"stride_gm": problem.stride_g, "ALIGN_GM": math.gcd(problem.stride_g, ALIGNED), "ALIGN_CO": 1, "programs_x": 0}
    for _, _, own in made:
        arguments |= own
    tiles = [tile for tile, *_ in made]
    arguments |= {"HAS_X": dx is not None, "HAS_C": dcoef is not None, "num_warps": tiles[0].warps}
    programs = sum([count for _, count, _ in made])
    configs = _plain_configs(_poly_kan_gradients_kernel, programs, min([tile.stages for tile in tiles]), arguments)
    splits = iter(tiles)
    results = [(out, None if out is None else _in_splits(next(splits).splits, out)) for out in (dx, dcoef)]
    _add(call.build, configs, (*dys, call.x, *coefficients, call.table), results)


# ---- dx of a large layer on Hopper GPUs, by the linear layers' main loop ---------------------------


def gemm_choice(problem: Problem) -> tuple[GemmTile, int] | None:
    """Blocks, and how many degrees a tile has side by side; None where another kernel takes less time, or this one cannot be."""
    itemsize = problem.dtype.itemsize
    copied = (problem.num_in, problem.num_out, problem.stride_x, problem.stride_g)
    copies = itemsize < 8 and devices.gpu_of(problem.device).has_wgmma and all([size * itemsize % 16 == 0 for size in copied])
    return plan.input_gradient_gemm(problem.sizes(problem.layer.first)) if copies else None


def _add_input_gradient_by_gemm(call: _Call, choice: tuple[GemmTile, int]) -> Tensor:
    """``dx [M, I]``; rows of dy and x are runs of memory, from boundaries of 16 bytes."""
    build, problem, layer = call.build, call.problem, call.problem.layer
    tile, degrees = choice
    value, slope = problem.normalizer
    gemm = Gemm(
        epilogue_input_gradient,
        value=value,
        slope=slope,
        params=(layer.terms, layer.first, degrees, layer.constants),
        functions=layer.prologues[True],
        begin=begin_nothing if knobs.runtime.interpret else fetch_input,
        sums=degrees,
    )
    width = tile.block_n // tile.parts // degrees
    b = operands.transposed_in_blocks(build, call.coefficients, layer.first, width, degrees, problem.dtype.itemsize == 4)
    dx = build.empty(call.x.shape, call.x.dtype)
    tensors = call.table, call.x
    add_gemm(build, call.dy, b, None, gemm, dx, side=call.x, tensors=tensors, precision=problem.precision, choose=lambda sizes: tile)
    return dx
