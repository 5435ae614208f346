"""The tuned choice of a multiply, looked up by its problem."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.launches import MultiplyProblem
from fastkron_py.kron.tune.choice import FACTORS_MOST, INTERPRETER, ITEMSIZE, Choice, Problem, rows_bucket
from fastkron_py.kron.tune.table import lookup


@lru_cache(maxsize=64)
def device_name(device: torch.device) -> str:
    """The name under which a device's choices are kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER


def problem_of(multiply: MultiplyProblem) -> Problem | None:
    """The problem that a multiply poses, or None for one that is not tuned: a part of the factors only."""
    count = len(multiply.factor_shapes)
    dtype = str(multiply.dtype).removeprefix("torch.")
    if multiply.start != 0 or multiply.stop != count or count > FACTORS_MOST or dtype not in ITEMSIZE:
        return None
    groups, rows, width, columns = multiply.shape
    return Problem(
        operation="multiply",
        device=device_name(multiply.device),
        triton=".".join(triton.__version__.split(".")[:2]),
        dtype=dtype,
        precision="high" if multiply.dtype == torch.float32 and multiply.precision != "highest" else "highest",
        factors=tuple((int(s[-2]), int(s[-1])) for s in multiply.factor_shapes),
        rows=rows_bucket(groups * rows),
        columns=columns,
        batched=groups > 1,
        contiguous=rows == 1 or multiply.x.row == width * columns,
    )


def tuned(multiply: MultiplyProblem) -> Choice | None:
    """The tuned choice for a multiply, or None for the closed form."""
    problem = problem_of(multiply)
    choice = None if problem is None else lookup(problem)
    if choice is not None and choice.has_chained and not kernels.has_chained(multiply.device, multiply.dtype):
        return None  # a device of the same name with another chip
    return choice
