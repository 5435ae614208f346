"""Tuned choices as plain data, the problems that they are for, and which of them are valid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from fastkron_py.kron.families import BY_NAME, TUNABLE, offers
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.kron.planner import segment_of

if TYPE_CHECKING:
    from fastkron_py.kron import problem as problems

ITEMSIZE: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FACTORS_MOST: Final = 64
INTERPRETER: Final = "interpreter"  # in place of a device's name


@dataclass(frozen=True)
class Problem:
    """The problem that a choice depends on. alpha, beta, z and the factors' strides are not part of it.

    Attributes:
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

    device: str
    triton: str
    dtype: str
    precision: str
    factors: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    batched: bool
    contiguous: bool


def rows_bucket(rows: int) -> int:
    """The power of two that is nearest to rows (by their ratio)."""
    return 1 << round(math.log2(rows))


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER


def problem_of(multiply: problems.Problem, device: torch.device) -> Problem | None:
    """The problem that a multiply poses, or None for one that is not tuned: a part of the factors only."""
    import triton  # by multiplies only: the command line reads tables without it

    count = len(multiply.factor_shapes)
    dtype = str(multiply.dtype).removeprefix("torch.")
    if multiply.start != 0 or multiply.stop != count or count > FACTORS_MOST or dtype not in ITEMSIZE:
        return None
    groups, rows, width, columns = multiply.shape
    return Problem(
        device=_device_name(device),
        triton=".".join(triton.__version__.split(".")[:2]),
        dtype=dtype,
        precision="high" if multiply.dtype == torch.float32 and multiply.precision != "highest" else "highest",
        factors=tuple((int(s[-2]), int(s[-1])) for s in multiply.factor_shapes),
        rows=rows_bucket(groups * rows),
        columns=columns,
        batched=groups > 1,
        contiguous=rows == 1 or multiply.x.row == width * columns,
    )


@dataclass(frozen=True)
class TunedLaunch:
    """One launch.

    Attributes:
        steps: (first factor, one past the last) of each.
        family: whose kernel it is.
        config: that kernel's configuration, None for what the closed form launches for the family's offer.
    """

    steps: tuple[tuple[int, int], ...]
    family: str
    config: Any = None

    @property
    def start(self) -> int:
        """First factor."""
        return self.steps[0][0]

    @classmethod
    def of(cls, launch: Launch) -> TunedLaunch:
        """A launch of the plan, as the closed form launches it."""
        return cls(tuple((s.start, s.stop) for s in launch.steps), launch.family)

    def as_launch(self, factors: Sequence[tuple[int, int]]) -> Launch:
        """The launch as it is planned, for factors of these shapes."""
        ps, qs = [p for p, _ in factors], [q for _, q in factors]
        return Launch(
            tuple([Step(start, stop, math.prod(ps[start:stop]), math.prod(qs[start:stop])) for start, stop in self.steps]),
            self.family,
            self.config,
        )

    def __str__(self) -> str:
        """A line for people: the factors of each step, the family, its blocks, warps, stages and programs a multiprocessor."""
        text = f"[{' '.join('*'.join(map(str, range(start, stop))) for start, stop in self.steps)}] {self.family}"
        if self.config is None:
            return text
        blocks = "x".join(str(getattr(self.config, f.name)) for f in fields(self.config) if f.name.startswith("block_"))
        short = (("num_warps", "w"), ("num_stages", "s"), ("programs_per_sm", "p"))
        return " ".join([text, blocks, *[f"{getattr(self.config, name)}{unit}" for name, unit in short if hasattr(self.config, name)]])


@dataclass(frozen=True)
class Choice:
    """Launches in the order in which they run."""

    launches: tuple[TunedLaunch, ...]

    def __str__(self) -> str:
        """A line for people."""
        return ", ".join(map(str, self.launches))


def obstacle(choice: Choice, problem: Problem) -> str | None:
    """Why a choice cannot carry out a problem on any device, or None.

    Whether a device has its families, and these such launches to offer, shows where it is looked up (`is_offered`). Whether a device
    has the shared memory shows when it is launched, and then the closed form's configurations take its place.
    """
    count = len(problem.factors)
    for launch in choice.launches:
        if not launch.steps or any(not 0 <= start < stop <= count for start, stop in launch.steps):
            return f"steps outside of the {count} factors"
        if any(one[1] != other[0] for one, other in zip(launch.steps, launch.steps[1:], strict=False)):
            return "steps of one launch that are no neighbours"
    covered = sorted(i for launch in choice.launches for start, stop in launch.steps for i in range(start, stop))
    if covered != list(range(count)):
        return f"steps that do not cover each of the {count} factors once"
    return next(filter(None, (_launch_obstacle(launch, problem) for launch in choice.launches)), None)


def _launch_obstacle(tuned: TunedLaunch, problem: Problem) -> str | None:
    if tuned.config is None:
        return None if tuned.family in BY_NAME else f"no family {tuned.family!r}"
    family = TUNABLE.get(tuned.family)
    if family is None or type(tuned.config) not in family.config_types:
        return f"a {type(tuned.config).__name__} for family {tuned.family!r}"
    return family.obstacle(tuned.as_launch(problem.factors), tuned.config, ITEMSIZE[problem.dtype])


def is_offered(choice: Choice, factors: Sequence[tuple[int, int]], problem: problems.Problem) -> bool:
    """Whether the families of a choice that has no `obstacle` offer all of its launches for this problem, in this or another order."""
    for launch in [replace(tuned, config=None).as_launch(factors) for tuned in choice.launches]:
        asked = replace(problem, families=(launch.family,))
        found = [offers(segment_of(asked, launch.start, launch.stop, placed)).get(launch.family, "") for placed in (False, True)]
        made = [bid.launch.shifted(launch.start) for offer in found if not isinstance(offer, str) for bid in offer]
        if not any((one.steps, one.family) == (launch.steps, launch.family) for one in made):
            return False
    return True
