"""Problems of polynomial KAN layers, right answers to them, and the cases made of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import float32_precision
from benchmarks.registry import Case
from fastkron_py.kan.layer_config import LayerConfig, describe, layer_config

CHECKED_ROWS = 512  # of y and dx, spread over all
CHUNK_ELEMENTS = 1 << 24  # of a basis in float64 at a time
# A recurrence in float32 errs by up to 6e-6 at degree 24; TF32 and half types by their operands' roundings.
TOLERANCES = {"float32": 1e-5, "tf32": 4e-3, "bfloat16": 1.5e-2}


@dataclass(frozen=True)
class Problem:
    """x ``[M, I]``, coefficients ``[degree + 1, O, I]``, dy ``[M, O]``; the gradients wanted, and how float32 is multiplied."""

    x: Tensor
    coefficients: Tensor
    dy: Tensor
    precision: str
    basis: str

    @property
    def layer(self) -> LayerConfig:
        """The layer's config, with tanh."""
        from fastkron_py.kan.bases.registry import find_basis

        parameters = tuple(find_basis(self.basis).parameters.values())
        return layer_config(describe(self.basis, parameters), self.coefficients.shape[0], "tanh", 0)

    @property
    def weight(self) -> Tensor:
        """Coefficients as the right operand of one product with a stored basis: ``[(degree + 1) * I, O]``, contiguous."""
        return self.coefficients.detach().permute(0, 2, 1).reshape(-1, self.coefficients.shape[1]).contiguous()

    @property
    def step(self) -> int:
        """Every how many rows are checked."""
        return max(1, self.x.shape[0] // CHECKED_ROWS)

    @cached_property
    def expected(self) -> list[Tensor]:
        """The checked rows of y and dx, and dC, in float64, over rows in chunks."""
        c = self.coefficients.detach().double()
        layer = self.layer
        rows = max(1, CHUNK_ELEMENTS // c[:, 0].numel())
        y, dx, dc = [], [], torch.zeros_like(c)
        for x, dy in zip(self.x.detach().split(rows), self.dy.split(rows), strict=True):
            x, dy = x.double(), dy.double()
            t = torch.tanh(x)
            values = torch.stack(list(layer.values(t)))
            slopes = torch.stack(list(layer.derivatives(t)))
            y.append(torch.einsum("dmi,doi->mo", values, c))
            dx.append(torch.einsum("dmi,dmi->mi", slopes, torch.einsum("mo,doi->dmi", dy, c)) / torch.cosh(x) ** 2)
            dc += torch.einsum("mo,dmi->doi", dy, values)
        return [torch.cat(y)[:: self.step], torch.cat(dx)[:: self.step], dc]

    def torch_precision(self) -> contextlib.AbstractContextManager[None]:
        """Let torch multiply float32 as this problem says."""
        return float32_precision(self.precision)


def inputs(parameters: Mapping[str, Any], device: torch.device) -> Problem:
    """Standard normal x and dy; coefficients that keep y's variance near 1."""
    m, i, o, degree = (parameters[k] for k in ("M", "in", "out", "degree"))
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = getattr(torch, parameters["dtype"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, dy = normal(m, i).to(dtype), normal(m, o).to(dtype)
    c = (normal(degree + 1, o, i) / math.sqrt(i * (degree + 1))).to(dtype)
    needs = bool(parameters.get("gradients"))
    return Problem(x.requires_grad_(needs), c.requires_grad_(needs), dy, parameters["precision"], parameters.get("basis", "chebyshev"))


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    if actual.shape != expected.shape:
        return math.inf
    return float(torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected))


def check(problem: Problem, y: Tensor) -> float:
    """Error of y on rows spread over all of it."""
    return error(y[:: problem.step], problem.expected[0])


def check_gradients(problem: Problem, gradients: Sequence[Tensor]) -> float:
    """The largest error of dx (on rows spread over all of it) and dC ``[degree + 1, O, I]`` (or ``[(degree + 1) * I, O]``)."""
    dx, dc = gradients
    expected = problem.expected[2]
    if dc.ndim == 2:
        dc = dc.reshape(expected.shape[0], expected.shape[2], expected.shape[1]).permute(0, 2, 1)
    return max(error(dx[:: problem.step], problem.expected[1]), error(dc, expected))


def case(
    row: tuple[int, int, int, int],
    kind: str,
    *,
    gradients: bool = False,
    quick: bool = False,
    basis: str = "chebyshev",
) -> Case:
    """A row (M, in, out, degree); kind: "float32", "tf32" or "bfloat16"."""
    m, i, o, degree = row
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    products = 3 if gradients else 1
    moved = (m * i + m * o) * (2 if gradients else 1) + (degree + 1) * i * o * (2 if gradients else 1)
    label = f"{m}, {i}->{o}, {degree}" + ("" if kind == "float32" else f" {kind}") + ("" if basis == "chebyshev" else f" {basis}")
    return Case(
        label=label,
        parameters={
            "M": m,
            "in": i,
            "out": o,
            "degree": degree,
            "dtype": dtype,
            "precision": "high" if kind == "tf32" else "highest",
            "gradients": gradients,
            "basis": basis,
        },
        dtype=dtype,
        tolerance=TOLERANCES[kind],
        floor_bytes=moved * getattr(torch, dtype).itemsize,
        flops=2 * products * m * i * o * degree,
        quick=quick,
    )
