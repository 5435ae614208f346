"""Two steps on one slice at a time in half precision: the sizes that the kernel takes, its tiles, its modelled time, and its launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.plan.steps import HALF_VECTOR, Launch, Step, padded, steps_of
from fastkron_py.kron.problem import MICROSECOND, LaunchProblem, Mode, Offer, Problem, Segment
from fastkron_py.kron.rates import figures, priced
from fastkron_py.runtime.gpu import GPU, HOPPER
from fastkron_py.runtime.kernels import LaunchConfig

name: Final = "slice_pair"
order: Final = 0
moves_to_front: Final = False  # a slice is stored where it was

ROWS: Final = 64  # of a warpgroup's product, to which those of the factor on the left are padded
LEAST_LEFT: Final = ROWS // 2 + 1  # rows and columns of that factor, and of the one on the right:
LEAST_RIGHT: Final = ROWS // 2  # narrower steps are multiplied by single warps
WIDEST: Final = 2 * ROWS  # of these, and of steps with a factor in the middle

Parts = tuple[tuple[int, int], ...]


class Figures(NamedTuple):
    """Sizes beyond which a program spills, or is slower than with other warps and stages; and the time of loading factors."""

    narrowest: int  # rows and columns of a step
    widest_left: int  # rows and columns of the factor on the left
    widest_right: int  # of the one on the right
    least_right_of_wide: int  # with a factor over WIDEST on the left
    most_sums: int  # of a thread
    most_sums_of_four: int  # of a thread, where four warps round a slice,
    least_of_four: int  # columns of their parts,
    loaded_ahead: int  # and elements that rows of x are multiples of, which are copied without registers
    most_turns: int  # in which a slice with a factor in the middle is read
    most_stages: int  # of a program
    small_slice: int  # elements, up to which all stages and programs are used,
    small_tile: int  # and of a matrix with a factor in the middle; up to which four warps are enough
    narrow_tile: int  # the same of narrow steps,
    most_narrow: int  # which have at most this number
    most_programs: int  # of a multiprocessor
    least_of_two: int  # elements beyond which two warps are faster where rows are whole vectors
    warp_factor: int  # elements of the factor on the left that a warp loads without spills
    most_warps: int  # of a multiprocessor, for narrow steps
    loading: float  # microseconds in which narrow steps load a second factor that is wide
    loads: float  # that a thread makes in a microsecond,
    free_loads: float  # and those that take no time,
    loads_of_slice: float  # with this number for each slice of the problem


OF: Final = figures(Figures, name, HOPPER)  # as of all GPUs whose tensor cores read operands from shared memory


class SlicePairConfig(NamedTuple):
    """A program of this number of warps multiplies one slice at a time, while the next ones are loaded."""

    num_warps: int
    stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class Tiling:
    """The tiles of the two steps of a slice, or of the outer ones of three.

    Attributes:
        transposed: the second step's factor is on the left of the products, else the first one's.
        pads: rows and columns of the factor on the left, each a power of two.
        p_parts: rows of the factor on the right, in parts (first, number), each a power of two.
        q_parts: its columns.
        is_whole: the factor on the right has no padding.
    """

    transposed: bool
    pads: tuple[int, int]
    p_parts: Parts
    q_parts: Parts
    is_whole: bool

    @cached_property
    def p(self) -> int:
        """Rows of the factor on the right, padded."""
        return sum([size for _, size in self.p_parts])

    @cached_property
    def q(self) -> int:
        """Columns of the factor on the right, padded."""
        return sum([size for _, size in self.q_parts])

    @cached_property
    def elements(self) -> int:
        """Of the larger one of a matrix of x and one of the result, padded."""
        return max(self.pads) * max(self.p, self.q)

    @cached_property
    def sums(self) -> int:
        """Of all threads of a program, for one of the two products."""
        return self.pads[1] * max(self.p, self.q)

    def operations(self, turns: int = 1) -> int:
        """Floating-point operations of a matrix that is read in this number of turns."""
        return 2 * self.pads[1] * self.p * (turns * self.pads[0] + self.q)


def is_narrow(steps: Sequence[Step]) -> bool:
    """Whether a warpgroup's products would pad one of the steps: single warps have smaller ones."""
    least, most = sorted([min(steps[0].p, steps[0].q), min(steps[-1].p, steps[-1].q)])
    return least < LEAST_RIGHT or most < LEAST_LEFT


def in_parts(size: int) -> Parts:
    """A number of columns in one part or two, each a power of two that a product takes."""
    if size <= ROWS:
        return ((0, padded(size)),)
    first = padded(size) // 2
    return ((0, first), (first, padded(size - first)))


def _tilings(steps: Sequence[Step]) -> Iterator[Tiling]:
    """The tilings that a program has registers for."""
    first, second = steps[0], steps[-1]
    if is_narrow(steps):
        is_whole = (second.p, second.q) == (second.p_pad, second.q_pad)
        found = Tiling(False, (first.p_pad, first.q_pad), ((0, second.p_pad),), ((0, second.q_pad),), is_whole)
        if max(*found.pads, found.p, found.q) <= WIDEST and found.elements <= OF.most_narrow:
            yield found
        return
    for transposed, left, right in ((False, first, second), (True, second, first)):
        if min(left.p, left.q) < LEAST_LEFT or (transposed and len(steps) == 3):
            continue
        pads = (max(padded(LEAST_LEFT), left.p_pad), max(padded(LEAST_LEFT), left.q_pad))
        p_parts, q_parts = [in_parts(n) if len(steps) == 2 else ((0, padded(n)),) for n in (right.p, right.q)]
        is_whole = all([sum(parts[-1]) == n for parts, n in ((p_parts, right.p), (q_parts, right.q))])
        found = Tiling(transposed, pads, p_parts, q_parts, is_whole)
        is_wide, most = max(pads) > WIDEST, OF.most_sums * 32 * warps_of(found, matrices_of(steps))
        is_small = max(pads) <= OF.widest_left and max(found.p, found.q) <= OF.widest_right and found.sums <= most
        if is_small and not (is_wide and min(found.p, found.q) < OF.least_right_of_wide):
            yield found


@lru_cache(maxsize=4096)
def _best_tiling(steps: tuple[Step, ...]) -> Tiling | None:
    """The tiling of fewest operations, or None where the kernel takes none; of equal ones the transposed one, which is stored faster."""
    found = [t for t in _tilings(steps) if shared_memory(t, 1, False) <= HOPPER.shared_memory]
    return min(found, key=lambda t: (t.operations(), not t.transposed)) if found else None


def tiling(steps: Sequence[Step]) -> Tiling:
    """The tiling of steps that `slice_pairs` or `slice_triples` gives; ValueError for others."""
    found = _best_tiling(tuple(steps))
    if found is None:
        raise ValueError(f"steps: expected two that the kernel takes; got {steps}")
    return found


def matrices_of(steps: Sequence[Step]) -> int:
    """Matrices in a slice: rows of the factor in the middle, or 1."""
    return steps[1].p if len(steps) == 3 else 1


def turns_of(steps: Sequence[Step]) -> int:
    """Times that a slice is read: registers hold the sums of some of the middle factor's columns at once."""
    if len(steps) == 2:
        return 1
    matrices, found = matrices_of(steps), tiling(steps)
    sums = matrices * found.sums // (32 * warps_of(found, matrices))
    return next((n for n in range(1, matrices) if matrices % n == 0 and sums <= n * OF.most_sums), matrices)


def slice_pairs(ps: Sequence[int], qs: Sequence[int]) -> Iterator[tuple[Step, ...]]:
    """The pairs of steps that multiply factors of these rows and columns and that the kernel takes."""
    for split in range(1, len(ps)):
        steps = first, second = steps_of(ps, qs, (0, split, len(ps)))
        if min(first.p, first.q, second.p, second.q) >= OF.narrowest and _best_tiling(steps) is not None:
            yield steps


def slice_triples(ps: Sequence[int], qs: Sequence[int]) -> Iterator[tuple[Step, ...]]:
    """The same with a small square factor in the middle, which takes no product: a slice is as many matrices as that has rows."""
    for at in range(1, len(ps) - 1):
        steps = first, middle, second = steps_of(ps, qs, (0, at, at + 1, len(ps)))
        widths = (first.p, first.q, second.p, second.q)
        is_small = middle.p == middle.q > 1 and min(widths) >= LEAST_LEFT and max(widths) <= WIDEST
        if is_small and turns_of(steps) <= OF.most_turns:
            yield steps


def warps_of(tiles: Tiling, matrices: int) -> int:
    """The warps of a program that are not narrow steps': matrices with a factor in the middle need the registers of eight."""
    return 8 if tiles.pads[1] > WIDEST // 2 and (matrices > 1 or tiles.elements > OF.small_tile) else 4


def shared_memory(tiles: Tiling, stages: int, adds: bool) -> int:
    """Bytes of a program, as Triton allocates them, at most.

    It holds slices of x and of z that are loaded ahead, and both factors. Each part of a result takes another layout through shared
    memory, which a single stage has free: 128 rows at a time where nothing is padded, and half of a transposed one.

    Args:
        tiles: of its steps.
        stages: slices in work.
        adds: z is added, and loaded ahead.
    """
    (p, q), ahead = tiles.pads, stages - 1
    part = (min(WIDEST, q) if tiles.is_whole else q) * max([size for _, size in tiles.q_parts])
    part //= 2 if tiles.transposed and q <= WIDEST else 1
    elements = stages * p * tiles.p + (ahead * q * tiles.q if adds else 0) + tiles.p * tiles.q + p * q
    return 2 * (elements + (part if ahead else 0))


def slice_pair_start(steps: Sequence[Step], slices: int) -> float:
    """Modelled time before the first slice, besides the launch's own and in units of it.

    Args:
        steps: as in `tiling`.
        slices: of all programs. Other launches take longer for each, too, where rows are no whole vectors.
    """
    found = tiling(steps)
    if is_narrow(steps):
        return OF.loading if max(found.p, found.q) > ROWS else 0.0
    first, second = steps[0], steps[-1]
    left, right = (second, first) if found.transposed else (first, second)
    rows = ((math.prod(found.pads), left.q), (found.p * found.q, right.q), (found.pads[0] * found.p, second.p))
    loads = sum([elements / math.gcd(length, HALF_VECTOR) for elements, length in rows]) / (32 * warps_of(found, matrices_of(steps)))
    return max(0.0, loads - OF.free_loads - OF.loads_of_slice * slices) / OF.loads


def slice_pair_config(steps: Sequence[Step], needs_z: bool, rounds_to: str, gpu: GPU) -> SlicePairConfig:
    """The launch of the steps.

    Args:
        steps: as in `tiling`.
        needs_z: whether the epilogue reads z.
        rounds_to: "float8" or "integers" where it rounds each slice; else "".
        gpu: where it runs.
    """
    found, matrices = tiling(steps), matrices_of(steps)
    adds = matrices == 1 and needs_z  # of several matrices, z is loaded after the last one
    if is_narrow(steps):
        return _narrow_config(steps, adds, gpu)
    is_small = found.pads[0] * found.p <= (OF.small_slice if matrices == 1 else OF.small_tile)
    most = OF.most_stages if is_small else OF.most_stages - 1
    stages = next((n for n in range(most, 1, -1) if shared_memory(found, n, adds) <= gpu.shared_memory), 1)
    programs = max(1, gpu.shared_memory // shared_memory(found, stages, adds))
    warps = warps_of(found, matrices)
    if matrices > 1:
        return SlicePairConfig(warps, stages, min(programs, 8 // warps))  # which have the registers
    held = 1 if warps == 4 else 2  # stages of each of two programs
    by_four = warps == 4 or (rounds_to == "integers" and _rounds_by_four(found, steps[-1].p))
    if rounds_to and programs == 1 and by_four and 2 * shared_memory(found, held, False) <= gpu.shared_memory:
        return SlicePairConfig(4, held, 2)  # one multiplies while the other waits for its row's largest number
    return SlicePairConfig(warps, stages, min(programs, OF.most_programs if rounds_to or is_small else OF.most_programs - 1))


def _rounds_by_four(tiles: Tiling, columns: int) -> bool:
    """Whether four warps have the registers for a tile of eight and round integers faster (float8 takes longer; measured on an H200)."""
    narrowest = min([size for _, size in (*tiles.p_parts, *tiles.q_parts)])
    is_short = tiles.sums <= OF.most_sums_of_four * 32 * 4 and narrowest >= OF.least_of_four
    return tiles.transposed and is_short and columns % OF.loaded_ahead == 0


def _narrow_config(steps: Sequence[Step], adds: bool, gpu: GPU) -> SlicePairConfig:
    """The launch of narrow steps: one warp, or two where rows are whole vectors, or more that load a wide first factor."""
    found = tiling(steps)
    p, q = found.pads
    is_exact = (p, q, found.p, found.q) == (steps[0].p, steps[0].q, steps[-1].p, steps[-1].q)
    warps = 2 if (is_exact and found.elements > OF.least_of_two) or found.elements > 2 * OF.narrow_tile else 1
    warps = max(warps, p * q // OF.warp_factor)
    stages = OF.most_stages if p * found.p <= OF.narrow_tile else OF.most_stages - 1
    return SlicePairConfig(warps, stages, max(1, min(OF.most_warps // warps, gpu.shared_memory // shared_memory(found, stages, adds))))


def refusal(problem: Problem) -> str | None:
    """Why there is no launch at all."""
    return None if problem.half else "takes half precision on a Hopper GPU"


def offers(segment: Segment) -> list[Offer] | str:
    """The pairs of steps, and those with a small factor in the middle, of the last factors."""
    if not segment.in_place or not segment.is_last:
        return "takes slices that are runs of memory, and leaves them in place"
    factors, found = (segment.ps, segment.qs), list[Offer]()
    for steps in (*slice_pairs(*factors), *slice_triples(*factors)):
        found.append(Offer.of(segment, name, quantities(segment.mode, steps), Launch(steps, name)))
    return found or f"takes two steps from {OF.narrowest} to {OF.widest_left} and {OF.widest_right} wide whose sums fit into registers"


def seconds(mode: Mode, steps: Sequence[Step]) -> float:
    """The modelled seconds of a launch."""
    return priced(name, mode.gpu, mode.itemsize, quantities(mode, steps))


def quantities(mode: Mode, steps: Sequence[Step]) -> dict[str, float]:
    """Those of a launch, whose programs take whole slices."""
    turns, rounds = mode.rounds(mode.batches * mode.slices, slice_pair_config(steps, False, "", mode.gpu).programs_per_sm)
    again, is_unaligned = turns_of(steps) - 1, mode.moves(1)["addresses"] > 0
    return {
        "start": MICROSECOND,
        "streamed": mode.streamed,
        "loading": slice_pair_start(steps, mode.slices) * MICROSECOND,
        "rounds": turns * MICROSECOND,
        "tiles": mode.moving(rounds * (mode.p * (1 + again) + mode.q)),
        "operations": mode.operating(rounds * matrices_of(steps) * tiling(steps).operations(1 + again)),
        "unaligned": mode.moved if is_unaligned else 0.0,
    }


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """The one launch of the steps; it has no configurations to tune."""
    from fastkron_py.kron.kernels.row_pair import _row_pair_fwd_kernel, store_product, store_quantized
    from fastkron_py.tiling.products import half_precision

    batches, steps, epilogue = problem.shape[0], problem.launch.steps, problem.epilogue
    first, second, matrices = steps[0], steps[-1], matrices_of(steps)
    made, found = slice_pair_config(steps, epilogue.needs_z, epilogue.rounds_to, problem.gpu), tiling(steps)
    programs = min(problem.num_slices, math.ceil(problem.gpu.multiprocessors * made.programs_per_sm / batches))
    factors = [(step.start - first.start, step.stop - first.start) for step in (first, second)]
    left, right = factors[::-1] if found.transposed else factors
    arguments = problem.common | {
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
        "STAGES": made.stages,
        "PRECISION": half_precision(),
        "STORE": store_quantized if epilogue.rounds_to else store_product,
        "num_warps": made.num_warps,
    }
    return (LaunchConfig(_row_pair_fwd_kernel, (batches * programs,), arguments),)
