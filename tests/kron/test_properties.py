"""Properties of the Kronecker verbs on problems that hypothesis draws."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes_list import Case, assert_near, call, expected, problem
from torch import Tensor

import fastkron_py
from fastkron_py import kron_matmul, kron_matmul_left
from fastkron_py.runtime.backend import is_interpreting

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MANY = settings(max_examples=200)
SOME = settings(max_examples=60)
FEW = settings(max_examples=8)
COMPILED = settings(max_examples=60)  # each compiles kernels of its own, in about a second


@st.composite
def factor_shapes(draw: st.DrawFn, largest: int = 4096) -> tuple[tuple[int, int], ...]:
    """One to five factors with sizes of 1 to 9, and at most ``largest`` rows and columns in all."""
    shapes: list[tuple[int, int]] = []
    rows = columns = 1
    for _ in range(draw(st.integers(1, 5))):
        p = draw(st.integers(1, min(9, largest // rows)))
        q = draw(st.integers(1, min(9, largest // columns)))
        rows, columns = rows * p, columns * q
        shapes.append((p, q))
    return tuple(shapes)


@st.composite
def batch_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two batch shapes that broadcast, of up to two dimensions of 1 to 3."""
    full = draw(st.lists(st.integers(1, 3), max_size=2))

    def part() -> tuple[int, ...]:
        kept = full[draw(st.integers(0, len(full))) :]
        return tuple(size if draw(st.booleans()) else 1 for size in kept)

    return part(), part()


@st.composite
def cases(draw: st.DrawFn, largest: int = 4096, batched: bool = True) -> Case:
    """A problem of at most 16 * largest elements."""
    x_batch, factor_batch = draw(batch_pairs()) if batched else ((), ())
    case = Case(draw(st.integers(0, 5)), draw(factor_shapes(largest)), x_batch, factor_batch)
    return case if case.elements <= 16 * largest else case._replace(rows=1, x_batch=(), factor_batch=())


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "every_second": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "batch_last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "offset": lambda t: torch.cat([torch.full_like(t[..., :1, :], math.nan), t], -2)[..., 1:, :],
}
layouts = st.sampled_from(sorted(LAYOUTS))
seeds = st.integers(0, 2**31)


def make(case: Case, seed: int, left: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    return problem(case, dtype, DEVICE, torch.Generator().manual_seed(seed), left=left)


def compare(case: Case, dtype: torch.dtype, left: bool, changes: tuple[str, str], seed: int, scalars: tuple[float, float]) -> None:
    """One drawn problem against the reference: result, dtype and contiguity."""
    x, factors = make(case, seed, left, dtype)
    x = LAYOUTS[changes[0]](x)
    factors = [LAYOUTS[changes[1]](f) for f in factors]
    z = torch.linspace(-1, 1, expected(x, factors, left=left).shape[-1], device=DEVICE).to(dtype)
    options = {"alpha": scalars[0], "beta": scalars[1], "z": z}
    y = call(left)(x, factors, **options)
    wanted = expected(x, factors, left=left, **options)
    assert y.dtype == dtype
    assert y.is_contiguous()
    # A few elements may cancel as a whole, and their relative error then grows as their sums of absolute values
    # exceed their sums; many elements do not.
    scale = 1.0
    if wanted.numel() > 0 and case.elements <= 200:
        sizes = {name: abs(value) for name, value in options.items()}
        sums = expected(x.abs(), [f.abs() for f in factors], left=left, **sizes)
        scale = float(sums.norm() / wanted.norm().clamp_min(1e-300))
    assert_near(y, wanted, scale=scale)


SCALARS = st.tuples(st.sampled_from([1.0, -0.5, 3.0]), st.sampled_from([0.0, 1.0, -0.25]))
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@MANY
@given(cases(), DTYPES, st.booleans(), st.tuples(layouts, layouts), seeds, SCALARS)
def test_equals_reference_torch(
    case: Case, dtype: torch.dtype, left: bool, changes: tuple[str, str], seed: int, scalars: tuple[float, float]
) -> None:
    with fastkron_py.backend("torch"):
        compare(case, dtype, left, changes, seed, scalars)


@(SOME if is_interpreting() else COMPILED)
@given(cases(256 if is_interpreting() else 4096), DTYPES, st.booleans(), st.tuples(layouts, layouts), seeds, SCALARS)
def test_equals_reference_triton(
    case: Case, dtype: torch.dtype, left: bool, changes: tuple[str, str], seed: int, scalars: tuple[float, float]
) -> None:
    with fastkron_py.backend("triton"):
        compare(case, dtype, left, changes, seed, scalars)


@FEW
@given(cases(128, batched=False), seeds)
def test_transpose_identity(backend_name: str, case: Case, seed: int) -> None:
    """<y, x K> = <y K^T, x>, and both equal <K x^T, y^T> of the left form."""
    x, factors = make(case, seed)
    product = kron_matmul(x, factors)
    y = torch.linspace(-1, 1, product.numel(), dtype=x.dtype, device=x.device).reshape(product.shape)
    transposed = [f.mT for f in factors]
    there = (y * product).sum()
    torch.testing.assert_close((kron_matmul(y, transposed) * x).sum(), there, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close((kron_matmul_left(transposed, x.mT) * y.mT).sum(), there, rtol=1e-10, atol=1e-11)


@FEW
@given(cases(128, batched=False), seeds, st.data())
def test_mixed_product(backend_name: str, case: Case, seed: int, data: st.DataObject) -> None:
    """(x K_A) K_B = x (A1 B1 (x) ... (x) AN BN)."""
    x, a = make(case, seed)
    b_shapes = tuple((q, data.draw(st.integers(1, 3))) for _, q in case.factors)
    _, b = make(Case(1, b_shapes), seed + 1)
    stepwise = kron_matmul(kron_matmul(x, a), b)
    torch.testing.assert_close(stepwise, kron_matmul(x, [f @ g for f, g in zip(a, b, strict=True)]), rtol=1e-10, atol=1e-12)


@FEW
@given(cases(128, batched=False), seeds, st.data())
def test_splitting_a_product(backend_name: str, case: Case, seed: int, data: st.DataObject) -> None:
    """Neighbouring factors may be multiplied out first, and identities put between factors change nothing."""
    x, factors = make(case, seed)
    y = kron_matmul(x, factors)
    one = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    at = data.draw(st.integers(0, len(factors)))
    torch.testing.assert_close(kron_matmul(x, [*factors[:at], one, *factors[at:]]), y, rtol=1e-12, atol=1e-13)
    if len(factors) > 1:
        at = min(at, len(factors) - 2)
        merged = torch.kron(factors[at].contiguous(), factors[at + 1].contiguous())
        torch.testing.assert_close(kron_matmul(x, [*factors[:at], merged, *factors[at + 2 :]]), y, rtol=1e-10, atol=1e-12)
