"""Launchers of the kernels that normalise rows and apply a rational function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.rational.config_layer_norm import RowWalk, walk
from fastkron_py.rational.kernels.layer_norm import _columns_kernel, _layer_norm_rational_bwd_kernel, _layer_norm_rational_fwd_kernel
from fastkron_py.rational.launches import Coefficients, coefficients
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig, Launcher

COLUMN_BLOCK: Final = 64
PROGRAM_BLOCK: Final = 32
GROUP_BLOCK: Final = 1024


class Problem(NamedTuple):
    """All that a launch depends on, but for the addresses."""

    rows: int
    channels: int
    function: Coefficients
    eps: float


def problem_of(tensors: Sequence[Tensor], a: Tensor, b: Tensor, eps: float, version: str, device: torch.device) -> Problem:
    """The problem on tensors, first x ``[..., C]``, and on coefficients."""
    x = tensors[0]
    function = coefficients(a, b, version, [t.dtype for t in (*tensors, a, b)], device)
    return Problem(x.numel() // x.shape[-1], x.shape[-1], function, eps)


def _arguments(problem: Problem, chosen: RowWalk) -> dict[str, Any]:
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


def forward_launcher(problem: Problem) -> Launcher:
    """The launch of a forward pass, on (x, weight, bias, a, b, y, mean, reciprocal deviation)."""
    chosen = walk(problem.rows, problem.channels, devices.gpu_of(problem.function.device).multiprocessors, backward=False)
    arguments = {"EPS": problem.eps, **_arguments(problem, chosen)}
    return Launcher([LaunchConfig(_layer_norm_rational_fwd_kernel, (chosen.programs,), arguments)])


class BackwardLaunchers(NamedTuple):
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


def backward_launchers(problem: Problem) -> BackwardLaunchers:
    """The launches of a backward pass."""
    chosen = walk(problem.rows, problem.channels, devices.gpu_of(problem.function.device).multiprocessors, backward=True)
    programs, channels, terms = chosen.programs, problem.channels, problem.function.terms
    denominator = problem.function.denominator
    arguments = {**_arguments(problem, chosen), "B_FIRST": denominator.first, "HAS_POLES": denominator.has_poles}
    first = Launcher([LaunchConfig(_layer_norm_rational_bwd_kernel, (programs,), arguments)])
    sizes = {"programs": programs, "CHANNELS": channels, "BLOCK_P": PROGRAM_BLOCK, "BLOCK_C": COLUMN_BLOCK}
    grid = ((2 + terms) * -(-channels // COLUMN_BLOCK),)
    columns = Launcher([LaunchConfig(_columns_kernel, grid, {**sizes, "num_warps": 4})])
    second = problem.function.sums(channels, GROUP_BLOCK, 4)
    return BackwardLaunchers(first, columns, second, (2 + terms, programs, channels), problem.function.dtype)
