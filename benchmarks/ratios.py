"""Ratios of a benchmark's measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def medians(case: dict[str, Any]) -> dict[str, float]:
    """Measured median seconds by contender."""
    return {r["contender"]: r["times"]["median"] for r in case["results"] if r["times"]}


def device_medians(case: dict[str, Any]) -> dict[str, float]:
    """The same of CUDA graphs, which wait for no host, where all contenders that were timed have one."""
    timed = [r for r in case["results"] if r["times"]]
    if all(r.get("graph_times") for r in timed):
        return {r["contender"]: r["graph_times"]["median"] for r in timed}
    return medians(case)


def geometric_mean(ratios: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _summary(pairs: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Geometric mean and largest of ratios, by name."""
    listed: dict[str, list[float]] = {}
    for name, ratio in pairs:
        listed.setdefault(name, []).append(ratio)
    return {
        name: {"geometric_mean": geometric_mean(values), "largest": max(values), "cases": len(values)} for name, values in listed.items()
    }


def of_measured(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For each contender: our median time over its median time, geometric mean and largest, where both have one."""
    subject = found["subject"]
    tables = [medians(case) for case in found["cases"]]
    return _summary((name, t[subject] / t[name]) for t in tables if subject in t for name in t if name != subject)


def of_recorded(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The same over figures that another run took; these are no measured ratios, and are told apart everywhere."""
    subject = found["subject"]
    pairs = [(medians(case), case["recorded"]) for case in found["cases"]]
    return _summary((name, t[subject] / figure["seconds"]) for t, of in pairs if subject in t for name, figure in of.items())
