"""Plots of a benchmark: bars of speed-up, and a roofline with the floor of one pass.

Grey text on no background, to be read on dark and on light pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot, ticker

from benchmarks.distribution import BETTER, rows_over
from benchmarks.ratios import medians

matplotlib.use("Agg")

INK = "#7f8791"
COLOURS = ("#e8743b", "#5aa9a3", "#7b8fd4", "#b07bb8", "#f2b179", INK)
NARROW = 4.0  # of speed-ups: up to this number of times the least, labels are at equal distances, else at 1, 2, 5 of each power of ten
STYLE = {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": INK}


def draw(found: dict[str, Any], stem: Path) -> list[Path]:
    """Draw a benchmark's results as far as there are pictures of them; returns the files."""
    with pyplot.rc_context(STYLE):
        if "distribution" in found:
            return [_sorted_ratios(found, stem.with_suffix(".png"))]
        drawn = [_bars(found, stem.with_suffix(".png"))]
        if any(case["floor_seconds"] for case in found["cases"]):
            drawn.append(_roofline(found, stem.with_name(f"{stem.name}_roofline.png")))
    return [path for path in drawn if path is not None]


def _title(found: dict[str, Any]) -> str:
    environment = found["environment"]
    where = environment["device"] if environment["device"] != "cpu" else f"{environment['cpu']}, {environment['threads']} threads"
    dtypes = dict.fromkeys(case["parameters"]["dtype"] for case in found["cases"])
    return f"{found['benchmark']}: {', '.join(dtypes)}, {where}"


def _measured(found: dict[str, Any]) -> list[str]:
    """Contenders with a time, in the order of the table."""
    timed = {name for case in found["cases"] for name in medians(case)}
    order = [r["contender"] for r in found["cases"][0]["results"]] if found["cases"] else []
    return [name for name in order if name in timed]


def _bars(found: dict[str, Any], path: Path) -> Path | None:
    """Speed-up over the baseline, slower to the left; figures of another run are hatched, and named as such."""
    baseline = found["baseline"]
    cases = [case for case in found["cases"] if baseline in medians(case)]
    recorded = list(dict.fromkeys(name for case in cases for name in case["recorded"]))
    columns: list[tuple[str, list[float | None]]] = [(n, [medians(c).get(n) for c in cases]) for n in _measured(found) if n != baseline]
    columns += [(n, [c["recorded"][n]["seconds"] if n in c["recorded"] else None for c in cases]) for n in recorded]
    if not cases or not columns:
        return None
    figure, axes = pyplot.subplots(figsize=(7.4, max(2.6, (0.1 + 0.07 * len(columns)) * len(cases) + 1.0)), layout="constrained")
    width = 0.84 / len(columns)
    for j, (name, seconds) in enumerate(columns):
        there = [(i, s) for i, s in enumerate(seconds) if s]
        lengths = [medians(cases[i])[baseline] / s for i, s in there]
        colour = COLOURS[j % len(COLOURS)]
        style: dict[str, Any] = {"color": colour}
        if j >= len(COLOURS):  # colours once more, not filled
            style = {"facecolor": "none", "edgecolor": colour, "linewidth": 1.2}
        if name in recorded:
            style = {"facecolor": "none", "edgecolor": INK, "hatch": "/////", "linewidth": 0.6}
        positions = [i - 0.42 + (j + 0.5) * width for i, _ in there]
        axes.barh(positions, [length - 1 for length in lengths], width * 0.92, left=1.0, label=name, **style)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(cases)), [case["label"] for case in cases], fontsize=8)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlabel(f"speed-up over {baseline}")
    low, high = axes.get_xlim()
    wide = high > NARROW * low
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)) if wide else ticker.MaxNLocator(7, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(found), fontsize=10)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130, transparent=True)
    pyplot.close(figure)
    return path


def _sorted_ratios(found: dict[str, Any], path: Path) -> Path:
    """Speed-up over the better peer on every problem, the worst to the left, a line for each dtype."""
    rows = rows_over(found, BETTER)
    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
    for j, dtype in enumerate(dict.fromkeys(row.dtype for row in rows)):
        ratios = sorted(row.ratio for row in rows if row.dtype == dtype)
        shares = [(i + 0.5) / len(ratios) for i in range(len(ratios))]
        axes.plot(shares, ratios, "o-", markersize=3, linewidth=1.0, label=f"{dtype}, {len(ratios)}", color=COLOURS[j % len(COLOURS)])
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    axes.set_xlabel("problems with a smaller speed-up")
    axes.set_ylabel("speed-up over the better peer")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{_title(found)}, seed {found['draw']['seed']}", fontsize=10)
    if rows:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, transparent=True)
    pyplot.close(figure)
    return path


def _roofline(found: dict[str, Any], path: Path) -> Path | None:
    """Attained FLOP/s over FLOPs per byte of one pass; no point can lie above the line of one pass."""
    cases = [case for case in found["cases"] if case["floor_seconds"] and case["flops"]]
    if not cases:
        return None
    figure, axes = pyplot.subplots(figsize=(7.0, 4.6), layout="constrained")
    for j, name in enumerate(_measured(found)):
        points = [(c["flops"] / c["floor_bytes"], c["flops"] / medians(c)[name]) for c in cases if name in medians(c)]
        axes.plot(*zip(*points, strict=True), "o", markersize=5 if j == 0 else 3.5, label=name, color=COLOURS[j % len(COLOURS)])
    intensities = sorted(c["flops"] / c["floor_bytes"] for c in cases)
    ends = [intensities[0] / 1.5, intensities[-1] * 1.5]
    bandwidth = cases[0]["floor_bytes"] / cases[0]["floor_seconds"]
    axes.plot(ends, [e * bandwidth for e in ends], color=INK, linewidth=1.2, label=f"one pass at {bandwidth / 1e12:.2f} TB/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte, if x is read once and y written once")
    axes.set_ylabel("FLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(found), fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, transparent=True)
    pyplot.close(figure)
    return path
