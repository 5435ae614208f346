"""Launchers of the rational kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastkron_py.rational.denominators.registry import Denominator, find_denominator
from fastkron_py.rational.kernels.elementwise import _rational_bwd_kernel, _rational_coefficients_kernel, _rational_fwd_kernel
from fastkron_py.rational.kernels.function import epilogue_rational, value_rational
from fastkron_py.rational.kernels.layer_norm import _columns_kernel, _layer_norm_rational_bwd_kernel, _layer_norm_rational_fwd_kernel
from fastkron_py.rational.plan import (
    BACKWARD,
    BACKWARD_HALF,
    FEW_BACKWARD,
    FEW_FORWARD_HALF,
    FEW_TERMS,
    FORWARD,
    FORWARD_HALF,
    HALF_BYTES,
    VECTOR_BYTES,
    LaunchShape,
    Preference,
    RowWalk,
    Runs,
    find_runs,
    linear_tile,
    walk,
    walk_rows,
)
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.precision import wide_dtype
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.gemm import epilogue_plain
from fastkron_py.tiling.gemm_config import GemmSizes, GemmTile
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm, add_rowwise, takes_descriptor

SUM_BLOCK: Final = 4096  # partial sums that a program of the second stage loads at once: few waits for memory


def is_approximate(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU's one-instruction reciprocal does, whose error is one unit in the last place of float32."""
    return dtype != torch.float64 and devices.gpu_of(device).has_approximations


class Coefficients(NamedTuple):
    """The problem of a launch on a rational function, without addresses."""

    a_shape: tuple[int, ...]
    a_strides: tuple[int, ...]
    b_shape: tuple[int, ...]
    b_strides: tuple[int, ...]
    denominator: Denominator
    dtype: torch.dtype  # that it is computed in
    device: torch.device

    @property
    def terms(self) -> int:
        """Coefficients of a group."""
        return self.a_shape[1] + self.b_shape[1]

    def arguments(self) -> dict[str, Any]:
        """The arguments, by name, of every kernel that evaluates the function."""
        return {
            "stride_ag": self.a_strides[0] if self.a_shape[0] > 1 else 0,
            "stride_ai": self.a_strides[1],
            "stride_bg": self.b_strides[0] if self.b_shape[0] > 1 else 0,
            "stride_bj": self.b_strides[1],
            "DENOMINATOR": self.denominator.device.complete(),
            "A_COUNT": self.a_shape[1],
            "B_COUNT": self.b_shape[1],
            "APPROXIMATE": is_approximate(self.dtype, self.device),
            "DTYPE": tl.float64 if self.dtype == torch.float64 else tl.float32,
        }

    def sums(self, count: int, block: int, num_warps: int) -> Launcher:
        """The second stage of the coefficients' gradients: count partial sums of each, block of them at a time."""
        arguments = {
            "stride_bg": self.b_strides[0],
            "stride_bj": self.b_strides[1],
            "count": count,
            "A_GROUPS": self.a_shape[0],
            "B_GROUPS": self.b_shape[0],
            "A_COUNT": self.a_shape[1],
            "B_COUNT": self.b_shape[1],
            "DENOMINATOR": self.denominator.device.complete(),
            "BLOCK": block,
            "num_warps": num_warps,
        }
        grid = (self.a_shape[0] * self.a_shape[1] + self.b_shape[0] * self.b_shape[1],)
        return Launcher([LaunchConfig(_rational_coefficients_kernel, grid, arguments)])


def coefficients(a: Tensor, b: Tensor, version: str, dtypes: Sequence[torch.dtype], device: torch.device) -> Coefficients:
    """Those of a and b, computed in the wide dtype of all operands."""
    shapes = tuple(a.shape), a.stride(), tuple(b.shape), b.stride()
    return Coefficients(*shapes, find_denominator(version), wide_dtype(*dtypes), device)


class Problem(NamedTuple):
    """All that a launch depends on, but for the addresses."""

    runs: Runs
    function: Coefficients
    dtypes: tuple[torch.dtype, ...]  # of tensors of x's shape, and of the coefficients
    need_x: bool = True
    need_coefficients: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the tensors of x's shape, at most."""
        return max(d.itemsize for d in self.dtypes[: len(self.runs.row_strides)])

    @property
    def is_few(self) -> bool:
        """Whether the coefficients leave registers: they are few, and in float32."""
        return self.function.dtype == torch.float32 and self.function.terms <= FEW_TERMS


def common_arguments(problem: Problem, chosen: LaunchShape, registers: int | None) -> dict[str, Any]:
    """The arguments that the forward and the backward kernel share, by name; narrow vectors need all registers."""
    step = chosen.phases * chosen.block
    is_wide = chosen.vector * problem.itemsize == VECTOR_BYTES
    # Elsewhere it has not been timed, and spills more; Triton's compilers for other vendors' GPUs refuse its name, whatever its value.
    is_limited = registers is not None and is_wide and devices.gpu_of(problem.function.device).capability == (9, 0)
    return {
        **problem.function.arguments(),
        **({"maxnreg": registers} if is_limited else {}),
        "total": chosen.total,
        "per_run": chosen.per_run,
        "phases": chosen.phases,
        "periods": chosen.periods,
        "last_phases": chosen.last_phases,
        "iterations": chosen.iterations,
        "short": chosen.short,
        "long_chunks": chosen.long_chunks,
        "rows_per_period": 0 if chosen.mode == "flat" else step // chosen.per_run,
        "GROUPS": problem.runs.groups,
        "VECTOR": chosen.vector,
        "BLOCK": chosen.block,
        "MODE": chosen.mode,
        "MASKED": chosen.masked,
        "num_warps": chosen.num_warps,
    }


def _chosen(problem: Problem, preference: Preference) -> LaunchShape:
    return walk(problem.runs, problem.itemsize, devices.gpu_of(problem.function.device).multiprocessors, preference)


def _forward_preference(problem: Problem) -> Preference:
    if problem.itemsize > HALF_BYTES:
        return FORWARD
    return FEW_FORWARD_HALF if problem.is_few else FORWARD_HALF


def _backward_preference(problem: Problem) -> Preference:
    if problem.itemsize <= HALF_BYTES:
        return BACKWARD_HALF
    return FEW_BACKWARD if problem.is_few else BACKWARD


def forward_launcher(problem: Problem, preference: Preference | None = None) -> Launcher:
    """The launch of a forward pass, on (x, a, b, y)."""
    preference = preference or _forward_preference(problem)
    chosen = _chosen(problem, preference)
    stride_x, stride_y = problem.runs.row_strides
    strides = {"stride_x": stride_x, "stride_y": stride_y}
    arguments = strides | common_arguments(problem, chosen, preference.registers)
    return Launcher([LaunchConfig(_rational_fwd_kernel, (chosen.programs * problem.runs.groups,), arguments)])


class BackwardLaunchers(NamedTuple):
    """The launches of a backward pass.

    Attributes:
        first: on (x, dy, a, b, dx, partial sums).
        second: on (partial sums, b, da, db).
        size: how many partial sums there are.
        dtype: of these.
    """

    first: Launcher
    second: Launcher
    size: int
    dtype: torch.dtype


def backward_launchers(problem: Problem, preference: Preference | None = None) -> BackwardLaunchers:
    """The launches of a backward pass; the first one's results that are not needed are not written."""
    preference = preference or _backward_preference(problem)
    chosen = _chosen(problem, preference)
    stride_x, stride_dy, stride_dx = problem.runs.row_strides
    arguments = {
        **{"stride_x": stride_x, "stride_dy": stride_dy, "stride_dx": stride_dx},
        **common_arguments(problem, chosen, preference.registers),
        "B_FIRST": problem.function.denominator.first,
        "SAME_STRIDES": stride_x == stride_dy == stride_dx,
        "NEED_X": problem.need_x,
        "NEED_COEFFICIENTS": problem.need_coefficients,
        "WARPS": chosen.num_warps,
    }
    groups = problem.runs.groups
    count = chosen.programs * groups * chosen.num_warps
    first = Launcher([LaunchConfig(_rational_bwd_kernel, (chosen.programs * groups,), arguments)])
    second = problem.function.sums(count, SUM_BLOCK, 8)
    return BackwardLaunchers(first, second, count * problem.function.terms, problem.function.dtype)


def problem_of(
    tensors: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    version: str,
    device: torch.device,
    needs: tuple[bool, bool] = (True, True),
) -> Problem | None:
    """The problem on tensors of x's shape; None where they are not made of runs.

    Args:
        tensors: x and y, or x, dy and dx.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        version: of the denominator.
        device: of all.
        needs: whether dx, and whether da and db are needed.
    """
    runs = find_runs(tensors[0].shape, [t.stride() for t in tensors], max(a.shape[0], b.shape[0]))
    if runs is None:
        return None
    dtypes = (*[t.dtype for t in tensors], a.dtype, b.dtype)
    return Problem(runs, coefficients(a, b, version, dtypes, device), dtypes, *needs)


# ---- layer normalisation ---------------------------------------------------------------------------

COLUMN_BLOCK: Final = 64
PROGRAM_BLOCK: Final = 32
GROUP_BLOCK: Final = 1024


class RowProblem(NamedTuple):
    """All that a launch depends on, but for the addresses."""

    rows: int
    channels: int
    function: Coefficients
    eps: float


def row_problem_of(tensors: Sequence[Tensor], a: Tensor, b: Tensor, eps: float, version: str, device: torch.device) -> RowProblem:
    """The problem on tensors, first x ``[..., C]``, and on coefficients."""
    x = tensors[0]
    function = coefficients(a, b, version, [t.dtype for t in (*tensors, a, b)], device)
    return RowProblem(x.numel() // x.shape[-1], x.shape[-1], function, eps)


def _row_arguments(problem: RowProblem, chosen: RowWalk) -> dict[str, Any]:
    function = problem.function
    return {
        **function.arguments(),
        "rows": problem.rows,
        "CHANNELS": problem.channels,
        "WIDTH": problem.channels // max(function.a_shape[0], function.b_shape[0]),
        "ROWS": chosen.rows,
        "BLOCK": chosen.block,
        "STAGES": chosen.stages,
        "num_warps": chosen.num_warps,
    }


def rows_forward_launcher(problem: RowProblem) -> Launcher:
    """The launch of a forward pass, on (x, weight, bias, a, b, y, mean, reciprocal deviation)."""
    chosen = walk_rows(problem.rows, problem.channels, devices.gpu_of(problem.function.device).multiprocessors, backward=False)
    arguments = {"EPS": problem.eps, **_row_arguments(problem, chosen)}
    return Launcher([LaunchConfig(_layer_norm_rational_fwd_kernel, (chosen.programs,), arguments)])


class RowsBackwardLaunchers(NamedTuple):
    """The launches of a backward pass.

    Attributes:
        first: on (x, dy, mean, reciprocal deviation, weight, bias, a, b, dx, partial sums).
        columns: on (partial sums, dweight, dbias, sums of each column).
        second: on (sums of each column, b, da, db).
        partial: the shape of the partial sums.
        dtype: of these.
    """

    first: Launcher
    columns: Launcher
    second: Launcher
    partial: tuple[int, int, int]
    dtype: torch.dtype


def rows_backward_launchers(problem: RowProblem) -> RowsBackwardLaunchers:
    """The launches of a backward pass."""
    chosen = walk_rows(problem.rows, problem.channels, devices.gpu_of(problem.function.device).multiprocessors, backward=True)
    programs, channels, terms = chosen.programs, problem.channels, problem.function.terms
    denominator = problem.function.denominator
    arguments = {**_row_arguments(problem, chosen), "B_FIRST": denominator.first, "HAS_POLES": denominator.has_poles}
    first = Launcher([LaunchConfig(_layer_norm_rational_bwd_kernel, (programs,), arguments)])
    sizes = {"programs": programs, "CHANNELS": channels, "BLOCK_P": PROGRAM_BLOCK, "BLOCK_C": COLUMN_BLOCK}
    grid = ((2 + terms) * -(-channels // COLUMN_BLOCK),)
    columns = Launcher([LaunchConfig(_columns_kernel, grid, {**sizes, "num_warps": 4})])
    second = problem.function.sums(channels, GROUP_BLOCK, 4)
    return RowsBackwardLaunchers(first, columns, second, (2 + terms, programs, channels), problem.function.dtype)


# ---- a linear layer before the function ------------------------------------------------------------


def epilogue_params(a: Tensor, b: Tensor, columns: int, device: torch.device) -> tuple[Any, ...]:
    """The constants of the epilogues of `rational/kernels/function.py`: sizes of the coefficients and of a result's columns."""
    groups = max(a.shape[0], b.shape[0])
    strides = [c.shape[1] if c.shape[0] > 1 else 0 for c in (a, b)]
    return a.shape[1], b.shape[1], columns // groups, is_approximate(a.dtype, device), *strides


def _linear_tile(build: Builder, x: Tensor, weight: Tensor, keep: bool) -> GemmTile:
    size = x.element_size()
    passes = 3 if x.dtype == torch.float32 else 1
    stored = 2 * size if keep else size
    has_descriptors = takes_descriptor(build, x) and takes_descriptor(build, weight)
    sizes = GemmSizes(x.shape[0], weight.shape[0], x.shape[1], size, passes, stored, False, devices.gpu_of(build.device), has_descriptors)
    return linear_tile(sizes, has_descriptors)


def linear_rational(tensors: Sequence[Any], options: tuple[Any, ...], keep: bool = False) -> Program:
    """The program of `fastkron::linear_rational`: ``P(z) / Q(z)`` with ``z = x @ weight.T + bias``, in memory only if it is kept.

    Args:
        tensors: x ``[..., K]``, float16, bfloat16 or float32, not empty; weight ``[N, K]``, like x; bias ``[N]`` or None; numerator
            ``[G, m + 1]`` or ``[1, m + 1]``, G dividing N; denominator ``[G, n]`` or ``[1, n]``, of version C with b_0 first.
        options: the denominator's name.
        keep: also return z, for the backward pass.
    """
    (version,) = options
    build = Builder(tensors)
    x, weight, bias, a, b = build.inputs
    shape = *x.shape[:-1], weight.shape[0]
    x = add_rowwise(build, build.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])))
    weight = add_rowwise(build, weight)
    y = build.empty((x.shape[0], weight.shape[0]), x.dtype)
    z = build.empty_like(y) if keep else None
    about, functions = epilogue_params(a, b, weight.shape[0], build.device), (find_denominator(version).device.complete(),)
    call = Gemm(epilogue_rational if keep else epilogue_plain, value=value_rational, params=about, functions=functions)
    coefficients = build.contiguous(a), build.contiguous(b)
    add_gemm(build, x, weight, bias, call, y, pair=z, tensors=coefficients, tile=_linear_tile(build, x, weight, keep))
    return build.program([y] if z is None else [y, z], [shape] if z is None else [shape, shape], saved=int(keep))
