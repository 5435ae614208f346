"""The Walsh-Hadamard transform of language models' rows, and FlatQuant's pairs of factors, in half types."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.kron.peers import GPYTORCH, LOOP, OURS
from benchmarks.kron.problems import TOLERANCES, case, check, inputs
from benchmarks.registry import Benchmark, Call, Case, Contender, register

ROWS = 16384
LENGTHS = (1024, 4096, 8192, 16384, 32768, 5120, 11008, 13824, 14336, 28672)
PAIRS = ((64, 64), (86, 128), (112, 128), (128, 128))
CHECKED_ROWS = 64


@dataclass(frozen=True)
class Rows:
    """x ``[M, n]``, and the dense matrix ``[n, n]`` of the orthogonal transform."""

    x: Tensor
    matrix: Tensor
    scale: float


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> Rows:
    n, dtype = parameters["n"], getattr(torch, parameters["dtype"])
    x = torch.randn(parameters["M"], n, generator=torch.Generator(device=device).manual_seed(0), device=device).to(dtype)
    scale = n**-0.5
    return Rows(x, fastkron_py.hadamard(torch.eye(n, device=device), scale=scale).to(dtype), scale)


def _error(problem: Rows, y: Tensor) -> float:
    """Relative Frobenius error of the first rows, against the dense product in float64."""
    matrix = fastkron_py.hadamard(torch.eye(problem.x.shape[1], dtype=torch.float64, device=y.device), scale=problem.scale)
    expected = problem.x[:CHECKED_ROWS].double() @ matrix
    return float(torch.linalg.norm(y[:CHECKED_ROWS].double() - expected) / torch.linalg.norm(expected))


def _row(n: int, dtype: str) -> Case:
    return Case(
        label=f"{ROWS} x {n} {dtype}",
        parameters={"M": ROWS, "n": n, "dtype": dtype},
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        floor_bytes=2 * ROWS * n * getattr(torch, dtype).itemsize,
        flops=ROWS * n * math.ceil(math.log2(n)),
        quick=n == 1024,
    )


TRANSFORMS = [_row(n, dtype) for dtype in ("bfloat16", "float16", "float32") for n in LENGTHS]
TRANSFORMS += [_row(n, "float64") for n in (1024, 4096, 16384, 14336)]


def _no_fast_hadamard(device: torch.device) -> str | None:
    return None if importlib.util.find_spec("fast_hadamard_transform") else "fast_hadamard_transform is not installed"


def _order(n: int) -> int | None:
    """The order m of fast_hadamard_transform's matrix for n = m * 2^k; None where it has none."""
    return {1: 1, 3: 12, 5: 20, 7: 28}.get(n // (n & -n))


def _fast_hadamard(problem: Rows) -> Call:
    interface = importlib.import_module("fast_hadamard_transform.fast_hadamard_transform_interface")
    order = _order(problem.x.shape[1])
    transform = interface.hadamard_transform if order == 1 else getattr(interface, f"hadamard_transform_{order}N")
    return lambda: transform(problem.x, scale=problem.scale)


def _in_our_matrix(y: Tensor) -> Tensor:
    """Exchange fast_hadamard_transform's matrix for that of `hadamard`: Hadamard matrices of one order differ.

    The first rows go back by the transpose of its matrix, the image of the identity, and through `hadamard`.
    """
    n = y.shape[1]
    if _order(n) == 1:
        return y
    scale = n**-0.5
    matrix = _fast_hadamard(Rows(torch.eye(n, device=y.device), torch.empty(0), scale))().double()
    return fastkron_py.hadamard(y[:CHECKED_ROWS].double() @ matrix.mT, scale=scale)


register(
    Benchmark(
        name="hadamard",
        description="The Walsh-Hadamard transform of rows, beside the dense product and fast_hadamard_transform.",
        device="cuda",
        cases=TRANSFORMS,
        contenders=[
            Contender("fastkron_py", lambda p: lambda: fastkron_py.hadamard(p.x, scale=p.scale), is_ours=True),
            Contender("dense product", lambda p: lambda: p.x @ p.matrix),
            Contender(
                "fast_hadamard_transform",
                _fast_hadamard,
                obstacle=_no_fast_hadamard,
                restore=_in_our_matrix,
                labels=frozenset(row.label for row in TRANSFORMS if _order(row.parameters["n"]) and row.dtype != "float64"),
            ),
        ],
        inputs=_inputs,
        check=_error,
        baseline="dense product",
        has_floor=True,
    )
)

register(
    Benchmark(
        name="kron_pairs",
        description="Rows of language models times two factors (FlatQuant), bfloat16 and float16.",
        device="cuda",
        cases=[case(ROWS, ps, dtype=dtype, quick=ps == (64, 64), name_dtype=True) for dtype in ("bfloat16", "float16") for ps in PAIRS],
        contenders=[OURS, LOOP, GPYTORCH],
        inputs=inputs,
        check=check,
        baseline="matmul + transpose",
        has_floor=True,
    )
)
