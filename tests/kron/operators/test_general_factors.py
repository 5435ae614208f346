"""Solves and determinants of factors whose eigenvectors are far from orthogonal, or that have too few of them.

The sums and products are well-conditioned: dense solves in float64 or complex128 err by rounding only, and so must these, however large the
condition of the eigenvectors is.
"""

import itertools
import math

import pytest
import torch
from kronecker_cases import dense_sum, near, random_factors

from fastkron_py import KroneckerProduct, KroneckerSum
from fastkron_py.kron.operators.pencil import schur, solve_triangular
from fastkron_py.reference import kron_dense


def transport(n, p):
    """Diffusion and strong transport: eigenvectors of condition ``p ** ((n - 1) / 2)``, of a norm of about 4."""
    ones = torch.ones(n - 1, dtype=torch.float64)
    return ((2 + p) * torch.eye(n, dtype=torch.float64) - torch.diag(ones, 1) - (1 + p) * torch.diag(ones, -1)) / p


def jordan(n, value=2.0):
    return value * torch.eye(n, dtype=torch.float64) + torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)


def rotated(f):
    """The same matrix in another basis, where rounding hides that it is defective."""
    q = torch.linalg.qr(torch.randn(f.shape, dtype=torch.float64)).Q
    return q @ f @ q.mT


KINDS = {
    "refined": lambda: [transport(6, 30.0)] * 3,
    "transport": lambda: [transport(6, 3000.0)] * 3,
    "of larger condition": lambda: [transport(8, 3000.0)] * 2,
    "critical damping": lambda: [torch.tensor([[0.0, 1.0], [-1.0, -2.0]], dtype=torch.float64)] * 2,
    "Jordan": lambda: [jordan(4), jordan(5).mT, jordan(3)],
    "rotated": lambda: [rotated(jordan(4)), rotated(jordan(5)), jordan(3)],
    "upwind": lambda: [10 * torch.eye(13, dtype=torch.float64) - 10 * torch.diag(torch.ones(12, dtype=torch.float64), -1)] * 2,
    "a batch": lambda: [torch.stack([transport(6, 3000.0), jordan(6), torch.eye(6).double()]), jordan(4), transport(5, 3000.0)],
    "one factor": lambda: [jordan(6)],
}


@pytest.fixture(params=KINDS)
def factors(request, device):
    return [f.to(device) for f in KINDS[request.param]()]


@pytest.fixture(params=[torch.float64, torch.complex128, torch.float32, torch.complex64], ids=["double", "zdouble", "single", "csingle"])
def dtype(request):
    return request.param


def wide(t):
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def check_solve(operator, dense):
    """x errs by some roundings times the condition of the matrix."""
    b = torch.randn(dense.shape[-1], 2, dtype=operator.dtype, device=dense.device)
    x = operator.solve(b)
    assert x.dtype == b.dtype
    expected = torch.linalg.solve(dense, wide(b).expand(*dense.shape[:-2], *b.shape))
    error = (x - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))
    assert (error <= 20 * torch.finfo(b.dtype).eps * torch.linalg.cond(dense)).all()


def test_solves(factors, dtype):
    factors = [(f * (1 + 0.2j) if dtype.is_complex else f).to(dtype) for f in factors]
    sizes, exact = [f.shape[-1] for f in factors], [wide(f) for f in factors]
    n, like = math.prod(sizes), {"dtype": exact[0].dtype, "device": exact[0].device}
    check_solve(KroneckerSum(factors), dense_sum(exact))
    check_solve(KroneckerProduct(factors).add_diagonal(0.5), kron_dense(exact) + 0.5 * torch.eye(n, **like))
    diagonals = [(torch.rand(p, dtype=torch.float64, device=like["device"]) + 0.5).to(dtype) for p in sizes]
    diagonal = torch.diag(kron_dense([wide(d)[:, None] for d in diagonals])[:, 0])
    check_solve(KroneckerProduct(factors).add_diagonal(diagonals), kron_dense(exact) + diagonal)
    masses = [(2 * torch.eye(p, **like) + 0.2 * torch.randn(p, p, **like)).to(dtype) for p in sizes]
    for own in (masses, [m @ m.mH for m in masses]):
        check_solve(KroneckerSum(factors, masses=own), dense_sum(exact, [wide(m) for m in own]))


def test_columns_that_are_not_finite_spoil_no_others(device):
    s = KroneckerSum([transport(6, 3000.0).to(device)] * 2)
    b = torch.randn(36, 3, dtype=torch.float64, device=device)
    expected = s.solve(b)
    b[4, 1], b[:, 2] = torch.nan, 0.0
    found = s.solve(b)
    near(found[:, 0], expected[:, 0])
    assert found[:, 1].isnan().any()
    assert (found[:, 2] == 0).all()


def test_singular_sums_raise(device):
    """Where rounding makes a nilpotent factor's eigenvalues 1e-5, x would be 1e16."""
    factor = rotated(jordan(3, 0.0)).to(device)
    for s in (KroneckerSum([factor, factor]), KroneckerSum([jordan(3, 0.0).to(device)] * 2)):
        with pytest.raises(torch.linalg.LinAlgError, match=r"factors: expected an invertible matrix for solve( without rcond=)?; got "):
            s.solve(torch.randn(9, dtype=torch.float64, device=device))


def test_inverse_quadratic_forms_and_determinants(factors):
    n = math.prod([f.shape[-1] for f in factors])
    dense = kron_dense(factors) + 0.5 * torch.eye(n, dtype=torch.float64, device=factors[0].device)
    b = torch.randn(n, dtype=torch.float64, device=factors[0].device)
    quadratic, logdet = KroneckerProduct(factors).add_diagonal(0.5).inv_quad_logdet(b)
    near(quadratic, (b * torch.linalg.solve(dense, b.expand(*dense.shape[:-2], n).unsqueeze(-1)).squeeze(-1)).sum(-1))
    near(logdet, torch.linalg.slogdet(dense).logabsdet)
    near(KroneckerSum(factors).logdet(), torch.linalg.slogdet(dense_sum(factors)).logabsdet)


# ---- derivatives ---------------------------------------------------------------------------------------------------------------

VALUES = {
    "sum, solve": (lambda fs, s, b: KroneckerSum(fs).solve(b), lambda fs, s, b: torch.linalg.solve(dense_sum(fs), b)),
    "sum, logdet": (lambda fs, s, b: KroneckerSum(fs).logdet(), lambda fs, s, b: torch.logdet(dense_sum(fs))),
    "product, solve": (
        lambda fs, s, b: KroneckerProduct(fs).add_diagonal(s).solve(b),
        lambda fs, s, b: torch.linalg.solve(kron_dense(fs) + s * torch.eye(len(b), dtype=s.dtype), b),
    ),
    "product, logdet": (
        lambda fs, s, b: KroneckerProduct(fs).add_diagonal(s).logdet(),
        lambda fs, s, b: torch.logdet(kron_dense(fs) + s * torch.eye(len(b), dtype=s.dtype)),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_gradients(name):
    for kind in ["refined", "large", "Jordan", "complex", "upwind"]:
        given = {"large": lambda: [transport(9, 300.0)] * 2, "complex": lambda: [(1 + 0.3j) * f for f in KINDS["rotated"]()]}.get(kind)
        given = (given or KINDS[kind])()
        leaves = [*[f.clone().requires_grad_() for f in given], torch.tensor(0.5, dtype=given[0].dtype, requires_grad=True)]
        b = torch.randn(math.prod([len(f) for f in given]), 2, dtype=given[0].dtype)
        found, expected = [], []
        for function, results in zip(VALUES[name], (found, expected), strict=True):
            y = function(leaves[:-1], leaves[-1], b)
            weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
            results += torch.autograd.grad((y * weight).sum().real, leaves, allow_unused=True, materialize_grads=True)
        for got, want in zip(found, expected, strict=True):
            near(got, want)


def test_gradients_in_single_precision():
    """Of eigenvectors of condition 40 and of 4000."""
    for n, p in ((5, 5.0), (6, 30.0)):
        leaves = [transport(n, p).float().requires_grad_() for _ in range(2)]
        exact = [f.detach().double().requires_grad_() for f in leaves]
        found = torch.autograd.grad(KroneckerSum(leaves).logdet(), leaves)
        for got, want in zip(found, torch.autograd.grad(torch.logdet(dense_sum(exact)), exact), strict=True):
            assert (got - want).norm() <= 2e-5 * want.norm()


@pytest.mark.parametrize("kind", ["Jordan", "of larger condition"])
def test_second_derivatives(kind):
    """Of solves all, of determinants those that eigenvectors of a moderate condition give."""
    given = [f.clone().requires_grad_() for f in KINDS[kind]()[:2]]
    b = torch.randn(math.prod([len(f) for f in given]), 1, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda *t: KroneckerSum(t[:-1]).solve(t[-1]), (*given, b), fast_mode=True, rtol=1e-2)
    (gradient, *_) = torch.autograd.grad(KroneckerSum(given).logdet(), given, create_graph=True)
    with pytest.raises(torch.linalg.LinAlgError, match="second derivatives of logdet: expected factors with eigenvectors"):
        torch.autograd.grad(gradient.sum(), given)


@pytest.mark.parametrize("identities", [[], [3]], ids=["", "an identity"])
def test_the_phase_of_a_hermitian_determinant_has_a_derivative(identities, device):
    """In directions that are not Hermitian; the phase itself is exact, for either sign."""
    like = {"dtype": torch.complex128, "device": device}
    other = torch.tensor([[3, 1j], [-1j, 2]], **like)
    eyes = [torch.eye(p, **like) for p in identities]
    unit = torch.eye(4 * math.prod(identities), **like)
    forms = [
        (lambda t: KroneckerProduct([t, other, *identities]).add_diagonal(0.5), lambda t: kron_dense([t, other, *eyes]) + 0.5 * unit),
        (lambda t: KroneckerProduct([t, other, *identities]), lambda t: kron_dense([t, other, *eyes])),
        (lambda t: KroneckerSum([t, other, *identities]), lambda t: dense_sum([t, other, *eyes])),
    ]
    for sign in (1, -1):
        leaf = torch.tensor([[2, 1 + 1j], [1 - 1j, sign * 3]], **like).requires_grad_()
        for function, dense in forms:
            found = function(leaf).slogdet().sign
            assert found.abs() == 1
            assert found.imag == 0
            (got,) = torch.autograd.grad(found.angle(), leaf)
            (want,) = torch.autograd.grad(torch.linalg.slogdet(dense(leaf)).sign.angle(), leaf)
            near(got, want)
            assert want.abs().max() > 0.1
        both = (leaf, other.clone().requires_grad_())
        torch.autograd.gradcheck(lambda *fs: KroneckerSum(fs).logdet().exp(), both, fast_mode=True)
        torch.autograd.gradgradcheck(lambda *fs: KroneckerSum(fs).logdet().exp(), both, fast_mode=True)


# ---- Schur forms ----------------------------------------------------------------------------------------------------------------


def test_schur_forms(device):
    for shape in [(5, 5), (2, 3, 4, 4), (2, 0, 0), (0, 3, 3)]:
        a = torch.randn(shape, dtype=torch.float64, device=device)
        t, q = schur(a)
        assert t.shape == q.shape == shape
        assert t.triu().equal(t)
        near(q @ t @ q.mH, a.to(t.dtype))
        near(q.mH @ q, torch.eye(shape[-1], dtype=t.dtype, device=device).expand(shape))


def test_back_substitution(device):
    """Of many small modes, and of modes that make wide triangular systems together."""
    for shapes, sums in itertools.product([[(7, 7)], [(20, 20), (9, 9)], [(3, 3), (2, 70, 70), (2, 2)], [(2, 1, 2, 2)] * 8], [True, False]):
        ts = [f.triu() / s[-1] for f, s in zip(random_factors(shapes, torch.complex128, device), shapes, strict=True)]
        shift = torch.tensor([0.5 + 0.5j, 0.3], device=device)[:, None].to(torch.complex128)
        shift = shift if ts[0].ndim == 4 else shift[:, 0]
        dense = dense_sum(ts) if sums else kron_dense(ts)
        dense = dense + shift[..., None, None] * torch.eye(dense.shape[-1], device=device)
        x = torch.randn(*dense.shape[:-1], 3, dtype=torch.complex128, device=device)
        near(solve_triangular(ts, shift, dense @ x, sums), x)


def test_factors_whose_columns_are_runs_of_memory_stay_as_they_are(device: torch.device) -> None:
    """torch.linalg.eig of torch 2.11 writes to such a matrix on a GPU: the factors were overwritten, and the solution was another one's."""
    for dtype in (torch.float32, torch.float64, torch.complex128):
        factors = [(torch.eye(n, dtype=dtype) + torch.randn(n, n, dtype=dtype) / (2 * n)).to(device).mT for n in (3, 4)]
        before, b = [f.clone() for f in factors], torch.randn(12, 2, dtype=dtype, device=device)
        x = KroneckerSum(factors).solve(b)
        assert all(torch.equal(f, was) for f, was in zip(factors, before, strict=True))
        assert (dense_sum(before) @ x - b).abs().max() <= 1e3 * torch.finfo(dtype).eps
