"""Launchers of the polynomial KAN kernels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kernels.devices import on_device
from fastkron_py.kernels.launcher import Launcher, Way
from fastkron_py.kernels.poly_kan import hopper_launch
from fastkron_py.kernels.poly_kan import kind as poly_kan_kind
from fastkron_py.kernels.poly_kan.constant import constant, store_gradient
from fastkron_py.kernels.poly_kan.dx_gemm_launch import GemmInputGradient
from fastkron_py.kernels.poly_kan.kernels import _poly_kan_dcoef_kernel, _poly_kan_dx_kernel, _poly_kan_fwd_kernel
from fastkron_py.kernels.poly_kan.kind import ALIGNED, Kind, Sum, aligned, low_halves, turned, turned_gradient, whole_vectors
from fastkron_py.kernels.poly_kan.spec import Spec
from fastkron_py.kernels.recipes import arithmetic
from fastkron_py.tuning import poly_kan as tuning
from fastkron_py.tuning.poly_kan import GROUP, Split, Tile


class _Way(NamedTuple):
    """How one of the three products is done."""

    turned: bool  # TF32 operands in shared memory have to run along the reduction; 16-bit ones need not
    first: int  # degree in the product
    tile: Tile
    split: Split
    constants: dict[str, Any]


def _way(kind: Kind, choose: Any, derivative: bool, depth: int, width: int) -> _Way:
    """Blocks, splits and the constants that the three kernels share; width is the result's, as far as blocks go along it."""
    sizes = kind.sizes()
    large = tuning.is_large(sizes)
    constant = kind.spec.found.has_constant
    first = int(constant and (derivative or large))
    tile, split = choose(sizes._replace(terms=max(1, kind.spec.terms - first)))
    compute, acc, precision = arithmetic(kind.dtype, kind.precision, True)
    if large and precision in ("tf32x3", "tf32"):
        precision = {"tf32x3": "split", "tf32": "cut"}[precision]
    start, step, value = kind.spec.maker(derivative)
    constants = {
        "TERMS": kind.spec.terms,
        "FIRST": first,
        "PARAMS": kind.spec.constants,
        "START": start,
        "STEP": step,
        "VALUE": value,
        "NORM": kind.spec.normalizer.value,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_N": width % tile.block_n == 0,
        "EVEN_K": depth % tile.block_k == 0,
        "COMPUTE": compute,
        "ACC": acc,
        "PRECISION": precision,
        "ALIGN_IN": math.gcd(kind.num_in, kind.stride_x, ALIGNED),
        "ALIGN_OUT": math.gcd(kind.num_out, ALIGNED),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return _Way(large and kind.dtype == torch.float32, first, tile, split, constants)


def _fewer_stages(kernel: Any, grid: int, arguments: dict[str, Any]) -> Launcher:
    """The launch, and the same with fewer stages for devices with less shared memory."""
    stages = [s for s in (4, 3, 2, 1) if s <= arguments["num_stages"]]
    return Launcher([Way(kernel, (grid,), {**arguments, "num_stages": s}) for s in stages])


class _Plain:
    """A product by a kernel in plain Triton, ready to be launched."""

    is_staged = False

    def __init__(self, kind: Kind, way: _Way, kernel: Any, tiles: int, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Of so many tiles of a result of this shape, with the arguments that the other kernels do not take, or take otherwise."""
        self.first = way.first
        precision = way.constants["PRECISION"]
        self.needs_low, self.rounds = precision == "split", precision == "cut"
        self.turned = way.turned
        splits = way.split.splits
        shared = {
            "rows": kind.rows,
            "num_in": kind.num_in,
            "num_out": kind.num_out,
            "stride_xm": kind.stride_x,
            "blocks_per_split": way.split.blocks,
            **way.constants,
        }
        self.launch = _fewer_stages(kernel, tiles * splits, {**shared, **arguments})
        self.partial = (splits, *shape) if splits > 1 else None  # else the kernel writes the result itself
        self.sum = Sum(splits, math.prod(shape))


class _Forward(_Plain):
    """y of x."""

    def __init__(self, kind: Kind) -> None:
        way = _way(kind, tuning.forward, False, kind.num_in, kind.num_out)
        arguments = {"HAS_BIAS": kind.has_bias or way.first == 1, "GROUP": GROUP}
        tiles = -(-kind.rows // way.tile.block_m) * -(-kind.num_out // way.tile.block_n)
        super().__init__(kind, way, _poly_kan_fwd_kernel, tiles, (kind.rows, kind.num_out), arguments)


class _InputGradient(_Plain):
    """dx."""

    def __init__(self, kind: Kind) -> None:
        way = _way(kind, tuning.input_gradient, True, kind.num_out, kind.num_in)
        arguments = {
            "stride_gm": kind.stride_g,
            "stride_co": 1 if way.turned else kind.num_in,
            "stride_ci": kind.num_out if way.turned else 1,
            "SLOPE": kind.spec.normalizer.derivative,
            "ALIGN_GM": math.gcd(kind.stride_g, ALIGNED),
            "ALIGN_CO": 1 if way.turned else math.gcd(kind.num_in, ALIGNED),
            "DEGREES": way.tile.degrees,
            "GROUP": GROUP,
            "EVEN_N": kind.num_in % way.tile.block_n == 0 and (kind.spec.terms - way.first) % way.tile.degrees == 0,
        }
        tiles = -(-kind.rows // way.tile.block_m) * -(-kind.num_in // way.tile.block_n)
        super().__init__(kind, way, _poly_kan_dx_kernel, tiles, (kind.rows, kind.num_in), arguments)


class _CoefficientGradient(_Plain):
    """dC."""

    def __init__(self, kind: Kind) -> None:
        way = _way(kind, tuning.coefficient_gradient, False, kind.rows, kind.num_out)
        arguments = {
            "stride_gm": 1 if way.turned else kind.stride_g,
            "stride_go": whole_vectors(kind.rows) if way.turned else 1,
            "DEGREES": way.tile.degrees,
            "ALIGN_GM": 1 if way.turned else math.gcd(kind.stride_g, ALIGNED),
        }
        groups = -(-(kind.spec.terms - way.first) // way.tile.degrees)
        tiles = groups * -(-kind.num_in // way.tile.block_m) * -(-kind.num_out // way.tile.block_n)
        super().__init__(kind, way, _poly_kan_dcoef_kernel, tiles, (kind.spec.terms, kind.num_out, kind.num_in), arguments)


@lru_cache(maxsize=512)
def _forward(kind: Kind) -> Any:
    return hopper_launch.StagedForward(kind) if hopper_launch.takes(kind) else _Forward(kind)


@lru_cache(maxsize=512)
def _input_gradient(kind: Kind) -> Any:
    by_gemm = GemmInputGradient(kind)
    if by_gemm.is_possible:
        return by_gemm
    staged = hopper_launch.StagedInputGradient(kind) if hopper_launch.takes(kind) else None
    return staged if staged is not None and staged.is_possible else _InputGradient(kind)


@lru_cache(maxsize=512)
def _coefficient_gradient(kind: Kind) -> Any:
    return hopper_launch.StagedCoefficientGradient(kind) if hopper_launch.takes(kind) else _CoefficientGradient(kind)


def forget_launches() -> None:
    """Choose every launch anew when it is next needed."""
    for cached in (_forward, _input_gradient, _coefficient_gradient):
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


def _launched(plan: Any, given: tuple[Any, ...], out: Tensor) -> Tensor:
    """Launch a plan, with a second stage where its reduction is split."""
    if plan.partial is None:
        plan.launch(*given, out)
        return out
    partial = torch.empty(plan.partial, dtype=torch.float64 if out.dtype == torch.float64 else torch.float32, device=out.device)
    plan.launch(*given, partial)
    plan.sum(partial, out)
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
        return _launched(plan, (dy, x, coefficients, low, _table(x, spec)), dx)


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
        _launched(plan, (given, low, x, _table(x, spec)), dcoef)
        if plan.first:
            store_gradient(parts, dcoef)
        return dcoef


def bias_gradient(dy: Tensor) -> Tensor:
    """``db [O]``, the sum of ``dy [M, O]``'s rows."""
    with on_device(dy):
        dy = _rowwise(dy)
        db = torch.empty(dy.shape[1], dtype=dy.dtype, device=dy.device)
        store_gradient(dy, db.view(1, -1, 1))  # as degree 0's coefficients of one input
        return db
