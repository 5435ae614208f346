"""The distribution of speed-ups over random problems: a peer's time over this library's, for the better peer and for each of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from benchmarks.ratios import device_medians, geometric_mean, medians

BETTER: Final = "the better peer"
WIDE: Final = 128  # factors over this on both sides
LONG: Final = 50e-6  # seconds of the better peer: shorter problems are calls more than work
WORST: Final = 10


class Row(NamedTuple):
    """One problem: a peer's median over this library's, and the groups by which the table splits."""

    ratio: float
    seconds: float  # of this library
    fastest: float  # of the better peer
    label: str
    dtype: str
    kind: str
    left: bool
    narrowest: int


def rows_over(found: dict[str, Any], peer: str) -> list[Row]:
    """The problems where both this library and the peer (or `BETTER`) have a time, worst first."""
    rows, subject = [], found["subject"]
    for case in found["cases"]:
        times, of = device_medians(case), case["parameters"]
        ours = times.pop(subject, None)
        seconds = min(times.values(), default=None) if peer == BETTER else times.get(peer)
        if ours is not None and seconds is not None:
            # One mode has one width on each side, and no form.
            sides = [side if isinstance(side, list | tuple) else [side] for side in (of["P"], of["Q"])]
            about = (case["label"], of["dtype"], of["kind"], of.get("left", False), min(map(min, sides)))
            rows.append(Row(seconds / ours, ours, min(times.values()), *about))
    return sorted(rows)


def _splits(rows: list[Row]) -> dict[str, Callable[[Row], bool]]:
    """The groups that the distribution is told of."""
    groups: dict[str, Callable[[Row], bool]] = {"all": lambda row: True, f"{LONG * 1e6:g} us and more": lambda row: row.fastest >= LONG}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        groups[dtype] = lambda row, dtype=dtype: row.dtype == dtype  # type: ignore[misc]
    for kind in dict.fromkeys(row.kind for row in rows):
        groups[kind] = lambda row, kind=kind: row.kind == kind  # type: ignore[misc]
    groups |= {"right form": lambda row: not row.left, "left form": lambda row: row.left}
    return groups | {f"all factors over {WIDE}": lambda row: row.narrowest > WIDE}


def summary(ratios: list[float]) -> dict[str, float]:
    """Count, geometric mean, quartiles and the least of ratios."""
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "problems": len(ratios),
        "geometric_mean": geometric_mean(ratios),
        "lower_quartile": lower,
        "median": median,
        "upper_quartile": upper,
        "worst": min(ratios),
    }


def of(found: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """For the better peer and for each peer: the summaries of groups of problems, by name; groups without problems are left out."""
    peers = dict.fromkeys(name for case in found["cases"] for name in medians(case) if name != found["subject"])
    told = {}
    for peer in (BETTER, *peers):
        rows = rows_over(found, peer)
        groups = {name: [row.ratio for row in rows if belongs(row)] for name, belongs in _splits(rows).items()}
        told[peer] = {name: summary(ratios) for name, ratios in groups.items() if ratios}
    return told


def show(found: dict[str, Any], console: Console) -> None:
    """Print the distribution, and the problems where the better peer is furthest ahead."""
    subject = found["subject"]
    title = f"{found['benchmark']}, seed {found['draw']['seed']}: a peer's time over {subject}'s"
    table = Table(title=title, box=HORIZONTALS, padding=(0, 1, 0, 0))  # 80 characters hold it
    for heading in ("over", "problems"):
        table.add_column(heading, no_wrap=True)
    for heading in ("count", "mean", "25%", "50%", "75%", "worst"):
        table.add_column(heading, justify="right", min_width=len(heading))
    for peer, groups in found["distribution"].items():
        shown = groups if peer == BETTER else dict(list(groups.items())[:2])
        for i, (name, numbers) in enumerate(shown.items()):
            count, *others = numbers.values()
            table.add_row("" if i else peer, name, str(count), *[f"{number:.2f}" for number in others])
        table.add_section()
    console.print(table)
    worst = Table("the worst problems")
    for heading in ("ratio", subject, BETTER):
        worst.add_column(heading, justify="right")
    for row in rows_over(found, BETTER)[:WORST]:
        worst.add_row(row.label, f"{row.ratio:.2f}", f"{row.seconds * 1e6:.0f} us", f"{row.fastest * 1e6:.0f} us")
    console.print(worst)
