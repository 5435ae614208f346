"""Narrow factors, multiplied without tensor cores: which ones, and the tiles of those kernels. Closed-form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from fastkron_py.kron.plan.steps import Launch, Step, tile_constants
from fastkron_py.kron.problem import LaunchProblem, Mode, Offer, Problem, Segment, add_launch, ceil
from fastkron_py.kron.rates import priced
from fastkron_py.runtime.gpu import GPU, next_power_of_two

if TYPE_CHECKING:
    from fastkron_py.kron.gradient_problem import GradientLaunch, GradientOffer, GroupProblem
    from fastkron_py.runtime.launch import LaunchConfig

name: Final = "narrow"
order: Final = 0
gradient_order: Final = 0
moves_to_front: Final = True
add: Final = add_launch

# Widest result, and most elements of a factor with its columns padded to a power of two, by bytes of an element: beyond these the
# multiply-adds take longer than the memory, and tensor cores are faster, whose tiles a narrower factor leaves mostly empty (measured on
# an H200).
WIDTH: Final = 16
ELEMENTS: Final = {2: 64, 4: 128, 8: 32}
TILE: Final = 2048  # elements of a tile of the result
# Where slices are runs of memory, a thread has one vector of them, with all sums of its slices, of these at most: so operands are loaded
# as they are multiplied, and do not change their layout in shared memory.
SUMS: Final = {2: 64, 4: 64, 8: 32, 16: 16}
VECTOR_BYTES: Final = 16
# The same of a gradient, whose kernel has its sums and the factor in registers.
GRADIENT_WIDTH: Final = 8
GRADIENT_ELEMENTS: Final = {2: 16, 4: 32, 8: 32}
GRADIENT_SUMS: Final = 16  # of a thread, at least those of one slice
THREADS: Final = 128
# Slices that are runs of memory are walked by a thread each, and a sector of several elements stays near for them all.
NEAR_BYTES: Final = 16384
MOST_SLICES: Final = 1024
PROGRAMS_PER_SM: Final = 8


@dataclass(frozen=True)
class NarrowConfig:
    """Tiles of block_s slices, in runs of this length, and block_q columns; unroll rows of the factor are multiplied together."""

    block_s: int
    run: int
    block_q: int
    unroll: int
    num_warps: int
    programs_per_sm: int


@dataclass(frozen=True)
class NarrowGradientConfig:
    """Tiles of block_s slices, in runs of this length; every program of a batch of factors leaves partial sums."""

    block_s: int
    run: int
    programs: int
    num_warps: int


def is_narrow(p: int, q: int, itemsize: int) -> bool:
    """Whether a mode is multiplied by a factor p x q, in real numbers of this size, without tensor cores."""
    return q <= WIDTH and p * next_power_of_two(q) <= ELEMENTS[itemsize]


def narrow_config(p: int, q: int, itemsize: int, num_slices: int, after: int, gpu: GPU) -> NarrowConfig:
    """Tiles of a multiply by a narrow factor.

    Args:
        p: rows of the (multiplied-out) factor.
        q: its columns.
        itemsize: bytes of an element.
        num_slices: slices there are in all.
        after: neighbouring slices that are a run of memory.
        gpu: where it runs.
    """
    block_q = next_power_of_two(q)
    most = min(MOST_SLICES, _spread(num_slices, 2 * gpu.multiprocessors))
    block_s, run = _vectors(after, itemsize, block_q, most)
    if run == 1:
        near = NEAR_BYTES // (p * itemsize) if after == 1 else most
        block_s = max(THREADS, min(TILE // block_q, most, 1 << near.bit_length() - 1))
    return NarrowConfig(block_s, run, block_q, min(p, WIDTH), THREADS // 32, PROGRAMS_PER_SM)


def is_narrow_gradient(p: int, q: int, itemsize: int) -> bool:
    """Whether the gradients of a mode and of its factor p x q are computed without tensor cores."""
    return max(p, q) <= GRADIENT_WIDTH and next_power_of_two(p) * next_power_of_two(q) <= GRADIENT_ELEMENTS[itemsize]


def gradient_config(problem: GroupProblem) -> NarrowGradientConfig:
    """Tiles of the gradients of a mode and of its narrow factor.

    Programs depend on the problem and the device alone, so results repeat bit for bit.
    """
    (p, q), (groups, _, _, after), num_slices, itemsize, gpu = (
        problem.sizes,
        problem.shape,
        problem.num_slices,
        problem.itemsize,
        problem.gpu,
    )
    sums = next_power_of_two(p) * next_power_of_two(q)
    most = min(MOST_SLICES, _spread(num_slices * groups, gpu.multiprocessors))
    block_s, run = _vectors(after, itemsize, sums, most)
    if run == 1:
        block_s = min(THREADS * max(1, GRADIENT_SUMS // sums), most)
    tiles = math.ceil(num_slices / block_s)
    most = max(1, math.ceil(gpu.multiprocessors * PROGRAMS_PER_SM / groups))
    return NarrowGradientConfig(block_s, run, math.ceil(tiles / math.ceil(tiles / most)), THREADS // 32)


def _vectors(after: int, itemsize: int, sums: int, most: int) -> tuple[int, int]:
    """(slices of a tile, at most `most`, and of its runs), of vectors as long as a thread has room for the sums of each slice."""
    vector = 1 if after == 1 else min(math.gcd(after, VECTOR_BYTES // itemsize), max(1, SUMS[itemsize] // sums), most // THREADS)
    run = math.gcd(after, THREADS * vector)
    return THREADS * vector, run if vector * itemsize == VECTOR_BYTES else min(run, vector)


def _spread(num_slices: int, programs: int) -> int:
    """Slices of a tile, a power of two, one for each thread at least, so that there are about this many tiles."""
    return max(THREADS, next_power_of_two(num_slices) // next_power_of_two(programs))


def refusal(problem: Problem) -> str | None:
    """Nothing is in the way."""
    return None


def offers(segment: Segment) -> list[Offer] | str:
    """One step of all factors."""
    problem, mode = segment.problem, segment.mode
    if not is_narrow(mode.p, mode.q, problem.itemsize):
        return f"takes one step of up to {WIDTH} columns and {ELEMENTS[problem.itemsize]} elements, in real numbers"
    step = Step(0, len(segment.ps), mode.p // problem.parts, mode.q // problem.parts, problem.parts)
    return [Offer(priced(name, problem.gpu, problem.itemsize, quantities(mode, step)), Launch((step,), name))]


def quantities(mode: Mode, step: Step) -> dict[str, float]:
    """Those of a step, whose programs move whole tiles."""
    config = narrow_config(step.p, step.q, mode.itemsize * step.parts, mode.slices, mode.after, mode.gpu)
    _, rounds = mode.rounds(mode.batches * ceil(mode.slices, config.block_s) * ceil(step.q, config.block_q), config.programs_per_sm)
    return mode.moves(config.block_s, config.run) | {"tiles": mode.moving(rounds * config.block_s * (mode.p + mode.q))}


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """The one launch of a step; it has no configurations to tune."""
    from fastkron_py.kron.kernels.narrow import _narrow_multiply_fwd_kernel
    from fastkron_py.runtime.launch import LaunchConfig
    from fastkron_py.tiling.products import arithmetic

    batches, launch = problem.shape[0], problem.launch
    config = narrow_config(launch.p, launch.q, problem.dtype.itemsize, problem.num_slices, problem.shape[3], problem.gpu)
    num_tiles = batches * math.ceil(problem.num_slices / config.block_s) * math.ceil(launch.q / config.block_q)
    arguments = problem.common | tile_constants(problem.shape, config.block_s)
    arguments |= {
        "ACC": arithmetic(problem.dtype, problem.precision, len(problem.factor_shapes) == 1).acc,
        "PARTS": problem.parts,
        "CONJ": problem.conj,
        "RUN": config.run,
        "P": launch.p,
        "Q": launch.q,
        "BLOCK_Q": config.block_q,
        "UNROLL": config.unroll,
        "num_tiles": num_tiles,
        "num_warps": config.num_warps,
    }
    programs = min(num_tiles, problem.gpu.multiprocessors * config.programs_per_sm)
    return (LaunchConfig(_narrow_multiply_fwd_kernel, (programs,), arguments),)


def gradient_offers(problem: GroupProblem) -> list[GradientOffer] | str:
    """A fused group of one step."""
    from fastkron_py.kron.gradient_problem import GradientOffer

    is_real_step = problem.is_fused and problem.split == 0 and not problem.dtype.is_complex
    if not is_real_step or not is_narrow_gradient(*problem.sizes, problem.itemsize):
        return f"takes one step of real numbers, of up to {GRADIENT_WIDTH} rows and columns"
    return [GradientOffer("narrow_gradients", gradient_quantities(problem), problem, partial(gradient_launch, problem))]


def gradient_quantities(problem: GroupProblem) -> dict[str, float]:
    """Those of a step's gradients, whose programs move whole tiles and have the products' sums in registers."""
    config, mode = gradient_config(problem), problem.mode
    _, rounds = mode.rounds(mode.batches * ceil(problem.num_slices, config.block_s), PROGRAMS_PER_SM)
    held = rounds * config.block_s
    return problem.moves(config.block_s, config.run, config.programs) | {
        "tiles": mode.moving(held * (2 * mode.p + mode.q)),
        "products": mode.moving(held * next_power_of_two(mode.p) * next_power_of_two(mode.q)),
    }


def gradient_launch(problem: GroupProblem) -> GradientLaunch:
    """The gradients of a step in one launch."""
    from fastkron_py.kron.gradient_problem import GradientLaunch
    from fastkron_py.kron.kernels.narrow import _narrow_multiply_bwd_kernel
    from fastkron_py.runtime.launch import LaunchConfig
    from fastkron_py.tiling.products import arithmetic

    config, groups, (p, q) = gradient_config(problem), problem.shape[0], problem.sizes
    arguments = problem.common | problem.tiles(config.block_s)
    arguments |= {
        "ACC": arithmetic(problem.dtype, problem.precision, True).acc,
        "programs": config.programs,
        "RUN": config.run,
        "P": p,
        "Q": q,
        "P_PAD": next_power_of_two(p),
        "Q_PAD": next_power_of_two(q),
        "num_warps": config.num_warps,
    }
    return GradientLaunch((LaunchConfig(_narrow_multiply_bwd_kernel, (groups * config.programs,), arguments),), config.programs)
