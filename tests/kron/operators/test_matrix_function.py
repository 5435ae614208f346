"""`KroneckerProduct.apply_function` against functions of the dense matrix in float64 or complex128, forward and backward.

In double precision both sides err by rounding only: 1e-10 relative, as for `KroneckerProduct`.
"""

import pytest
import torch
from kronecker_cases import SQUARE, hermitian, near, random_factors

from fastkron_py import KroneckerProduct
from fastkron_py.reference import kron_dense
from fastkron_py.testing import assert_close


def test_functions(dtype, device):
    for shapes in SQUARE:
        factors = hermitian(random_factors(shapes, dtype, device, dominant=False))
        k, dense = KroneckerProduct(factors), kron_dense(factors)
        values, vectors = torch.linalg.eigh(dense)
        x = torch.randn(dense.shape[-1], 3, dtype=dtype, device=device)
        root = k.apply_function(torch.sqrt)
        near(root @ x, vectors @ (values.sqrt()[..., None] * (vectors.mH @ x)))
        near(root.to_dense() @ root.to_dense(), dense)
        near(root.mT.to_dense(), root.to_dense().mT)
        near(root @ x[:, 0], (root @ x)[..., 0])
        near(x.mT @ root, x.mT @ root.to_dense())
        near(torch.matmul(x[:, 0], root), x[:, 0] @ root.to_dense())
        if dtype.is_complex:
            turn = k.apply_function(lambda v: torch.polar(torch.ones_like(v), v))
            near(turn @ x, vectors @ (torch.exp(1j * values)[..., None] * (vectors.mH @ x)))
            near(x.mT @ turn, x.mT @ turn.to_dense())
            near(turn.mH @ (turn @ x), x.expand(*dense.shape[:-2], *x.shape))


@pytest.mark.parametrize("equal", [False, True], ids=["", "equal eigenvalues"])
def test_gradients_of_functions(equal, dtype):
    """With respect to x, the factors and what f closes over, against torch's own of the dense matrix where eigenvalues differ."""
    if equal:
        factors = [1.5 * torch.eye(p, dtype=dtype) for p in (2, 3)]
    else:
        factors = hermitian(random_factors([(2, 2), (2, 3, 3)], dtype, "cpu", dominant=False))
    factors = [f.requires_grad_() for f in factors]
    x, s = torch.randn(6, 2, dtype=dtype, requires_grad=True), torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def function(x, s, *fs):
        return KroneckerProduct([(f + f.mH) / 2 for f in fs]).apply_function(lambda v: (v + s).log()) @ x

    def turned(x, s, *fs):
        return KroneckerProduct([(f + f.mH) / 2 for f in fs]).apply_function(lambda v: torch.polar(torch.ones_like(v), s * v)) @ x

    assert torch.autograd.gradcheck(function, (x, s, *factors), fast_mode=True)
    if dtype.is_complex:
        assert torch.autograd.gradcheck(turned, (x, s, *factors), fast_mode=True)
    (g,) = torch.autograd.grad(function(x, s, *factors).abs().sum(), factors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="apply_function: factors have derivatives of the first order"):
        g.abs().sum().backward()
    fixed = [f.detach() for f in factors]
    assert torch.autograd.gradgradcheck(lambda x, s: function(x, s, *fixed), (x, s), fast_mode=True)
    arguments = (x.detach(), s.detach(), *fixed)
    by_func = torch.func.grad(lambda *t: function(*t).abs().sum(), argnums=(0, 1, 2, 3))(*arguments)
    for got, want in zip(by_func, torch.autograd.grad(function(x, s, *factors).abs().sum(), (x, s, *factors)), strict=True):
        near(got, want)


def test_gradients_of_functions_at_near_eigenvalues():
    """A pair 1e-9 apart, where a quotient of differences would lose nine digits."""
    f = torch.diag(torch.tensor([1.0, 1 + 1e-9, 2.0], dtype=torch.float64)).requires_grad_()
    x, y = torch.randn(2, 6, dtype=torch.float64)
    other = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    (found,) = torch.autograd.grad(y @ (KroneckerProduct([f, other]).apply_function(torch.square) @ x), f)
    (expected,) = torch.autograd.grad(y @ (torch.kron(f @ f, other @ other) @ x), f)
    near(found, expected)


def test_what_is_refused_beside_a_function():
    root = KroneckerProduct([torch.eye(2), torch.eye(3)]).apply_function(torch.sqrt)
    with pytest.raises(ValueError, match=r"x: expected dimension -1 of size 6, the product of the factors' sizes; got shape \(4, 5\)"):
        torch.ones(4, 5) @ root
    with pytest.raises(ValueError, match=r"x: expected dimension -2 of size 6"):
        root @ torch.ones(4, 5)
    for product in (lambda: root @ root, lambda: root @ KroneckerProduct([torch.eye(6)])):
        with pytest.raises(TypeError, match="x: expected an array; got"):
            product()


def singular(dtype, device):
    """A covariance of rank 6 of 400 but for rounding, which leaves negative eigenvalues."""
    x = torch.linspace(0, 1, 20, dtype=torch.float64, device=device)
    line = torch.exp(-0.1 * (x - x[:, None]) ** 2).to(dtype)
    return KroneckerProduct([line, line])


def test_square_roots_of_singular_products(dtype, device):
    k = singular(dtype, device)
    assert (k.eigvalsh() < 0).any()
    z = torch.randn(400, 2, dtype=dtype, device=device)
    near(k.sqrt() @ (k.sqrt() @ z), k @ z)
    near(k.apply_function(torch.sqrt) @ (k.apply_function(torch.sqrt) @ z), k @ z)
    assert k.add_diagonal(0.0).sample((3,)).isfinite().all()
    for s in (0.3, torch.tensor(0.3, dtype=dtype, device=device), torch.full((2, 1), 0.3, dtype=dtype, device=device)):
        root = k.add_diagonal(s).sqrt()
        near(root @ (root @ z), (k.add_diagonal(s) @ z).expand(root.shape[:-2] + z.shape))


def test_gradients_of_square_roots(dtype):
    """Of a singular product they are finite, and those of the regular part."""
    factors = [torch.diag(torch.tensor(d, dtype=torch.float64)).to(dtype).requires_grad_() for d in ([0.0, 1.0, 4.0], [1.0, 9.0])]
    (k := KroneckerProduct(factors)).sqrt().to_dense().sum().real.backward()
    near(factors[0].grad[1:, 1:].diagonal(), torch.tensor([2.0, 1.0], dtype=dtype))  # 4 / (2 sqrt(f))
    assert all(f.grad.isfinite().all() for f in k.factors)
    regular = [f.detach() for f in hermitian(random_factors([(2, 2), (3, 3)], dtype, "cpu", dominant=False))]
    s = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda s: KroneckerProduct(regular).add_diagonal(s.to(dtype)).sqrt().to_dense(), s)
    with pytest.raises(ValueError, match="factors: expected a positive semi-definite matrix for a square root; got an eigenvalue of -1"):
        KroneckerProduct([-torch.eye(2), torch.eye(2)]).sqrt() @ torch.ones(4)
    with pytest.raises(ValueError, match="s: expected one number"):
        KroneckerProduct([torch.eye(2)]).add_diagonal(torch.ones(2)).sqrt()


@pytest.mark.parametrize("sizes", [(0,), (2, 0, 3)])
def test_backward_passes_of_empty_factors(sizes, dtype):
    """Of functions, samples and estimated determinants: gradients of 0, of the factors' shapes."""
    shift = [torch.ones(p, dtype=dtype, requires_grad=True) for p in (0, *sizes)]
    for function in (
        lambda k: k.apply_function(torch.exp) @ torch.ones(0, 2, dtype=dtype),
        lambda k: k.sqrt() @ torch.ones(0, 2, dtype=dtype),
        lambda k: k.add_diagonal(1.0).sample((2,)),
        lambda k: k.add_diagonal(shift[0]).sample((2,)),
        lambda k: k.add_diagonal(shift[1:]).sample((2,)),
        lambda k: k.add_diagonal(shift[0]).logdet(probes=2),
    ):
        factors = [torch.eye(p, dtype=dtype, requires_grad=True) for p in sizes]
        function(KroneckerProduct(factors)).sum().real.backward()
        assert all(f.grad is not None and f.grad.shape == f.shape and (f.grad == 0).all() for f in factors)


def test_roots_of_singular_matrices_survive_rounding(dtype, device):
    """Smooth covariances, whose least eigenvalues are rounding; and jitter where they are more negative."""
    x = torch.linspace(0, 1, 30, dtype=torch.float64, device=device)
    line = torch.exp(-2 * (x - x[:, None]) ** 2).to(dtype)
    rank_one = torch.ones(2, 3, 3, dtype=dtype, device=device)
    for single in (False, True):
        k = KroneckerProduct([line, 2, rank_one])
        k = k.to(torch.complex64 if dtype.is_complex else torch.float32) if single else k
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.cholesky(k.factors[0])
        lower = k.cholesky()
        tolerance = 2e-4 if single else 1e-12
        assert_close((lower @ lower.mH).to_dense(), k.to_dense(), rms_tol=tolerance, max_tol=tolerance)
        for f in (lower.factors[0], lower.factors[2]):
            assert torch.equal(f, f.tril())
            assert (f.diagonal(dim1=-2, dim2=-1).real >= 0).all()
        b = torch.randn(180, 2, dtype=k.dtype, device=device)
        assert_close(k.sqrt() @ (k.sqrt() @ b), k @ b, rms_tol=10 * tolerance, max_tol=10 * tolerance)
    indefinite = KroneckerProduct([torch.diag(torch.tensor([2.0, -1e-3], dtype=torch.float64)).to(dtype)])
    with pytest.raises(torch.linalg.LinAlgError, match=r"factors\[0\] .* got an eigenvalue of -0.001 \(jitter= raises it\)"):
        indefinite.cholesky()
    with pytest.raises(ValueError, match=r"factors: .* got an eigenvalue of -0.001 \(jitter= raises it\)"):
        indefinite.sqrt() @ torch.ones(2, dtype=dtype)
    wanted = indefinite.to_dense() + 0.01 * torch.eye(2).double()
    lower, root = indefinite.cholesky(jitter=0.01), indefinite.sqrt(jitter=torch.tensor(0.01, dtype=torch.float64))
    near((lower @ lower.mH).to_dense(), wanted)
    near(root @ (root @ torch.eye(2, dtype=dtype)), wanted)
    with pytest.raises(TypeError, match="jitter: expected a number"):
        indefinite.cholesky(jitter="0")
    singular = KroneckerProduct([torch.ones(2, 2).double().requires_grad_()])
    with pytest.raises(torch.linalg.LinAlgError, match="for derivatives; got a singular one"):
        singular.cholesky()
