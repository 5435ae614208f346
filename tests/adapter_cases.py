"""Problems of LoKr products: shapes and random operands.

Helper of several test files: no tests here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Matrix = Tensor | tuple[Tensor, Tensor]


class LoKrCase(NamedTuple):
    """Sizes of x ``[*rows, in1 * in2]`` and of the factors; a rank of None is a matrix."""

    rows: tuple[int, ...]
    w1: tuple[int, int]
    w2: tuple[int, int]
    rank1: int | None = None
    rank2: int | None = None


CASES = [
    LoKrCase((5,), (3, 2), (4, 6)),
    LoKrCase((2, 3), (4, 4), (8, 5), rank2=1),
    LoKrCase((7,), (2, 6), (9, 3), rank1=1),
    LoKrCase((3,), (5, 4), (6, 8), rank1=2, rank2=2),
    LoKrCase((), (2, 3), (5, 4), rank2=2),
    LoKrCase((2, 1, 2), (1, 1), (7, 3)),
    LoKrCase((40,), (8, 8), (16, 16), rank2=3),
]


def case_id(case: LoKrCase) -> str:
    """A case in a test's name."""
    ranks = "_".join(str(r) for r in (case.rank1, case.rank2) if r is not None)
    return f"{case.rows}-{case.w1}-{case.w2}" + (f"-rank{ranks}" if ranks else "")


def matrix(sizes: tuple[int, int], rank: int | None, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Matrix:
    """A random factor."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    return draw(*sizes) if rank is None else (draw(sizes[0], rank), draw(rank, sizes[1]))


def lokr_problem(
    case: LoKrCase,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    factor_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Matrix, Matrix, Tensor]:
    """x, w1, w2 and base."""
    made = factor_dtype or dtype
    w1, w2 = matrix(case.w1, case.rank1, made, device, generator), matrix(case.w2, case.rank2, made, device, generator)
    x = torch.randn(*case.rows, case.w1[1] * case.w2[1], generator=generator, dtype=torch.float64).to(dtype).to(device)
    base = torch.randn(*case.rows, case.w1[0] * case.w2[0], generator=generator, dtype=torch.float64).to(dtype).to(device)
    return x, w1, w2, base


def leaves_of(*given: Any) -> list[Tensor]:
    """The tensors among arguments, pairs opened."""
    found: list[Tensor] = []
    for g in given:
        found += list(g) if isinstance(g, tuple) else [g]
    return found


def mapped(function: Any, w: Matrix) -> Matrix:
    """A factor with a function applied to its tensors."""
    return (function(w[0]), function(w[1])) if isinstance(w, tuple) else function(w)
