"""Tuned choices, and the problems that they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

from fastkron_py.kron.families import TUNABLE, offers
from fastkron_py.kron.plan.steps import Launch
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
        factors=multiply.shapes,
        rows=rows_bucket(groups * rows),
        columns=columns,
        batched=groups > 1,
        contiguous=rows == 1 or multiply.x.row == width * columns,
    )


@dataclass(frozen=True)
class Choice:
    """Launches in the order in which they run; without a configuration, as the closed form launches them."""

    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        """A line for people: of each launch the factors of each step, the family, and its configuration."""
        steps = [" ".join(["*".join(map(str, range(step.start, step.stop))) for step in launch.steps]) for launch in self.launches]
        return ", ".join([f"[{text}] {one.family} {one.config or ''}".rstrip() for text, one in zip(steps, self.launches, strict=True)])

    def is_offered(self, multiply: problems.Problem) -> bool:
        """Whether families offer its launches, in this or another order, and have their configurations: nothing else is launched."""
        from fastkron_py.kron.forward import launches_of

        if sorted([i for one in self.launches for i in range(one.start, one.stop)]) != [*range(len(multiply.shapes))]:
            return False
        for launch in self.launches:
            asked = replace(multiply, families=(launch.family,))
            found = [offers(segment_of(asked, launch.start, launch.stop, placed)).get(launch.family, "") for placed in (False, True)]
            made = [bid.launch.shifted(launch.start) for offer in found if not isinstance(offer, str) for bid in offer]
            if launch.steps not in [one.steps for one in made]:
                return False
        plain = launches_of(multiply, Choice(tuple([replace(launch, config=None) for launch in self.launches])))
        pairs = [(TUNABLE[one.family].choices(made), one) for one, made in zip(self.launches, plain, strict=True) if one.config is not None]
        return all([one.config in configs for configs, one in pairs])
