"""`eager`: wall time of eager calls beside torch's, and beside an autograd function that does nothing but launch as often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.eager.problems import Problem, cases, error_of, inputs
from benchmarks.ratios import geometric_mean
from benchmarks.registry import Benchmark, Call, Contender, register

OURS, TORCH, IN_PLACE, BARE = "fastkron_py", "torch", "matmul in place", "bare function"
ANY_RESULT: Final = 10.0  # a tolerance for the contender that computes nothing
ASSUMED: Final = (1, 3)  # launches of a forward and a backward pass that cannot be counted
IDLE_ELEMENTS: Final = 256  # of the tensors that it multiplies
NARROW: Final = 50  # characters of a row's name
COLUMNS: Final = (("times", OURS), ("times", TORCH), ("times", IN_PLACE), ("times", BARE), ("graph_times", OURS))


# ---- contenders --------------------------------------------------------------------------------


class Bare(torch.autograd.Function):
    """An autograd function that launches as often as told, and returns memory without values."""

    @staticmethod
    def forward(ctx: Any, launch: Callable[[int], None], launches: tuple[int, int], shape: torch.Size, *given: Tensor) -> Tensor:
        """An empty result of this shape."""
        ctx.launch, ctx.count = launch, launches[1]
        ctx.save_for_backward(*given)
        y = given[0].new_empty(shape)
        launch(launches[0])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Empty gradients."""
        found = [torch.empty_like(t) for t in ctx.saved_tensors]
        ctx.launch(ctx.count)
        return None, None, None, *found


def _bare(problem: Problem) -> Call:
    a, b, out = torch.ones(3, IDLE_ELEMENTS, device=problem.given[0].device).unbind()
    launches, shape = problem.launches or ASSUMED, problem.dy.shape

    def launch(count: int) -> None:
        for _ in range(count):
            torch.mul(a, b, out=out)

    return problem.call(lambda *given: Bare.apply(launch, launches, shape, *given))  # type: ignore[no-untyped-call]


def _zeros(found: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) for t in ([found] if isinstance(found, Tensor) else found)]


def _in_place(problem: Problem) -> Call:
    if problem.in_place is None:
        raise NotImplementedError("layers have no such form")
    return problem.call(problem.in_place)


# ---- the table ---------------------------------------------------------------------------------


def _median(case: dict[str, Any], key: str, name: str) -> float | None:
    for result in case["results"]:
        if result["contender"] == name and result[key]:
            return float(result[key]["median"])
    return None


def _spread(case: dict[str, Any]) -> float:
    """Half of the distance between the quartiles of this library's times, over their median."""
    times = next(r["times"] for r in case["results"] if r["contender"] == OURS)
    return float(times["upper_quartile"] - times["lower_quartile"]) / 2 / float(times["median"]) if times else 0.0


def ratio(case: dict[str, Any], key: str = "times") -> float | None:
    """The better of torch's times over this library's."""
    ours, *peers = (_median(case, key, name) for name in (OURS, TORCH, IN_PLACE))
    known = [t for t in peers if t is not None]
    return min(known) / ours if known and ours else None


def groups(found: dict[str, Any]) -> dict[str, list[float]]:
    """The ratios of random products of several factors forward and with backward, of one factor, of chosen rows, and of layers."""
    told: dict[str, list[float]] = {}
    for case in found["cases"]:
        of, value = case["parameters"], ratio(case)
        if value is None:
            continue
        name = "layers" if "layer" in of else "chosen" if case["label"].startswith("chosen") else "drawn"
        if name == "drawn":
            name = "drawn, one factor" if len(of["P"]) == 1 else f"drawn, {of['kind']}"
        told.setdefault(name, []).append(value)
    return told


def show(found: dict[str, Any], console: Console) -> None:
    """Print a line for each row, the slowest ones beside torch last, and a line for each group."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say("microseconds: eager, of ours with the spread, and a CUDA graph's; the better of torch and in place over ours, eager and graph")
    say(f"{'row':{NARROW}}  ours      torch  in place  bare  launches  graph  ratio  graph's")
    for case in sorted(found["cases"], key=lambda case: -(ratio(case) or 0.0)):
        ours, *others, graph = (_median(case, key, name) for key, name in COLUMNS)
        numbers = [f"{1e6 * t:.0f}" if t else "-" for t in (ours, *others, graph)]
        of_eager, of_graph = (f"{r:.2f}" if (r := ratio(case, key)) else "-" for key in ("times", "graph_times"))
        launches = "+".join(map(str, case.get("details", {}).get("launches", ()))) or "-"
        say(
            f"{case['label'][:NARROW]:{NARROW}}  {numbers[0]:>5} ±{_spread(case):3.0%} {numbers[1]:>6} {numbers[2]:>8} {numbers[3]:>6} "
            f"{launches:>8} {numbers[4]:>6} {of_eager:>6} {of_graph:>7}"
        )
    for name, ratios in groups(found).items():
        behind = len([r for r in ratios if r < 0.95])
        say(f"{name}: {len(ratios)} rows, geometric mean {geometric_mean(ratios):.2f}, worst {min(ratios):.2f}, {behind} below 0.95")


register(
    Benchmark(
        name="eager",
        description="Wall time of eager calls: random and chosen Kronecker products and layers, beside torch and a bare autograd function.",
        device="cuda",
        cases=(),
        draw=cases,
        contenders=[
            Contender(OURS, lambda p: p.call(p.ours), is_ours=True),
            Contender(TORCH, lambda p: p.call(p.torch)),
            Contender(IN_PLACE, _in_place),
            Contender(BARE, _bare, restore=_zeros, tolerance=ANY_RESULT),
        ],
        inputs=inputs,
        check=error_of,
        baseline=TORCH,
        eager=True,
        rounds=(7, 40),
        case_seconds=0.4,
        details=lambda problem: {"launches": problem.launches} if problem.launches else {},
        table=show,
        notes=("The bare function launches torch.mul(out=) as often as this library's CUDA graph has nodes; without a graph 1 + 3 times.",),
    )
)
