"""The launches of rational functions: alone, behind layer normalisation, and on the result of a linear layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastkron_py.rational.denominators.registry import Denominator, find_denominator
from fastkron_py.rational.kernels.elementwise import WALK, _rational_bwd_kernel, _rational_coefficients_kernel, _rational_fwd_kernel
from fastkron_py.rational.kernels.function import epilogue_rational, value_rational
from fastkron_py.rational.kernels.layer_norm import _columns_kernel, _layer_norm_rational_bwd_kernel, _layer_norm_rational_fwd_kernel
from fastkron_py.rational.plan import MEASURED, LaunchShape, RowWalk, Runs, linear_tile, preference, walk, walk_rows
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import VECTOR_BYTES
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.precision import wide_dtype
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.gemm import epilogue_plain
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm, add_rowwise


def is_approximate(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU's one-instruction reciprocal does, whose error is one unit in the last place of float32."""
    return dtype != torch.float64 and devices.gpu_of(device).has_approximations


class Function(NamedTuple):
    """A rational function in a program: coefficients ``[G, m + 1]`` or ``[1, m + 1]``, and ``[G, n]`` or ``[1, n]``."""

    a: Tensor
    b: Tensor
    denominator: Denominator
    dtype: torch.dtype  # that it is computed in
    device: torch.device

    @property
    def terms(self) -> int:
        """Coefficients of a group."""
        return self.a.shape[1] + self.b.shape[1]

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return max(self.a.shape[0], self.b.shape[0])

    def arguments(self) -> dict[str, Any]:
        """The arguments, by name, of every kernel that evaluates the function."""
        return {
            "stride_ag": self.a.stride(0) if self.a.shape[0] > 1 else 0,
            "stride_ai": self.a.stride(1),
            "stride_bg": self.b.stride(0) if self.b.shape[0] > 1 else 0,
            "stride_bj": self.b.stride(1),
            "DENOMINATOR": self.denominator.device.complete(),
            "A_COUNT": self.a.shape[1],
            "B_COUNT": self.b.shape[1],
            "APPROXIMATE": is_approximate(self.dtype, self.device),
            "DTYPE": tl.float64 if self.dtype == torch.float64 else tl.float32,
        }

    def add_sums(self, build: Builder, partial: Tensor, gradients: Sequence[Tensor], count: int, block: int, num_warps: int) -> None:
        """Add the second stage of the coefficients' gradients: count partial sums of each, block of them at a time."""
        arguments = {
            **{name: value for name, value in self.arguments().items() if name in _rational_coefficients_kernel.arg_names},
            "count": count,
            "A_GROUPS": self.a.shape[0],
            "B_GROUPS": self.b.shape[0],
            "BLOCK": block,
            "num_warps": num_warps,
        }
        grid = (self.a.numel() + self.b.numel(),)
        build.launch(Launcher([LaunchConfig(_rational_coefficients_kernel, grid, arguments)]), (partial, self.b, *gradients))


def function_of(build: Builder, a: Tensor, b: Tensor, version: str, tensors: Sequence[Tensor]) -> Function:
    """The function of a and b, computed in the wide dtype of all operands."""
    return Function(a, b, find_denominator(version), wide_dtype(*[t.dtype for t in (*tensors, a, b)]), build.device)


# ---- the function alone ----------------------------------------------------------------------------


def _walked(function: Function, runs: Runs, tensors: Sequence[Tensor], backward: bool) -> tuple[LaunchShape, int, dict[str, Any]]:
    """How programs walk over tensors of x's shape, how many do, and the arguments that both kernels share."""
    itemsize, gpu = max(t.element_size() for t in tensors), devices.gpu_of(function.device)
    wanted = preference(backward, itemsize, function.terms if function.dtype == torch.float32 else math.inf)
    chosen = walk(runs, itemsize, gpu.multiprocessors, wanted)
    # Narrow vectors need all registers. Elsewhere a limit has not been timed, and spills more; Triton's compilers for other vendors' GPUs
    # refuse its name, whatever its value.
    is_limited = wanted.registers is not None and chosen.vector * itemsize == VECTOR_BYTES and gpu.capability == (9, 0)
    arguments = {
        **function.arguments(),
        **({"maxnreg": wanted.registers} if is_limited else {}),
        **{name: getattr(chosen, name) for name in WALK},
        "GROUPS": runs.groups,
        "VECTOR": chosen.vector,
        "BLOCK": chosen.block,
        "MODE": chosen.mode,
        "MASKED": chosen.masked,
        "num_warps": chosen.num_warps,
    }
    return chosen, chosen.programs * runs.groups, arguments


def add_forward(build: Builder, runs: Runs, x: Tensor, a: Tensor, b: Tensor, version: str, like: Tensor) -> Tensor:
    """``P(x) / Q(x)``; arguments as of `torch_backend.add_forward`."""
    _, programs, arguments = _walked(function_of(build, a, b, version, (x, like)), runs, (x, like), False)
    strides = dict(zip(("stride_x", "stride_y"), runs.row_strides, strict=True))
    y = build.empty_like(like)
    build.launch(Launcher([LaunchConfig(_rational_fwd_kernel, (programs,), strides | arguments)]), (x, a, b, y))
    return y


def add_gradients(
    build: Builder, runs: Runs, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool], version: str, like: Tensor
) -> list[Tensor]:
    """[dx] + [da, db], those that are needed; arguments as of `torch_backend.add_gradients`."""
    need_x, need_coefficients = needs
    function = function_of(build, a, b, version, (x, dy, like))
    chosen, programs, arguments = _walked(function, runs, (x, dy, like), True)
    stride_x, stride_dy, stride_dx = runs.row_strides
    arguments |= {
        **{"stride_x": stride_x, "stride_dy": stride_dy, "stride_dx": stride_dx},
        "B_FIRST": function.denominator.first,
        "SAME_STRIDES": stride_x == stride_dy == stride_dx,
        "NEED_X": need_x,
        "NEED_COEFFICIENTS": need_coefficients,
        "WARPS": chosen.num_warps,
    }
    dx = build.empty_like(like) if need_x else x  # a gradient that is not needed is not written
    count = programs * chosen.num_warps
    partial = build.empty((count * function.terms,), function.dtype) if need_coefficients else x
    sums = [build.empty(c.shape, c.dtype) for c in (a, b)] if need_coefficients else []
    build.launch(Launcher([LaunchConfig(_rational_bwd_kernel, (programs,), arguments)]), (x, dy, a, b, dx, partial))
    if need_coefficients:
        function.add_sums(build, partial, sums, count, MEASURED.sum_block, 8)
    return [dx] * need_x + sums


# ---- layer normalisation ---------------------------------------------------------------------------


def _rows_walked(function: Function, x: Tensor, backward: bool) -> tuple[RowWalk, dict[str, Any]]:
    """How programs walk over rows of ``x [..., C]``, and the arguments that both kernels share."""
    channels = x.shape[-1]
    rows = x.numel() // channels
    chosen = walk_rows(rows, channels, devices.gpu_of(function.device).multiprocessors, backward)
    arguments = {
        **function.arguments(),
        "rows": rows,
        "CHANNELS": channels,
        "WIDTH": channels // function.groups,
        "ROWS": chosen.rows,
        "BLOCK": chosen.block,
        "STAGES": chosen.stages,
        "num_warps": chosen.num_warps,
    }
    return chosen, arguments


def add_layer_norm(build: Builder, tensors: Sequence[Tensor], eps: float, version: str, dtype: torch.dtype) -> list[Tensor]:
    """[y in this dtype, each row's mean, and its reciprocal deviation].

    Args:
        build: of the program.
        tensors: x ``[..., C]``, weight, bias, numerator and denominator, as `takes_rows` takes them.
        eps: added to the variance.
        version: of the denominator.
        dtype: of y.
    """
    x, weight, bias, a, b = tensors
    x = build.contiguous(x)
    y = build.empty_like(x, dtype=dtype)
    compute = wide_dtype(x.dtype)
    mean, rstd = (build.empty((x.numel() // x.shape[-1],), compute) for _ in range(2))
    chosen, arguments = _rows_walked(function_of(build, a, b, version, (x, weight, bias, y)), x, False)
    config = LaunchConfig(_layer_norm_rational_fwd_kernel, (chosen.programs,), {"EPS": eps, **arguments})
    build.launch(Launcher([config]), (x, weight, bias, a, b, y, mean, rstd))
    return [y, mean, rstd]


def add_layer_norm_gradients(build: Builder, dy: Tensor, tensors: Sequence[Tensor], kept: Sequence[Tensor], version: str) -> list[Tensor]:
    """[dx, dweight, dbias, da, db]; tensors as of `add_layer_norm`, kept as its last two results."""
    x, weight, bias, a, b = tensors
    x, dy = build.contiguous(x), build.contiguous(dy)
    dx, dweight, dbias, *sums = results = [build.empty(t.shape, t.dtype) for t in (x, weight, bias, a, b)]
    function = function_of(build, a, b, version, (x, dy, weight, bias))
    chosen, arguments = _rows_walked(function, x, True)
    programs, channels, terms = chosen.programs, x.shape[-1], function.terms
    partial = build.empty((2 + terms, programs, channels), function.dtype)
    of_columns = build.empty((terms, channels), torch.float64)
    arguments |= {"B_FIRST": function.denominator.first, "HAS_POLES": function.denominator.has_poles}
    first = LaunchConfig(_layer_norm_rational_bwd_kernel, (programs,), arguments)
    build.launch(Launcher([first]), (x, dy, *kept, weight, bias, a, b, dx, partial))
    sizes = {
        "programs": programs,
        "CHANNELS": channels,
        "BLOCK_P": MEASURED.program_block,
        "BLOCK_C": MEASURED.column_block,
        "num_warps": 4,
    }
    columns = LaunchConfig(_columns_kernel, ((2 + terms) * -(-channels // MEASURED.column_block),), sizes)
    build.launch(Launcher([columns]), (partial, dweight, dbias, of_columns))
    function.add_sums(build, of_columns, sums, channels, MEASURED.group_block, 4)
    return results


# ---- a linear layer before the function ------------------------------------------------------------


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
    strides = [c.shape[1] if c.shape[0] > 1 else 0 for c in (a, b)]
    width = weight.shape[0] // max(a.shape[0], b.shape[0])
    params = a.shape[1], b.shape[1], width, is_approximate(a.dtype, build.device), *strides
    functions = (find_denominator(version).device.complete(),)
    call = Gemm(epilogue_rational if keep else epilogue_plain, value=value_rational, params=params, functions=functions)
    coefficients = build.contiguous(a), build.contiguous(b)
    add_gemm(build, x, weight, bias, call, y, pair=z, tensors=coefficients, choose=linear_tile)
    return build.program([y] if z is None else [y, z], [shape] if z is None else [shape, shape], saved=int(keep))
