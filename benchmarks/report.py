"""A benchmark's results as a table on the terminal, as JSON and as a plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

STATUS_STYLES = {"unavailable": "dim", "wrong": "bold red", "error": "red"}


def _number(seconds: float) -> str:
    """Milliseconds in three digits."""
    value = seconds * 1e3
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if 0 < value < 1000 else f"{value:.0f}"


def _cell(result: dict[str, Any], baseline: float | None) -> Text:
    if result["status"] != "ok":
        return Text(result["status"], style=STATUS_STYLES[result["status"]])
    times = result["times"]
    spread = (times["upper_quartile"] - times["lower_quartile"]) / 2 / times["median"]
    speed_up = f"{baseline / times['median']:.2f}x" if baseline else "-"
    lines = [f"{_number(times['median'])} ±{spread:.0%}", f"min {_number(times['minimum'])}", speed_up, f"{result['error']:.1e}"]
    if result["graph_times"]:
        lines.append(f"graph {_number(result['graph_times']['median'])}")
    return Text("\n".join(lines))


def _median(case: dict[str, Any], contender: str) -> float | None:
    times = next((r["times"] for r in case["results"] if r["contender"] == contender), None)
    return times["median"] if times else None


def show(found: dict[str, Any], console: Console) -> None:
    """Print the table, the ratios and the conditions."""
    environment, baseline = found["environment"], found["baseline"]
    names = [r["contender"] for r in found["cases"][0]["results"]] if found["cases"] else []
    has_floor = any(case["floor_seconds"] for case in found["cases"])
    title = f"{found['benchmark']}, {found['dtype']}, milliseconds: median ± half the quartiles' distance, minimum, "
    title += f"speed-up over {baseline}, error"
    table = Table(title=title, show_lines=True)
    table.add_column("case", no_wrap=True)
    if has_floor:
        table.add_column("floor", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for case in found["cases"]:
        floor = [_number(case["floor_seconds"])] if has_floor else []
        table.add_row(case["label"], *floor, *[_cell(r, _median(case, baseline)) for r in case["results"]])
    console.print(table)
    for reason in sorted({f"{r['contender']}: {r['status']}, {r['reason']}" for c in found["cases"] for r in c["results"] if r["reason"]}):
        console.print(Text(reason, style="yellow"))
    for name, ratio in found["ratios"].items():
        console.print(f"our time / {name}: geometric mean {ratio['geometric_mean']:.2f}, largest {ratio['largest']:.2f}", highlight=False)
    console.print(
        f"{environment['device']}, {environment['cpu']}, {environment['threads']} threads on {environment['usable_cores']} cores, "
        f"load {environment['load_average']} to {environment['load_average_after']}; allow_tf32={environment['allow_tf32']}, "
        f"float32_matmul_precision={environment['float32_matmul_precision']}, torch {environment['versions']['torch']}",
        highlight=False,
    )


def write(found: dict[str, Any], out: Path, console: Console) -> None:
    """Write NAME.json and NAME.png to the folder."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{found['benchmark']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"wrote {path}", highlight=False)
    picture = path.with_suffix(".png")
    try:
        _plot(found, picture)
    except ImportError as error:
        console.print(f"no plot: {error}", highlight=False)
        return
    console.print(f"wrote {picture}", highlight=False)


def _plot(found: dict[str, Any], path: Path) -> None:
    """Bars of speed-up over the baseline; grey text on no background, to be read on dark and on light pages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    baseline = found["baseline"]
    cases = [case for case in found["cases"] if _median(case, baseline)]
    names = [r["contender"] for r in cases[0]["results"] if any(_median(c, r["contender"]) for c in cases)] if cases else []
    ink = "#7f8791"
    colours = ("#e8743b", "#f2b179", ink, "#5aa9a3", "#7b8fd4", "#b07bb8")
    with pyplot.rc_context({"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": ink}):
        figure, axes = pyplot.subplots(figsize=(max(7.0, 1.15 * len(cases)), 4.2), layout="constrained")
        width = 0.84 / max(len(names), 1)
        for j, name in enumerate(names):
            pairs = [(i, case) for i, case in enumerate(cases) if _median(case, name)]
            heights = [(_median(case, baseline) or 0.0) / (_median(case, name) or 1.0) for _, case in pairs]
            axes.bar([i - 0.42 + (j + 0.5) * width for i, _ in pairs], heights, width * 0.92, label=name, color=colours[j % len(colours)])
        axes.axhline(1.0, color=ink, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(cases)), [case["label"] for case in cases], rotation=20 if len(cases) <= 10 else 60, ha="right")
        axes.set_ylabel(f"speed-up over {baseline}")
        axes.spines[["top", "right"]].set_visible(False)
        environment = found["environment"]
        where = environment["device"] if environment["device"] != "cpu" else environment["cpu"]
        axes.set_title(f"{found['benchmark']}: {found['dtype']}, {where}, {environment['threads']} threads", fontsize=10)
        axes.legend(frameon=False, ncols=min(len(names), 5), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22))
        figure.savefig(path, dpi=150, transparent=True)
        pyplot.close(figure)
