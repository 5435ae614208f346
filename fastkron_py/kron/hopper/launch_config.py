"""Launches of the register-chained kernels of the backward pass: whether one takes a group, and with which arguments."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any, Final, NamedTuple

from fastkron_py.kron.backward_problem import GradientProblem, shared_strides
from fastkron_py.kron.families import fragments
from fastkron_py.kron.families.fragments import TileLayout
from fastkron_py.kron.plan.chained_gradient import (
    NARROW,
    NEIGHBOURS,
    Operand,
    StepGradientConfig,
    bases,
    step_gradient,
    step_gradient_config,
)
from fastkron_py.kron.plan.chained_pair import Constant, PairGradientConfig, Permutation, pair_gradient, pair_gradient_config
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig

_VECTOR: Final = 4  # elements that are copied at once
_MOST_OFFSET: Final = 2**31 - 1


class ChainedLaunch(NamedTuple):
    """A launch, and how many partial sums it leaves for each batch."""

    config: LaunchConfig
    partials: int


def chained_launch(problem: GradientProblem) -> ChainedLaunch | None:
    """The launch of a register-chained kernel for a group, or None where none can take it."""
    chain = problem.group.split > problem.group.start
    if not chain and problem.sizes == (NARROW, NARROW) and problem.around[2] % NEIGHBOURS == 0:
        problem = problem.with_neighbours(NEIGHBOURS)
    if not fragments.takes_gradients(problem.dtype, devices.gpu_of(problem.device)) or not _copies_whole_vectors(problem):
        return None
    groups, rows, before, after = problem.around
    addresses = problem.addresses
    fastest = after if addresses["TAIL"] else before if addresses["HEAD"] else rows * before
    around = (rows * before * after, after, fastest, groups, devices.gpu_of(problem.device).multiprocessors)
    config: StepGradientConfig | PairGradientConfig | None
    if chain:
        config = pair_gradient_config(*_step_sizes(problem), *around)
    else:
        p, q = (size // problem.neighbours for size in problem.sizes)
        config = step_gradient_config(p, q, *around, problem.need_x) if problem.neighbours > 1 or min(p, q) > NARROW else None
    if config is None or (addresses["TAIL"] and after * max(problem.sizes) + config.block_s > _MOST_OFFSET):
        return None
    if isinstance(config, PairGradientConfig):
        return ChainedLaunch(_pair_launch(problem, config), config.programs)
    return ChainedLaunch(_step_launch(problem, config), config.programs * config.summed)


def _copies_whole_vectors(problem: GradientProblem) -> bool:
    """Whether rows begin where a vector may, and slices follow each other as a kernel is compiled for."""
    p, q = problem.sizes
    addresses = problem.addresses
    if any(stride % _VECTOR for side in ("u_strides", "g_strides") for stride in addresses[side][:3]):
        return False
    place = 2 if addresses["HEAD"] else 1
    return bool(addresses["TAIL"] or (addresses["u_strides"][place] == p and addresses["g_strides"][place] == q))


def _step_sizes(problem: GradientProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows of a chain's steps, and columns."""
    split = problem.group.split - problem.group.start
    (pa, qa), (pb, qb) = (
        [math.prod(s[i] for s in part) for i in (0, 1)] for part in (problem.factor_shapes[:split], problem.factor_shapes[split:])
    )
    return (pa, pb), (qa, qb)


def _common(problem: GradientProblem, config: StepGradientConfig | PairGradientConfig) -> dict[str, Any]:
    """Arguments of either kernel."""
    groups, _, before, after = problem.around
    p, q = problem.sizes
    addresses = problem.addresses
    return {
        "u_strides": addresses["u_strides"],
        "g_strides": addresses["g_strides"],
        "dx_strides": problem.dx_strides,
        "factor_strides": tuple(shared_strides(s, groups) for s in problem.factor_strides),
        "num_tiles": addresses["num_slices"] // config.block_s,
        "programs": config.programs,
        "before": before,
        "after": after,
        "SHAPES": problem.factor_shapes,
        "STRIDES": tuple((1, after) if addresses["TAIL"] else (size, 1) for size in (p, q, p)),
        "BLOCK_S": config.block_s,
        "CHUNK": config.chunk,
        "STAGES": config.stages,
        "NEED_X": problem.need_x,
        "SCALE": problem.scaled,
        "HEAD": addresses["HEAD"],
        "TAIL": addresses["TAIL"],
        "THREE": problem.precision == "highest",
        "num_warps": config.num_warps,
    }


def _operand(operand: Operand) -> tuple[Any, ...]:
    return (*bases(operand), operand.order, operand.shape)


def _step_launch(problem: GradientProblem, config: StepGradientConfig) -> LaunchConfig:
    """The launch for a group of one step."""
    p, q = (size // config.neighbours for size in problem.sizes)
    plan = step_gradient(p, q, config, problem.addresses["TAIL"], problem.need_x)
    back: tuple[Any, ...] = ()
    if plan.back is not None:
        made = plan.back
        back = (_operand(made.operand), made.columns, made.out_columns, made.order, astuple(made.store))
    arguments = {
        **_common(problem, config),
        "P": p,
        "Q": q,
        "NEIGHBOURS": config.neighbours,
        "SUMMED": config.summed,
        "U_TILE": tuple(map(tuple, plan.u_tile)),
        "G_TILE": tuple(map(tuple, plan.g_tile)),
        "LEFT": _operand(plan.left),
        "RIGHT": _operand(plan.right),
        "SUM_ROWS": plan.rows,
        "SUM_COLUMNS": plan.columns,
        "BACK": back,
        "WARPS": config.warps,
        "NEED_F": any(problem.need_factors),
    }
    kernel, _ = fragments.gradient_kernels()
    return LaunchConfig(kernel, (problem.around[0] * config.programs,), arguments)


def _pair_launch(problem: GradientProblem, config: PairGradientConfig) -> LaunchConfig:
    """The launch for a chain of two steps."""
    p, q = _step_sizes(problem)
    split = problem.group.split - problem.group.start
    plan = pair_gradient(p, q, config, problem.addresses["TAIL"])

    def plain(field: Any) -> tuple[Any, ...]:
        if isinstance(field, Operand):
            return _operand(field)
        if isinstance(field, Constant):
            return tuple(map(tuple, field.tile)), _operand(field.operand)
        return astuple(field) if isinstance(field, Permutation | TileLayout) else tuple(map(tuple, field))

    arguments = {
        **_common(problem, config),
        "SPLIT": split,
        "P": p,
        "Q": q,
        **{name.upper(): plain(field) for name, field in vars(plan).items()},
        "WARPS": config.num_warps,
        "NEED_A": any(problem.need_factors[:split]),
        "NEED_B": any(problem.need_factors[split:]),
    }
    _, kernel = fragments.gradient_kernels()
    return LaunchConfig(kernel, (problem.around[0] * config.programs,), arguments)
