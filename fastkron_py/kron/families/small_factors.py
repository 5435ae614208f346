"""Small factors in one launch, in float32 and float64 without tensor cores: the products it takes, its time, and its phases.

In a phase (`plan.phases`) each thread multiplies the factors whose modes its registers hold whole, in full precision.

Closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastkron_py.kron.plan.phases import DOUBLE, LEAST_TILE, SINGLE, VECTOR, Phase, phase_of
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.kron.problem import Candidate, LaunchProblem, Problem, Segment, add_launch

if TYPE_CHECKING:
    import torch

    from fastkron_py.runtime.gpu import GPU
    from fastkron_py.runtime.launch import LaunchConfig

name: Final = "small_factors"
moves_to_front: Final = True
add: Final = add_launch

SIZES: Final = (2, 4, 8)  # rows and columns of a factor
_LONGEST: Final = {SINGLE: 14, DOUBLE: 13}  # bits of a row, by bytes of an element
_VALUES: Final = {SINGLE: 6, DOUBLE: 5}  # bits of a thread's elements
_LEAST_BITS: Final = 8  # of a row: shorter ones are one factor of the other kernels, multiplied out
_LARGE_TILE: Final = 13  # bits that leave room for few tiles on a multiprocessor
# Readings and writings that a launch takes, by bytes of an element, with these sums of products for an element: up to 24, up to 32 (in
# float64 with factors of 8), and the same of large tiles. Measured on an H200.
_PASSES: Final = {SINGLE: (1.07, 1.25, 1.5, 1.9), DOUBLE: (1.1, 1.4, 2.3, 2.3)}
_LIGHT_PRODUCTS, _LIGHT_LARGE_PRODUCTS = 24, 28
# In the plan's units the register-chained kernel takes 1.05 where it was measured at 1.46, and the plain one 1.1 at 1.17.
_UNITS: Final = {SINGLE: 0.72, DOUBLE: 0.95}
# Launches until the first tiles are multiplied, by bytes of an element: with factors of 2 and 4, and with one of 8.
_START: Final = {SINGLE: (0.15, 1.0), DOUBLE: (0.0, 0.5)}


class Group(NamedTuple):
    """A factor's mode in an index."""

    factor: int
    low: int  # its lowest bit
    width: int  # bits


class SmallFactors(NamedTuple):
    """A launch.

    Attributes:
        tile: bits of an index into a tile.
        bits: of a row.
        phases: the first one is that in which elements are loaded, the last one that in which they are stored.
    """

    tile: int
    bits: int
    phases: tuple[Phase, ...]

    @property
    def num_warps(self) -> int:
        """Of a program."""
        return 1 << len(self.phases[0].warps)


def takes_small_factors(ps: Sequence[int], qs: Sequence[int], itemsize: int) -> bool:
    """Whether the kernel multiplies all of these factors at once."""
    is_small = len(ps) > 1 and tuple(ps) == tuple(qs) and all([p in SIZES for p in ps])
    return is_small and itemsize in _LONGEST and sum([_width(p) for p in ps]) <= _LONGEST[itemsize]


def small_factors_cost(ps: Sequence[int], itemsize: int, moved: float, launch: float) -> float:
    """Modelled time, in units of moving one element once.

    Args:
        ps: sizes of the factors.
        itemsize: bytes of an element.
        moved: elements that are read and written.
        launch: time of a launch.
    """
    bits, products, has_eights = sum([_width(p) for p in ps]), sum(ps), max(ps) == max(SIZES)
    if bits < _LEAST_BITS:
        return math.inf
    if bits >= _LARGE_TILE:
        heavy = 2 + (products > _LIGHT_LARGE_PRODUCTS)
    else:
        heavy = int(products > _LIGHT_PRODUCTS or (itemsize == DOUBLE and min(ps) == max(SIZES)))
    return _UNITS[itemsize] * _PASSES[itemsize][heavy] * moved + _START[itemsize][has_eights] * launch


@lru_cache(maxsize=256)
def small_factors(ps: tuple[int, ...], itemsize: int) -> SmallFactors:
    """The launch for square factors of these sizes."""
    bits = sum([_width(p) for p in ps])
    tile, vector, values = max(LEAST_TILE, bits), VECTOR[itemsize], _VALUES[itemsize]
    left, low = [], 0
    for factor in reversed(range(len(ps))):
        left.append(Group(factor, low, _width(ps[factor])))
        low += _width(ps[factor])
    found: list[Phase] = []
    while left or not _is_last(found[-1], vector):
        taken = _beside_vectors(left, vector, values)
        if found and len(taken) < len(left):
            taken = _together(left, values)
            registers = _bits_of(taken)
        else:
            registers = set(range(vector)) | _bits_of(taken)
        found.append(_phase(tile, registers, values, taken))
        left = [group for group in left if group not in taken]
    return SmallFactors(tile, bits, tuple(found))


def _width(p: int) -> int:
    return p.bit_length() - 1


def _bits_of(groups: Sequence[Group]) -> set[int]:
    return {bit for group in groups for bit in range(group.low, group.low + group.width)}


def _beside_vectors(left: Sequence[Group], vector: int, values: int) -> list[Group]:
    """Groups that registers hold beside 16 bytes of neighbours: those that share their bits, then the highest; lanes have the others."""
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


def _is_last(phase: Phase, vector: int) -> bool:
    """Whether elements may be stored from it: 16 bytes of a thread, and whole sectors of a warp."""
    return set(range(vector)) <= set(phase.registers) and phase.lanes[0] <= vector + 1


def kernel() -> Any:
    """The kernel, or None where this Triton cannot compile it."""
    from fastkron_py.runtime.device import gluon_kernel

    return gluon_kernel("kron.kernels.small_factors", "_small_factors_fwd_kernel")


def takes(dtype: torch.dtype, gpu: GPU) -> bool:
    """Whether the kernel multiplies this type on a GPU: on those that it was timed on."""
    return gpu.has_wgmma and gpu.is_measured and not dtype.is_complex and dtype.itemsize in (SINGLE, DOUBLE)


def refusal(problem: Problem) -> str | None:
    """What is in the way of any launch."""
    if takes(problem.dtype, problem.gpu) and (problem.itemsize == DOUBLE or problem.precision == "highest"):
        return None
    return "takes float32 in full precision and float64, on GPUs that it was timed on"


def candidates(segment: Segment) -> list[Candidate] | str:
    """All factors at once."""
    problem, ps = segment.problem, segment.ps
    is_all = segment.is_first and segment.is_last and problem.before == 1
    if not is_all or not takes_small_factors(ps, segment.qs, problem.itemsize):
        return f"takes all factors at once, which are square, of {SIZES} rows, and rows of up to 2^{_LONGEST[problem.itemsize]} elements"
    cost = small_factors_cost(ps, problem.itemsize, float(segment.moved), problem.launch_cost)
    return [(cost, Launch(tuple([Step.of(ps, segment.qs, i, i + 1) for i in range(len(ps))]), name))]


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """The one launch of the steps; it has no configurations to tune."""
    from fastkron_py.runtime.launch import LaunchConfig

    strides, num_slices = problem.factor_strides, problem.num_slices
    found = small_factors(tuple([step.p for step in problem.launch.steps]), problem.itemsize)
    at_once = 1 << found.tile - found.bits
    programs = math.ceil(num_slices / at_once)
    arguments = problem.common | {
        "programs": programs,
        "BITS": found.bits,
        "TILE": found.tile,
        "PHASES": tuple([(*phase[:3], tuple([(*group, *strides[group.factor][1:]) for group in phase.modes])) for phase in found.phases]),
        "COUNT": len(found.phases),
        "EVEN": num_slices % at_once == 0,
        "num_warps": found.num_warps,
    }
    return (LaunchConfig(kernel(), (problem.shape[0] * programs,), arguments),)
