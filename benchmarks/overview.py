"""One picture of the measurements on a GPU: ``python -m benchmarks.overview [PICTURE] [--results DIR]``.

A dot is a case of a benchmark: how many times as long another library takes for it, both timed in the same run. Lines are
geometric means. A group names the GPU of its records.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot

from benchmarks.plots import COLOURS, INK, STYLE
from benchmarks.ratios import geometric_mean, medians

RESULTS = Path(__file__).parent / "results"
# Comparisons, in groups: (name of the benchmark, contender) to the picture's label.
ROWS: dict[str, dict[tuple[str, str], str]] = {
    "Kronecker products": {
        ("kron", "GPyTorch"): "forward, GPyTorch",
        ("kron", "matmul + transpose"): "forward, torch's loop over factors",
        ("kron_backward", "GPyTorch"): "forward and backward, GPyTorch",
        ("kron_float64", "GPyTorch"): "float64, GPyTorch",
        ("kron_half", "matmul + transpose"): "half types, torch's loop",
        ("hadamard", "fast_hadamard_transform"): "Hadamard transform, fast_hadamard_transform",
        ("quantum", "permute + mm"): "quantum gates, permute and torch.mm",
    },
    "LoKr adapters": {
        ("lokr", "PEFT's formula"): "forward, PEFT's formula",
        ("lokr_backward", "PEFT's formula"): "forward and backward, PEFT's formula",
    },
    "Gaussian processes": {
        ("gp_ski", "GPyTorch"): "KISS-GP, a training step, GPyTorch",
        ("gp_ski", "GPyTorch, dense factors"): "the same with dense factors",
        ("gp_skip", "GPyTorch"): "SKIP, a training step, GPyTorch",
        ("gp_love", "GPyTorch"): "LOVE, a prediction, GPyTorch",
    },
    "rational activations": {
        ("rational", "FlashKAT's algorithm"): "a pass, FlashKAT's algorithm",
        ("rational", "torch GELU"): "a pass, torch's GELU",
        ("kat", "ViT"): "training KAT, timm's ViT",
        ("kat", "FlashKAT's algorithm"): "training KAT, FlashKAT's algorithm",
    },
    "KAN layers": {
        ("poly_kan", "torch.compile of the recurrence"): "forward, torch.compile",
        ("poly_kan", "basis kernel + cuBLAS"): "forward, basis kernel + cuBLAS",
        ("poly_kan_backward", "torch.compile of the recurrence"): "forward and backward, torch.compile",
    },
    "gated MLPs": {
        ("gated", "cuBLAS + SwiGLU kernel"): "bfloat16, cuBLAS + SwiGLU kernel",
        ("gated", "torch.compile"): "bfloat16, torch.compile",
        ("gated_float16", "cuBLAS + SwiGLU kernel"): "float16, cuBLAS + SwiGLU kernel",
    },
}


def speed_ups(found: dict[str, Any], contender: str) -> list[float]:
    """For each case that both have a time of: theirs over ours."""
    tables = [medians(case) for case in found["cases"] if not case["parameters"].get("quick")]
    return [t[contender] / t[found["subject"]] for t in tables if contender in t and found["subject"] in t]


class Row(NamedTuple):
    """A line of the picture. Rows of one group and one GPU stand together."""

    group: str
    gpu: str
    label: str
    ratios: list[float]


def _gpu(found: dict[str, Any]) -> str:
    """The kind of GPU of a record: "H100" of "NVIDIA H100 80GB HBM3"."""
    name: str = found["environment"]["device"]
    return name.removeprefix("NVIDIA ").split()[0]


def gathered(results: Path) -> list[Row]:
    """Rows of all that has been measured."""
    rows = []
    for group, of_group in ROWS.items():
        for (name, contender), label in of_group.items():
            path = results / f"{name}.json"
            found = json.loads(path.read_text()) if path.exists() else None
            ratios = speed_ups(found, contender) if found else []
            if found and ratios:
                rows.append(Row(group, _gpu(found), label, ratios))
    order = list(dict.fromkeys(row[:2] for row in rows))
    return sorted(rows, key=lambda row: order.index(row[:2]))


def _row(axes: Any, row: Row, place: float, colour: str) -> None:
    mean = geometric_mean(row.ratios)
    axes.plot(row.ratios, [place] * len(row.ratios), "o", color=colour, markersize=4, alpha=0.55, markeredgewidth=0)
    axes.plot([mean, mean], [place - 0.34, place + 0.34], color=colour, linewidth=2.5)
    axes.annotate(f"{mean:.3g}", (max(row.ratios), place), (6, 0), textcoords="offset points", va="center", fontsize=8)


def draw(rows: list[Row], path: Path) -> None:
    """Dots and their geometric means, group by group, on a logarithmic axis."""
    groups = {group: COLOURS[i % len(COLOURS)] for i, group in enumerate(dict.fromkeys(row[:2] for row in rows))}
    places = [i + 0.4 * list(groups).index(row[:2]) for i, row in enumerate(rows)]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8.0, 0.6 + 0.3 * len(rows) + 0.12 * len(groups)), layout="constrained")
        for row, place in zip(rows, places, strict=True):
            _row(axes, row, place, groups[row[:2]])
        for group, colour in groups.items():
            of_group = [place for row, place in zip(rows, places, strict=True) if row[:2] == group]
            where = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(1.0, sum(of_group) / len(of_group), ", ".join(group), color=colour, fontsize=9, **where)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xlim(right=axes.get_xlim()[1] * 1.6)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_yticks(places, [f"{row.label} ({len(row.ratios)})" for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("times as long as fastkron_py takes; in brackets the number of cases")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130, transparent=True)
        pyplot.close(figure)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overview", description=__doc__)
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/images/overview.png"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files that benchmarks write")
    options = parser.parse_args()
    draw(gathered(options.results), options.picture)
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
