"""Factors beside identities: one mode in the middle of x, and two with a mode between them."""

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

# The last four: each dimension of one tensor with four.
SIZES: tuple[tuple[int | str, ...], ...] = (
    *((64, "64", 64), (128, "128", 128), (1024, "16", 16), (4096, "64"), ("64", 64, "64"), ("16", 256, "16")),
    *(("64", 64, 128, 128), (64, "64", 128, 128), (64, 64, "128", 128), (64, 64, 128, "128")),
)
ELEMENTS = 2**26  # of x
CHECKED_ROWS = 2


@dataclass(frozen=True)
class Modes:
    """x ``[M, K]`` and factors, square matrices and integers."""

    x: Tensor
    factors: list[Tensor | int]

    @property
    def dense(self) -> list[Tensor]:
        """The factors with identities as matrices."""
        return [torch.eye(f, dtype=self.x.dtype, device=self.x.device) if isinstance(f, int) else f for f in self.factors]

    @property
    def tensor(self) -> Tensor:
        """x with a dimension for each factor."""
        return self.x.unflatten(1, [f.shape[0] for f in self.dense])

    @property
    def of(self) -> dict[int, Tensor]:
        """The matrices by dimension of that tensor."""
        return {i: f for i, f in enumerate(self.factors, start=1) if isinstance(f, Tensor)}


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> Modes:
    generator = torch.Generator(device=device).manual_seed(0)
    dtype, sizes = getattr(torch, parameters["dtype"]), [int(s) for s in parameters["sizes"]]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    factors = [s if isinstance(s, int) else draw(int(s), int(s)) for s in parameters["sizes"]]
    return Modes(draw(parameters["M"], math.prod(sizes)), factors)


def _einsum(p: Modes) -> Tensor:
    """One matrix after the other, as a user would write it."""
    y = p.tensor
    for dim, f in p.of.items():
        y = torch.einsum("apb,pq->aqb", y.reshape(-1, f.shape[0], y[(0,) * (dim + 1)].numel()), f).reshape(y.shape)
    return y.reshape(p.x.shape)


def _error(p: Modes, y: Tensor) -> float:
    """Relative Frobenius error of the first rows, against einsum in float64."""
    expected = _einsum(Modes(p.x[:CHECKED_ROWS].double(), [f.double() if isinstance(f, Tensor) else f for f in p.factors]))
    return float(torch.linalg.norm(y.reshape(p.x.shape)[:CHECKED_ROWS].double() - expected) / torch.linalg.norm(expected))


def _case(sizes: tuple[int | str, ...], dtype: str) -> Case:
    width = math.prod([int(s) for s in sizes])
    rows = max(1, ELEMENTS // width)
    return Case(
        label=" (x) ".join(s if isinstance(s, str) else f"I_{s}" for s in sizes) + f" {dtype}",
        parameters={"M": rows, "sizes": list(sizes), "dtype": dtype},
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        floor_bytes=2 * rows * width * getattr(torch, dtype).itemsize,
        flops=sum(2 * rows * width * int(s) for s in sizes if isinstance(s, str)),
        quick=sizes == SIZES[0],
    )


register(
    Benchmark(
        name="kron_identity",
        description="Factors beside identities: integers, the same modes by mode_matmul, dense identities, einsum.",
        device="cuda",
        cases=[_case(sizes, dtype) for dtype in ("float32", "bfloat16") for sizes in SIZES],
        contenders=[
            Contender("fastkron_py", lambda p: lambda: fastkron_py.kron_matmul(p.x, p.factors), is_ours=True),
            Contender("mode_matmul", lambda p: lambda x=p.tensor, of=p.of: fastkron_py.mode_matmul(x, of)),
            Contender("dense identities", lambda p: lambda factors=p.dense: fastkron_py.kron_matmul(p.x, factors)),
            Contender("einsum", lambda p: lambda: _einsum(p)),
        ],
        inputs=_inputs,
        check=_error,
        baseline="einsum",
        has_floor=True,
    )
)
