"""Every choice that ships for this GPU computes the product, on fewer rows than it was tuned with."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from tuning_cases import HERE, carry_out, expected, launches_by, operands, version

from fastkron_py.kron.tune import table
from fastkron_py.kron.tune.table import Entry
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.gpu

MOST_ELEMENTS = 1 << 26  # of the larger of x and the result: the reference is in float64


def shipped() -> list[Entry]:
    file = Path(str(resources.files("fastkron_py.kron.tune"))) / "tables" / table.file_name(HERE)
    return [e for e in table.read(file).values() if e.choice is not None and e.problem.triton == version()]


def test_shipped_choices_are_right() -> None:
    """One test for all, since a table may be empty."""
    for entry in shipped():
        p = entry.problem
        widest = max(math.prod(a for a, _ in p.factors), math.prod(b for _, b in p.factors)) * p.columns
        x, factors = operands(replace(p, rows=max(2, min(p.rows, MOST_ELEMENTS // widest))))
        y = carry_out(launches_by(entry.choice, x, factors, p.precision), x, factors)
        steps = 2 * len(factors)
        bounds = {}
        if p.dtype == "float32" and p.precision == "high":
            bounds = {"rms_tol": steps * 2.0**-11, "max_tol": 4 * steps * 2.0**-11}
        assert_close(y, expected(x, factors), steps=steps, name=f"{p} by {entry.choice}", **bounds)
        del x, y
        torch.cuda.empty_cache()
