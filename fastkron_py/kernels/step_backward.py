"""Launches of the fragment kernel of the backward pass: whether it takes a group of one step, and with which arguments."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, Final

from fastkron_py.kernels import devices
from fastkron_py.kernels.backward_kind import Kind, shared_strides
from fastkron_py.kernels.launcher import Way
from fastkron_py.kernels.triton_backend import _multiprocessors
from fastkron_py.tuning.fragment_gradient import StepGradientConfig, bases, step_gradient, step_gradient_config

_VECTOR: Final = 4  # elements that are copied at once
_MOST_OFFSET: Final = 2**31 - 1


def step_config(kind: Kind) -> StepGradientConfig | None:
    """The fragment kernel's tile for a group of one step, or None where it cannot take it."""
    if kind.group.split > kind.group.start or not devices.has_gradient_fragments(kind.device, kind.dtype):
        return None
    groups, rows, before, after = kind.around
    p, q = kind.sizes
    addresses = kind.addresses
    # Whole vectors are copied, so rows must begin where one may; and slices follow each other as the kernel is compiled for.
    if any(stride % _VECTOR for side in ("u_strides", "g_strides") for stride in addresses[side][:3]):
        return None
    place = 2 if addresses["HEAD"] else 1
    if not addresses["TAIL"] and (addresses["u_strides"][place] != p or addresses["g_strides"][place] != q):
        return None
    fastest = after if addresses["TAIL"] else before if addresses["HEAD"] else rows * before
    config = step_gradient_config(p, q, rows * before * after, after, fastest, groups, _multiprocessors(kind.device), kind.need_x)
    if config is None or (addresses["TAIL"] and after * max(p, q) + config.block_s > _MOST_OFFSET):
        return None
    return config


def step_way(kind: Kind, config: StepGradientConfig) -> Way:
    """The launch for a group of one step."""
    groups, _, before, after = kind.around
    p, q = kind.sizes
    addresses = kind.addresses
    tail = addresses["TAIL"]
    plan = step_gradient(p, q, config, tail, kind.need_x)
    left, right = ((*bases(o), o.order, o.shape) for o in (plan.left, plan.right))
    back: tuple[Any, ...] = ()
    if plan.back is not None:
        made, operand = plan.back, plan.back.operand
        back = ((*bases(operand), operand.order, operand.shape), made.columns, made.out_columns, made.order, astuple(made.store))
    arguments = {
        "u_strides": addresses["u_strides"],
        "g_strides": addresses["g_strides"],
        "dx_strides": kind.dx_strides,
        "factor_strides": tuple(shared_strides(s, groups) for s in kind.factor_strides),
        "num_tiles": addresses["num_slices"] // config.block_s,
        "programs": config.programs,
        "before": before,
        "after": after,
        "SHAPES": kind.factor_shapes,
        "P": p,
        "Q": q,
        "U_TILE": tuple(map(tuple, plan.u_tile)),
        "G_TILE": tuple(map(tuple, plan.g_tile)),
        "LEFT": left,
        "RIGHT": right,
        "SUM_ROWS": plan.rows,
        "SUM_COLUMNS": plan.columns,
        "BACK": back,
        "STRIDES": tuple((1, after) if tail else (size, 1) for size in (p, q, p)),
        "BLOCK_S": config.block_s,
        "CHUNK": config.chunk,
        "WARPS": config.warps,
        "STAGES": config.stages,
        "NEED_X": kind.need_x,
        "NEED_F": any(kind.need_factors),
        "SCALE": kind.scaled,
        "HEAD": addresses["HEAD"],
        "TAIL": tail,
        "THREE": kind.precision == "highest",
        "num_warps": config.num_warps,
    }
    return Way(devices.gradient_kernel(), (groups * config.programs,), arguments)
