"""``python -m benchmarks.markdown FILE.json ...``: results as Markdown tables, for docs and README."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import number


def _cell(result: dict[str, Any], subject: float | None) -> str:
    """Milliseconds, how many times as long as the subject, and the share, where it was taken."""
    if not result["times"]:
        reason = result["reason"] or ""
        return "out of memory" if any(name in reason for name in ("OutOfMemory", "MemoryError")) else str(result["status"])
    median = result["times"]["median"]
    told = [number(median, 1e3)]
    if subject and subject != median:
        told.append(f"{median / subject:.2g}x")
    if result.get("share") is not None:
        told.append(f"{result['share']:.0%}")
    return ", ".join(told)


def table(found: dict[str, Any]) -> str:
    """A benchmark's cases as rows, its contenders as columns, and the geometric means below."""
    names = list(dict.fromkeys(r["contender"] for case in found["cases"] for r in case["results"]))
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for case in found["cases"]:
        of = {r["contender"]: r for r in case["results"]}
        times = of[found["subject"]]["times"]
        cells = [_cell(of[name], times["median"] if times else None) for name in names]
        lines.append(f"| {case['label']} | " + " | ".join(cells) + " |")
    environment = found["environment"]
    means = [f"{1 / r['geometric_mean']:.2f} times as fast as {name} over {r['cases']} cases" for name, r in found["ratios"].items()]
    told = ["Milliseconds", "times the subject's", "share of Kronecker products"]
    has_share = any(r.get("share") is not None for case in found["cases"] for r in case["results"])
    lines += ["", f"{', '.join(told if has_share else told[:2])}; {environment['device']}. Geometric mean: {'; '.join(means)}."]
    return "\n".join(lines)


def main(paths: list[str]) -> None:
    """Print a table for each file."""
    for path in paths:
        found = json.loads(Path(path).read_text())
        print(f"{found['benchmark']}: {found['description']}\n\n{table(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
