"""A plan as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fastkron_py.distributed.estimate import Step
    from fastkron_py.distributed.planner import Plan

UNITS: Final = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


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


def factors_text(ps: tuple[int, ...], qs: tuple[int, ...]) -> str:
    """Factors in few words: 64^4, or 8x16 4x4."""
    if ps == qs and len(set(ps)) == 1:
        return f"{ps[0]}^{len(ps)}" if len(ps) > 1 else str(ps[0])
    return " ".join(str(p) if p == q else f"{p}x{q}" for p, q in zip(ps, qs, strict=True))


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
    sent = f", {sending(plan)}" if plan.parts > 1 else ""
    lines = [
        f"{form} = {p.m}, {factors_text(p.ps, p.qs)}, {dtype}: {plan.grid[0]} x {plan.grid[1]} grid, {chunks}{sent}",
        *("  " + "  ".join(text.ljust(size) for text, size in zip(row, sizes, strict=True)).rstrip() for row in rows),
        f"  sent by all ranks {amount(plan.bytes_total, 'B')}; peak memory per rank {amount(plan.peak_memory, 'B')}",
        f"  modelled {duration(plan.seconds)}, {amount(plan.flop_rate, 'FLOP/s')}, efficiency {plan.efficiency:.0%}; "
        f"processor {duration(plan.cpu_seconds)}",
    ]
    return "\n".join(lines)


def sending(plan: Plan) -> str:
    """How parts of an exchange go to their ranks, in few words."""
    if plan.direct:
        return "stored directly"
    return "sent in runs" if plan.messages else "packed"


def _row(plan: Plan, step: Step, stage: int) -> tuple[str, ...]:
    p = plan.problem
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
    return (name, factors_text(p.ps[start:stop], p.qs[start:stop]), duration(step.multiply_seconds), *exchange)
