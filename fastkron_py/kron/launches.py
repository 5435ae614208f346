"""Launch configurations of a multiply: kernels, grids and arguments besides pointers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch

from fastkron_py.kron.epilogues import StoreEpilogue
from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.hopper.whole_row_launch import whole_row_launch
from fastkron_py.kron.hopper.wide_config import multiply_launch
from fastkron_py.kron.kernels.narrow_multiply import _narrow_multiply_fwd_kernel
from fastkron_py.kron.kernels.row_pair import _row_pair_fwd_kernel, store_product, store_quantized
from fastkron_py.kron.kernels.sliced_multiply import _fused_multiply_fwd_kernel, _sliced_multiply_fwd_kernel
from fastkron_py.kron.plan.chained import ChainedConfig, chained_config, chained_layout, chained_pad, run_sectors
from fastkron_py.kron.plan.launch import ChainConfig, Config, SingleConfig, chain_configs, single_configs
from fastkron_py.kron.plan.mode import Mode
from fastkron_py.kron.plan.narrow import NarrowConfig, is_narrow, narrow_config
from fastkron_py.kron.plan.plan import Launch
from fastkron_py.kron.plan.row_pair import matrices_of, row_pair_config, tiling, turns_of
from fastkron_py.kron.plan.wide import is_wide, looped_seconds, multiply_config
from fastkron_py.kron.small_factors_launch import small_factors_launch
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import GPU
from fastkron_py.runtime.launch import LaunchConfig
from fastkron_py.tiling.arithmetic import arithmetic

_Strides = tuple[int, int, int, int, int]


class Rows(NamedTuple):
    """Strides of an operand ``[B, L, n, R]`` whose last two dimensions are one run with a constant stride.

    Where R has a stride of its own, column, a launch can address the last modes only, which R alone comes after.
    """

    batch: int
    row: int
    unit: int
    column: int | None = None

    def in_place(self, mode: int, after: int, merged: bool) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, before, mode, after]``; merged: l counts rows and modes before."""
        inner, along = (self.unit, after * self.unit) if self.column is None else (self.column, self.unit)
        step = mode * along
        return (self.batch, step if merged else self.row, 0 if merged else step, along, inner)

    def is_merged(self, before: int, mode: int, after: int) -> bool:
        """Whether rows and modes before are one dimension."""
        return self.row == before * self.in_place(mode, after, False)[2]

    def transposed(self, others: int) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, mode, others]``, where j counts the others."""
        return (self.batch, self.row, self.unit, others * self.unit, 0)


def parts_of(dtype: torch.dtype) -> int:
    """Real numbers of an element."""
    return 2 if dtype.is_complex else 1


def in_words(strides: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Strides as kernels take them (`tiling.elements`): an element is one word, or two of float64."""
    return tuple([2 * stride for stride in strides]) if dtype == torch.complex128 else tuple(strides)


def passes_of(dtype: torch.dtype, precision: str) -> int:
    """Products of tensor cores that a product of this precision takes."""
    return 3 if dtype.to_real() == torch.float32 and precision == "highest" else 1


def mode_of(shape: tuple[int, int, int, int], p: int, q: int, dtype: torch.dtype, precision: str, device: torch.device) -> Mode:
    """The sizes of a multiply of one mode by a factor p x q, in an operand with this (B, L, before, after) around the mode.

    A complex factor is a real one of twice the sides (`tiling.elements`).
    """
    groups, rows, before, after = shape
    parts, real = parts_of(dtype), dtype.to_real()
    gpu = devices.gpu_of(device)
    return Mode(groups, rows * before, after, parts * p, parts * q, real.itemsize, passes_of(dtype, precision), gpu)


@dataclass(frozen=True)
class LaunchProblem:
    """One launch of a multiply, without its tensors.

    Attributes:
        launch: its steps.
        dtype: of all tensors.
        precision: of float32 products.
        epilogue: of the sums.
        shape: (B, L, before, after) around the launch's modes.
        transposed: the modes, which are the last ones of x, are the first ones of y.
        mode_stride: of a transposed y, in elements: ``before``, or more where y is a block of a tensor.
        static: the shape but for L depends on the factors alone, so that kernels may be compiled for it.
        x: strides of the operand.
        y: strides of the result.
        z: strides of the addend; those of y where there is none.
        factor_shapes: (P, Q) of each factor.
        factor_strides: (B, P, Q) of each factor.
        device: of all tensors.
        conj: whether the factors are conjugated.
    """

    launch: Launch
    dtype: torch.dtype
    precision: str
    epilogue: StoreEpilogue
    shape: tuple[int, int, int, int]
    transposed: bool
    mode_stride: int
    static: bool
    x: Rows
    y: Rows
    z: Rows
    factor_shapes: tuple[tuple[int, int], ...]
    factor_strides: tuple[tuple[int, int, int], ...]
    device: torch.device
    conj: bool = False

    def mode(self) -> Mode:
        """The sizes of a launch of one step."""
        return mode_of(self.shape, self.launch.p, self.launch.q, self.dtype, self.precision, self.device)


def _common(problem: LaunchProblem) -> dict[str, Any]:
    """The arguments that every kernel of a multiply has: strides, sizes and the epilogue."""
    (_, rows, before, after), launch = problem.shape, problem.launch
    merged = False
    if problem.transposed:
        x, y, z = problem.x.in_place(launch.p, 1, False), *[r.transposed(problem.mode_stride) for r in (problem.y, problem.z)]
    else:
        pairs = ((problem.x, launch.p), (problem.y, launch.q), (problem.z, launch.q))
        merged = before > 1 and (rows == 1 or all(r.is_merged(before, size, after) for r, size in pairs))
        x, y, z = (r.in_place(size, after, merged) for r, size in pairs)
    return {
        "x_strides": in_words(x, problem.dtype),
        "y_strides": in_words(y, problem.dtype),
        "z_strides": in_words(z, problem.dtype),
        "factor_strides": problem.factor_strides,
        "num_slices": rows * before * after,
        "before": before,
        "after": after,
        "SHAPES": problem.factor_shapes,
        "HEAD": not merged and before != 1,
        "TAIL": after != 1,
        "EPILOGUE": problem.epilogue.function(problem.dtype),
    }


def run_of(before: int, after: int, block_s: int) -> int:
    """Slices of a tile of block_s, a power of two, that are one run of memory wherever the tile begins."""
    return math.gcd(after if after != 1 else before, block_s)


def tile_constants(shape: tuple[int, int, int, int], block_s: int) -> dict[str, Any]:
    """The constants of a kernel on tiles of block_s slices, of an operand with this (B, L, before, after) around its modes."""
    _, rows, before, after = shape
    return {
        "BLOCK_S": block_s,
        "RUN": run_of(before, after, block_s),
        "EVEN": rows * before * after % block_s == 0,
    }


def launch_configs(problem: LaunchProblem, config: Config | None = None) -> tuple[LaunchConfig, ...]:
    """Launch configurations in order of preference; later ones need less shared memory.

    Args:
        problem: the launch.
        config: a tuned configuration, which is preferred to the closed form's.
    """
    (batches, _, before, after), launch, itemsize = problem.shape, problem.launch, problem.dtype.to_real().itemsize
    common = _common(problem)
    num_slices = common["num_slices"]
    if launch.kernel == "chained":
        closed = chained_config(launch.steps, itemsize, run_sectors(before, after), num_slices)
        chained = [c for c in (config, closed) if isinstance(c, ChainedConfig)]
        # Where tiles are loaded ahead, also without: that needs no second tile in shared memory.
        return tuple(found for c in chained for found in _chained(problem, common, num_slices, c))
    gpu, chain = devices.gpu_of(problem.device), len(launch.steps) > 1
    if launch.kernel == "row_pair":
        return (_row_pair(problem, common, gpu),)
    if launch.kernel == "whole_row":
        return (whole_row_launch(launch.steps, common, batches, gpu),)
    if launch.kernel == "small_factors":
        return (small_factors_launch(launch.steps, problem.factor_strides, itemsize, batches, common),)
    compute, acc, precision = arithmetic(problem.dtype, problem.precision, not chain and len(problem.factor_shapes) == 1)
    parts = parts_of(problem.dtype)
    elements = common | {"ACC": acc, "PARTS": parts, "CONJ": problem.conj}
    if config is None and not chain and is_narrow(parts * launch.p, parts * launch.q, itemsize):
        narrow = narrow_config(launch.p, launch.q, problem.dtype.itemsize, num_slices, after, gpu)
        return (_narrow(problem, elements, narrow, gpu),)
    plain = elements | {"COMPUTE": compute, "PRECISION": precision, "TRANSPOSED": problem.transposed or common["TAIL"]}
    configs: tuple[SingleConfig | ChainConfig, ...]
    if chain:
        plain |= _chain_constants(launch, batches)
        configs = chain_configs(launch, itemsize, num_slices, after if after != 1 else before, gpu)
    else:
        plain |= {"P": launch.p, "Q": launch.q}
        configs = single_configs(parts * launch.p, parts * launch.q, itemsize, num_slices, gpu, parts)
    if isinstance(config, SingleConfig | ChainConfig):
        configs = (config, *configs)
    found = tuple([_plain(problem, plain, c, gpu) for c in configs])
    if config is None and takes_tensor_cores(problem):
        return multiply_launch(problem.mode(), common, problem.factor_strides[0], problem.static), *found
    return found


def takes_tensor_cores(problem: LaunchProblem) -> bool:
    """Whether the kernel for wide factors is faster than the plain one."""
    is_single = len(problem.factor_shapes) == 1 and is_wide(problem.launch.p, problem.launch.q)
    if not is_single or not kernels.has_wide(problem.device, problem.dtype):
        return False
    return multiply_config(problem.mode())[0] < looped_seconds(problem.mode())


def _plain(problem: LaunchProblem, common: dict[str, Any], config: SingleConfig | ChainConfig, gpu: GPU) -> LaunchConfig:
    """The launch configuration of a plain Triton kernel: for one step, or for a chain."""
    batches, launch = problem.shape[0], problem.launch
    num_tiles = batches * math.ceil(common["num_slices"] / config.block_s)
    arguments = common | tile_constants(problem.shape, config.block_s) | {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if isinstance(config, SingleConfig):
        block_p, block_q = (block // parts_of(problem.dtype) for block in (config.block_p, config.block_q))
        num_tiles *= math.ceil(launch.q / block_q)
        resident = batches == 1 and launch.p <= block_p and launch.q <= block_q
        arguments |= {"BLOCK_P": block_p, "BLOCK_Q": block_q, "RESIDENT": resident}
    kernel = _sliced_multiply_fwd_kernel if isinstance(config, SingleConfig) else _fused_multiply_fwd_kernel
    return LaunchConfig(kernel, (min(num_tiles, gpu.multiprocessors * config.programs_per_sm),), arguments | {"num_tiles": num_tiles})


def _row_pair(problem: LaunchProblem, common: dict[str, Any], gpu: GPU) -> LaunchConfig:
    """The launch configuration of two steps on one slice at a time."""
    batches, steps, epilogue = problem.shape[0], problem.launch.steps, problem.epilogue
    first, second, matrices = steps[0], steps[-1], matrices_of(steps)
    config, found = row_pair_config(steps, epilogue.needs_z, epilogue.rounds_to, gpu), tiling(steps)
    programs = min(common["num_slices"], math.ceil(gpu.multiprocessors * config.programs_per_sm / batches))
    factors = [(step.start - first.start, step.stop - first.start) for step in (first, second)]
    left, right = factors[::-1] if found.transposed else factors
    arguments = common | {
        "programs": programs,
        "LEFT": left,
        "RIGHT": right,
        "MIDDLE": matrices,
        "SUMS": matrices // turns_of(steps),
        "PADS": found.pads,
        "P_PARTS": found.p_parts,
        "Q_PARTS": found.q_parts,
        "TRANSPOSED": found.transposed,
        "PAIRED": found.transposed and epilogue.rounds_to != "" and second.q % 2 == 0,
        "X_SIZES": (first.p, second.p),
        "Y_SIZES": (first.q, second.q),
        "STAGES": config.stages,
        "PRECISION": arithmetic(torch.bfloat16, problem.precision, True).precision,
        "STORE": store_quantized if epilogue.rounds_to else store_product,
        "num_warps": config.num_warps,
    }
    return LaunchConfig(_row_pair_fwd_kernel, (batches * programs,), arguments)


def _narrow(problem: LaunchProblem, common: dict[str, Any], config: NarrowConfig, gpu: GPU) -> LaunchConfig:
    """The launch configuration of the kernel for a narrow factor."""
    batches, launch = problem.shape[0], problem.launch
    num_tiles = batches * math.ceil(common["num_slices"] / config.block_s) * math.ceil(launch.q / config.block_q)
    arguments = common | tile_constants(problem.shape, config.block_s)
    arguments |= {
        "RUN": config.run,
        "P": launch.p,
        "Q": launch.q,
        "BLOCK_Q": config.block_q,
        "UNROLL": config.unroll,
        "num_tiles": num_tiles,
        "num_warps": config.num_warps,
    }
    return LaunchConfig(_narrow_multiply_fwd_kernel, (min(num_tiles, gpu.multiprocessors * config.programs_per_sm),), arguments)


def _chain_constants(launch: Launch, batches: int) -> dict[str, Any]:
    """The constants of a chain that do not depend on its configuration."""
    steps = launch.steps
    table, rest = [], math.prod(s.p_pad for s in steps)
    for s in reversed(steps):
        rest //= s.p_pad
        table.append((s.start - launch.start, s.stop - launch.start, s.p, s.p_pad, s.q_pad, rest))
        rest *= s.q_pad
    return {
        "STEPS": tuple(table),
        "RESIDENT": batches == 1,
        "P_SIZES": tuple(s.p for s in steps),
        "P_PADS": tuple(s.p_pad for s in steps),
        "P_TOTAL": math.prod(s.p_pad for s in steps),
        "Q_SIZES": tuple(s.q for s in steps),
        "Q_PADS": tuple(s.q_pad for s in steps),
        "Q_TOTAL": math.prod(s.q_pad for s in steps),
    }


# TF32 holds float16 and bfloat16 exactly, and its truncated sums have more bits than bfloat16.
_ROUND = {torch.float32: 2, torch.float16: 1, torch.bfloat16: 0}
_RUNTIME = 0  # a stride that a kernel is not compiled for,
_RUNTIME_NARROW = -1  # with all of a tile's offsets below 2^31
_MOST_OFFSET = 2**31 - 1


def _chained(problem: LaunchProblem, common: dict[str, Any], num_slices: int, config: ChainedConfig) -> tuple[LaunchConfig, ...]:
    """Launch configurations for the register-chained kernel: with tiles of a loop loaded ahead, where they can be, and without."""
    batches, _, before, after = problem.shape
    steps = problem.launch.steps
    head, tail = common["HEAD"], common["TAIL"]
    plan = chained_layout(steps, config.block_s, config.num_warps, problem.dtype.itemsize, (tail, tail or problem.transposed))
    run = run_of(before, after, config.block_s) if head or tail else config.block_s
    num_tiles = batches * math.ceil(num_slices / config.block_s)
    loop = config.programs_per_sm > 0 and batches == 1
    p_sizes, q_sizes = tuple(s.p for s in steps), tuple(s.q for s in steps)
    p_pads, q_pads = (tuple(map(chained_pad, sizes)) for sizes in (p_sizes, q_sizes))
    padded = (p_sizes, q_sizes) != (p_pads, q_pads)
    arguments = {
        **common,
        "num_tiles": num_tiles,
        "STEPS": tuple(astuple(step) for step in plan.steps),
        "ALONG_P": tuple(_along_p(problem.factor_strides[step.stop - 1]) for step in plan.steps),
        "STORE_ORDER": plan.order,
        "LOAD": astuple(plan.load),
        "STORE": astuple(plan.store),
        "P_SIZES": p_sizes,
        "P_PADS": p_pads,
        "Q_SIZES": q_sizes,
        "Q_PADS": q_pads,
        "PADDED": padded,
        "STRIDES": _strides(problem, common, config.block_s),
        "BLOCK_S": config.block_s,
        "WARPS": config.num_warps,
        "WARPGROUP": config.warpgroup,
        "LOOP": loop,
        "RUN": run,
        "EVEN": num_slices % config.block_s == 0,
        "THREE": problem.dtype == torch.float32 and problem.precision == "highest",
        "ROUND": _ROUND[problem.dtype],
        "num_warps": config.num_warps,
        "maxnreg": config.max_registers or None,
    }
    grid = (min(num_tiles, devices.gpu_of(problem.device).multiprocessors * config.programs_per_sm) if loop else num_tiles,)
    ahead = loop and len(steps) == 1 and problem.dtype.itemsize == 4 and run == config.block_s and not padded
    return tuple(
        LaunchConfig(kernels.chained_kernel(), grid, arguments | {"FETCH": fetch}) for fetch in ((True, False) if ahead else (False,))
    )


def _along_p(strides: tuple[int, int, int]) -> bool:
    """Whether neighbouring rows of a factor with strides (B, P, Q), not columns, are consecutive in memory."""
    return strides[1] == 1 and strides[2] != 1


def _strides(problem: LaunchProblem, common: dict[str, Any], block_s: int) -> tuple[int, ...]:
    """(slice, mode) strides of x, y and z that the kernel is compiled for; `_RUNTIME` for the others."""
    found = []
    fastest = 4 if common["TAIL"] else 2 if common["HEAD"] else 1
    for strides, size in (
        (common["x_strides"], problem.launch.p),
        (common["y_strides"], problem.launch.q),
        (common["z_strides"], problem.launch.q),
    ):
        slices, modes = strides[fastest], strides[3]
        reach = slices * block_s + modes * 2 * size
        if fastest == 1 and slices != size * modes:
            slices = _RUNTIME  # rows of a larger tensor
        if not problem.static and modes != 1:
            slices, modes = (slices if common["TAIL"] else _RUNTIME), _RUNTIME_NARROW
        found += [slices, modes] if reach <= _MOST_OFFSET else [_RUNTIME, _RUNTIME]
    return tuple(found)
