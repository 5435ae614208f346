"""Tuned choices as plain data, their problems, and the one predicate of valid choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from fastkron_py.kron.families import fragments, tile
from fastkron_py.kron.families.fragments import ChainedConfig, fits_chained
from fastkron_py.kron.families.registry import Family
from fastkron_py.kron.families.tile import CHAIN_STEPS, CHAIN_TILE, ChainConfig, SingleConfig, is_chain
from fastkron_py.kron.plan.plan import MERGE_WIDTH
from fastkron_py.kron.plan.steps import DOT_SIDE, Launch, Step, padded

# Raised when a kernel or the meaning of a configuration changes so that older timings say nothing any more. Not the library's
# version: most releases leave the kernels alone, and a table shall outlive them.
SCHEMA: Final = 2
ITEMSIZE: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
OPERATIONS: Final = ("multiply",)
FACTORS_MOST: Final = 64
Config = tile.Config | ChainedConfig  # of a launch
INTERPRETER: Final = "interpreter"  # in place of a device's name
WARPS: Final = (1, 2, 4, 8, 16)
STAGES_MOST: Final = 8
PROGRAMS_MOST: Final = 32
REGISTERS: Final = (32, 255)  # fewest and most of a thread
# Elements of any one tile of a single step: more than fits on any device, and the most that a compiler takes in seconds.
SINGLE_TILE: Final = 1 << 15


@dataclass(frozen=True)
class Problem:
    """The problem that a choice depends on. alpha, beta, z and the factors' strides are not part of it.

    Attributes:
        operation: "multiply".
        device: its name, or "interpreter".
        triton: major and minor version.
        dtype: of the tensors.
        precision: of float32 products, "highest" or "high"; "highest" for the other dtypes, where it changes nothing.
        factors: (P_i, Q_i) of each factor as the kernels see it (transposed in the left form).
        rows: rows of x times batches, rounded to a power of two (`rows_bucket`): a longer grid, and nothing else.
        columns: elements that lie side by side behind every mode (those of x in the left form), exactly: on them
            depends how every access is aligned.
        batched: every batch has factors of its own.
        contiguous: rows of x follow each other in memory without a gap.
    """

    operation: str
    device: str
    triton: str
    dtype: str
    precision: str
    factors: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    batched: bool
    contiguous: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]


def rows_bucket(rows: int) -> int:
    """The power of two that is nearest to rows (by their ratio)."""
    return 1 << round(math.log2(rows))


@dataclass(frozen=True)
class ChosenLaunch:
    """One launch: its steps as (first factor, one past the last), its kernel and that kernel's configuration."""

    steps: tuple[tuple[int, int], ...]
    kernel: str  # key of KERNELS
    config: Config


@dataclass(frozen=True)
class Choice:
    """Launches in the order in which they run."""

    launches: tuple[ChosenLaunch, ...]

    def as_launches(self, factors: Sequence[tuple[int, int]]) -> list[Launch]:
        """The launches as a plan, for factors of these shapes."""
        return [as_launch(chosen, factors) for chosen in self.launches]

    @property
    def has_chained(self) -> bool:
        """Whether some launch needs the register-chained kernel, and so its GPUs."""
        return any(KERNELS[chosen.kernel].family is fragments for chosen in self.launches)

    def __str__(self) -> str:
        """A line for people: the factors of each step, the kernel, its blocks, warps, stages and programs a multiprocessor."""
        return ", ".join(_launch_text(chosen) for chosen in self.launches)


def _launch_text(chosen: ChosenLaunch) -> str:
    steps = " ".join("*".join(map(str, range(start, stop))) for start, stop in chosen.steps)
    blocks = "x".join(str(getattr(chosen.config, f.name)) for f in fields(chosen.config) if f.name.startswith("block_"))
    short = (("num_warps", "w"), ("num_stages", "s"), ("programs_per_sm", "p"))
    rest = " ".join(f"{getattr(chosen.config, name)}{unit}" for name, unit in short if hasattr(chosen.config, name))
    return f"[{steps}] {chosen.kernel} {blocks} {rest}"


def as_launch(chosen: ChosenLaunch, factors: Sequence[tuple[int, int]]) -> Launch:
    """A launch whose steps are given by their factors' numbers, with their sizes."""
    return Launch(tuple(_step(start, stop, factors) for start, stop in chosen.steps), KERNELS[chosen.kernel].family.name)


def _step(start: int, stop: int, factors: Sequence[tuple[int, int]]) -> Step:
    mine = factors[start:stop]
    return Step(start, stop, math.prod(p for p, _ in mine), math.prod(q for _, q in mine))


# ---- which choices are valid -----------------------------------------------------------------


def _single_obstacle(launch: Launch, config: Any, problem: Problem) -> str | None:
    if len(launch.steps) != 1:
        return f"a single step was expected, not {len(launch.steps)}"
    if config.programs_per_sm < 1:
        return "no program"
    sides = (config.block_s, config.block_p, config.block_q)
    if min(sides) < DOT_SIDE:
        return f"a block is narrower than {DOT_SIDE}"
    if config.block_p > padded(launch.p) or config.block_q > padded(launch.q):
        return "a block is wider than the factor"
    if max(sides) * sorted(sides)[1] > SINGLE_TILE:
        return f"a tile has more than {SINGLE_TILE} elements"
    return None


def _chain_obstacle(launch: Launch, config: Any, problem: Problem) -> str | None:
    if config.programs_per_sm < 1:
        return "no program"
    if not 2 <= len(launch.steps) <= CHAIN_STEPS:
        return f"a chain of 2 to {CHAIN_STEPS} steps was expected, not of {len(launch.steps)}"
    if not is_chain(launch, problem.itemsize, launch.stop == len(problem.factors) and problem.columns == 1):
        return "the chain does not fit on chip"
    width = launch.tile_width
    if config.block_s * width > 2 * CHAIN_TILE[problem.itemsize]:
        return "the tile does not fit on chip"
    if config.block_s * min(width // max(s.p_pad, s.q_pad) for s in launch.steps) < DOT_SIDE:
        return f"a product has fewer than {DOT_SIDE} rows"
    return None


def _chained_obstacle(launch: Launch, config: Any, problem: Problem) -> str | None:
    if problem.dtype == "float64" or problem.device == INTERPRETER:
        return f"the register-chained kernel has no {'float64' if problem.dtype == 'float64' else 'interpreter'}"
    if config.max_registers and not REGISTERS[0] <= config.max_registers <= REGISTERS[1]:
        return f"max_registers = {config.max_registers}"
    if not fits_chained(launch.steps, config.block_s, config.num_warps, config.warpgroup):
        return "the chain does not fit into the registers"
    return None


class Kernel(NamedTuple):
    """A kernel that a choice can name: its family and its configuration's type, and why a launch with it is not valid, if it is not."""

    family: Family
    config: type
    obstacle: Callable[[Launch, Any, Problem], str | None]


KERNELS: Final[dict[str, Kernel]] = {
    "single": Kernel(tile, SingleConfig, _single_obstacle),
    "chain": Kernel(tile, ChainConfig, _chain_obstacle),
    "chained": Kernel(fragments, ChainedConfig, _chained_obstacle),
}


def kernel_of(config: Config) -> str:
    """The name of the kernel that a configuration is for."""
    return next(name for name, kernel in KERNELS.items() if kernel.config is type(config))


def obstacle(choice: Choice, problem: Problem) -> str | None:
    """Why a choice cannot carry out a problem, or None: the one predicate of valid choices.

    A valid choice computes the right result; whether a device has the shared memory for it shows when it is launched, and
    then the closed form's configurations take its place.
    """
    count = len(problem.factors)
    for chosen in choice.launches:
        if not chosen.steps or any(not 0 <= start < stop <= count for start, stop in chosen.steps):
            return f"steps outside of the {count} factors"
        if any(one[1] != other[0] for one, other in zip(chosen.steps, chosen.steps[1:], strict=False)):
            return "steps of one launch that are no neighbours"
    covered = sorted(i for chosen in choice.launches for start, stop in chosen.steps for i in range(start, stop))
    if covered != list(range(count)):
        return f"steps that do not cover each of the {count} factors once"
    return next(filter(None, (launch_obstacle(chosen, problem) for chosen in choice.launches)), None)


def is_valid(choice: Choice, problem: Problem) -> bool:
    """Whether a choice has no `obstacle`."""
    return obstacle(choice, problem) is None


def launch_obstacle(chosen: ChosenLaunch, problem: Problem) -> str | None:
    """Why one launch cannot be run, or None; that its steps are neighbours is taken for granted."""
    kernel = KERNELS.get(chosen.kernel)
    if kernel is None or type(chosen.config) is not kernel.config:
        return f"kernel {chosen.kernel!r} with a {type(chosen.config).__name__}"
    launch = as_launch(chosen, problem.factors)
    if any(s.stop - s.start > 1 and max(s.p, s.q) > MERGE_WIDTH for s in launch.steps):
        return f"factors multiplied out beyond a width of {MERGE_WIDTH}"
    for f in fields(chosen.config):
        value = getattr(chosen.config, f.name)
        if not _is_allowed(f.name, value):
            return f"{f.name} = {value}"
    return kernel.obstacle(launch, chosen.config, problem)


def _is_allowed(name: str, value: int) -> bool:
    """The constraint on a field of this name in every kernel's configuration."""
    if name.startswith("block_"):
        return value > 0 and value & (value - 1) == 0
    if name == "num_warps":
        return value in WARPS
    if name == "num_stages":
        return 1 <= value <= STAGES_MOST
    return name != "programs_per_sm" or 0 <= value <= PROGRAMS_MOST
