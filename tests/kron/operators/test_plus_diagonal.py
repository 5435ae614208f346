"""`KroneckerProduct.add_diagonal` against the dense matrix in float64 or complex128, forward and backward.

In double precision both sides err by rounding only, times the condition of the (well-conditioned) matrices: 1e-10 relative is wide for
rounding and narrow for mistakes. Conjugate gradients are asked for residuals of 1e-13.
"""

import numpy as np
import pytest
import torch
from kronecker_cases import hermitian, near, random_factors

from fastkron_py import KroneckerProduct
from fastkron_py.kron.operators import krylov, lanczos
from fastkron_py.reference import kron_dense

FORMS = ["number", "0-dimensional", "one for each matrix", "Kronecker", "operator", "vector", "vectors"]
EXACT = {"tolerance": 1e-13}


def positive(*shape, dtype, device):
    return (torch.rand(shape, dtype=torch.float64, device=device) + 0.5).to(dtype)


def drawn_diagonal(form, factors):
    """The argument, and the diagonal as a vector."""
    first, sizes = factors[0], [f.shape[-1] for f in factors]
    n, like = int(np.prod(sizes)), {"dtype": first.dtype, "device": first.device}
    parts = [positive(p, **like) for p in sizes]
    kron = kron_dense([d[:, None] for d in parts])[:, 0]
    batch = torch.broadcast_shapes(*[f.shape[:-2] for f in factors])
    one, each, vector, vectors = (positive(*s, **like) for s in ((), (*batch, 1), (n,), (*batch, n)))
    return {
        "number": (0.7, torch.full((n,), 0.7, **like)),
        "0-dimensional": (one, one.expand(n)),
        "one for each matrix": (each, each.expand(*batch, n)),
        "Kronecker": (parts, kron),
        "operator": (KroneckerProduct([torch.diag(d) for d in parts]), kron),
        "vector": (vector, vector),
        "vectors": (vectors, vectors),
    }[form]


def test_equal_shifts_have_eigenvectors(dtype, device):
    factors = hermitian(random_factors([(3, 3), (2, 2)], dtype, device, dominant=False))
    a, dense = KroneckerProduct(factors).add_diagonal(-0.5), kron_dense(factors) - 0.5 * torch.eye(6, device=device)
    values, vectors = a.eigh()
    v = vectors.to_dense()
    near(v @ (values[:, None] * v.mH), dense)
    near(a.eigvalsh().sort().values, torch.linalg.eigvalsh(dense))


def test_samples_have_the_covariance(dtype, device):
    """100,000 samples: an element of their covariance errs by about 1/300 of the largest, and 5 times that is allowed."""
    for form in FORMS:
        factors = hermitian(random_factors([(2, 2), (2, 2, 2)], dtype, device, dominant=False))
        s, diagonal = drawn_diagonal(form, factors)
        a, dense = KroneckerProduct(factors).add_diagonal(s), kron_dense(factors) + torch.diag_embed(diagonal)
        x = a.sample((1000, 100), generator=torch.Generator(device).manual_seed(0)).flatten(0, 1)
        assert x.shape == (100_000, 2, 4)
        covariance = torch.einsum("sbi,sbj->bij", x, x.conj()) / len(x)
        assert (covariance - dense).abs().amax() < 5 / 300 * dense.abs().amax()
        assert a.sample().shape == (2, 4)


# ---- conjugate gradients ---------------------------------------------------------------------------------------------------------


def grid(sizes, device, noise=0.1):
    """A Gaussian process' covariance on a grid, and noise of differing strength."""
    lines = [torch.linspace(0, 1, p, dtype=torch.float64, device=device) for p in sizes]
    factors = [torch.exp(-3 * (x - x[:, None]).abs()) for x in lines]
    return KroneckerProduct(factors), noise * (torch.rand(int(np.prod(sizes)), dtype=torch.float64, device=device) + 0.1)


def test_masks(dtype, device):
    factors = hermitian(random_factors([(4, 4), (2, 3, 3)], dtype, device, dominant=False))
    for form in FORMS:
        s, diagonal = drawn_diagonal(form, factors)
        a, dense = KroneckerProduct(factors).add_diagonal(s), kron_dense(factors) + torch.diag_embed(diagonal)
        mask = torch.rand(12, device=device) < 0.6
        mask[0] = True
        kept = mask.nonzero()[:, 0]
        b = torch.randn(12, 2, dtype=dtype, device=device)
        x = a.solve(torch.where(mask[:, None], b, torch.nan), mask=mask, **EXACT)
        near(x[:, kept], torch.linalg.solve(dense[:, kept][:, :, kept], b[kept].expand(2, len(kept), 2)))
        assert (x[:, ~mask] == 0).all()


def test_preconditioning(device):
    """A vector that is a Kronecker product takes one iteration or two; another takes fewer than without a preconditioner."""
    k, noise = grid((12, 10, 8), device)
    b = torch.randn(960, 2, dtype=torch.float64, device=device)
    parts = [positive(p, dtype=torch.float64, device=device) for p in (12, 10, 8)]
    easy = k.add_diagonal(kron_dense([d[:, None] for d in parts])[:, 0])
    easy.solve(b)
    assert easy.convergence.iterations <= 2
    counts = []
    for preconditioner in (True, False, lambda r: r / 2):
        a = k.add_diagonal(noise)
        near(a @ a.solve(b, preconditioner=preconditioner, **EXACT), b)
        assert a.convergence.converged
        counts.append(a.convergence.iterations)
    assert counts[0] < counts[1] / 2
    assert counts[2] == counts[1]


def test_progress_and_convergence(device):
    k, noise = grid((12, 10), device)
    a, seen = k.add_diagonal(noise), []
    b = torch.randn(120, dtype=torch.float64, device=device)
    x = a.solve(b, tolerance=1e-8, progress=lambda i, residual: seen.append((i, residual)))
    found = a.convergence
    assert [i for i, _ in seen] == list(range(1, found.iterations + 1))
    assert found.converged
    assert found.tolerance == 1e-8
    residual = float((a @ x - b).norm() / b.norm())
    assert residual <= 1e-8
    assert found.residual == pytest.approx(residual, rel=1e-3)
    a.solve(torch.zeros_like(b))
    assert a.convergence == (0, 0.0, 1e-10, True)


def test_no_convergence_is_a_warning_and_a_record(device):
    k, noise = grid((12, 10), device)
    a, b = k.add_diagonal(noise), torch.randn(120, 2, dtype=torch.float64, device=device, requires_grad=True)
    with pytest.warns(
        RuntimeWarning, match="conjugate gradients: relative residual .* after 3 iterations, above the tolerance 1e-10"
    ) as caught:
        x = a.solve(b, max_iterations=3)
    assert not a.convergence.converged
    assert a.convergence.iterations == 3
    assert a.convergence.residual > 1e-10
    assert f"{a.convergence.residual:.3g}" in str(caught[0].message)
    with pytest.warns(RuntimeWarning, match="conjugate gradients"):  # and of the backward pass
        x.sum().backward()


def test_float32_reaches_its_tolerance(device):
    """Ill-conditioned enough that the recurrence's residual leaves the true one; with less noise a GPU's rounding alone is 1e-4."""
    k, noise = grid((32, 32), device, noise=3e-2)
    a = k.float().add_diagonal(noise.float())
    b = torch.randn(1024, device=device)
    x = a.solve(b)
    assert a.convergence.converged
    dense = k.to_dense() + torch.diag(noise)
    assert float((dense @ x.double() - b.double()).norm() / b.norm()) < 2e-4


def with_missing_points(dtype, device, share=0.3):
    """A grid whose missing points have a noise of 1e6, others of 0.01, and the dense matrix in float64."""
    x = torch.linspace(0, 1, 12, dtype=torch.float64, device=device)
    line = torch.exp(-20 * (x - x[:, None]) ** 2)
    s = torch.where(torch.rand(144) < share, 1e6, 0.01).double().to(device)  # the same problem on every device
    return KroneckerProduct([line, line]).to(dtype).add_diagonal(s.to(dtype)), torch.kron(line, line) + torch.diag(s)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("single", [False, True], ids=["float64", "float32"])
def test_a_diagonal_that_spans_decades(single, share, device):
    """The default takes fewer iterations than dividing by the diagonal, which takes fewer than the 1000 that are allowed."""
    a, dense = with_missing_points(torch.float32 if single else torch.float64, device, share)
    b = torch.randn(144, 2, dtype=torch.float64).to(device)
    counts = []
    for preconditioner in (lambda r: r / (dense.diagonal() - 1)[:, None].to(r.dtype), True):
        x = a.solve(b.to(a.dtype), preconditioner=preconditioner)
        assert a.convergence.converged
        counts.append(a.convergence.iterations)
        assert (x - torch.linalg.solve(dense, b)).norm() < (1e-3 if single else 1e-8) * torch.linalg.solve(dense, b).norm()
    assert counts[1] < counts[0]


def test_the_best_iterate_is_returned(device):
    """Residuals of a poor preconditioner rise above that of 0 and fall below it; each column has its own best."""
    a, dense = with_missing_points(torch.float64, device)
    b = torch.randn(144, 3, dtype=torch.float64).to(device)
    b[:, 2] = 0
    for count in (1, 7, 40, 90):
        seen = []
        for columns in ([0], [1], [0, 1, 2]):
            given, residuals = b[:, columns], []
            with pytest.warns(RuntimeWarning, match="conjugate gradients"):
                x = a.solve(given, preconditioner=False, max_iterations=count, progress=lambda _, r, to=residuals: to.append(r))
            found = ((dense @ x - given).norm(dim=0) / given.norm(dim=0)).nan_to_num(0.0)
            assert a.convergence.residual == pytest.approx(float(found.max()), rel=1e-6)
            seen.append((found, min([1.0, *residuals])))
        for column in (0, 1):
            assert float(seen[column][0]) <= seen[column][1] * (1 + 1e-6)
            assert float(seen[2][0][column]) == pytest.approx(seen[column][1], rel=0.25)  # rounding differs, and iterations multiply it


def test_nothing_worse_than_zero_is_returned(device):
    """A preconditioner that leads away: the first iterates are worse than x = 0 in one column, and better in the other."""
    values, scales = torch.tensor([[[1.0], [1e4]], [[1.0], [10.0]]], dtype=torch.float64, device=device)
    b = torch.tensor([[1.0, 0.0], [1e-3, 1.0]], dtype=torch.float64, device=device)
    with pytest.warns(RuntimeWarning, match="conjugate gradients"):
        x, found = krylov.conjugate_gradients(lambda x: values * x, lambda r: scales * r, b, krylov.stopping(0, 1, None, torch.float64))
    assert (x[:, 0] == 0).all()
    assert (values * x - b)[:, 1].norm() < 1e-12
    assert found.residual == 1


def test_the_warning_points_at_the_caller_and_says_what_helps(device):
    a, _ = with_missing_points(torch.float64, device)
    s = a.solve
    for call in (s, a.to(torch.float64).solve, torch.no_grad()(s), lambda *args, **options: a.inv_quad_logdet(*args, **options)):
        with pytest.warns(RuntimeWarning, match="mask= .* preconditioner= ") as caught:
            call(torch.ones(144, dtype=torch.float64, device=device), max_iterations=2)
        assert {w.filename for w in caught} == {__file__}


def test_a_restart_goes_beyond_the_tolerance(device):
    """Rounding left the true residual above a tolerance that the recurrence had just reached; reaching it again would leave it there."""
    torch.manual_seed(0)
    matrix = torch.randn(50, 50, dtype=torch.float64, device=device)
    matrix, b = matrix @ matrix.mT + torch.eye(50, device=device), torch.randn(50, 1, dtype=torch.float64, device=device)
    residuals = []

    def apply(x):
        is_check = min(residuals, default=1) <= 1e-6 and bool(x.norm() > 1e-3)  # the steps of a restart are smaller
        return matrix @ x + (1.1e-6 * b if is_check else 0)

    stop = krylov.stopping(1e-6, 1000, lambda _, residual: residuals.append(residual), torch.float64)
    _, found = krylov.conjugate_gradients(apply, lambda r: r.clone(), b, stop)
    assert found.converged
    assert residuals[-1] <= 2.5e-7


# ---- estimates of determinants ---------------------------------------------------------------------------------------------------


def test_estimated_determinants(dtype, device):
    """Within four standard errors, where chance leaves one of 16,000 out; the error is 0 where D is a Kronecker product."""
    factors = hermitian(random_factors([(8, 8), (2, 10, 10)], dtype, device, dominant=False))
    k, dense = KroneckerProduct(factors), kron_dense(factors)
    generator = torch.Generator(device).manual_seed(0)
    for spread in (1.0, 20.0):
        d = (spread * torch.rand(80, dtype=torch.float64, device=device) + 0.5).to(dtype)
        a, exact = k.add_diagonal(d), torch.logdet(dense + torch.diag(d))
        found = a.logdet(probes=64, generator=generator)
        assert found.dtype == exact.dtype
        assert ((found - exact).abs() < 4 * a.standard_error).all()
        assert (a.standard_error < 0.02 * exact.abs()).all()
        _, again = a.inv_quad_logdet(torch.ones(80, dtype=dtype, device=device), probes=64, generator=generator)
        assert ((again - exact).abs() < 4 * a.standard_error).all()
    parts = [positive(p, dtype=dtype, device=device) for p in (8, 10)]
    d = kron_dense([p[:, None] for p in parts])[:, 0]
    near(k.add_diagonal(d).logdet(probes=2), torch.logdet(dense + torch.diag(d)))


def test_estimated_determinants_of_diagonals_that_span_decades(device):
    for share in [0.3, 0.7]:
        a, dense = with_missing_points(torch.float64, device, share)
        found, exact = a.logdet(probes=200, generator=torch.Generator(device).manual_seed(0)), torch.logdet(dense)
        assert (found - exact).abs() < 4 * a.standard_error
        assert a.standard_error < 0.01 * exact.abs()
        s = torch.where(dense.diagonal() > 2, 1e6, 0.01).double().requires_grad_()
        value = KroneckerProduct(a.factors).add_diagonal(s).logdet(probes=200, generator=torch.Generator(device).manual_seed(0))
        (gradient,) = torch.autograd.grad(value, s)
        assert ((gradient - torch.linalg.inv(dense).diagonal()) * s.detach()).norm() < 30  # of 2e7 with the same matrix for both


def test_unfinished_quadratures_count_in_the_error(device):
    """Eigenvalues of nine decades, evenly spread in logarithms, are too many for the steps that there are."""
    values = torch.logspace(-9, 0, 4000, dtype=torch.float64, device=device)[:, None]
    z = (torch.randint(2, (4000, 16), device=device) * 2 - 1).double()
    mean, error = lanczos.trace_of_log(lambda x: values * x, z)
    exact = float(values.log().sum())  # of a diagonal matrix, whichever the signs
    assert mean > exact + 1
    assert abs(float(mean) - exact) < float(error)
    mean, error = lanczos.trace_of_log(lambda x: values.sqrt().sqrt() * x, z)
    assert abs(float(mean) - exact / 4) < 1e-3
    assert float(error) < 1


def test_gradients_of_estimated_determinants(dtype):
    """The mean of 40 gradients of 16 probes each, within five of its standard errors; exact where D is a Kronecker product."""
    factors = [f.requires_grad_() for f in hermitian(random_factors([(4, 4), (5, 5)], dtype, "cpu", dominant=False))]
    d = (5 * torch.rand(20, dtype=torch.float64) + 0.5).requires_grad_()
    own = [*factors, d]
    exact = torch.autograd.grad(torch.linalg.slogdet(kron_dense(factors) + torch.diag(d).to(dtype)).logabsdet, own)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(40):
        value = KroneckerProduct(factors).add_diagonal(d.to(dtype)).logdet(probes=16, generator=generator).real
        found.append(torch.autograd.grad(value, own))
    for got, want in zip(zip(*found, strict=True), exact, strict=True):
        samples = torch.stack(got)
        assert ((samples.mean(0) - want).abs() <= 5 * samples.std(0) / 40**0.5 + 1e-9 * want.abs().amax()).all()
    parts = [(torch.rand(p, dtype=torch.float64) + 0.5).to(dtype).requires_grad_() for p in (4, 5)]
    own = [*factors, *parts]
    kron = (parts[0][:, None] * parts[1]).flatten()
    exact = torch.autograd.grad(torch.linalg.slogdet(kron_dense(factors) + torch.diag(kron)).logabsdet, own)
    kron = (parts[0][:, None] * parts[1]).flatten()
    value = KroneckerProduct(factors).add_diagonal(kron).logdet(probes=2).real
    for got, want in zip(torch.autograd.grad(value, own, create_graph=True), exact, strict=True):
        near(got, want)
    (g,) = torch.autograd.grad(KroneckerProduct(factors).add_diagonal(kron).logdet(probes=2).real, parts[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="logdet: derivatives of the first order"):
        g.abs().sum().backward()


def test_forward_mode_of_estimated_determinants(dtype):
    """Tangents are those of the gradient, by the same probes, in torch.func and beside other tensors that have none."""
    factors = hermitian(random_factors([(3, 3), (4, 4)], dtype, "cpu", dominant=False))
    d = 5 * torch.rand(12, dtype=torch.float64) + 0.5
    moves = hermitian(random_factors([(3, 3), (4, 4)], dtype, "cpu", dominant=False)), torch.linspace(-1, 1, 12, dtype=torch.float64)

    def value(factors, d):
        generator = torch.Generator().manual_seed(3)
        return KroneckerProduct(factors).add_diagonal(d.to(dtype)).logdet(probes=8, generator=generator).real

    gradients = torch.func.grad(value, (0, 1))(factors, d)
    of_factors = sum([(g.conj() * m).sum().real for g, m in zip(gradients[0], moves[0], strict=True)])
    of_shift = (gradients[1] * moves[1]).sum()
    found, tangent = torch.func.jvp(value, (factors, d), moves)
    torch.testing.assert_close(found, value(factors, d))
    torch.testing.assert_close(tangent, of_factors + of_shift)
    torch.testing.assert_close(torch.func.jvp(lambda d: value(factors, d), (d,), moves[1:])[1], of_shift)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(tangent, of_shift)


# ---- derivatives -------------------------------------------------------------------------------------------------------------------

MASK = torch.tensor([True, True, False, True, False, True])
DERIVED = {
    "solve": lambda a, x: a.solve(x, **EXACT),
    "masked solve": lambda a, x: a.solve(x, mask=MASK, **EXACT),
    "logdet": lambda a, x: a.logdet(),
    "inv_quad_logdet": lambda a, x: a.inv_quad_logdet(x, **EXACT),
    "sample": lambda a, x: a.sample((2,), generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("form", ["0-dimensional", "one for each matrix", "Kronecker", "vector"])
@pytest.mark.parametrize("name", DERIVED)
def test_gradients_at_equal_eigenvalues(name, form, dtype):
    """With respect to x, both factors and s, at multiples of the identity, where derivatives of eigenvectors are infinite."""
    factors = [1.5 * torch.eye(p, dtype=dtype) for p in (2, 3)]
    s, _ = drawn_diagonal(form, factors)
    s = [t.real.requires_grad_() for t in (s if isinstance(s, list) else [s])]
    factors = [f.requires_grad_() for f in factors]
    x = torch.randn(6, 2, dtype=dtype, requires_grad=True)

    def function(x, f0, f1, *s):  # a symmetric matrix moves as one
        s = [t.to(dtype) for t in s]
        return DERIVED[name](KroneckerProduct([(f0 + f0.mH) / 2, (f1 + f1.mH) / 2]).add_diagonal(s if form == "Kronecker" else s[0]), x)

    assert torch.autograd.gradcheck(function, (x, *factors, *s), fast_mode=True)
    if name != "sample":
        assert torch.autograd.gradgradcheck(function, (x, *factors, *s), fast_mode=True)


# ---- arrays, copies, bad input -------------------------------------------------------------------------------------------------------


def test_large_products_are_never_built(device):
    """2**18 points: the residuals of a direct solve and of an iterative one, and a determinant by its eigenvalues."""
    k, noise = grid((64, 64, 64), device)
    b = torch.randn(64**3, dtype=torch.float64, device=device)
    a = k.add_diagonal(0.1)
    near(a @ a.solve(b), b)
    near(a.logdet(), (k.eigvalsh() + 0.1).log().sum())
    a = k.add_diagonal(noise)
    near(a @ a.solve(b, tolerance=1e-12), b)  # single elements err by 20 times the mean


def test_direct_solves_warn_of_nothing():
    """A warning would be an error here."""
    KroneckerProduct([torch.eye(2)] * 2).add_diagonal(1.0).solve(torch.ones(4), tolerance=0)
