"""A plan as a picture: blocks that move between the ranks of a line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastkron_py.distributed.blocks import Exchange
from fastkron_py.distributed.table import factors_text
from fastkron_py.errors import value_error

if TYPE_CHECKING:
    from fastkron_py.distributed.planner import Plan, Step

INK, MUTED = "#1f2933", "#7b8794"
COLOURS = ("#5b93c7", "#3fae8e", "#f2c47e", "#d98880", "#a58bc9", "#8fb6de", "#a5dcc4", "#e8d5a3")
MOST_RANKS: Final = 16


def picture(plan: Plan, where: Any) -> None:
    """Draw, for every exchange, which elements of one row of x each rank gets from whom.

    Args:
        plan: of at most 16 ranks a line.
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

    figure = Figure(figsize=(11, 1.6 + 1.7 * len(plan.exchanges)), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    _draw(plan, figure.add_axes((0.01, 0.01, 0.98, 0.98)))
    figure.savefig(where)


def _draw(plan: Plan, axes: Any) -> None:
    axes.axis("off")
    axes.set_xlim(-0.16, 1.02)
    axes.set_ylim(3.0 * len(plan.exchanges) + 1.2, -0.6)
    p = plan.problem
    title = f"{factors_text(p.ps, p.qs)} over {plan.parts} ranks of a line: one row of x"
    axes.text(-0.16, -0.2, title, fontsize=13, fontweight="bold", color=INK, va="center")
    y = 0.4
    stage = 0
    for step in plan.steps:
        if step.exchange is None:
            continue
        stage += step.factors is not None
        text = "come to whole slices" if step.factors is None else f"stage {stage}: " + _multiplied(plan, step)
        _band(axes, y, _source_pieces(step.exchange), text, "before")
        _band(axes, y + 1.4, _target_pieces(step.exchange), "", "after the exchange")
        y += 3.0
    axes.text(-0.16, y + 0.3, "Colour: the rank that computed it. Boxes: the rank that holds it.", fontsize=9, color=MUTED)


def _multiplied(plan: Plan, step: Step) -> str:
    start, stop = step.factors or (0, 0)
    p = plan.problem
    return f"multiply {factors_text(p.inner[start:stop], p.outer[start:stop])}"


Piece = tuple[float, float, int]  # from, to (of 1), and the rank it comes from
Held = list[tuple[float, float, list[Piece]]]  # for each rank what it holds


def _source_pieces(exchange: Exchange) -> Held:
    total = exchange.columns
    return [(a / total, b / total, [(a / total, b / total, r)]) for r, (a, b) in enumerate(pairwise(exchange.source))]


def _target_pieces(exchange: Exchange) -> Held:
    """Shares of what each rank holds, by the rank they come from, in the order of a message's arrival."""
    total = exchange.rows * exchange.columns
    held = []
    for receiver, (a, b) in enumerate(pairwise(exchange.target)):
        pieces, at = [], a
        for sender in range(exchange.ranks):
            size = exchange.size(sender, receiver)
            pieces.append((at / total, (at + size) / total, sender))
            at += size
        held.append((a / total, b / total, pieces))
    return held


def _band(axes: Any, y: float, held: Held, text: str, label: str) -> None:
    from matplotlib.patches import Rectangle

    axes.text(0, y - 0.12, text, fontsize=10, color=INK, va="bottom")
    axes.text(-0.16, y + 0.45, label, fontsize=9, color=MUTED, va="center")
    for rank, (a, b, pieces) in enumerate(held):
        for left, right, origin in pieces:
            axes.add_patch(
                Rectangle((left, y), right - left, 0.9, facecolor=COLOURS[origin % len(COLOURS)], edgecolor="white", linewidth=0.4)
            )
        if b > a:
            axes.add_patch(Rectangle((a, y), b - a, 0.9, fill=False, edgecolor=INK, linewidth=1.4))
            axes.text((a + b) / 2, y + 0.45, str(rank), ha="center", va="center", fontsize=9, color=INK)
