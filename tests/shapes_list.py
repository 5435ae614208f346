"""The Kronecker problems that the suite runs, and what a right answer to them is.

Helper of several test files: no tests here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastkron_py import kron_matmul, kron_matmul_left, reference
from fastkron_py.runtime.backend import is_interpreting
from fastkron_py.testing import assert_close

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)

Shape = tuple[int, ...]


class Case(NamedTuple):
    """One problem: x ``[*x_batch, rows, prod P_i]`` (right form) and factors ``[*factor_batch, P_i, Q_i]``."""

    rows: int
    factors: tuple[Shape, ...]
    x_batch: Shape = ()
    factor_batch: Shape = ()

    @property
    def name(self) -> str:
        groups: list[list[Any]] = []  # runs of equal factors, [shape, length]
        for f in self.factors:
            if groups and groups[-1][0] == f:
                groups[-1][1] += 1
            else:
                groups.append([f, 1])
        text = "-".join(f"{p}x{q}" + (f"^{n}" if n > 1 else "") for (p, q), n in groups)
        batch = f"_b{list(self.x_batch)}{list(self.factor_batch)}".replace(" ", "") if self.x_batch or self.factor_batch else ""
        return f"m{self.rows}_{text}{batch}"

    @property
    def elements(self) -> int:
        """Size of the largest of x, the intermediates and the result."""
        widths, width = [], math.prod(p for p, _ in self.factors)
        for p, q in reversed(self.factors):
            widths.append(width)
            width = width // p * q
        count = math.prod(torch.broadcast_shapes(self.x_batch, self.factor_batch))
        return count * self.rows * max(*widths, width)


def power(rows: int, p: int, q: int, n: int) -> Case:
    return Case(rows, ((p, q),) * n)


# FastKron's own test shapes: squares, with M among 1, 3, 13, 16, 17, 20.
SQUARES = [
    *(power(m, 1, 1, n) for m, n in ((1, 1), (17, 9))),
    *(power(m, 2, 2, n) for m, n in ((1, 1), (3, 5), (16, 9))),
    *(power(m, 3, 3, n) for m, n in ((13, 1), (1, 3), (3, 6))),
    *(power(m, 4, 4, n) for m, n in ((17, 2), (3, 4), (1, 6))),
    *(power(m, 5, 5, n) for m, n in ((20, 2), (3, 4))),
    *(power(m, 6, 6, n) for m, n in ((13, 2), (1, 4))),
    *(power(m, 7, 7, n) for m, n in ((16, 2), (3, 3))),
    *(power(m, 8, 8, n) for m, n in ((17, 1), (20, 2), (3, 3), (1, 4))),
    *(power(m, 12, 12, n) for m, n in ((13, 2), (1, 3))),
    *(power(m, 16, 16, n) for m, n in ((17, 2), (3, 3))),
    *(power(m, 24, 24, n) for m, n in ((3, 2), (1, 3))),
    *(power(m, 32, 32, n) for m, n in ((20, 1), (17, 2), (1, 3))),
    power(3, 50, 50, 2),
    *(power(m, 64, 64, n) for m, n in ((16, 1), (3, 2))),
    *(power(m, 128, 128, n) for m, n in ((13, 1), (1, 2))),
    *(power(m, 255, 255, n) for m, n in ((13, 1), (1, 2))),
    *(power(m, 512, 512, n) for m, n in ((3, 1), (1, 2))),
]
RECTANGULAR = [
    *(power(m, 2, 4, n) for m, n in ((1, 1), (13, 3), (3, 6))),
    *(power(m, 5, 1, n) for m, n in ((17, 1), (20, 4))),
    *(power(m, 1, 4, n) for m, n in ((20, 1), (3, 5))),
    *(Case(m, ((2, 3), (5, 2), (6, 4))) for m in (1, 16, 17)),
]
FACTORS_OF_BATCHES = ((4, 3), (2, 5))
BATCHES = [
    Case(3, FACTORS_OF_BATCHES, (2,), ()),
    Case(3, FACTORS_OF_BATCHES, (), (2,)),
    Case(13, FACTORS_OF_BATCHES, (2, 3), (2, 3)),
    Case(3, FACTORS_OF_BATCHES, (2, 1), (3,)),
    Case(1, FACTORS_OF_BATCHES, (2, 1), (2, 4)),
    Case(3, FACTORS_OF_BATCHES, (3, 3, 1), (3, 1, 4)),
]
# What FastKron's list lacks: widths of 1 beside others, primes, unequal, very many factors.
ODD = [
    Case(3, ((1, 1), (7, 7), (1, 1))),
    Case(5, ((1, 3), (11, 1), (1, 2), (4, 5))),
    Case(3, ((7, 5), (11, 13), (3, 2))),
    Case(2, ((31, 37), (29, 23))),
    Case(17, ((2, 2), (64, 64))),
    Case(17, ((64, 64), (2, 2))),
    Case(3, ((100, 3), (3, 100))),
    Case(2, ((127, 1), (1, 127))),
    Case(1, ((2, 128), (128, 2))),
    Case(2, ((8, 8), (9, 9), (10, 10))),
    Case(70, ((3, 3), (16, 16))),
    *(power(3, 2, 2, n) for n in (10, 11)),
    power(1, 2, 2, 12),
    Case(2, ((1, 1),) * 26 + ((2, 2),) * 12 + ((1, 1),) * 26),  # 64 factors
]
CASES = [*SQUARES, *RECTANGULAR, *BATCHES, *ODD]

# Dimensions of size 0: nothing to compute, or sums over nothing.
EMPTY = [
    Case(0, ((3, 2), (2, 4))),
    Case(3, ((0, 2), (2, 4))),
    Case(3, ((3, 0), (2, 4))),
    Case(3, ((0, 0),)),
    Case(3, ((0, 2), (2, 0))),
    Case(3, ((3, 2), (2, 4)), (0,), ()),
    Case(3, ((3, 2), (2, 4)), (), (0,)),
    Case(3, ((3, 2), (2, 4)), (2, 1), (0,)),
]

# A program of an interpreted kernel costs milliseconds, and its number grows with the elements.
INTERPRETED_ELEMENTS = 40_000


def ids(value: Any) -> str | None:
    """Parameter names: of cases, dtypes, functions and tuples of names."""
    if isinstance(value, Case):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple) and all(isinstance(v, str) for v in value):
        return "-".join(value) or "none"
    return getattr(value, "__name__", None)


def on_backends(cases: Iterable[Case], limit: int = INTERPRETED_ELEMENTS, factors: int = 64) -> pytest.MarkDecorator:
    """Parametrise over ``backend_name`` and ``case``; the longest-running cases are left out for interpreted Triton.

    Each case left out has a smaller twin of the same widths or the same kind in `CASES`.

    Args:
        cases: problems.
        limit: most elements when interpreted.
        factors: most factors when interpreted.
    """
    few = [case for case in cases if case.elements <= limit and len(case.factors) <= factors]
    return backend_pairs("case", cases, few)


def backend_pairs(argument: str, values: Iterable[Any], interpreted: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise over ``backend_name`` and an argument, which for interpreted Triton takes fewer values."""
    pairs = [("torch", value) for value in values]
    pairs += [("triton", value) for value in (interpreted if is_interpreting() else values)]
    return pytest.mark.parametrize(("backend_name", argument), pairs, indirect=["backend_name"], ids=ids)


def problem(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator, *, left: bool = False, integers: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Random x and factors of a case (in the left form factors are ``[Q_i, P_i]`` and x ``[K, rows]``).

    x is normal, factors are +-[0.5, 1.5) over ``sqrt(P_i)``: results stay of order 1 even after 64 factors, so that
    half types neither overflow nor lose precision to denormals. With ``integers`` all are small integers whose every
    partial sum is exact (see `_integers`).
    """
    k = math.prod(p for p, _ in case.factors)
    # Drawn in the right form's layout, then stored anew: the left form's tensors are contiguous too.
    if integers:
        share = max(1, math.floor(_exact_limit(dtype) ** (1 / len(case.factors))))
        x = torch.randint(-1, 2, (*case.x_batch, case.rows, k), generator=generator).to(dtype)
        factors = [_integers((*case.factor_batch, p, q), min(share, 1024), generator).to(dtype) for p, q in case.factors]
    else:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        x = torch.randn(*case.x_batch, case.rows, k, dtype=wide, generator=generator).to(dtype)
        factors = [(_away_from_zero((*case.factor_batch, p, q), wide, generator) / max(p, 1) ** 0.5).to(dtype) for p, q in case.factors]
    if left:
        x, factors = x.mT.contiguous(), [f.mT.contiguous() for f in factors]
    return x.to(device), [f.to(device) for f in factors]


def _away_from_zero(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random signs or phases, sizes uniform in [0.5, 1.5)."""
    direction = torch.randn(shape, dtype=dtype, generator=generator).sgn()
    return direction * (0.5 + torch.rand(shape, dtype=torch.float64, generator=generator))


def _exact_limit(dtype: torch.dtype) -> int:
    """A size up to which integers are exact in every kernel for dtype.

    All integers up to 2^11 in float16, 2^8 in bfloat16, 2^24 in float32; the limit of float32 is lower since
    tf32x3 splits a number into two parts of 11 bits.
    """
    return {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**20}.get(dtype, 2**40)


def _integers(shape: Shape, column_sum: int, generator: torch.Generator) -> Tensor:
    """Integer matrices whose columns' absolute values sum to at most column_sum: what bounds every partial sum."""
    *batch, p, q = shape
    f = torch.zeros(shape, dtype=torch.float64)
    if f.numel() == 0:
        return f
    draws = min(column_sum, 3 * p)
    rows = torch.randint(p, (*batch, draws, q), generator=generator)
    signs = torch.randint(0, 2, rows.shape, generator=generator).double() * 2 - 1
    return f.scatter_add_(-2, rows, signs)


def wide(t: Any) -> Any:
    """Upcast to float64 or complex128, for a reference."""
    if isinstance(t, Tensor):
        return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)
    if isinstance(t, list | tuple):
        return [wide(s) for s in t]
    return t


def call(left: bool) -> Callable[..., Tensor]:
    """`kron_matmul` or `kron_matmul_left`, both called as ``(x, factors, ...)``."""

    def right_form(x: Tensor, factors: Sequence[Tensor], **options: Any) -> Tensor:
        return kron_matmul(x, factors, **options)

    def left_form(x: Tensor, factors: Sequence[Tensor], **options: Any) -> Tensor:
        return kron_matmul_left(factors, x, **options)

    return left_form if left else right_form


def expected(x: Tensor, factors: Sequence[Tensor], *, left: bool = False, **options: Any) -> Tensor:
    """The reference in float64 (complex128) of the numbers as they are."""
    return reference.kron_matmul(wide(x), wide(list(factors)), left=left, **{k: wide(v) for k, v in options.items()})


# Largest relative Frobenius error. float32 and float64: as promised, whatever kernel runs. A half type has
# unit roundoff u = 2^-11 or 2^-8 and is rounded once for each pass over x: independent errors of at most u
# (0.4 u in the mean square) add up like their root, and 4 u stands for far more passes than any case has.
TOLERANCES = {
    torch.float16: 4 * 2.0**-11,
    torch.bfloat16: 4 * 2.0**-8,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float64: 1e-14,
    torch.complex128: 1e-14,
}


def relative_error(result: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the error over that of the float64 reference; NaN if any element is NaN."""
    error = torch.linalg.vector_norm(result.detach().to(wanted.dtype) - wanted)
    return float(error / torch.linalg.vector_norm(wanted)) if wanted.any() else float(error)


def assert_near(result: Tensor, wanted: Tensor, *, scale: float = 1.0) -> None:
    """`assert_close` at this suite's tolerances: the same for every number of factors, times scale."""
    tolerance = TOLERANCES[result.dtype] * scale
    assert_close(result.detach(), wanted.detach(), rms_tol=tolerance, max_tol=4 * tolerance)


def assert_same(result: Tensor, wanted: Tensor) -> None:
    """Bit for bit (NaN equal to NaN), same dtype and shape."""
    torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
