"""A function of a Hermitian Kronecker product times x: a product with eigenvectors, a scaling, and a product back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.kron.problems import TOLERANCES
from benchmarks.registry import Benchmark, Case, Contender, register
from fastkron_py.kron.operators.spectral import by_basis

# (size of each factor, columns of x)
ROWS = (((16,) * 4, 1024), ((32, 32, 32), 1), ((32, 32, 32), 1024), ((64, 64, 64), 1), ((64, 64, 64), 128), ((8,) * 8, 1))
CHECKED = 2  # columns


@dataclass(frozen=True)
class Spectrum:
    """Orthogonal vectors, values ``[n]`` and x ``[n, M]``."""

    vectors: list[Tensor]
    values: Tensor
    x: Tensor

    @property
    def inverses(self) -> list[Tensor]:
        """The vectors' inverses."""
        return [v.mT for v in self.vectors]


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> Spectrum:
    generator = torch.Generator(device=device).manual_seed(0)
    dtype, sizes = getattr(torch, parameters["dtype"]), parameters["sizes"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64)

    vectors = [torch.linalg.qr(draw(n, n))[0].to(dtype) for n in sizes]
    n = math.prod(sizes)
    return Spectrum(vectors, (draw(n).abs() + 1).to(dtype), draw(n, parameters["M"]).to(dtype))


def _separate(s: Spectrum) -> Tensor:
    """Each step a pass of its own."""
    rotated = fastkron_py.kron_matmul_left(s.inverses, s.x)
    return fastkron_py.kron_matmul_left(s.vectors, rotated.mul_(s.values.unsqueeze(-1)))


def _modes(vectors: list[Tensor], x: Tensor) -> Tensor:
    """One mode after the other by torch."""
    y = x
    before = 1
    for v in vectors:
        y = torch.matmul(v, y.reshape(before, v.shape[1], -1))
        before *= v.shape[0]
    return y.reshape(x.shape)


def _by_torch(s: Spectrum) -> Tensor:
    return _modes(s.vectors, _modes(s.inverses, s.x).mul_(s.values.unsqueeze(-1)))


def _error(s: Spectrum, y: Tensor) -> float:
    """Relative Frobenius error of the first columns, against torch in float64."""
    expected = _by_torch(Spectrum([v.double() for v in s.vectors], s.values.double(), s.x[:, :CHECKED].double()))
    return float(torch.linalg.norm(y[:, :CHECKED].double() - expected) / torch.linalg.norm(expected))


def _case(sizes: tuple[int, ...], columns: int, dtype: str) -> Case:
    return Case(
        label=f"{' x '.join(map(str, sizes))}, {columns} column{'s' * (columns > 1)}, {dtype}",
        parameters={"sizes": list(sizes), "M": columns, "dtype": dtype},
        dtype=dtype,
        tolerance=2 * TOLERANCES[dtype],  # two products
        quick=(sizes, columns) == ROWS[1],
    )


register(
    Benchmark(
        name="kron_function",
        description="A function of a symmetric Kronecker product times x, once its eigenvectors are known.",
        device="cuda",
        cases=[_case(*row, dtype) for dtype in ("float32", "float64") for row in ROWS],
        contenders=[
            Contender("fastkron_py", lambda s: lambda: by_basis(s.inverses, s.values, s.vectors, s.x), is_ours=True),
            Contender("kron_matmul_left, and a pass that scales", lambda s: lambda: _separate(s)),
            Contender("torch.matmul for each mode", lambda s: lambda: _by_torch(s)),
        ],
        inputs=_inputs,
        check=_error,
        baseline="torch.matmul for each mode",
    )
)
