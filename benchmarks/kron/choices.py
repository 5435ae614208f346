"""The plans of the golden problems as JSON, and those that differ between two revisions: which families multiply which factors.

    python -m benchmarks.kron.choices --out old.json                      # of one revision
    python -m benchmarks.kron.choices --compare old.json > changed.json   # in another one

For each plan that changed it has the problem, both revisions' launches, and this revision's modelled seconds of both.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import benchmarks.kron.hadamard
import benchmarks.kron.products  # noqa: F401
from benchmarks.kron.golden import GPUS, built
from benchmarks.kron.programs import pretending, program_of
from benchmarks.registry import registered


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """The problems of multiplies, and ("backward", problem) of backward passes, that are planned inside the block."""
    from fastkron_py.kron import forward, gradients

    found, choose, problem_of = list[Any](), forward.choose, gradients._problem

    def multiply(problem: Any, *tuned: Any) -> Any:
        found.append(problem)
        return choose(problem, *tuned)

    def backward(*of: Any) -> Any:
        found.append(("backward", problem_of(*of)))
        return found[-1][1]

    with patch.object(forward, "choose", multiply), patch.object(gradients, "_problem", backward):
        yield found


def named() -> Iterator[tuple[str, list[Any]]]:
    """(name, problems) of each row of the benchmarks on one GPU."""
    for name, benchmark in registered().items():
        rows = () if callable(benchmark.cases) or benchmark.device == "cpu" else benchmark.cases
        for row in [row for row in rows if "P" in row.parameters]:
            with pretending(), recorded() as found:
                program_of({**row.parameters, "left": name == "kron_left", "kind": name.removeprefix("kron_")})
            yield f"{name} {row.label}", [replace(problem, precision="high") for problem in found] if name == "kron_tf32" else found


def golden() -> Iterator[tuple[str, list[Any]]]:
    """(kind and number, problems) of each golden problem."""
    with recorded() as found:
        for number, (kind, _, programs) in enumerate(built()):
            found.clear()
            list(programs)
            yield f"{kind} {number}", [*found]


def planned() -> Iterator[tuple[str, dict[str, Any], list[tuple[Any, Any]]]]:
    """(kind, sizes, (problem, plan) of each multiply) of each golden problem."""
    from fastkron_py.kron.planner import plan

    with recorded() as found:
        for kind, sizes, programs in built():
            found.clear()
            list(programs)
            multiplies = [problem for problem in found if not isinstance(problem, tuple)]
            yield kind, {**sizes, "gpu": GPUS[sizes["gpu"]].name}, [(problem, plan(problem)) for problem in multiplies]


def described(plan: Any) -> dict[str, Any]:
    """A plan's launches, each by its family and the factors of its steps."""
    launches = [[launch.family, [[step.start, step.stop] for step in launch.steps]] for launch in plan.launches]
    return {"launches": launches, "moves to front": bool(plan.transposed)}


def seconds_of(problem: Any, plan: dict[str, Any]) -> float | None:
    """This revision's modelled seconds of another one's plan; None if it is of other factors, or has a launch that is no longer offered."""
    from fastkron_py.kron.families import offers
    from fastkron_py.kron.plan.steps import Launch, Step
    from fastkron_py.kron.planner import placed_segment, places

    if sorted([i for _, ends in plan["launches"] for j, k in ends for i in range(j, k)]) != [*range(problem.start, problem.stop)]:
        return None
    ps, qs = ([shape[side] for shape in problem.factor_shapes] for side in (-2, -1))
    steps = [[Step(i, j, math.prod(ps[i:j]), math.prod(qs[i:j]), problem.parts) for i, j in ends] for _, ends in plan["launches"]]
    launches = [Launch(tuple(mine), family) for mine, (family, _) in zip(steps, plan["launches"], strict=True)]
    in_place, total = not plan["moves to front"], 0.0
    for launch, place in zip(launches, places(launches, problem.sizes, problem.shape[3], not in_place), strict=True):
        start, stop = launch.start - problem.start, launch.stop - problem.start
        segment = placed_segment(problem, start, stop, place, in_place, launch is launches[-1])
        made = offers(segment).get(launch.family, "")
        own = [] if isinstance(made, str) else [bid.seconds for bid in made if bid.launch.shifted(launch.start).steps == launch.steps]
        if not own:
            return None
        total += min(own)
    return total


def changes(old: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The plans that differ from those of another revision."""
    for i, (kind, sizes, made) in enumerate(planned()):
        for number, (problem, plan) in enumerate(made):
            before, new = (old[f"{i}"] + [None] * (number + 1))[number], described(plan)
            if before is not None and before != new:
                yield {
                    "number": i,
                    "kind": kind,
                    **sizes,
                    "x": problem.shape,
                    "factors": [shape[-2:] for shape in problem.factor_shapes],
                    "multiplied": [problem.start, problem.stop],
                    "old": before | {"seconds": seconds_of(problem, before)},
                    "new": new | {"seconds": seconds_of(problem, new)},
                }


def summary(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How many plans changed, by dtype and by families."""
    families = [" ".join([name for name, _ in one[side]["launches"]]) for side in ("old", "new") for one in found]
    pairs = zip(families[: len(found)], families[len(found) :], strict=True)
    yield f"{len(found)} plans of {len({one['number'] for one in found})} problems"
    yield ", ".join([f"{dtype} {count}" for dtype, count in Counter([one["dtype"] for one in found]).most_common()])
    yield from [f"{count:5} {old} -> {new}" for (old, new), count in Counter(pairs).most_common()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the plans, or print those that differ; a summary goes to the file that is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kron.choices", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--compare", type=Path, help="the file of another revision")
    parser.add_argument("--summary", type=Path, help="a file for the numbers of changes, by dtype and families")
    options = parser.parse_args(arguments)
    if options.out:
        made = {f"{i}": [described(plan) for _, plan in plans] for i, (_, _, plans) in enumerate(planned())}
        options.out.write_text(json.dumps(made))
    if options.compare:
        found = list(changes(json.loads(options.compare.read_text())))
        print(json.dumps(found, indent=1))
        if options.summary:
            options.summary.write_text("\n".join(summary(found)) + "\n")


if __name__ == "__main__":
    main()
