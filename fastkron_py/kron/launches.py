"""What a launch passes to its kernel besides pointers, worked out from a `Case`: all that it depends on but tensors."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch

from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.hopper.wide_config import multiply_launch
from fastkron_py.kron.kernels.sliced_multiply import (
    _fused_multiply_fwd_kernel,
    _sliced_multiply_fwd_kernel,
    epilogue_axpby,
    epilogue_plain,
    epilogue_scale,
)
from fastkron_py.kron.plan.chained import ChainedConfig, chained_config, chained_layout, chained_pad, run_sectors
from fastkron_py.kron.plan.launch import ChainConfig, Config, SingleConfig, chain_configs, single_configs
from fastkron_py.kron.plan.plan import Launch
from fastkron_py.kron.plan.wide import Mode, is_wide, looped_seconds, multiply_config
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import GPU
from fastkron_py.runtime.launch import LaunchConfig
from fastkron_py.tiling.arithmetic import arithmetic

_Strides = tuple[int, int, int, int, int]


class Rows(NamedTuple):
    """Strides of an operand ``[B, L, n, R]`` whose last two dimensions are one run with a constant stride."""

    batch: int
    row: int
    unit: int

    def in_place(self, mode: int, after: int, merged: bool) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, before, mode, after]``; merged: l counts rows and modes before."""
        step = mode * after * self.unit
        return (self.batch, step if merged else self.row, 0 if merged else step, after * self.unit, self.unit)

    def turned(self, others: int) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, mode, others]``, where j counts the others."""
        return (self.batch, self.row, self.unit, others * self.unit, 0)


def passes_of(dtype: torch.dtype, precision: str) -> int:
    """Products of tensor cores that a product of this precision takes."""
    return 3 if dtype == torch.float32 and precision == "highest" else 1


def mode_of(shape: tuple[int, int, int, int], p: int, q: int, dtype: torch.dtype, precision: str, device: torch.device) -> Mode:
    """The sizes of a multiply of one mode by a factor p x q, in an operand with this (B, L, before, after) around the mode."""
    groups, rows, before, after = shape
    return Mode(groups, rows * before, after, p, q, dtype.itemsize, passes_of(dtype, precision), devices.gpu_of(device))


_EPILOGUES = {"plain": epilogue_plain, "scale": epilogue_scale, "axpby": epilogue_axpby}


@dataclass(frozen=True)
class Case:
    """One launch of a multiply, without its tensors."""

    launch: Launch
    dtype: torch.dtype
    precision: str
    epilogue: str  # key of _EPILOGUES
    shape: tuple[int, int, int, int]  # (B, L, before, after) around the launch's modes
    turn: bool  # the modes, which are the last ones, become the first
    apart: int  # of what is turned, elements between two modes of the result: before, or more where this is a block of it
    fixed: bool  # shape but for L is a matter of the factors, so that kernels may be compiled for it
    x: Rows
    y: Rows
    z: Rows
    factor_shapes: tuple[tuple[int, int], ...]
    factor_strides: tuple[tuple[int, int, int], ...]  # (B, P, Q) each
    device: torch.device

    @property
    def gpu(self) -> GPU:
        """The record of the device."""
        return devices.gpu_of(self.device)

    def mode(self) -> Mode:
        """The sizes of a launch of one step."""
        return mode_of(self.shape, self.launch.p, self.launch.q, self.dtype, self.precision, self.device)


def launch_configs(case: Case, config: Config | None = None) -> tuple[LaunchConfig, ...]:
    """Launch configurations of a case in order of preference; later ones need less shared memory.

    Args:
        case: what is launched.
        config: a tuned configuration, which is preferred to the closed form's.
    """
    _, rows, before, after = case.shape
    launch = case.launch
    merged = False
    if case.turn:
        x, y, z = case.x.in_place(launch.p, 1, False), case.y.turned(case.apart), case.z.turned(case.apart)
    else:
        pairs = ((case.x, launch.p), (case.y, launch.q), (case.z, launch.q))
        merged = before > 1 and all(r.row == before * size * after * r.unit for r, size in pairs)
        x, y, z = (r.in_place(size, after, merged) for r, size in pairs)
    chain = len(launch.steps) > 1
    compute, acc, precision = arithmetic(case.dtype, case.precision, not chain and len(case.factor_shapes) == 1)
    num_slices = rows * before * after
    common = {
        "x_strides": x,
        "y_strides": y,
        "z_strides": z,
        "factor_strides": case.factor_strides,
        "num_slices": num_slices,
        "before": before,
        "after": after,
        "SHAPES": case.factor_shapes,
        "HEAD": not merged and before != 1,
        "TAIL": after != 1,
        "EPILOGUE": _EPILOGUES[case.epilogue],
    }
    if launch.chained:
        closed = chained_config(launch.steps, case.dtype.itemsize, run_sectors(before, after), num_slices)
        ways = [c for c in (config, closed) if isinstance(c, ChainedConfig)]
        # Where tiles are fetched ahead, also without: that needs no second tile in shared memory.
        return tuple(launch_config for c in ways for launch_config in _chained(case, common, num_slices, c))
    common |= {"COMPUTE": compute, "ACC": acc, "PRECISION": precision}
    fastest = after if after != 1 else before
    configs: tuple[SingleConfig | ChainConfig, ...] = (
        chain_configs(launch, case.dtype.itemsize, num_slices, fastest, case.gpu)
        if chain
        else single_configs(launch.p, launch.q, case.dtype.itemsize, num_slices, case.gpu)
    )
    if isinstance(config, SingleConfig | ChainConfig):
        configs = (config, *configs)
    found = tuple(_finished(_MAKERS[type(c)](case, c, num_slices), common, c, num_slices, fastest, case) for c in configs)
    return (
        (multiply_launch(case.mode(), common, case.factor_strides[0], case.fixed), *found)
        if config is None and takes_tensor_cores(case)
        else found
    )


def takes_tensor_cores(case: Case) -> bool:
    """Whether the kernel for wide factors is faster than the plain one."""
    if len(case.factor_shapes) > 1 or not is_wide(case.launch.p, case.launch.q) or not kernels.has_wide(case.device, case.dtype):
        return False
    seconds, _ = multiply_config(case.mode())
    return seconds < looped_seconds(case.mode())


def _finished(
    part: tuple[Any, int, dict[str, Any]],
    common: dict[str, Any],
    config: SingleConfig | ChainConfig,
    num_slices: int,
    fastest: int,
    case: Case,
) -> LaunchConfig:
    kernel, num_tiles, special = part
    arguments = {
        **common,
        **special,
        "num_tiles": num_tiles,
        "BLOCK_S": config.block_s,
        "ALIGNED": fastest % config.block_s == 0,
        "EVEN": num_slices % config.block_s == 0,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return LaunchConfig(kernel, (min(num_tiles, case.gpu.multiprocessors * config.programs_per_sm),), arguments)


# TF32 holds float16 and bfloat16 exactly, and its truncated sums more than bfloat16 can say.
_ROUND = {torch.float32: 2, torch.float16: 1, torch.bfloat16: 0}
_RUNTIME = 0  # a stride that a kernel is not compiled for,
_RUNTIME_NARROW = -1  # with all of a tile's offsets below 2^31
_MOST_OFFSET = 2**31 - 1


def _chained(case: Case, common: dict[str, Any], num_slices: int, config: ChainedConfig) -> tuple[LaunchConfig, ...]:
    """Launch configurations for the register-chained kernel: with tiles of a loop fetched ahead, where they can be, and without."""
    batches, _, before, after = case.shape
    steps = case.launch.steps
    head, tail = common["HEAD"], common["TAIL"]
    turned = case.turn
    plan = chained_layout(steps, config.block_s, config.num_warps, case.dtype.itemsize, (tail, tail or turned))
    fastest = after if tail else before
    num_tiles = batches * math.ceil(num_slices / config.block_s)
    loop = config.programs_per_sm > 0 and batches == 1
    p_pads, q_pads = tuple(chained_pad(s.p) for s in steps), tuple(chained_pad(s.q) for s in steps)
    p_sizes, q_sizes = tuple(s.p for s in steps), tuple(s.q for s in steps)
    padded = (p_sizes, q_sizes) != (p_pads, q_pads)
    aligned = not (head or tail) or fastest % config.block_s == 0
    arguments = {
        **common,
        "num_tiles": num_tiles,
        "STEPS": tuple(astuple(step) for step in plan.steps),
        "ALONG_P": tuple(_along_p(case.factor_strides[step.stop - 1]) for step in plan.steps),
        "STORE_ORDER": plan.order,
        "LOAD": astuple(plan.load),
        "STORE": astuple(plan.store),
        "P_SIZES": p_sizes,
        "P_PADS": p_pads,
        "Q_SIZES": q_sizes,
        "Q_PADS": q_pads,
        "PADDED": padded,
        "STRIDES": _strides(case, common, config.block_s),
        "BLOCK_S": config.block_s,
        "WARPS": config.num_warps,
        "WARPGROUP": config.warpgroup,
        "LOOP": loop,
        "ALIGNED": aligned,
        "EVEN": num_slices % config.block_s == 0,
        "THREE": case.dtype == torch.float32 and case.precision == "highest",
        "ROUND": _ROUND[case.dtype],
        "num_warps": config.num_warps,
        "maxnreg": config.max_registers or None,
    }
    grid = (min(num_tiles, case.gpu.multiprocessors * config.programs_per_sm) if loop else num_tiles,)
    ahead = loop and len(steps) == 1 and case.dtype.itemsize == 4 and aligned and not padded
    return tuple(
        LaunchConfig(kernels.chained_kernel(), grid, arguments | {"FETCH": fetch}) for fetch in ((True, False) if ahead else (False,))
    )


def _along_p(strides: tuple[int, int, int]) -> bool:
    """Whether neighbouring rows of a factor with strides (B, P, Q), not columns, are consecutive in memory."""
    return strides[1] == 1 and strides[2] != 1


def _strides(case: Case, common: dict[str, Any], block_s: int) -> tuple[int, ...]:
    """(slice, mode) strides of x, y and z that the kernel is compiled for; `_RUNTIME` for the others."""
    found = []
    fastest = 4 if common["TAIL"] else 2 if common["HEAD"] else 1
    for strides, size in ((common["x_strides"], case.launch.p), (common["y_strides"], case.launch.q), (common["z_strides"], case.launch.q)):
        slices, modes = strides[fastest], strides[3]
        reach = slices * block_s + modes * 2 * size
        if fastest == 1 and slices != size * modes:
            slices = _RUNTIME  # rows of a larger tensor
        if not case.fixed and modes != 1:
            slices, modes = (slices if common["TAIL"] else _RUNTIME), _RUNTIME_NARROW
        found += [slices, modes] if reach <= _MOST_OFFSET else [_RUNTIME, _RUNTIME]
    return tuple(found)


def _single(case: Case, config: SingleConfig, num_slices: int) -> tuple[Any, int, dict[str, Any]]:
    """Kernel, number of tiles and own constants of a single step."""
    p, q = case.launch.p, case.launch.q
    num_tiles = case.shape[0] * math.ceil(num_slices / config.block_s) * math.ceil(q / config.block_q)
    resident = case.shape[0] == 1 and p <= config.block_p and q <= config.block_q
    constants = {"P": p, "Q": q, "BLOCK_P": config.block_p, "BLOCK_Q": config.block_q, "RESIDENT": resident}
    return _sliced_multiply_fwd_kernel, num_tiles, constants


def _chain(case: Case, config: ChainConfig, num_slices: int) -> tuple[Any, int, dict[str, Any]]:
    """Kernel, number of tiles and own constants of a chain."""
    steps = case.launch.steps
    table, rest = [], math.prod(s.p_pad for s in steps)
    for s in reversed(steps):
        rest //= s.p_pad
        table.append((s.start - case.launch.start, s.stop - case.launch.start, s.p, s.p_pad, s.q_pad, rest))
        rest *= s.q_pad
    constants = {
        "STEPS": tuple(table),
        "RESIDENT": case.shape[0] == 1,
        "P_SIZES": tuple(s.p for s in steps),
        "P_PADS": tuple(s.p_pad for s in steps),
        "P_TOTAL": math.prod(s.p_pad for s in steps),
        "Q_SIZES": tuple(s.q for s in steps),
        "Q_PADS": tuple(s.q_pad for s in steps),
        "Q_TOTAL": math.prod(s.q_pad for s in steps),
    }
    return _fused_multiply_fwd_kernel, case.shape[0] * math.ceil(num_slices / config.block_s), constants


# Who works out a launch's own part of the arguments, by the type of its configuration.
_MAKERS: dict[type, Any] = {SingleConfig: _single, ChainConfig: _chain}
