"""Plans of multiplies on GPUs that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.planner import plan
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.runtime.gpu import HOPPER

DTYPES = {(2, 1): torch.bfloat16, (4, 1): torch.float32, (8, 1): torch.float64, (4, 2): torch.complex64, (8, 2): torch.complex128}
"""By bytes of a real number, and the real numbers of an element."""


def planned(
    ps: Sequence[int],
    qs: Sequence[int] | None = None,
    rows: int = 1024,
    columns: int = 1,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> list[Launch]:
    """The launches of least modelled time on a Hopper GPU; fields are those of a `Problem`."""
    shapes = list(zip(ps, ps if qs is None else qs, strict=True))
    return plan(replace(contiguous_problem(shapes, rows, columns, dtype, HOPPER), **fields)).launches
