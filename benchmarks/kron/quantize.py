"""Rows of language models times two factors, rounded to eight or four bits with a scale for each row, as in front of a quantised layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastkron_py
from benchmarks.kron.problems import Problem, case, inputs
from benchmarks.registry import Benchmark, Case, Contender, register
from fastkron_py import reference
from fastkron_py.kron.quantize import LARGEST, rounded

ROWS = 16384
PAIRS = ((64, 64), (86, 128), (112, 128), (172, 64))
CHECKED_ROWS = 64
FORMATS: dict[str, torch.dtype | str] = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "int4": "int4"}

Call = Callable[[], Any]


class Rounding(NamedTuple):
    """A product, and the format that its rows are rounded to."""

    product: Problem
    kind: str


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> Rounding:
    return Rounding(inputs(parameters, device), parameters["format"])


def _error(problem: Rounding, found: Any) -> float:
    """Relative Frobenius error of the first rows; the format's own error is most of it."""
    product = problem.product
    wanted = reference.kron_matmul(product.x[:CHECKED_ROWS].double(), [f.double() for f in product.factors])
    if isinstance(found, Tensor):
        got = found[:CHECKED_ROWS].double()
    else:
        values, scales = found
        got = fastkron_py.functional.Quantized(values[:CHECKED_ROWS], scales[:CHECKED_ROWS]).dequantize().double()
    return float(torch.linalg.norm(got - wanted) / torch.linalg.norm(wanted))


def _case(ps: tuple[int, int], kind: str) -> Case:
    plain = case(ROWS, ps, dtype="bfloat16", quick=ps == (64, 64))
    tolerance = {"int8": 0.02, "float8_e4m3fn": 0.04, "int4": 0.25}[kind]
    return replace(plain, label=f"{plain.label} {kind}", parameters={**plain.parameters, "format": kind}, tolerance=tolerance)


def _product(problem: Rounding) -> Tensor:
    return fastkron_py.kron_matmul(problem.product.x, problem.product.factors)


def _ours(problem: Rounding) -> Any:
    return fastkron_py.kron_quantize(problem.product.x, problem.product.factors, FORMATS[problem.kind])


def _then_torch(compiled: bool) -> Callable[[Rounding], Call]:
    def prepare(problem: Rounding) -> Call:
        function = torch.compile(rounded) if compiled else rounded
        return lambda: function(_product(problem), 1 / LARGEST[problem.kind], problem.kind)

    return prepare


register(
    Benchmark(
        name="kron_quantize",
        description="Rows times two factors, rounded to int8, float8 or int4 with a scale for each row (FlatQuant), bfloat16.",
        device="cuda",
        cases=[_case(ps, kind) for ps in PAIRS for kind in FORMATS],
        contenders=[
            Contender("fastkron_py", lambda p: lambda: _ours(p), is_ours=True),
            Contender("kron_matmul, not rounded", lambda p: lambda: _product(p)),
            Contender("kron_matmul, then torch", _then_torch(False)),
            Contender("kron_matmul, then torch.compile", _then_torch(True)),
        ],
        inputs=_inputs,
        check=_error,
        baseline="kron_matmul, then torch.compile",
        has_floor=True,
    )
)
