"""Launch configurations of the fused backward pass: a group's gradients in one launch."""

from __future__ import annotations

import math
from typing import Any

from fastkron_py.kron.backward_problem import GradientProblem, numbers_of, shared_strides
from fastkron_py.kron.families.narrow import is_narrow_gradient, narrow_gradient_config
from fastkron_py.kron.hopper.launch_config import chained_launch
from fastkron_py.kron.kernels.fused_backward import _fused_multiply_bwd_kernel
from fastkron_py.kron.kernels.narrow import _narrow_multiply_bwd_kernel
from fastkron_py.kron.plan.gradient import FusedConfig, Group, fused_configs
from fastkron_py.kron.plan.steps import padded, tile_constants
from fastkron_py.kron.problem import parts_of
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.launch import LaunchConfig
from fastkron_py.tiling.products import arithmetic


def fused_launch(problem: GradientProblem) -> tuple[int, list[LaunchConfig]]:
    """Partial sums of each batch of factors, and the launch configurations of a fused group, the preferred one first."""
    split = problem.group.split - problem.group.start
    if split == 0 and not problem.dtype.is_complex and is_narrow_gradient(*problem.sizes, problem.dtype.itemsize):
        return _narrow(problem)
    chained = chained_launch(problem)
    local = Group(0, split, problem.group.stop - problem.group.start)
    groups, rows, before, after = problem.around
    gpu = devices.gpu_of(problem.device)
    configs = fused_configs(local, problem.factor_shapes, numbers_of(problem.dtype), rows * before * after, after, groups, gpu)
    programs = configs[0].programs if chained is None else chained.partials  # a program of the plain kernel leaves one
    arguments = _common(problem, programs) | _plain_constants(problem, split)
    plain = [_plain(problem, config, arguments) for config in configs]
    return programs, plain if chained is None else [chained.config, *plain]


def _common(problem: GradientProblem, programs: int) -> dict[str, Any]:
    """The arguments that the kernels share."""
    _, acc, _ = arithmetic(problem.dtype, problem.precision, True)
    return {
        **problem.addresses,
        "dx_strides": problem.dx_strides,
        "factor_strides": tuple(shared_strides(s, problem.around[0]) for s in problem.factor_strides),
        "programs": programs,
        "SHAPES": problem.factor_shapes,
        "NEED_X": problem.need_x,
        "SCALE": problem.scaled,
        "ACC": acc,
    }


def _tiles(problem: GradientProblem, block_s: int) -> dict[str, Any]:
    """The arguments that depend on the slices of a tile."""
    return tile_constants(problem.around, block_s) | {"num_tiles": math.ceil(math.prod(problem.around[1:]) / block_s)}


def _narrow(problem: GradientProblem) -> tuple[int, list[LaunchConfig]]:
    groups, rows, before, after = problem.around
    p, q = problem.sizes
    config = narrow_gradient_config(p, q, problem.dtype.itemsize, rows * before * after, after, groups, devices.gpu_of(problem.device))
    arguments = {
        **_common(problem, config.programs),
        **_tiles(problem, config.block_s),
        "RUN": config.run,
        "P": p,
        "Q": q,
        "P_PAD": next_power_of_two(p),
        "Q_PAD": next_power_of_two(q),
        "num_warps": config.num_warps,
    }
    return config.programs, [LaunchConfig(_narrow_multiply_bwd_kernel, (groups * config.programs,), arguments)]


def _plain_constants(problem: GradientProblem, split: int) -> dict[str, Any]:
    """The constants of the plain kernel that do not depend on its configuration."""
    shapes = problem.factor_shapes
    steps = ((0, split), (split, len(shapes)))
    sizes = [tuple(math.prod(s[i] for s in shapes[slice(*step)]) for step in steps) for i in (0, 1)]
    parts = parts_of(problem.dtype)
    pads = [tuple(padded(n, parts) if stop > start else 1 for n, (start, stop) in zip(side, steps, strict=True)) for side in sizes]
    # Nothing between two steps may overflow, as in the multiply.
    compute, _, precision = arithmetic(problem.dtype, problem.precision, split == 0 and len(shapes) == 1)
    return {
        "SPLIT": split,
        "P_SIZES": sizes[0],
        "P_PADS": pads[0],
        "P_TOTAL": math.prod(pads[0]),
        "Q_SIZES": sizes[1],
        "Q_PADS": pads[1],
        "Q_TOTAL": math.prod(pads[1]),
        "NEED_A": any(problem.need_factors[:split]),
        "NEED_B": any(problem.need_factors[split:]),
        "COMPUTE": compute,
        "PRECISION": precision,
        "PARTS": parts,
    }


def _plain(problem: GradientProblem, config: FusedConfig, arguments: dict[str, Any]) -> LaunchConfig:
    """The launch configuration of the plain Triton kernel."""
    tiles = {
        **_tiles(problem, config.block_s),
        "SUMS_A": config.sums[0],
        "SUMS_B": config.sums[1],
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return LaunchConfig(_fused_multiply_bwd_kernel, (problem.around[0] * arguments["programs"],), arguments | tiles)
