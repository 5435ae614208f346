"""Plans simulated (`simulator`): beside measurements, and from 16 to 4,096 GPUs.

    python -m benchmarks.distributed.simulate [--write]

prints three tables: each measured product beside its simulation, a summary by method, and the efficiency of grids. With --write the last
two go into docs/how_it_works/distributed.md, and a picture into docs/images. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.distributed.ranks import LOOP_SECONDS, REPEATS, scalings
from benchmarks.distributed.simulator import Event, Simulation, simulate
from fastkron_py.distributed import Plan, Problem, plan
from fastkron_py.distributed.plan.cost import multiply_seconds
from fastkron_py.distributed.plan.links import NVLINK

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/how_it_works/distributed.md"
PICTURE = ROOT / "docs/images/distributed_simulated.png"
NEAR = 0.1
MEMORY = 140e9
GPUS = (16, 64, 512, 4096)
COLUMNS = (1, 2, 8, 16, 64)
SLOW = 1.5
CALLS = 4  # in a loop, simulated


@dataclass(frozen=True)
class Row:
    """A measured product.

    Attributes:
        gpus: number.
        name: of the product.
        made: its plan.
        measured: seconds.
        simulated: seconds, with multiplies as modelled.
        scaled: seconds, with multiplies as measured on one GPU.
    """

    gpus: int
    name: str
    made: Plan
    measured: float
    simulated: float
    scaled: float

    @property
    def method(self) -> str:
        """Stages and transport, in a table."""
        if self.made.is_local:
            return "local"
        way = "by rows" if self.made.by_rows else "by stages"
        return f"{way}, {self.made.transport_model.label}"

    def error(self, scaled: bool) -> float:
        """Of the simulation, relative to the measurement."""
        return (self.scaled if scaled else self.simulated) / self.measured - 1


def measured_rows() -> Iterator[Row]:
    """All forward products of the committed results. Plans model forward passes alone, so those with gradients are left out."""
    known = {s.name: s for s in scalings(True, False)}
    for path in sorted(RESULTS.glob("distributed_*_h200.json")):
        scaling = json.loads(path.read_text())["scaling"]
        gpus = scaling["ranks"]
        for product in scaling["products"]:
            case = known[product["name"]]
            if case.backward:
                continue
            m = case.total(gpus)
            problem = Problem(m, case.sizes, case.sizes, case.dtype)
            scale = product["alone"] / multiply_seconds(case.rows, problem, 0, len(case.sizes), NVLINK)
            for grid in product["grids"]:
                for way in grid["also"] if grid["grid"] != "auto" else ():
                    made = plan(problem, tuple(grid["shape"]), chunks=way["chunks"], **_options(grid, way))
                    calls = max(REPEATS[0], min(REPEATS[1], round(LOOP_SECONDS / way["seconds"])))
                    found = [simulate(made, calls=calls, scale=s).seconds for s in (1.0, scale)]
                    yield Row(gpus, case.name, made, way["seconds"], found[0], found[1])


def _options(grid: dict[str, Any], way: dict[str, Any]) -> dict[str, Any]:
    if grid["shape"][1] == 1:
        return {}
    transport = "peer memory" if way["direct"] else "messages" if way["messages"] else "packed"
    return {"stages": way["stages"] if way["stages"] == "rows" else tuple(way["stages"]), "transport": transport}


def measured_table(rows: list[Row]) -> list[str]:
    """Every row."""
    lines = [
        "| GPUs | product | grid | method | chunks | measured, ms | plan, ms | simulated, ms | simulated with measured multiplies, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        times = f"{r.measured * 1e3:.3g} | {r.made.seconds * 1e3:.3g} | {r.simulated * 1e3:.3g} ({r.error(False):+.0%})"
        lines.append(
            f"| {r.gpus} | {r.name} | {r.made.grid[0]} x {r.made.grid[1]} | {r.method} | {r.made.chunks} | {times}"
            f" | {r.scaled * 1e3:.3g} ({r.error(True):+.0%}) |"
        )
    return lines


def summary_table(rows: list[Row]) -> list[str]:
    """Errors by number of GPUs and method."""
    lines = [
        "| GPUs | method | rows | within 10% | error: median, least, most | the same with measured multiplies |",
        "|---|---|---|---|---|---|",
    ]
    for gpus, method in dict.fromkeys((r.gpus, r.method) for r in rows):
        found = [r for r in rows if (r.gpus, r.method) == (gpus, method)]
        lines.append(f"| {gpus} | {method} | {len(found)} | {near(found, False)} | {_spread(found, False)} | {_spread(found, True)} |")
    return [*lines, f"| all | | {len(rows)} | {near(rows, False)} | {_spread(rows, False)} | {_spread(rows, True)} |"]


def near(rows: list[Row], scaled: bool) -> int:
    """How many are within 10%."""
    return sum(abs(r.error(scaled)) <= NEAR for r in rows)


def _spread(rows: list[Row], scaled: bool) -> str:
    errors = [r.error(scaled) for r in rows]
    text = f"{statistics.median(errors):+.0%}, {min(errors):+.0%}, {max(errors):+.0%}"
    return f"{near(rows, scaled)}: {text}" if scaled else text


@dataclass(frozen=True)
class Growth:
    """A product that is planned for more and more GPUs: rows for each, or for all."""

    label: str
    sizes: tuple[int, ...]
    rows: float
    is_weak: bool

    def problem(self, gpus: int) -> Problem:
        """On this number of GPUs."""
        return Problem(round(self.rows * (gpus if self.is_weak else 1)), self.sizes, self.sizes)


GROWTHS = (
    Growth("64^4, 128 rows a GPU", (64,) * 4, 128, True),
    Growth("64^4, M = 4,096", (64,) * 4, 4096, False),
    Growth("128^5, a row for 4 GPUs", (128,) * 5, 0.25, True),
)


def grid_plan(problem: Problem, gpus: int, columns: int) -> Plan | None:
    """The plan of a grid with this number of columns; none where a GPU's memory is too small."""
    try:
        return plan(problem, (gpus // columns, columns), memory=MEMORY)
    except ValueError:
        return None


def efficiency(made: Plan, slow: float = 1.0) -> float:
    """Simulated: one GPU's modelled time, over this one's times the number of GPUs; with one rank slower by a factor."""
    p = made.problem
    alone = multiply_seconds(p.m, p, 0, len(p.ps), made.links)
    return alone / (_in_loop(made, slow).seconds * made.world_size)


def _in_loop(made: Plan, slow: float) -> Simulation:
    return simulate(made, calls=CALLS, slow=None if slow == 1.0 else {made.world_size // 2: slow})


def scaling_table() -> list[str]:
    """Efficiency by grid, without and with a slow rank, and the same of the plan's choice."""
    lines = [
        f"| product | GPUs | {' | '.join(map(_shape, COLUMNS))} | chosen by `plan` | its efficiency |",
        f"|---|---|{'---|' * len(COLUMNS)}---|---|",
    ]
    for growth in GROWTHS:
        for gpus in GPUS:
            problem = growth.problem(gpus)
            cells = []
            for columns in COLUMNS:
                made = grid_plan(problem, gpus, columns) if columns <= gpus else None
                cells.append("-" if made is None else _cell(made))
            chosen = plan(problem, world_size=gpus, memory=MEMORY)
            how = "" if chosen.is_local else f": {_stages(chosen)}, {chosen.transport_model.label}, {chosen.chunks} chunks"
            text = f"{chosen.grid[0]} x {chosen.grid[1]}{how} | {_cell(chosen)}"
            lines.append(f"| {growth.label} | {gpus:,} | {' | '.join(cells)} | {text} |")
    return lines


def _cell(made: Plan) -> str:
    return f"{efficiency(made):.0%} / {efficiency(made, SLOW):.0%}"


def _stages(made: Plan) -> str:
    return "by rows" if made.by_rows else f"stages {' + '.join(map(str, made.cuts))}"


def write(name: str, lines: list[str]) -> None:
    """Put a table between its two comments in the page."""
    text = PAGE.read_text()
    begin, end = f"<!-- simulated: {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    PAGE.write_text(before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1])


SHOWN = (
    ("packed", "packed", None),
    ("through peer memory", "peer memory", None),
    (f"through peer memory, rank 1 takes {SLOW:g}x as long", "peer memory", {1: SLOW}),
)
LABELLED = 0.4  # ms, from which on a bar has its chunk's number


def draw(path: Path) -> None:
    """What the ranks of a pair do, and efficiency over the number of GPUs."""
    from matplotlib import pyplot

    from benchmarks.plots import STYLE

    with pyplot.rc_context(STYLE):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.4, 7.6), height_ratios=(1.3, 1), layout="constrained")
        _draw_streams(above)
        _draw_growth(below, GROWTHS[1])
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(path, dpi=130, transparent=True)
        pyplot.close(figure)


def _draw_streams(axes: Any) -> None:
    """A line for each stream of a rank; one of equal ranks is shown."""
    problem, labels = Problem(128, (64,) * 4, (64,) * 4), list[str]()
    for name, transport, slow in SHOWN:
        found = simulate(plan(problem, (1, 2), stages="rows", transport=transport, chunks=8), slow=slow)
        axes.text(0.1, len(labels), name, fontsize=8, va="center", weight="bold")
        labels.append("")
        for usage in found.usages:
            own = [e for e in found.events if e.rank == usage.rank]
            for stream in sorted({e.stream for e in own}):
                _draw_stream(axes, [e for e in own if e.stream == stream], len(labels))
                labels.append(f"rank {usage.rank}: {stream}" if len(found.usages) > 1 else stream)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0)
    axes.set_xlabel("ms")
    axes.set_title("64^4, M = 128 on 1 x 2 GPUs, by rows in 8 chunks, simulated", fontsize=10)


def _draw_stream(axes: Any, events: list[Event], row: int) -> None:
    from benchmarks.plots import COLOURS

    colours = {"multiply": COLOURS[0], "copy": COLOURS[4], "exchange": COLOURS[1], "push": COLOURS[1], "pull": COLOURS[2]}
    labels = axes.get_legend_handles_labels()[1]
    for event in events:
        what = event.what if event.stream in ("compute", "exchange") else event.stream
        start, length = event.start * 1e3, (event.stop - event.start) * 1e3
        label = None if what in labels else what
        axes.barh(row, length, 0.8, left=start, color=colours[what], edgecolor="white", linewidth=0.4, label=label)
        labels.append(what)
        if length > LABELLED:
            axes.text(start + length / 2, row, str(event.chunk + 1), fontsize=6, ha="center", va="center", color="white")


def _draw_growth(axes: Any, growth: Growth) -> None:
    from matplotlib.ticker import PercentFormatter

    from benchmarks.plots import COLOURS

    for colour, columns in zip(COLOURS, COLUMNS, strict=False):
        plans = [(n, made) for n in GPUS if columns <= n and (made := grid_plan(growth.problem(n), n, columns)) is not None]
        gpus = [n for n, _ in plans]
        axes.plot(gpus, [efficiency(made) for _, made in plans], "o-", color=colour, markersize=4, label=_shape(columns))
        axes.plot(gpus, [efficiency(made, SLOW) for _, made in plans], "o:", color=colour, markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(GPUS, [f"{n:,}" for n in GPUS])
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("GPUs n, 8 a host")
    axes.set_ylabel("simulated efficiency")
    axes.set_title(f"{growth.label}, by grid; dotted: one rank takes {SLOW:g}x as long", fontsize=10)


def _shape(columns: int) -> str:
    return "n x 1" if columns == 1 else f"n/{columns} x {columns}"


def main(arguments: list[str] | None = None) -> int:
    """Print, and write where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.simulate", description=__doc__)
    parser.add_argument("--write", action="store_true", help="tables into the documentation, and the picture")
    options = parser.parse_args(arguments)
    rows = list(measured_rows())
    tables = {"measured": summary_table(rows), "scaling": scaling_table()}
    print("\n".join([*measured_table(rows), "", *tables["measured"], "", *tables["scaling"]]))
    if options.write:
        for name, lines in tables.items():
            write(name, lines)
        draw(PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
