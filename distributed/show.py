"""A plan as a table, and as a picture: blocks that move between the ranks of a row group."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastkron_py.distributed.cost import Step
from fastkron_py.distributed.layout import Exchange, Leg, Rectangle
from fastkron_py.distributed.problem import Problem
from fastkron_py.runtime.errors import value_error

if TYPE_CHECKING:
    from fastkron_py.distributed.plan import Plan

UNITS: Final = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
INK, MUTED = "#1f2933", "#7b8794"
COLOURS = ("#5b93c7", "#3fae8e", "#f2c47e", "#d98880", "#a58bc9", "#8fb6de", "#a5dcc4", "#e8d5a3")
WIDTH, HEIGHT = 2.6, 2.0  # of a matrix, in the axes' units
MOST_RANKS: Final = 16


def amount(value: float, unit: str) -> str:
    """A number with a prefix: 1.07 GB, 45.6 TFLOP/s."""
    for prefix, size in UNITS:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds in words: 33 us, 1.2 ms."""
    if seconds == 0:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def factors_text(problem: Problem, start: int = 0, stop: int | None = None) -> str:
    """Factors of a problem in few words: 64^4, or 8x16 4x4, or I_64 8."""
    stop = len(problem.ps) if stop is None else stop
    ps, qs = problem.ps[start:stop], problem.qs[start:stop]
    own = [i for i in problem.identities if start <= i < stop]
    if ps == qs and len(set(ps)) == 1 and not own:
        return f"{ps[0]}^{len(ps)}" if len(ps) > 1 else str(ps[0])
    texts = [str(p) if p == q else f"{p}x{q}" for p, q in zip(ps, qs, strict=True)]
    return " ".join([f"I_{text}" if start + i in own else text for i, text in enumerate(texts)])


def table(plan: Plan) -> str:
    """The plan in lines: the problem, one row for each step, totals."""
    p = plan.problem
    form = "K @ x, M" if p.left else "x @ K, M"
    dtype = str(p.dtype).removeprefix("torch.")
    rows: list[tuple[str, ...]] = [("step", "factors", "multiply", "copies", "sent per rank", "to other hosts", "messages", "exchange")]
    stage = 0
    for step in plan.steps:
        stage += step.factors is not None
        rows.append(_row(plan, step, stage))
    sizes = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    chunks = f"{plan.chunks} chunks of rows" if plan.chunks > 1 else "one chunk of rows"
    sent = f", {plan.transport_model.label}" if not plan.is_local else ""
    lines = [
        f"{form} = {p.m}, {factors_text(p)}, {dtype}: {plan.grid[0]} x {plan.grid[1]} grid, {chunks}{sent}",
        *("  " + "  ".join(text.ljust(size) for text, size in zip(row, sizes, strict=True)).rstrip() for row in rows),
        f"  sent by all ranks {amount(plan.bytes_total, 'B')}; peak memory per rank {amount(plan.peak_memory, 'B')}",
        f"  modelled {duration(plan.seconds)}, {amount(plan.flop_rate, 'FLOP/s')}, efficiency {plan.efficiency:.0%}; "
        f"processor {duration(plan.cpu_seconds)}",
    ]
    return "\n".join(lines)


def _row(plan: Plan, step: Step, stage: int) -> tuple[str, ...]:
    exchange = (
        (
            duration(step.copy_seconds),
            amount(step.bytes_sent, "B"),
            amount(step.bytes_to_hosts, "B"),
            f"{step.messages} x {plan.chunks}" if plan.chunks > 1 else str(step.messages),
            duration(step.exchange_seconds),
        )
        if step.leg is not None
        else ("-",) * 5
    )
    if step.factors is None:
        return ("to rows" if plan.by_rows else "align", "-", "-", *exchange)
    start, stop = step.factors
    name = "product" if plan.by_rows else f"stage {stage}"
    return (name, factors_text(plan.problem, start, stop), duration(step.multiply_seconds), *exchange)


def picture(plan: Plan, where: Any) -> None:
    """Draw, for every exchange, which elements each rank held, and which it holds then.

    Args:
        plan: of at most 16 ranks a row group.
        where: a path, or matplotlib axes.

    Raises:
        ValueError: too many ranks to draw.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if plan.parts > MOST_RANKS:
        raise value_error("plan", f"at most {MOST_RANKS} ranks that exchange, for a picture", plan.parts)
    if not isinstance(where, str | Path):
        _draw(plan, where)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 0.95 * (1.3 + 2.6 * _count(plan))), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    _draw(plan, figure.add_axes((0.01, 0.01, 0.98, 0.98)))
    figure.savefig(where)


def _draw(plan: Plan, axes: Any) -> None:
    axes.axis("off")
    axes.set_xlim(0, 10)
    axes.set_ylim(2.6 * _count(plan) + 1.3, 0)
    p = plan.problem
    shown = "x and the result" if plan.by_rows else "one row of x"
    title = f"{factors_text(p)} over {plan.parts} ranks that exchange: {shown}"
    axes.text(0.1, 0.35, title, fontsize=13, fontweight="bold", color=INK, va="center")
    top, stage = 1.0, 0
    for step in plan.steps:
        if step.leg is not None:
            stage += step.factors is not None
            _exchange(axes, top, step.leg, _title(plan, step, stage))
            top += 2.6
    text = f"Colour: the rank that had it before. Frame and number: the rank that holds it. Parts are {plan.transport_model.label}."
    axes.text(0.1, top + 0.05, text, fontsize=9, color=MUTED, va="center")


def _count(plan: Plan) -> int:
    return sum(step.leg is not None for step in plan.steps)


def _title(plan: Plan, step: Step, stage: int) -> tuple[str, str]:
    if step.factors is None:
        return ("to whole rows", "of a row group") if plan.by_rows else ("to whole slices", "a little moves between neighbours")
    start, stop = step.factors
    name = "product, and back" if plan.by_rows else f"stage {stage}"
    return name, f"multiply {factors_text(plan.problem, start, stop)}, then exchange"


def _exchange(axes: Any, top: float, leg: Leg, title: tuple[str, str]) -> None:
    """The matrix [Q, S] before and after, once in columns and once in ranges of its rows; the same colours at the same places."""
    exchange = leg.exchange
    axes.text(0.1, top + 0.7, title[0], fontsize=11, fontweight="bold", color=INK, va="center")
    axes.text(0.1, top + 1.1, title[1], fontsize=9, color=INK, va="center")
    axes.text(0.1, top + 1.5, f"matrix [{exchange.rows}, {exchange.columns}]", fontsize=9, color=MUTED, va="center")
    every = range(exchange.ranks)
    columns = [[Rectangle(0, exchange.rows, a, b)] if b > a else [] for a, b in pairwise(exchange.source)]
    rows = [merge([r for sender in every for r in exchange.rectangles(sender, receiver)]) for receiver in every]
    for left, owned in ((3.4, rows if leg.back else columns), (7.0, columns if leg.back else rows)):
        for sender in every:
            for receiver in every:
                for r in exchange.rectangles(sender, receiver):
                    _box(axes, left, top, exchange, r, facecolor=COLOURS[(receiver if leg.back else sender) % len(COLOURS)], linewidth=0)
        for rank, rectangles in enumerate(owned):
            for r in rectangles:
                _box(axes, left, top, exchange, r, fill=False, edgecolor=INK, linewidth=1.2)
            if rectangles:
                x, y = _centre(left, top, exchange, max(rectangles, key=lambda r: r.size))
                axes.text(x, y, str(rank), fontsize=9, color=INK, ha="center", va="center")
    axes.annotate("", (6.85, top + 1.0), (6.15, top + 1.0), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.4})


def merge(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Rectangles of the same rows, put together: one rank holds up to three of them."""
    rows = sorted({(r.row, r.row_stop) for r in rectangles})
    found = []
    for row, row_stop in rows:
        columns = [(r.column, r.column_stop) for r in rectangles if (r.row, r.row_stop) == (row, row_stop)]
        found.append(Rectangle(row, row_stop, min(a for a, _ in columns), max(b for _, b in columns)))
    return found


def _box(axes: Any, left: float, top: float, exchange: Exchange, r: Rectangle, **style: Any) -> None:
    from matplotlib.patches import Rectangle as Patch

    x, y = _corner(left, top, exchange, r.row, r.column)
    x_stop, y_stop = _corner(left, top, exchange, r.row_stop, r.column_stop)
    axes.add_patch(Patch((x, y), x_stop - x, y_stop - y, **style))


def _corner(left: float, top: float, exchange: Exchange, row: int, column: int) -> tuple[float, float]:
    return left + WIDTH * column / exchange.columns, top + HEIGHT * row / exchange.rows


def _centre(left: float, top: float, exchange: Exchange, r: Rectangle) -> tuple[float, float]:
    (x, y), (x_stop, y_stop) = _corner(left, top, exchange, r.row, r.column), _corner(left, top, exchange, r.row_stop, r.column_stop)
    return (x + x_stop) / 2, (y + y_stop) / 2
