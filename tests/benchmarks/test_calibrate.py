"""Prices of launches: what the fit finds, that the recorded times follow it, and that choices by it are nearly the best ones."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kron import calibrate
from benchmarks.kron.programs import pretending

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "calibration_h100.csv"
RATES = ROOT / "fastkron_py" / "kron" / "rates" / "hopper.json"
SOME = 250  # cases of each dtype


@pytest.fixture(scope="module")
def rows() -> list[calibrate.Row]:
    """The recorded launches of some cases."""
    found = calibrate.read(RECORDED)
    chosen = set[tuple[Any, ...]]()
    for dtype in calibrate.DTYPES:
        chosen |= {*random.Random(0).sample(sorted({row.case for row in found if row.dtype == dtype}), SOME)}
    return [row for row in found if row.case in chosen]


def test_the_fit_finds_prices() -> None:
    """Of times that are sums of quantities, but for noise of a few percent, and a time that is not."""
    generator = random.Random(0)
    launches = []
    for _ in range(300):
        made = {"start": 1e-6, "bytes": generator.uniform(0, 1e-4), "unused": generator.uniform(0, 1e-4), "streamed": 0.0}
        us = (2.5 + 1e6 * 0.4 * made["bytes"]) * math.exp(generator.gauss(0, 0.03))
        launches.append((made, us))
    launches[0] = (launches[0][0], 1000 * launches[0][1])
    prices = calibrate.fit(launches)
    assert prices["start"] == pytest.approx(2.5, rel=0.05)
    assert prices["bytes"] == pytest.approx(0.4, rel=0.05)
    assert prices.get("unused", 0.0) < 0.01


def test_choices_by_the_recorded_prices_are_nearly_the_best(rows: list[calibrate.Row]) -> None:
    """Prices that are those of another quantity are no better than chance, which shows that the check can fail."""
    prices = json.loads(RATES.read_text())["prices"]
    wrong = {section: {size: {"start": 1.0} for size in sizes} for section, sizes in prices.items()}
    with pretending():
        assert max(losses(rows, prices).values()) < 1.1
        # Of gradients there is often one launch alone.
        assert min([loss for what, loss in losses(rows, wrong).items() if "gradients" not in what]) > 1.2


def test_recorded_times_follow_the_prices(rows: list[calibrate.Row]) -> None:
    prices = json.loads(RATES.read_text())["prices"]
    with pretending():
        ratios = [row.us / calibrate.modelled(row, prices) for row in rows]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.05)
    low, *_, high = statistics.quantiles(ratios, n=10)
    assert 0.65 < low < high < 1.6


def losses(rows: list[calibrate.Row], prices: dict[str, Any]) -> dict[str, float]:
    """Times of the choices over those of the best launches, in geometric mean, by dtype."""
    found = calibrate.losses(rows, {row: calibrate.modelled(row, prices) for row in rows})
    return {dtype: math.exp(statistics.mean([math.log(loss) for loss, _, _ in made])) for dtype, made in found.items()}


def test_every_launch_of_gradients_has_quantities_and_a_program() -> None:
    families = set()
    with pretending():
        for dtype in calibrate.DTYPES:
            for case in calibrate.gradient_cases(dtype)[:40]:
                widths = [case.before * math.prod(side) * case.after for side in zip(*case.factors, strict=True)]
                u, g = (torch.empty(1, case.rows, width, 1, dtype=getattr(torch, dtype), device="meta") for width in widths)
                factors = [torch.empty(1, p, q, dtype=u.dtype, device="meta") for p, q in case.factors]
                for row in calibrate.gradient_launches(case):
                    section, made = calibrate.quantities(row)
                    assert section == row.family
                    assert all(value >= 0 for value in made.values())
                    assert calibrate.gradient_program_of(row, u, g, factors)._steps
                    families.add(row.family)
    assert families >= {f"{name}_gradients" for name in ("tile", "tile_chain", "narrow", "fragments")} | {*calibrate.ALONE}


def test_every_launch_of_random_cases_has_quantities_and_a_program() -> None:
    with pretending():
        for dtype in calibrate.DTYPES:
            for case in calibrate.cases(dtype)[:12]:
                width = case.before * math.prod([p for p, _ in case.factors]) * case.after
                x = torch.empty(1, case.rows, width, 1, dtype=getattr(torch, dtype), device="meta")
                factors = [torch.empty(1, p, q, dtype=x.dtype, device="meta") for p, q in ((1, 1), *case.factors, (1, 1))]
                found = list(calibrate.launches(case))
                assert {"tile", "matmul"} <= {row.family for row in found} or len(case.factors) > 1
                for row in found:
                    _, made = calibrate.quantities(row)
                    assert min(made.values()) >= 0
                    assert made["start"] > 0
                    calibrate.program_of(row, x, factors)
