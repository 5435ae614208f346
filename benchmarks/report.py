"""A benchmark's results as a table on the terminal and as JSON; plots are drawn by `benchmarks.plots`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import distribution
from benchmarks.ratios import medians

STATUS_STYLES = {"unavailable": "dim", "wrong": "bold red", "error": "red"}
UNITS = {"microseconds": 1e6, "milliseconds": 1e3}


def number(seconds: float, unit: float) -> str:
    """Three digits in a unit."""
    value = seconds * unit
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if 0 < value < 1000 else f"{value:.0f}"


def _cell(result: dict[str, Any], case: dict[str, Any], baseline: float | None, unit: float) -> Text:
    if result["status"] != "ok":
        return Text(result["status"], style=STATUS_STYLES[result["status"]])
    times = result["times"]
    spread = (times["upper_quartile"] - times["lower_quartile"]) / 2 / times["median"]
    lines = [f"{number(times['median'], unit)} ±{spread:.0%}"]
    lines += [
        f"{name} {number(result[key]['median'], unit)}" for name, key in (("graph", "graph_times"), ("host", "host_times")) if result[key]
    ]
    lines.append(f"{baseline / times['median']:.2f}x" if baseline else "-")
    if case.get("items"):
        lines.append(f"{case['items'] / times['median']:,.0f} a second")
    if floor := case["floor_seconds"]:
        lines.append(f"{floor / times['median']:.0%} floor")
    if result["peak_of_x"] is not None:
        lines.append(f"{result['peak_of_x']:.2f} x")
    if result.get("share") is not None:
        lines.append(f"{result['share']:.0%} share")
    if result["repeats"] is not None:
        lines.append("repeats" if result["repeats"] else "does not repeat")
    lines.append(f"{result['error']:.1e}" + (" TF32" if result["allow_tf32"] else ""))
    return Text("\n".join(lines))


def _recorded_cell(figure: dict[str, Any] | None, unit: float) -> Text:
    if figure is None:
        return Text("-", style="dim")
    memory = "" if figure["peak_of_x"] is None else f"\n{figure['peak_of_x']:.1f} x"
    return Text(number(figure["seconds"], unit) + memory, style="italic dim")


def _unit(found: dict[str, Any]) -> tuple[str, float]:
    shortest = min((m for case in found["cases"] for m in medians(case).values()), default=1.0)
    name = "microseconds" if shortest < 1e-3 else "milliseconds"
    return name, UNITS[name]


def _show_cases(found: dict[str, Any], console: Console) -> None:
    """Print the table of all cases."""
    baseline, cases = found["baseline"], found["cases"]
    names = [r["contender"] for r in cases[0]["results"]] if cases else []
    recorded = list(dict.fromkeys(name for case in cases for name in case["recorded"]))
    has_floor = any(case["floor_seconds"] for case in cases)
    unit_name, unit = _unit(found)
    title = f"{found['benchmark']}, {unit_name}: median ± half the quartiles' distance, speed-up over {baseline}, error"
    table = Table(title=title, show_lines=True)
    table.add_column("case", no_wrap=True)
    for heading in (["floor"] if has_floor else []) + names + recorded:
        table.add_column(heading, justify="right")
    for case in cases:
        floor = [number(case["floor_seconds"], unit)] if has_floor else []
        cells = [_cell(r, case, medians(case).get(baseline), unit) for r in case["results"]]
        table.add_row(
            f"{case['label']}\n{case['parameters']['dtype']}",
            *floor,
            *cells,
            *[_recorded_cell(case["recorded"].get(n), unit) for n in recorded],
        )
    console.print(table)


def show(found: dict[str, Any], console: Console, table: Callable[[dict[str, Any], Console], None] | None = None) -> None:
    """Print the table of the cases, or the distribution of drawn ones, the ratios and the conditions; or its own table last."""
    environment, cases = found["environment"], found["cases"]
    if table is None:
        (distribution.show if "distribution" in found else _show_cases)(found, console)
    for reason in sorted({f"{r['contender']}: {r['status']}, {r['reason']}" for c in cases for r in c["results"] if r["reason"]}):
        console.print(Text(reason, style="yellow"))
    if found["left_out"]:
        console.print(Text(f"no time left for {', '.join(found['left_out'])}", style="yellow"))
    subject = found["subject"]
    for heading, those in (("", found["ratios"]), (", a figure of another run", found["recorded_ratios"])):
        for name, ratio in those.items():
            mean, largest, count = ratio["geometric_mean"], ratio["largest"], ratio["cases"]
            line = f"{subject} / {name}{heading}: geometric mean {mean:.2f}, largest {largest:.2f}, {count} cases"
            console.print(line, highlight=False)
    for note in found["notes"]:
        console.print(Text(note, style="dim"))
    console.print(
        f"{environment['device']}, {environment['cpu']}, {environment['threads']} threads on {environment['usable_cores']} cores, "
        f"load {environment['load_average']} to {environment['load_average_after']}; allow_tf32={environment['allow_tf32']}, "
        f"float32_matmul_precision={environment['float32_matmul_precision']}, torch {environment['versions']['torch']}, "
        f"triton {environment['versions'].get('triton')}; {found['seconds']} s",
        highlight=False,
    )
    if table is not None:
        table(found, console)


def line(case: dict[str, Any]) -> str:
    """A case in one line, for who waits for the table."""
    told = [
        f"{r['contender']} {number(r['times']['median'], 1e3)} ms" if r["times"] else f"{r['contender']} {r['status']}"
        for r in case["results"]
    ]
    return f"{case['label']}: {', '.join(told)}"


def save(found: dict[str, Any], out: Path) -> Path:
    """Write NAME.json to the folder, in one step: the file before it stays until the new one is whole."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{found['benchmark']}.json"
    draft = path.with_suffix(".json.part")
    draft.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    draft.replace(path)
    return path


def write(found: dict[str, Any], out: Path, console: Console) -> None:
    """Write NAME.json and, where matplotlib is installed, NAME.png and NAME_roofline.png to the folder."""
    path = save(found, out)
    console.print(f"wrote {path}", highlight=False)
    try:
        from benchmarks import plots
    except ImportError as error:
        console.print(f"no plot: {error}", highlight=False)
        return
    for picture in plots.draw(found, path.with_suffix("")):
        console.print(f"wrote {picture}", highlight=False)
