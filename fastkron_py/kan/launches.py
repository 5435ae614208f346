"""Launchers of the polynomial KAN kernels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kan import config as tuning
from fastkron_py.kan import problem as poly_kan_kind
from fastkron_py.kan.config import GROUP, Split, Tile
from fastkron_py.kan.dx_gemm_launch import GemmInputGradient
from fastkron_py.kan.hopper import launch as hopper_launch
from fastkron_py.kan.kernels.constant import constant, store_gradient
from fastkron_py.kan.kernels.forward import _poly_kan_fwd_kernel
from fastkron_py.kan.kernels.gradients import _poly_kan_gradients_kernel
from fastkron_py.kan.problem import ALIGNED, Kind, Sum, aligned, low_halves, turned, turned_gradient, whole_vectors
from fastkron_py.kan.spec import Spec
from fastkron_py.runtime.device import has_approximations, on_device
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.tiling.arithmetic import arithmetic


class _Way(NamedTuple):
    """How one of the three products is done."""

    turned: bool  # TF32 operands in shared memory have to run along the reduction; 16-bit ones need not
    first: int  # degree in the product
    tile: Tile
    split: Split

    def even(self, width: int, depth: int) -> tuple[bool, bool]:
        """Whether blocks divide the product's width, as far as they go along it, and its depth."""
        return width % self.tile.block_n == 0, depth % self.tile.block_k == 0


def _way(kind: Kind, choose: Any, derivative: bool) -> _Way:
    """Blocks and splits."""
    sizes = kind.sizes()
    large = tuning.is_large(sizes)
    first = int(kind.spec.found.has_constant and (derivative or large))
    tile, split = choose(sizes._replace(terms=max(1, kind.spec.terms - first)))
    return _Way(large and kind.dtype == torch.float32, first, tile, split)


def _normalizer(kind: Kind) -> tuple[Any, Any]:
    """Value and derivative, of float32 sums by the device's own exponential and reciprocal."""
    return kind.spec.normalizer.device_functions(kind.wide == torch.float32 and has_approximations(kind.device))


def _constants(kind: Kind) -> dict[str, Any]:
    """What all kernels take."""
    compute, acc, precision = arithmetic(kind.dtype, kind.precision, True)
    if tuning.is_large(kind.sizes()) and precision in ("tf32x3", "tf32"):
        precision = {"tf32x3": "split", "tf32": "cut"}[precision]
    return {
        "rows": kind.rows,
        "num_in": kind.num_in,
        "num_out": kind.num_out,
        "stride_xm": kind.stride_x,
        "TERMS": kind.spec.terms,
        "PARAMS": kind.spec.constants,
        "NORM": _normalizer(kind)[0],
        "GROUP": GROUP,
        "COMPUTE": compute,
        "ACC": acc,
        "PRECISION": precision,
        "ALIGN_IN": math.gcd(kind.num_in, kind.stride_x, ALIGNED),
        "ALIGN_OUT": math.gcd(kind.num_out, ALIGNED),
    }


def _fewer_stages(kernel: Any, grid: int, arguments: dict[str, Any]) -> Launcher:
    """The launch, and the same with fewer stages for devices with less shared memory."""
    stages = [s for s in (4, 3, 2, 1) if s <= arguments["num_stages"]]
    return Launcher([LaunchConfig(kernel, (grid,), {**arguments, "num_stages": s}) for s in stages])


class _Plain:
    """A product by a kernel in plain Triton, ready to be launched."""

    is_staged = False

    def __init__(self, way: _Way, precision: str) -> None:
        self.first = way.first
        self.needs_low, self.rounds = precision == "split", precision == "cut"
        self.turned = way.turned


class _Stored(NamedTuple):
    """Where a kernel stores a result: as partial sums of this shape, which are then added up; None for the result itself."""

    partial: tuple[int, ...] | None
    sum: Any

    def target(self, out: Tensor) -> Tensor:
        """What the kernel writes for a result."""
        return out if self.partial is None else _partial(self.partial, out)

    def add_up(self, target: Tensor, out: Tensor) -> None:
        """The second stage, where there is one."""
        if self.partial is not None:
            self.sum(target, out)


def _stored(splits: int, shape: tuple[int, ...]) -> _Stored:
    return _Stored((splits, *shape) if splits > 1 else None, Sum(splits, math.prod(shape)))


class _Forward(_Plain):
    """y of x."""

    def __init__(self, kind: Kind) -> None:
        way = _way(kind, tuning.forward, False)
        constants = _constants(kind)
        super().__init__(way, constants["PRECISION"])
        tile, split = way.tile, way.split
        start, step, value = kind.spec.prologue(False)
        even_n, even_k = way.even(kind.num_out, kind.num_in)
        arguments = {
            "blocks_per_split": split.blocks,
            "FIRST": way.first,
            "DEGREES": max(1, kind.spec.terms - way.first) // split.groups,
            "START": start,
            "STEP": step,
            "VALUE": value,
            "HAS_BIAS": kind.has_bias or way.first == 1,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "EVEN_N": even_n,
            "EVEN_K": even_k,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        tiles = -(-kind.rows // tile.block_m) * -(-kind.num_out // tile.block_n)
        sums = split.splits * split.groups
        self.launch = _fewer_stages(_poly_kan_fwd_kernel, tiles * sums, {**constants, **arguments})
        self.partial, self.sum = _stored(sums, (kind.rows, kind.num_out))


class _InputGradient:
    """What the gradients' kernel needs for dx."""

    def __init__(self, kind: Kind) -> None:
        self.way = way = _way(kind, tuning.input_gradient, True)
        tile, splits = way.tile, way.split.splits
        even_n, even_k = way.even(kind.num_in, kind.num_out)
        start, step, value = kind.spec.prologue(True)
        self.arguments = {
            "stride_co": 1 if way.turned else kind.num_in,
            "stride_ci": kind.num_out if way.turned else 1,
            "blocks_x": way.split.blocks,
            "SLOPE": _normalizer(kind)[1],
            "FIRST_X": way.first,
            "START_X": start,
            "STEP_X": step,
            "VALUE_X": value,
            "TILE_X": (tile.block_m, tile.block_n, tile.block_k, tile.degrees),
            "EVEN_X": (even_n and (kind.spec.terms - way.first) % tile.degrees == 0, even_k),
            "ALIGN_CO": 1 if way.turned else math.gcd(kind.num_in, ALIGNED),
            "FLAT_X": not tuning.is_large(kind.sizes()),
        }
        self.programs = splits * -(-kind.rows // tile.block_m) * -(-kind.num_in // tile.block_n)
        self.stored = _stored(splits, (kind.rows, kind.num_in))


class _CoefficientGradient:
    """What it needs for dC."""

    def __init__(self, kind: Kind) -> None:
        self.way = way = _way(kind, tuning.coefficient_gradient, False)
        tile, splits = way.tile, way.split.splits
        start, step, value = kind.spec.prologue(False)
        self.arguments = {
            "stride_go": whole_vectors(kind.rows) if way.turned else 1,
            "blocks_c": way.split.blocks,
            "FIRST_C": way.first,
            "START_C": start,
            "STEP_C": step,
            "VALUE_C": value,
            "TILE_C": (tile.block_m, tile.block_n, tile.block_k, tile.degrees),
            "EVEN_C": way.even(kind.num_out, kind.rows),
        }
        groups = -(-(kind.spec.terms - way.first) // tile.degrees)
        self.programs = splits * groups * -(-kind.num_in // tile.block_m) * -(-kind.num_out // tile.block_n)
        self.stored = _stored(splits, (kind.spec.terms, kind.num_out, kind.num_in))


_TENSORS: Final = 8  # that the kernel takes
_UNREAD: Final = ("stride_go", "stride_co", "stride_ci", "blocks_x", "blocks_c", "ALIGN_CO")  # integers of what is not made


class _Gradients(_Plain):
    """One of the gradients, or both in one launch, of layers for which nothing is prepared."""

    def __init__(self, kind: Kind, of_x: bool, of_coefficients: bool) -> None:
        wanted = ((_InputGradient, of_x), (_CoefficientGradient, of_coefficients))
        made: list[_InputGradient | _CoefficientGradient] = [make(kind) for make, is_wanted in wanted if is_wanted]
        constants = _constants(kind)
        way, tile = made[0].way, made[0].way.tile
        super().__init__(way, constants["PRECISION"])
        turned = way.turned and not of_x  # dy
        arguments = {
            "stride_gm": 1 if turned else kind.stride_g,
            "ALIGN_GM": 1 if turned else math.gcd(kind.stride_g, ALIGNED),
            "programs_x": made[0].programs if of_x else 0,
            "HAS_X": of_x,
            "HAS_C": of_coefficients,
            "num_warps": tile.warps,
            "num_stages": min([each.way.tile.stages for each in made]),
        }
        for each in made:
            arguments |= each.arguments
        arguments |= constants
        absent = [name for name in _poly_kan_gradients_kernel.arg_names[_TENSORS:] if name not in arguments]
        arguments |= {name: 1 if name in _UNREAD else None for name in absent}
        self.launch = _fewer_stages(_poly_kan_gradients_kernel, sum([each.programs for each in made]), arguments)
        self.stored = [each.stored for each in made]

    def __call__(self, given: tuple[Tensor, ...], dx: Tensor | None, dcoef: Tensor | None) -> None:
        """Launch on the kernel's tensors but for the results, which are given where they are wanted."""
        results = [out for out in (dx, dcoef) if out is not None]
        pairs = list(zip(self.stored, results, strict=True))
        targets = [stored.target(out) for stored, out in pairs]
        absent = given[0]  # never touched
        self.launch(*given, absent if dx is None else targets[0], absent if dcoef is None else targets[-1])
        for (stored, out), target in zip(pairs, targets, strict=True):
            stored.add_up(target, out)


@lru_cache(maxsize=512)
def _forward(kind: Kind) -> Any:
    return hopper_launch.StagedForward(kind) if hopper_launch.takes(kind) else _Forward(kind)


@lru_cache(maxsize=512)
def _input_gradient(kind: Kind) -> Any:
    by_gemm = GemmInputGradient(kind)
    if by_gemm.is_possible:
        return by_gemm
    staged = hopper_launch.StagedInputGradient(kind) if hopper_launch.takes(kind) else None
    return staged if staged is not None and staged.is_possible else _Gradients(kind, True, False)


@lru_cache(maxsize=512)
def _coefficient_gradient(kind: Kind) -> Any:
    return hopper_launch.StagedCoefficientGradient(kind) if hopper_launch.takes(kind) else _Gradients(kind, False, True)


@lru_cache(maxsize=512)
def _both_gradients(kind: Kind) -> _Gradients | None:
    """One launch for both; None for large layers, which prepare operands for each."""
    return None if tuning.is_large(kind.sizes()) else _Gradients(kind, True, True)


def forget_launches() -> None:
    """Choose every launch anew when it is next needed."""
    for cached in (_forward, _input_gradient, _coefficient_gradient, _both_gradients):
        cached.cache_clear()
    poly_kan_kind.forget_launches()


def _table(x: Tensor, spec: Spec) -> Tensor:
    return spec.table(x) if spec.table_size else x


def _rowwise(t: Tensor) -> Tensor:
    """A matrix whose rows are runs of memory, one after the other, and which begins on a boundary of 16 bytes."""
    runs = (t.stride(1) == 1 or t.shape[1] == 1) and t.stride(0) >= t.shape[1]
    return t if runs and t.data_ptr() & 15 == 0 else t.clone(memory_format=torch.contiguous_format)


def _kind(x: Tensor, coefficients: Tensor, dy: Tensor | None, has_bias: bool, spec: Spec, precision: str) -> Kind:
    rows, num_in = x.shape
    stride_g = 0 if dy is None else dy.stride(0)
    return Kind(rows, num_in, coefficients.shape[1], x.stride(0), stride_g, has_bias, spec, precision, x.dtype, x.device)


def _partial(shape: tuple[int, ...], out: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float64 if out.dtype == torch.float64 else torch.float32, device=out.device)


def _launched(plan: Any, given: tuple[Any, ...], out: Tensor) -> Tensor:
    """Launch a plan, with a second stage where its reduction is split."""
    stored = _Stored(plan.partial, plan.sum)
    target = stored.target(out)
    plan.launch(*given, target)
    stored.add_up(target, out)
    return out


def forward(x: Tensor, coefficients: Tensor, bias: Tensor | None, spec: Spec, precision: str) -> Tensor:
    """``y [M, O]`` of ``x [M, I]`` and contiguous coefficients ``[terms, O, I]``, none of them empty."""
    with on_device(x):
        x = _rowwise(x)
        kind = _kind(x, coefficients, None, bias is not None, spec, precision)
        plan = _forward(kind)
        if plan.first:  # degree 0 is a bias
            bias = constant(coefficients, bias, kind.wide)
        if plan.is_staged:
            coefficients = aligned(coefficients)
        low = low_halves(coefficients) if plan.needs_low else coefficients
        y = torch.empty((kind.rows, kind.num_out), dtype=x.dtype, device=x.device)
        return _launched(plan, (x, coefficients, low, _table(x, spec), x if bias is None else bias), y)


def input_gradient(dy: Tensor, x: Tensor, coefficients: Tensor, spec: Spec, precision: str) -> Tensor:
    """``dx [M, I]``."""
    with on_device(x):
        dy, x = _rowwise(dy), _rowwise(x)
        if dy.dtype == torch.float32:
            dy = dy.contiguous()  # as its low halves are
        plan = _input_gradient(_kind(x, coefficients, dy, False, spec, precision))
        if isinstance(plan, GemmInputGradient):
            return plan(dy, x, coefficients, _table(x, spec))
        if plan.turned:
            coefficients, low, _ = turned(coefficients, plan.needs_low, plan.rounds)
        else:
            coefficients = aligned(coefficients)
            low = low_halves(coefficients) if plan.needs_low else coefficients
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if plan.is_staged:
            low_dy = low_halves(dy) if plan.needs_low else dy
            return _launched(plan, (dy, low_dy, x, coefficients, low, _table(x, spec)), dx)
        plan((dy, dy, x, coefficients, low, _table(x, spec)), dx, None)
        return dx


def coefficient_gradient(dy: Tensor, x: Tensor, coefficients: Tensor, spec: Spec, precision: str) -> Tensor:
    """``dC [terms, O, I]``."""
    with on_device(x):
        dy, x = _rowwise(dy), _rowwise(x)
        plan = _coefficient_gradient(_kind(x, coefficients, dy, False, spec, precision))
        dcoef = torch.empty(coefficients.shape, dtype=x.dtype, device=x.device)
        if plan.turned:
            given, low, parts = turned_gradient(dy, plan.needs_low, plan.rounds, plan.first == 1)
        else:
            given, low, parts = dy, low_halves(dy) if plan.needs_low else dy, dy
        if plan.is_staged:
            _launched(plan, (given, low, x, _table(x, spec)), dcoef)
        else:
            plan((given, low, x, x, x, _table(x, spec)), None, dcoef)
        if plan.first:
            store_gradient(parts, dcoef)
        return dcoef


def gradients(dy: Tensor, x: Tensor, coefficients: Tensor, spec: Spec, precision: str) -> list[Tensor]:
    """[``dx [M, I]``, ``dC [terms, O, I]``], of small layers in one launch, and another for each that is summed up."""
    with on_device(x):
        dy, x = _rowwise(dy), _rowwise(x)
        plan = _both_gradients(_kind(x, coefficients, dy, False, spec, precision))
        if plan is None:
            return [input_gradient(dy, x, coefficients, spec, precision), coefficient_gradient(dy, x, coefficients, spec, precision)]
        coefficients = aligned(coefficients)
        dx, dcoef = (torch.empty(t.shape, dtype=x.dtype, device=x.device) for t in (x, coefficients))
        plan((dy, dy, x, coefficients, coefficients, _table(x, spec)), dx, dcoef)
        return [dx, dcoef]


def bias_gradient(dy: Tensor) -> Tensor:
    """``db [O]``, the sum of ``dy [M, O]``'s rows."""
    with on_device(dy):
        dy = _rowwise(dy)
        db = torch.empty(dy.shape[1], dtype=dy.dtype, device=dy.device)
        store_gradient(dy, db.view(1, -1, 1))  # as degree 0's coefficients of one input
        return db
