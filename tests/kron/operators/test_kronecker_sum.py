"""`KroneckerSum` against the dense sum in float64 or complex128, forward and backward.

In double precision both sides err by rounding only, times the condition of the (well-conditioned) sums: 1e-10 relative, as for
`KroneckerProduct`.
"""

import itertools
import warnings

import pytest
import torch
from kronecker_cases import SQUARE, dense_sum, hermitian, near, random_factors

from fastkron_py import KroneckerProduct, KroneckerSum
from fastkron_py.kron.operators import algebra
from fastkron_py.reference import kron_dense
from fastkron_py.testing import assert_close


def drawn(shapes, dtype, device, kind):
    """Factors and masses: symmetric positive definite ones, or general ones far from singular."""
    factors = [f + 3 * f.shape[-1] * torch.eye(f.shape[-1], device=device) for f in random_factors(shapes, dtype, device, dominant=False)]
    masses = None
    if "mass" in kind:
        masses = random_factors([s[-2:] for s in shapes], dtype, device, dominant=False)
        masses = (
            hermitian([m / 2 for m in masses]) if "skew" not in kind else [m / 4 + 2 * torch.eye(len(m), device=device) for m in masses]
        )
    return hermitian(factors) if kind.startswith("symmetric") else factors, masses


@pytest.fixture
def merging(monkeypatch):
    """Neighbours of small operands are summed up too; the number of products is kept."""
    products = []
    monkeypatch.setattr(algebra, "LARGE", 0)
    monkeypatch.setattr(algebra, "LARGE_ON_GPU", 0)
    for name in ("kron_matmul", "kron_matmul_left"):
        original = getattr(algebra, name)
        monkeypatch.setattr(algebra, name, lambda *a, original=original, **k: products.append(1) or original(*a, **k))
    return products


@pytest.mark.parametrize("masses", [(), (0, 1, 2, 3), (2,)], ids=["no masses", "masses", "one mass"])
@pytest.mark.parametrize(
    ("factors", "products"),
    [((2, 4, 2, 5), 2), ((2, -2, 3, 2), 3), ((2, 2, 2, 2), 1), ((5, 7, 3, 3), 3), ((-2, -3, 2, 2), 3)],
    ids=str,
)
def test_neighbours_are_summed_up(factors, products, masses, dtype, device, merging):
    """Fewer products, the same numbers, derivatives to every factor and mass; integers (negative here) keep terms of their own."""
    sizes = [abs(f) for f in factors]
    whole, _ = drawn([(2, p, p) if i == 3 else (p, p) for i, p in enumerate(sizes)], dtype, device, "general")
    units = random_factors([(p, p) for p in sizes], dtype, device, dominant=False)
    given = [p if f < 0 else w for f, p, w in zip(factors, sizes, whole, strict=True)]
    eyes = [torch.eye(p, dtype=dtype, device=device) for p in sizes]
    weights = [units[i] if i in masses else p for i, p in enumerate(sizes)] if masses else None
    dense = dense_sum(
        [e if isinstance(g, int) else g for g, e in zip(given, eyes, strict=True)],
        [e if isinstance(w, int) else w for w, e in zip(weights or sizes, eyes, strict=True)],
    )
    x = torch.randn(dense.shape[-1], 3, dtype=dtype, device=device)
    s = KroneckerSum(given, masses=weights)
    near(s @ x, dense @ x)
    assert len(merging) <= products
    near(x.mT @ s, x.mT @ dense)
    tensors = [t.requires_grad_() for t in (x, *given, *(weights or [])) if isinstance(t, torch.Tensor)]

    def product(x, *own):
        own = iter(own)
        filled = [next(own) if isinstance(g, torch.Tensor) else g for g in given]
        loads = None if weights is None else [next(own) if isinstance(w, torch.Tensor) else w for w in weights]
        return KroneckerSum(filled, masses=loads) @ x

    torch.autograd.gradcheck(product, tensors, fast_mode=True)
    torch.autograd.gradgradcheck(product, tensors, fast_mode=True)


def test_large_operands_take_fewer_products(device):
    """From some size on, and in float32 with its usual error."""
    factors = random_factors([(4, 4)] * 6, torch.float32, device, dominant=False)
    x = torch.randn(4096, 32, device=device)
    s = KroneckerSum(factors)
    near = torch.stack([KroneckerProduct([4**i, f, 4 ** (5 - i)]).double() @ x.double() for i, f in enumerate(factors)]).sum(0)
    assert_close(s @ x, near, magnitude=near.abs().max().expand_as(near))


def test_eigh(dtype, device):
    for shapes, mass in itertools.product(SQUARE, [False, True]):
        factors, masses = drawn(shapes, dtype, device, "symmetric, mass" if mass else "symmetric")
        s, dense = KroneckerSum(factors, masses=masses), dense_sum(factors, masses)
        unit = kron_dense(masses) if masses else torch.eye(dense.shape[-1], dtype=dtype, device=device)
        values, vectors = s.eigh()
        assert isinstance(vectors, KroneckerProduct)
        assert values.dtype == torch.float64
        v = vectors.to_dense()
        near(dense @ v, unit @ v * values[..., None, :])
        near(v.mH @ unit @ v, torch.eye(v.shape[-1], dtype=dtype, device=device).expand_as(v))
        near(s.eigvalsh(), values)


# ---- derivatives ---------------------------------------------------------------------------------------------------------------


def test_gradients_at_equal_eigenvalues(dtype):
    """Multiples of the identity, where derivatives of eigenvectors are infinite: torch's own formula of `eigh` gives NaN."""
    for name in ("solve", "logdet"):
        factors = [(c * torch.eye(p, dtype=dtype)).requires_grad_() for c, p in ((2.0, 2), (1.0, 3))]
        x = torch.randn(6, 2, dtype=dtype, requires_grad=True)

        def function(x, *fs, name=name):
            s = KroneckerSum([(f + f.mH) / 2 for f in fs])
            return s.solve(x) if name == "solve" else s.logdet()

        assert torch.autograd.gradcheck(function, (x, *factors), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (x, *factors), fast_mode=True)
        values, vectors = KroneckerSum([(f + f.mH) / 2 for f in factors]).eigh()
        through = vectors @ ((vectors.mH @ x) / values[:, None])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert any(not g.isfinite().all() for g in torch.autograd.grad(through.abs().sum(), factors))


# ---- dtypes, arrays, conversions ------------------------------------------------------------------------------------------------


def test_large_sums_are_never_built():
    """2**24 points: the residual of a solve, and a determinant by its closed form."""
    line = 2 * torch.eye(64, dtype=torch.float64) - torch.diag(torch.ones(63, dtype=torch.float64), 1)
    line = line - torch.diag(torch.ones(63, dtype=torch.float64), -1)
    s = KroneckerSum([line] * 3)
    b = torch.ones(64**3, dtype=torch.float64)
    near(s @ s.solve(b), b)
    k = torch.arange(1, 65, dtype=torch.float64) * torch.pi / 65
    values = 2 - 2 * k.cos()
    near(s.logdet(), (values[:, None, None] + values[:, None] + values).log().sum())


def test_traces_build_no_identity(device):
    """Identities of any size, alone in a term too, and as masses."""
    a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64, device=device)
    assert float(KroneckerSum([2**40, 2**40, a]).trace()) == 2.0**80 * 9
    assert KroneckerSum([8000, a]).trace() == 8000 * 7
    s = KroneckerSum([3, a], masses=[torch.eye(3, dtype=torch.float64, device=device) + 1, 2])
    assert s.trace() == s.to_dense().trace()


def test_a_batched_mass_of_one_factor(device):
    """It is no part of the sum, but gives it its batch."""
    a, m = (torch.randn(*batch, 3, 3, dtype=torch.float64, device=device) for batch in ((), (2,)))
    s = KroneckerSum([a], masses=[m])
    assert s.shape == (2, 3, 3)
    near(s.to_dense(), a.expand(2, 3, 3))
    near(s.trace(), a.trace().expand(2))
    near(s.diagonal(), a.diagonal().expand(2, 3))
