"""Small factors, multiplied without tensor cores: which ones, and the tiles of those kernels, by an analytical cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from fastkron_py.kron.plan.steps import GradientLaunch, Launch, Step, tile_constants
from fastkron_py.kron.problem import GradientOffer, LaunchProblem, Mode, Offer, Segment, ceil
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.gpu import GPU, VECTOR_BYTES, next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig

if TYPE_CHECKING:
    from fastkron_py.kron.gradient_problem import GroupProblem

name: Final = "narrow"
order: Final = 0
gradient_order: Final = 0
moves_to_front: Final = True

THREADS: Final = 128


class Figures(NamedTuple):
    """Sizes up to which these kernels are faster than tensor cores, whose tiles small factors leave mostly empty, and those of tiles."""

    width: int  # of the result; beyond it multiply-adds take longer than the memory
    elements: Mapping[int, int]  # of a factor with its columns padded to a power of two, by bytes of an element
    tile: int  # elements of a tile of the result
    # of a thread at most, by bytes of an element. Where slices are runs of memory, it has one vector of them, with all sums of its
    # slices: so operands are loaded as they are multiplied, and do not change their layout in shared memory.
    sums: Mapping[int, int]
    gradient_width: int  # as width, of a gradient, whose kernel has its sums and the factor in registers
    gradient_elements: Mapping[int, int]  # as elements
    gradient_sums: int  # of a thread, at least those of one slice
    # of slices that are runs of memory and are walked by a thread each: a sector of several elements stays near for them all.
    near_bytes: int
    most_slices: int  # of a tile
    programs_per_sm: int  # at a time on a multiprocessor

    @classmethod
    def of(cls, gpu: GPU) -> Figures:
        """Those of a GPU."""
        return figures(cls, name, gpu)


class NarrowConfig(NamedTuple):
    """Tiles of block_s slices, in runs of this length, and block_q columns; unroll rows of the factor are multiplied together."""

    block_s: int
    run: int
    block_q: int
    unroll: int


class NarrowGradientConfig(NamedTuple):
    """Tiles of block_s slices, in runs of this length; every program of a batch of factors leaves partial sums."""

    block_s: int
    run: int
    programs: int


def is_narrow(p: int, q: int, itemsize: int, gpu: GPU) -> bool:
    """Whether a mode is multiplied by a factor p x q, in real numbers of this size, without tensor cores."""
    of = Figures.of(gpu)
    return q <= of.width and p * next_power_of_two(q) <= of.elements[itemsize]


def narrow_config(p: int, q: int, itemsize: int, num_slices: int, after: int, gpu: GPU) -> NarrowConfig:
    """Tiles of a multiply by a small factor.

    Args:
        p: rows of the (multiplied-out) factor.
        q: its columns.
        itemsize: bytes of an element.
        num_slices: slices there are in all.
        after: neighbouring slices that are a run of memory.
        gpu: where it runs.
    """
    block_q, of = next_power_of_two(q), Figures.of(gpu)
    most = min(of.most_slices, _spread(num_slices, 2 * gpu.multiprocessors))
    block_s, run = _vectors(after, itemsize, of.sums[itemsize] // block_q, most)
    if run == 1:
        near = of.near_bytes // (p * itemsize) if after == 1 else most
        block_s = max(THREADS, min(of.tile // block_q, most, 1 << near.bit_length() - 1))
    return NarrowConfig(block_s, run, block_q, min(p, of.width))


def is_narrow_gradient(p: int, q: int, itemsize: int, gpu: GPU) -> bool:
    """Whether the gradients of a mode and of its factor p x q are computed without tensor cores."""
    of = Figures.of(gpu)
    return max(p, q) <= of.gradient_width and next_power_of_two(p) * next_power_of_two(q) <= of.gradient_elements[itemsize]


def gradient_config(problem: GroupProblem) -> NarrowGradientConfig:
    """Tiles of the gradients of a mode and of its small factor.

    Programs depend on the problem and the device alone, so results repeat bit for bit.
    """
    (p, q), (groups, _, _, after), gpu, of = problem.sizes, problem.shape, problem.gpu, Figures.of(problem.gpu)
    sums = next_power_of_two(p) * next_power_of_two(q)
    most = min(of.most_slices, _spread(problem.num_slices * groups, gpu.multiprocessors))
    block_s, run = _vectors(after, problem.itemsize, of.sums[problem.itemsize] // sums, most)
    if run == 1:
        block_s = min(THREADS * max(1, of.gradient_sums // sums), most)
    tiles = math.ceil(problem.num_slices / block_s)
    most = max(1, math.ceil(gpu.multiprocessors * of.programs_per_sm / groups))
    return NarrowGradientConfig(block_s, run, math.ceil(tiles / math.ceil(tiles / most)))


def _vectors(after: int, itemsize: int, longest: int, most: int) -> tuple[int, int]:
    """(slices of a tile, at most `most`, and of its runs), of vectors as long as a thread's registers hold the sums of each slice."""
    vector = 1 if after == 1 else min(math.gcd(after, VECTOR_BYTES // itemsize), max(1, longest), most // THREADS)
    run = math.gcd(after, THREADS * vector)
    return THREADS * vector, run if vector * itemsize == VECTOR_BYTES else min(run, vector)


def _spread(num_slices: int, programs: int) -> int:
    """Slices of a tile, a power of two, one for each thread at least, so that there are about this many tiles."""
    return max(THREADS, next_power_of_two(num_slices) // next_power_of_two(programs))


def offers(segment: Segment) -> list[Offer] | str:
    """One step of all factors."""
    problem, mode = segment.problem, segment.mode
    if not is_narrow(mode.p, mode.q, problem.itemsize, problem.gpu):
        of = Figures.of(problem.gpu)
        return f"takes one step of up to {of.width} columns and {of.elements[problem.itemsize]} elements, in real numbers"
    step = Step(0, len(segment.ps), mode.p // problem.parts, mode.q // problem.parts, problem.parts)
    return [Offer.of(segment, name, quantities(mode, step), Launch((step,), name))]


def quantities(mode: Mode, step: Step) -> dict[str, float]:
    """Those of a step, whose programs move whole tiles."""
    config = narrow_config(step.p, step.q, mode.itemsize * step.parts, mode.slices, mode.after, mode.gpu)
    tiles = mode.batches * ceil(mode.slices, config.block_s) * ceil(step.q, config.block_q)
    _, rounds = mode.rounds(tiles, Figures.of(mode.gpu).programs_per_sm)
    return mode.moves(config.block_s, config.run, tiles=mode.moving(rounds * config.block_s * (mode.p + mode.q)))


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """The one launch of a step; it has no configurations to tune."""
    from fastkron_py.kron.kernels.narrow import _narrow_multiply_fwd_kernel
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
        "num_warps": THREADS // 32,
    }
    programs = min(num_tiles, problem.gpu.multiprocessors * Figures.of(problem.gpu).programs_per_sm)
    return (LaunchConfig(_narrow_multiply_fwd_kernel, (programs,), arguments),)


def gradient_offers(problem: GroupProblem) -> list[GradientOffer] | str:
    """A fused group of one step."""
    is_real_step = problem.is_fused and problem.split == 0 and not problem.dtype.is_complex
    if not is_real_step or not is_narrow_gradient(*problem.sizes, problem.itemsize, problem.gpu):
        return f"takes one step of real numbers, of up to {Figures.of(problem.gpu).gradient_width} rows and columns"
    return [GradientOffer(name, "narrow_gradients", gradient_quantities(problem), problem, partial(gradient_launch, problem))]


def gradient_quantities(problem: GroupProblem) -> dict[str, float]:
    """Those of a step's gradients, whose programs move whole tiles and have the products' sums in registers."""
    config, mode = gradient_config(problem), problem.mode
    _, rounds = mode.rounds(mode.batches * ceil(problem.num_slices, config.block_s), Figures.of(problem.gpu).programs_per_sm)
    held = rounds * config.block_s
    return problem.moves(
        config.block_s,
        config.run,
        partial_sums=config.programs,
        tiles=mode.moving(held * (2 * mode.p + mode.q)),
        products=mode.moving(held * next_power_of_two(mode.p) * next_power_of_two(mode.q)),
    )


def gradient_launch(problem: GroupProblem) -> GradientLaunch:
    """The gradients of a step in one launch."""
    from fastkron_py.kron.kernels.narrow import _narrow_multiply_bwd_kernel
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
        "num_warps": THREADS // 32,
    }
    return GradientLaunch((LaunchConfig(_narrow_multiply_bwd_kernel, (groups * config.programs,), arguments),), config.programs)
