"""Rows in one launch, without tensor cores: small factors in float32 and float64, and Hadamard transforms by additions.

A tile is 2^T elements of one row or several, and bit i of an index is the same in all phases. A phase says which thread has which element,
and the modes that it multiplies before elements change threads: its registers hold these whole.

An analytical cost model: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastkron_py.kron.plan.steps import Launch, is_even, steps_of
from fastkron_py.kron.problem import MICROSECOND, LaunchProblem, Mode, Offer, Problem, Segment
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.gpu import GPU, HOPPER
from fastkron_py.runtime.kernels import LaunchConfig, gluon_kernel

if TYPE_CHECKING:
    import torch


LANES: Final = 5  # bits of 32 threads
SINGLE, DOUBLE = 4, 8  # bytes of an element
VECTOR: Final = {2: 3, SINGLE: 2, DOUBLE: 1}  # bits of 16 bytes, by bytes of an element


class Figures(NamedTuple):
    """Sizes that registers hold, and those beyond which other kernels are faster; bits are those of a number of elements."""

    least_tile: int  # bits
    widest: int  # order m of a matrix in registers that tensor cores multiply with
    most_bits: Mapping[int, int]  # of transformed rows, by bytes of an element; beyond, no registers are left for the next row
    few_values: int  # bits of a thread's elements,
    more_values: int  # of large tiles, where that saves an exchange, and of wide matrices:
    large: int  # bits of a tile, and
    narrow: int  # the widest matrix that is not wide
    longest: Mapping[int, int]  # bits of a row of small factors, by bytes of an element
    values: Mapping[int, int]  # bits of a thread's elements there
    least_bits: int  # of such a row: shorter ones are one merged factor of the other kernels
    large_tile: int  # bits with which few tiles fit on a multiprocessor
    light_products: int  # sums of products for an element that memory hides,
    light_large_products: int  # in large tiles too


OF: Final = figures(Figures, "small_factors", HOPPER)  # as of all GPUs


class Phase(NamedTuple):
    """Where the bits of an index lie, from the lowest of each on, and the modes that are multiplied: registers hold them whole."""

    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    modes: tuple[Any, ...]


def phase_of(tile: int, registers: Sequence[int], modes: Sequence[Any]) -> Phase:
    """The phase of a tile of this number of bits whose lanes have the lowest bits that registers do not have."""
    others = [bit for bit in range(tile) if bit not in registers]
    return Phase(tuple(registers), tuple(others[:LANES]), tuple(others[LANES:]), tuple(modes))


class Transform(NamedTuple):
    """A launch.

    Attributes:
        tile: bits of an index into a tile.
        bits: of a row of factors; of a Hadamard transform k, those that are transformed: they are the lowest ones.
        order_bits: b of m, the next ones.
        loaded: the phase in which elements are loaded; of factors the first one.
        order: of a tile's bits, seen as dimensions, that makes it a right operand ``[2^b, n]``; empty where m is 1.
        phases: those that follow; the last one is that in which elements are stored.
    """

    tile: int
    bits: int
    order_bits: int
    loaded: Phase
    order: tuple[int, ...]
    phases: tuple[Phase, ...]

    @property
    def row(self) -> int:
        """Elements of a padded row."""
        return 1 << self.bits + self.order_bits

    @property
    def num_warps(self) -> int:
        """Of a program."""
        return 1 << len(self.loaded.warps)


# ---- Hadamard transforms --------------------------------------------------------------------------
# A row of n = m * 2^k elements is padded to 2^(k + b), where m <= 2^b. In a phase each thread adds and subtracts elements that differ in
# one bit, for each bit that its registers hold: a mode is the number of a bit.


@lru_cache(maxsize=256)
def transform(m: int, bits: int, itemsize: int) -> Transform:
    """The launch for rows of m * 2^bits elements of so many bytes; sums have 4, or 8 where elements have.

    M is 1, or the order of a matrix, `Figures.widest` at most, of float32.
    """
    order_bits = (m - 1).bit_length()
    tile = max(OF.least_tile, bits + order_bits)
    values = OF.more_values if (tile >= OF.large and itemsize < DOUBLE) or m > OF.narrow else OF.few_values
    vector = min(bits, VECTOR[itemsize])
    columns = [*range(bits), *range(bits + order_bits, tile)]  # but for m's
    if not order_bits:
        high = _highest(columns, bits, vector + LANES, values - vector)
        registers = [*columns[:vector], *high]
        first = phase_of(tile, registers, [bit for bit in registers if bit < bits])
        return Transform(tile, bits, 0, first, (), (first, *_others(tile, bits, vector, values, first)))
    # m's lowest bits are at home in registers and lanes as a right operand of the tensor cores has them, and then as a sum.
    m_bits = range(bits, bits + order_bits)
    eighths = columns[vector : vector + 3]
    high = _highest(columns, bits, vector + 3, values - vector - order_bits + 2)
    loaded = _as_operand(tile, 0, [*columns[:vector], m_bits[0], *m_bits[3:], *high], [*m_bits[1:3], *eighths])
    summed = _as_operand(tile, bits, [*columns[:vector], eighths[0], *m_bits[3:], *high], [*eighths[1:], *m_bits[:3]])
    n = [*eighths, *loaded.warps, *columns[:vector], *high]
    order = tuple([tile - 1 - bit for bit in reversed([*n, *m_bits])])
    return Transform(tile, bits, order_bits, loaded, order, (summed, *_others(tile, bits, vector, values, summed)))


def takes_transform(m: int, bits: int, itemsize: int, shared_memory: int) -> bool:
    """Whether there is a launch for rows of m * 2^bits elements of so many bytes, where a program can have this shared memory."""
    if m > 1 and (m > OF.widest or itemsize != SINGLE or bits < VECTOR[SINGLE]):  # half precision: two factors on tensor cores are faster
        return False
    row = bits + (m - 1).bit_length()
    return row <= OF.most_bits[itemsize] and max(SINGLE, itemsize) << max(OF.least_tile, row) <= shared_memory


def _as_operand(tile: int, bits: int, registers: Sequence[int], lanes: Sequence[int]) -> Phase:
    """The phase with these bits in registers and lanes, and all others in warps."""
    others = [bit for bit in range(tile) if bit not in registers and bit not in lanes]
    return Phase(tuple(registers), tuple(lanes), tuple(others), tuple([bit for bit in registers if bit < bits]))


def _highest(columns: Sequence[int], bits: int, least: int, count: int) -> list[int]:
    """The highest bits of columns from number least on, transformed ones first."""
    left = list(columns[least:])
    ranked = [*[bit for bit in reversed(left) if bit < bits], *[bit for bit in reversed(left) if bit >= bits]]
    return sorted(ranked[:count])


def _others(tile: int, bits: int, vector: int, values: int, first: Phase) -> list[Phase]:
    """The phases after the first one: a thread has neighbours in the last one, and a warp those behind each other."""
    left = [bit for bit in range(bits) if bit not in first.modes]
    near = vector + LANES
    found: list[Phase] = []
    while [bit for bit in left if bit < near]:
        low, high = [bit for bit in left if bit < near], [bit for bit in left if bit >= near]
        taken = low[:values]
        if len(high) > values - vector:
            taken += high[: values - len(taken)]
        registers = [*taken, *[bit for bit in first.registers if bit not in taken]][:values]
        found.append(phase_of(tile, sorted(registers), taken))
        left = [bit for bit in left if bit not in taken]
    while left or not found or not _ends_transform(found[-1], vector):
        taken = left[: values - vector]
        others = [bit for bit in range(tile - 1, near - 1, -1) if bit not in taken]
        registers = [*range(vector), *taken, *others][:values]
        found.append(phase_of(tile, sorted(registers), taken))
        left = left[len(taken) :]
    return found


def _ends_transform(phase: Phase, vector: int) -> bool:
    """Whether elements may be stored from it."""
    return set(range(vector)) <= set(phase.registers) and phase.lanes == tuple(range(vector, vector + LANES))


# ---- small factors --------------------------------------------------------------------------------

name: Final = "small_factors"
order: Final = 0
moves_to_front: Final = True
kernel: Final = partial(gluon_kernel, "kron.kernels.butterfly", "_small_factors_fwd_kernel")  # None where this Triton cannot compile it

SIZES: Final = (2, 4, 8)  # rows and columns of a factor


class Group(NamedTuple):
    """A factor's mode in an index."""

    factor: int
    low: int  # its lowest bit
    width: int  # bits


def takes_small_factors(ps: Sequence[int], qs: Sequence[int], itemsize: int) -> bool:
    """Whether the kernel multiplies all of these factors at once."""
    is_small = len(ps) > 1 and tuple(ps) == tuple(qs) and all([p in SIZES for p in ps])
    return is_small and itemsize in OF.longest and sum([_width(p) for p in ps]) <= OF.longest[itemsize]


def quantities(mode: Mode, ps: Sequence[int]) -> dict[str, float]:
    """Those of a launch: memory hides the products of light tiles, and of large ones few fit on a multiprocessor."""
    products, is_large = sum(ps), sum([_width(p) for p in ps]) >= OF.large_tile
    is_heavy = products > (OF.light_large_products if is_large else OF.light_products)
    return {
        "start": MICROSECOND,
        "streamed": mode.streamed,
        "wide_start": MICROSECOND if max(ps) == max(SIZES) else 0.0,
        "bytes": mode.moved,
        "large": mode.moved if is_large else 0.0,
        "heavy": mode.moved if is_heavy else 0.0,
    }


@lru_cache(maxsize=256)
def small_factors(ps: tuple[int, ...], itemsize: int) -> Transform:
    """The launch for square factors of these sizes."""
    bits = sum([_width(p) for p in ps])
    tile, vector, values = max(OF.least_tile, bits), VECTOR[itemsize], OF.values[itemsize]
    left, low = [], 0
    for factor in reversed(range(len(ps))):
        left.append(Group(factor, low, _width(ps[factor])))
        low += _width(ps[factor])
    found: list[Phase] = []
    while left or not _ends_product(found[-1], vector):
        taken = _beside_vectors(left, vector, values)
        if found and len(taken) < len(left):
            taken = _together(left, values)
            registers = _bits_of(taken)
        else:
            registers = set(range(vector)) | _bits_of(taken)
        found.append(_phase(tile, registers, values, taken))
        left = [group for group in left if group not in taken]
    return Transform(tile, bits, 0, found[0], (), tuple(found))


def _width(p: int) -> int:
    return p.bit_length() - 1


def _bits_of(groups: Sequence[Group]) -> set[int]:
    return {bit for group in groups for bit in range(group.low, group.low + group.width)}


def _beside_vectors(left: Sequence[Group], vector: int, values: int) -> list[Group]:
    """Groups that registers hold next to one 16-byte vector: those that share its bits, then the highest; lanes have the others."""
    taken = [group for group in left if group.low < vector]
    if len(set(range(vector)) | _bits_of(taken)) > vector + 1:
        taken = []
    near = len(set(range(vector)) | _bits_of(taken))  # a bit of lanes, so that a warp has whole sectors
    for group in sorted(left, key=lambda group: -group.low):
        if group.low > near and len(set(range(vector)) | _bits_of([*taken, group])) <= values:
            taken.append(group)
    return taken


def _together(left: Sequence[Group], values: int) -> list[Group]:
    """The lowest groups that registers hold."""
    taken: list[Group] = []
    for group in sorted(left, key=lambda group: group.low):
        if len(_bits_of([*taken, group])) <= values:
            taken.append(group)
    return taken


def _phase(tile: int, registers: set[int], values: int, groups: Sequence[Group]) -> Phase:
    """The phase with these bits in registers, and others of the highest; lanes have the lowest ones left."""
    more = [bit for bit in reversed(range(tile)) if bit not in registers]
    own = sorted([*registers, *more[: values - len(registers)]])
    return phase_of(tile, own, groups)


def _ends_product(phase: Phase, vector: int) -> bool:
    """Whether elements may be stored from it: 16 bytes of a thread, and whole sectors of a warp."""
    return set(range(vector)) <= set(phase.registers) and phase.lanes[0] <= vector + 1


def takes(dtype: torch.dtype, gpu: GPU) -> bool:
    """Whether the kernel multiplies this type on a GPU: on those that it was timed on."""
    return gpu.has_wgmma and gpu.is_measured and not dtype.is_complex and dtype.itemsize in (SINGLE, DOUBLE)


def refusal(problem: Problem) -> str | None:
    """Why there is no launch at all."""
    if takes(problem.dtype, problem.gpu) and (problem.itemsize == DOUBLE or problem.precision == "highest"):
        return None
    return "takes float32 in full precision and float64, on GPUs that it was timed on"


def offers(segment: Segment) -> list[Offer] | str:
    """All factors at once."""
    problem, ps = segment.problem, segment.ps
    if not segment.is_all or not takes_small_factors(ps, segment.qs, problem.itemsize):
        return f"takes all factors at once, which are square, of {SIZES} rows, and rows of up to 2^{OF.longest[problem.itemsize]} elements"
    if sum([_width(p) for p in ps]) < OF.least_bits:
        return f"takes rows of at least 2^{OF.least_bits} elements"
    launch = Launch(steps_of(ps, segment.qs, tuple(range(len(ps) + 1))), name)
    return [Offer.of(segment, name, quantities(segment.mode, ps), launch)]


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """The one launch of the steps; it has no configurations to tune."""
    strides, (_, rows, before, after) = problem.factor_strides, problem.shape
    found = small_factors(tuple([step.p for step in problem.launch.steps]), problem.itemsize)
    at_once = 1 << found.tile - found.bits
    programs = math.ceil(problem.num_slices / at_once)
    arguments = problem.common | {
        "programs": programs,
        "BITS": found.bits,
        "TILE": found.tile,
        "PHASES": tuple([(*phase[:3], tuple([(*group, *strides[group.factor][1:]) for group in phase.modes])) for phase in found.phases]),
        "COUNT": len(found.phases),
        "EVEN": is_even(rows, before * after, at_once),
        "num_warps": found.num_warps,
    }
    return (LaunchConfig(kernel(), (problem.shape[0] * programs,), arguments),)
