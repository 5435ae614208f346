"""A plan as a picture: blocks that move between the ranks of a row group."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle as Patch

from fastkron_py.distributed import Plan
from fastkron_py.distributed.layout import Exchange, Leg, Rectangle, Step
from fastkron_py.distributed.plan import factors_text

INK, MUTED = "#1f2933", "#7b8794"
COLOURS: Final = ("#5b93c7", "#3fae8e", "#f2c47e", "#d98880", "#a58bc9", "#8fb6de", "#a5dcc4", "#e8d5a3")
WIDTH, HEIGHT = 2.6, 2.0  # of a matrix, in the axes' units


def picture(plan: Plan, path: Path) -> None:
    """Draw, for every exchange, which elements each rank held, and which it holds then."""
    figure = Figure(figsize=(9.5, 0.95 * (1.3 + 2.6 * _count(plan))), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    _draw(plan, figure.add_axes((0.01, 0.01, 0.98, 0.98)))
    figure.savefig(path)


def _draw(plan: Plan, axes: Any) -> None:
    axes.axis("off")
    axes.set_xlim(0, 10)
    axes.set_ylim(2.6 * _count(plan) + 1.3, 0)
    p = plan.problem
    shown = "x and the result" if plan.by_rows else "one row of x"
    title = f"{factors_text(p)} over {plan.parts} ranks that exchange: {shown}"
    axes.text(0.1, 0.35, title, fontsize=13, fontweight="bold", color=INK, va="center")
    top = 1.0
    for step in plan.steps:
        if step.leg is not None:
            _exchange(axes, top, step.leg, _title(plan, step))
            top += 2.6
    text = f"Colour: the rank that had it before. Frame and number: the rank that holds it. Parts are {plan.sending}."
    axes.text(0.1, top + 0.05, text, fontsize=9, color=MUTED, va="center")


def _count(plan: Plan) -> int:
    return sum(step.leg is not None for step in plan.steps)


def _title(plan: Plan, step: Step) -> tuple[str, str]:
    if not step.multiplies:
        return ("to whole rows", "of a row group") if plan.by_rows else ("to whole slices", "a little moves between neighbours")
    name = "product, and back" if plan.by_rows else step.name.partition(" of ")[0]
    return name, f"multiply {factors_text(plan.problem, step.start, step.stop)}, then exchange"


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
    x, y = _corner(left, top, exchange, r.row, r.column)
    x_stop, y_stop = _corner(left, top, exchange, r.row_stop, r.column_stop)
    axes.add_patch(Patch((x, y), x_stop - x, y_stop - y, **style))


def _corner(left: float, top: float, exchange: Exchange, row: int, column: int) -> tuple[float, float]:
    return left + WIDTH * column / exchange.columns, top + HEIGHT * row / exchange.rows


def _centre(left: float, top: float, exchange: Exchange, r: Rectangle) -> tuple[float, float]:
    (x, y), (x_stop, y_stop) = _corner(left, top, exchange, r.row, r.column), _corner(left, top, exchange, r.row_stop, r.column_stop)
    return (x + x_stop) / 2, (y + y_stop) / 2
