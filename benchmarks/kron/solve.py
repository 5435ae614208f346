"""Linear systems with Kronecker structure: a sum, and a product with a multiple of the identity, by eigenbases of the factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.registry import Benchmark, Call, Case, Contender, register

SHIFT = 0.1
# (kind, size of each factor, whether a dense solve fits): systems of 2^13 unknowns, and of 2^24.
ROWS = (("sum", (16, 16, 32), True), ("sum", (256, 256, 256), False), ("shifted", (16, 16, 32), True), ("shifted", (256, 256, 256), False))
TOLERANCE = 1e-9


@dataclass(frozen=True)
class System:
    """``A u = b`` with A the Kronecker sum of the factors, or their Kronecker product plus ``SHIFT I``."""

    is_sum: bool
    factors: list[Tensor]
    b: Tensor

    def operator(self) -> Any:
        """A, without anything computed of it."""
        if self.is_sum:
            return fastkron_py.KroneckerSum(self.factors)
        return fastkron_py.KroneckerProduct(self.factors).add_diagonal(SHIFT)

    def apply(self, u: Tensor) -> Tensor:
        """``A u``, one dimension after the other by torch."""
        grid = y = u.reshape([f.shape[0] for f in self.factors])
        terms = []
        for i, f in enumerate(self.factors):
            term = torch.movedim(torch.tensordot(f, grid if self.is_sum else y, dims=([1], [i])), 0, i)
            terms.append(term)
            y = term
        return (torch.stack(terms).sum(0) if self.is_sum else y + SHIFT * grid).reshape(u.shape)


def _laplacian(n: int, device: torch.device) -> Tensor:
    off = torch.ones(n - 1, dtype=torch.float64, device=device)
    return (n + 1) ** 2 * (2 * torch.eye(n, dtype=torch.float64, device=device) - off.diag(1) - off.diag(-1))


def _kernel(n: int, device: torch.device) -> Tensor:
    """An exponential covariance of n points of the unit interval."""
    t = torch.linspace(0, 1, n, dtype=torch.float64, device=device)
    return torch.exp(-8 * (t[:, None] - t).abs())


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> System:
    is_sum = parameters["kind"] == "sum"
    factors = [(_laplacian if is_sum else _kernel)(n, device) for n in parameters["sizes"]]
    b = torch.randn(math.prod(parameters["sizes"]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return System(is_sum, factors, b.to(device))


def _residual(s: System, u: Tensor) -> float:
    """``|A u - b| / |b|``."""
    return float(torch.linalg.norm(s.apply(u) - s.b) / torch.linalg.norm(s.b))


def _dense(s: System) -> Call:
    matrix = s.operator().to_dense()
    return lambda: torch.cholesky_solve(s.b[:, None], torch.linalg.cholesky(matrix))[:, 0]


def _case(kind: str, sizes: tuple[int, ...]) -> Case:
    name = {"sum": "Kronecker sum", "shifted": f"Kronecker product + {SHIFT} I"}[kind]
    return Case(
        label=f"{name}, {' x '.join(map(str, sizes))}",
        parameters={"kind": kind, "sizes": list(sizes), "dtype": "float64"},
        dtype="float64",
        tolerance=TOLERANCE,
        quick=math.prod(sizes) <= 2**13,
    )


register(
    Benchmark(
        name="kron_solve",
        description="Linear systems of a Kronecker sum, and of a Kronecker product plus a multiple of the identity, float64.",
        device="cuda",
        cases=[_case(kind, sizes) for kind, sizes, _ in ROWS],
        contenders=[
            Contender("fastkron_py", lambda s: lambda: s.operator().solve(s.b), is_ours=True),
            Contender(
                "Cholesky of the dense matrix", _dense, labels=frozenset(_case(kind, sizes).label for kind, sizes, fits in ROWS if fits)
            ),
        ],
        inputs=_inputs,
        check=_residual,
        baseline="Cholesky of the dense matrix",
        notes=("The error is the residual over the right-hand side. A solve computes the factors' eigenbases too.",),
    )
)
