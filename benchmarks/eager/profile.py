"""Where the host's time of a cached eager call goes: cProfile of one thread, as a table of Markdown.

    python -m benchmarks.eager.profile ["chosen: 16 x 8^2 float32 backward" ...]    # labels of `eager`

The backward pass runs in the calling thread, since cProfile sees no other; and cProfile's own time counts, most of all in short functions.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.eager.problems import chosen_cases, inputs
from benchmarks.timing import host_timer, measure

LABELS: Final = ("chosen: 16 x 8^2 float32 backward",)
CALLS: Final = 2000
ROWS: Final = 16
ROOT: Final = Path(__file__).resolve().parents[2]


def name_of(file: str, line: int, function: str) -> str:
    """A function and where it stands: in this library, in a package, or written in C."""
    if file == "~":
        return function.strip("<>{}").replace("built-in ", "").replace("method ", "").replace("'", "")
    path = Path(file)
    if "site-packages" in path.parts:
        home = Path(*path.parts[path.parts.index("site-packages") + 1 :])
    else:
        home = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    return f"{home}:{function}"


def rows_of(call: Callable[[], Any]) -> list[list[str]]:
    """The functions that take most time of their own: calls of each, own and whole microseconds in one call."""
    for _ in range(CALLS // 10):
        call()
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.enable()
        for _ in range(CALLS):
            call()
        profile.disable()
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = sorted(stats.items(), key=lambda item: -item[1][2])[:ROWS]
    return [
        [name_of(*key), f"{count / CALLS:.0f}", f"{1e6 * own / CALLS:.1f}", f"{1e6 * whole / CALLS:.1f}"]
        for key, (_, count, own, whole, _) in found
    ]


def main() -> None:
    """Print the tables."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {case.label: case for case in chosen_cases()}
    torch.set_grad_enabled(False)
    for label in sys.argv[1:] or LABELS:
        problem = inputs(cases[label].parameters, device)
        call = problem.call(problem.ours)
        call()
        (times,) = measure([call], host_timer(device), seconds=1.0, rounds=(9, 200))
        print(f"{label} on {device}: the host takes {1e6 * times.median:.0f} us without a profiler\n")
        for row in (["function", "calls", "own us", "whole us"], ["---"] * 4, *rows_of(call)):
            print(f"| {' | '.join(row)} |")
        print()


if __name__ == "__main__":
    main()
