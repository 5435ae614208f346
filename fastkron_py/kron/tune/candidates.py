"""The candidates of a search: other plans of nearly the least modelled time, then configurations around the best so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from fastkron_py.kron.families import fragments, tile
from fastkron_py.kron.plan.plan import MERGE_WIDTH, places, plans, transposes
from fastkron_py.kron.plan.steps import Launch, PlanProblem
from fastkron_py.kron.tune.choice import Choice, ChosenLaunch, Config, Problem, is_valid, kernel_of, launch_obstacle
from fastkron_py.runtime.gpu import GPU, HOPPER

# Of the families that have configurations to choose from.
CONFIGS: Final[dict[str, Callable[[Launch, int, int, tuple[int, int], GPU], Sequence[Config]]]] = {
    family.name: family.configs for family in (tile, fragments)
}
MODEL_SLACK: Final = 1.5  # plans modelled to take longer than this many times the least are not tried
PLANS_MOST: Final = 8
WIDTHS: Final = (MERGE_WIDTH, 32, 16)
# Values of a configuration's field that are tried: factors of the present one, or values in their own right.
FACTORS: Final = {"block_s": (0.5, 2), "block_p": (0.5, 2), "block_q": (0.5, 2)}
VALUES: Final = {
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4),
    "programs_per_sm": (0, 1, 2, 3, 4),
    "max_registers": (80, 96, 128, 168),
    "warpgroup": (False, True),
}


def closed_form(launch: Launch, problem: Problem, before: int, after: int, gpu: GPU) -> Iterator[ChosenLaunch]:
    """A launch with the configurations that are its defaults, the preferred one first."""
    for config in CONFIGS[launch.family](launch, problem.itemsize, problem.rows * before * after, (before, after), gpu):
        yield ChosenLaunch(tuple((s.start, s.stop) for s in launch.steps), kernel_of(config), config)


def starting_points(problem: Problem, chained: bool = False, gpu: GPU = HOPPER) -> list[Choice]:
    """Plans with their default configurations: the closed form's, then others in the order of modelled time.

    The model does not tell moving modes to the front from leaving them in place, so the closed form's plan comes in both orders.
    """
    ps, qs = tuple(p for p, _ in problem.factors), tuple(q for _, q in problem.factors)
    planned = PlanProblem(problem.itemsize, problem.rows, problem.columns, chained)
    default = plans(ps, qs, planned)
    found = default + plans(ps, qs, planned, PLANS_MOST, WIDTHS)
    near = [launches for cost, launches in found if cost <= MODEL_SLACK * default[0][0]]
    near[1:1] = [tuple(reversed(near[0]))]
    choices = [_with_defaults(launches, problem, gpu) for launches in dict.fromkeys(near)]
    return [choice for choice in choices if choice is not None][:PLANS_MOST]


def _with_defaults(launches: tuple[Launch, ...], problem: Problem, gpu: GPU) -> Choice | None:
    """A plan with, for each launch, the first default configuration that is valid."""
    transposed = transposes(launches, len(problem.factors), problem.columns)
    sizes = [p for p, _ in problem.factors]
    chosen: list[ChosenLaunch] = []
    for launch, (before, after) in zip(launches, places(launches, sizes, problem.columns, transposed), strict=True):
        valid = (c for c in closed_form(launch, problem, before, after, gpu) if launch_obstacle(c, problem) is None)
        first = next(valid, None)
        if first is None:
            return None
        chosen.append(first)
    choice = Choice(tuple(chosen))
    return choice if is_valid(choice, problem) else None


def _changed(config: Any) -> Iterator[Any]:
    """Configurations that differ in one field."""
    for field in fields(config):
        now = getattr(config, field.name)
        values = [int(now * factor) for factor in FACTORS.get(field.name, ())] + list(VALUES.get(field.name, ()))
        yield from (replace(config, **{field.name: value}) for value in values if value != now)


def neighbours(choice: Choice, problem: Problem) -> list[Choice]:
    """Valid choices that differ from this one in one field of one configuration.

    Equal launches, with steps of the same sizes and the same configuration, change together.
    """
    planned = choice.as_launches(problem.factors)
    alike = [(tuple((s.p, s.q) for s in launch.steps), c.config) for launch, c in zip(planned, choice.launches, strict=True)]
    found = []
    for group in dict.fromkeys(alike):
        for config in _changed(group[1]):
            launches = (replace(c, config=config) if g == group else c for g, c in zip(alike, choice.launches, strict=True))
            found.append(Choice(tuple(launches)))
    return [choice for choice in found if is_valid(choice, problem)]
