"""``python -m benchmarks.markdown FILE.json ...``: results as Markdown tables, for the site and the README."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import number


def times_text(factor: float) -> str:
    """How many times as long as the subject: two decimals where the difference is small, at most three digits."""
    return f"{factor:.2f}x" if factor < 3 else f"{factor:.1f}x" if factor < 10 else f"{factor:.0f}x"


def _cell(result: dict[str, Any], subject: float | None) -> str:
    """Milliseconds, how many times as long as the subject, and the share, where it was taken."""
    if not result["times"]:
        reason = result["reason"] or ""
        if any(name in reason for name in ("OutOfMemory", "MemoryError")):
            return "out of memory"
        return "not run" if result["status"] == "unavailable" else str(result["status"])
    median = result["times"]["median"]
    told = [number(median, 1e3)]
    if subject and subject != median:
        told.append(times_text(median / subject))
    if result.get("share") is not None:
        told.append(f"{result['share']:.0%}")
    return ", ".join(told)


def _recorded(case: dict[str, Any], name: str, subject: float | None) -> str:
    """A figure of another run, in italics."""
    figure = (case.get("recorded") or {}).get(name)
    if figure is None:
        return ""
    return f"*{number(figure['seconds'], 1e3)}" + (f", {times_text(figure['seconds'] / subject)}*" if subject else "*")


def _row(case: dict[str, Any], names: list[str], recorded: list[str], subject: str) -> list[str]:
    of = {r["contender"]: r for r in case["results"]}
    times = of[subject]["times"]
    median = times["median"] if times else None
    cells = [_cell(of[name], median) if name in of else "" for name in names]
    return [case["label"], *cells, *(_recorded(case, name, median) for name in recorded)]


def _with_floors(rows: list[list[str]], cases: list[dict[str, Any]]) -> list[list[str]]:
    """A column of floors behind the labels, where cases have them."""
    floors = [case.get("floor_seconds") for case in cases]
    if not any(floors):
        return rows
    cells = ["floor", *(number(floor, 1e3) if floor else "" for floor in floors)]
    return [[row[0], cell, *row[1:]] for row, cell in zip(rows, cells, strict=True)]


def _conditions(environment: dict[str, Any]) -> str:
    """The device, the versions and the date of a run, where it wrote them down."""
    versions = environment.get("versions", {})
    told = [environment["device"], *(f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions)]
    return ", ".join([*told, *([environment["date"][:10]] if "date" in environment else [])])


def table(found: dict[str, Any]) -> str:
    """A benchmark's cases as rows, the contenders that were timed as columns, and the geometric means below."""
    results = [r for case in found["cases"] for r in case["results"]]
    timed = {r["contender"] for r in results if r["times"]}
    names = [name for name in dict.fromkeys(r["contender"] for r in results) if name in timed]
    recorded = list(dict.fromkeys(name for case in found["cases"] for name in case.get("recorded") or {}))
    rows = [["", *names, *recorded], *(_row(case, names, recorded, found["subject"]) for case in found["cases"])]
    rows = _with_floors(rows, found["cases"])
    rows.insert(1, ["---"] * len(rows[0]))
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in rows]
    ratios = found["ratios"] | found.get("recorded_ratios", {})
    means = [f"{1 / r['geometric_mean']:.2f}x the speed of {name}, {r['cases']} cases" for name, r in ratios.items()]
    told = ["Milliseconds", f"times as long as {found['subject']}"]
    if any(r.get("share") is not None for r in results):
        told.append("share of Kronecker products")
    lines += ["", f"{', '.join(told)}; {_conditions(found['environment'])}."]
    if means:
        lines += ["", f"Geometric means: {'; '.join(means)}."]
    return "\n".join(lines)


def main(paths: list[str]) -> None:
    """Print a table for each file."""
    for path in paths:
        found = json.loads(Path(path).read_text())
        print(f"{found['benchmark']}: {found['description']}\n\n{table(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
