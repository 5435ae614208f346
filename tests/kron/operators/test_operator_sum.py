"""Sums of lazy operators against the dense matrix in float64: which solver they take, what it refuses, estimates, sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kronecker_cases import definite, near

from fastkron_py import KroneckerProduct, KroneckerSum
from fastkron_py.kron.operators.operator_sum import OperatorSum
from fastkron_py.testing import assert_close


def products(count: int, sizes: tuple[int, ...] = (3, 4)) -> list[KroneckerProduct]:
    return [KroneckerProduct([definite(n) for n in sizes]) for _ in range(count)]


def general(n: int) -> torch.Tensor:
    return torch.randn(n, n, dtype=torch.float64) / n + 2 * torch.eye(n)


def test_kronecker_sums_stay_kronecker_sums() -> None:
    a, b, c = (KroneckerSum([definite(3), definite(4)]) for _ in range(3))
    assert isinstance(a + b - c, KroneckerSum)
    near((a + 2 * b - c).to_dense(), a.to_dense() + 2 * b.to_dense() - c.to_dense())
    near((KroneckerSum([a.factors[0], 4]) + a).to_dense(), KroneckerSum([2 * a.factors[0], torch.eye(4) + a.factors[1]]).to_dense())
    masses = [definite(3), definite(4)]
    with_masses = [KroneckerSum([definite(3), definite(4)], masses=masses) for _ in range(2)]
    assert isinstance(sum(with_masses), KroneckerSum)
    near(sum(with_masses).to_dense(), with_masses[0].to_dense() + with_masses[1].to_dense())
    assert isinstance(a + with_masses[0], OperatorSum)


COMMUTING = {
    "polynomial": lambda f, g: KroneckerProduct([f, g]) + KroneckerProduct([f @ f, g @ g]) - 0.1 * KroneckerProduct([f, len(g)]),
    "sum and product": lambda f, g: KroneckerSum([f, g]) + KroneckerProduct([f, g]),
    "sum and number": lambda f, g: KroneckerProduct([f, g]).add_diagonal(0.5) + KroneckerProduct([f @ f, len(g)]),
    "mass matrices": lambda f, g: KroneckerSum([f, g], masses=[f @ f, g @ g]) + 0.3 * KroneckerProduct([f @ f, g @ g]),
}


@pytest.mark.parametrize("name", COMMUTING)
def test_terms_that_commute_are_solved_directly(name: str, dtype: torch.dtype) -> None:
    for f, g in [(definite(3).to(dtype), definite(4).to(dtype)), (general(3).to(dtype), general(4).to(dtype))]:
        b = torch.randn(12, 2, dtype=dtype)
        a = COMMUTING[name](f, g)
        near(a.solve(b), torch.linalg.solve(a.to_dense(), b))
        assert a.convergence is None
        near(a.slogdet().logabsdet, torch.linalg.slogdet(a.to_dense()).logabsdet)
        near(a.slogdet().sign, torch.linalg.slogdet(a.to_dense()).sign)
        quadratic, logdet = a.inv_quad_logdet(b)
        near(quadratic, (b.conj() * torch.linalg.solve(a.to_dense(), b)).sum().real)
        near(logdet.real, torch.linalg.slogdet(a.to_dense()).logabsdet)

    def value(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return COMMUTING[name](f, g).slogdet().logabsdet

    f, g = (definite(n).to(dtype).requires_grad_() for n in (3, 4))
    dense = torch.linalg.slogdet(COMMUTING[name](f, g).to_dense()).logabsdet
    for mine, theirs in zip(torch.autograd.grad(value(f, g), (f, g)), torch.autograd.grad(dense, (f, g)), strict=True):
        near(mine, theirs)
    (first,) = torch.autograd.grad(value(f, g), f, create_graph=True)
    with pytest.raises(NotImplementedError, match="derivatives of the first order"):
        torch.autograd.grad(first.real.sum(), f)


def test_other_sums_are_solved_by_iterations() -> None:
    a, b, c = products(3)
    right = torch.randn(12, 2, dtype=torch.float64)
    cases = {
        "definite": a + b + c,
        "indefinite": a + b - 3 * c,
        "general": sum(KroneckerProduct([general(3), general(4)]) for _ in range(3)),
        "Schroedinger": KroneckerSum([definite(3), definite(4)]).add_diagonal(torch.rand(12, dtype=torch.float64)),
        "a batch": a + b.add_diagonal(torch.rand(2, 12, dtype=torch.float64)),
        "masked": a.masked(rows=range(12), columns=range(12)) + b,
    }
    for name, s in cases.items():
        seen: list[int] = []
        for preconditioner in (True, False, lambda r: r / 2):
            x = s.solve(right, tolerance=1e-12, preconditioner=preconditioner, progress=lambda i, _, seen=seen: seen.append(i))
            near(s.to_dense() @ x, right.expand(*s.shape[:-2], 12, 2))
            assert s.convergence is not None, name
            assert s.convergence.converged, name
            with pytest.raises(AssertionError):
                near(s.to_dense() @ x * 1.001, right.expand(*s.shape[:-2], 12, 2))
        assert seen[0] == 1
        mask = torch.arange(12) % 4 != 1
        x = s.solve(torch.where(mask[:, None], right, torch.nan), mask=mask, tolerance=1e-12)
        near(s.to_dense()[..., mask, :][..., mask] @ x[..., mask, :], right[mask].expand(*s.shape[:-2], 9, 2))
        assert (x[..., ~mask, :] == 0).all()


@pytest.mark.parametrize("kind", ["conjugate gradients", "GMRES"])
def test_no_convergence_is_a_warning_and_the_best_iterate(kind: str) -> None:
    torch.manual_seed(0)
    factors = (lambda: [definite(8) / 8, definite(9) / 9]) if kind != "GMRES" else (lambda: [torch.randn(8, 8).double(), general(9)])
    s = sum(KroneckerProduct(factors()) for _ in range(3))
    b = torch.randn(72, 2, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=f"{kind}: relative residual .* after 3 iterations, above the tolerance 1e-10"):
        x = s.solve(b, max_iterations=3)
    assert not s.convergence.converged
    found = ((s @ x - b).norm(dim=0) / b.norm(dim=0)).max()
    assert float(found) == pytest.approx(s.convergence.residual)
    assert float(found) < 1


def test_restarts() -> None:
    """More steps than one Krylov space has: 130 separate eigenvalues, of a matrix that is not normal."""
    n = 130
    a = torch.diag(torch.linspace(0.05, 9, n, dtype=torch.float64)) + torch.diag(0.02 * torch.ones(n - 1, dtype=torch.float64), 1)
    s = KroneckerProduct([a, torch.eye(1, dtype=torch.float64)]).add_diagonal(torch.zeros(n, dtype=torch.float64)) + KroneckerProduct(
        [a, 1]
    )
    b = torch.randn(n, 3, dtype=torch.float64)
    b[:, 2] = 0
    x = s.solve(b, tolerance=1e-11, max_iterations=5000, preconditioner=False)
    assert s.convergence.iterations > 50
    assert ((2 * a) @ x - b).norm() < 1e-10 * b.norm()
    assert (x[:, 2] == 0).all()


def test_estimated_determinants(dtype: torch.dtype) -> None:
    a, b, c = (KroneckerProduct([definite(8).to(dtype) / 8, definite(10).to(dtype) / 10]) for _ in range(3))
    s = a + b + c
    dense = s.to_dense()
    exact = torch.logdet(dense).real
    found = s.logdet(probes=64, generator=torch.Generator().manual_seed(0))
    assert abs(float(found.real - exact)) < 4 * float(s.standard_error)
    assert float(s.standard_error) < 0.05 * abs(float(exact))
    assert torch.equal(found, s.logdet(probes=64, generator=torch.Generator().manual_seed(0)))
    f = a.factors[0].requires_grad_()
    (mine,) = torch.autograd.grad(s.logdet(probes=4096, generator=torch.Generator().manual_seed(0)).real, f)
    (theirs,) = torch.autograd.grad(torch.linalg.slogdet(s.to_dense()).logabsdet, f)
    assert (mine - theirs).norm() < 0.05 * theirs.norm()  # 4096 random vectors
    f.requires_grad_(False)
    many = (KroneckerProduct([torch.eye(100), torch.eye(100)]) for _ in range(2))
    with pytest.raises(ValueError, match=r"probes: expected a number of probe vectors.*got None for shape \(10000, 10000\)"):
        (sum(many) + KroneckerProduct([torch.eye(100), torch.eye(100)]).add_diagonal(torch.rand(10000))).logdet()


def test_large_sums() -> None:
    """A million unknowns: a pencil by eigenvectors, and a potential on a grid by conjugate gradients."""
    n = 100
    line = 2.1 * torch.eye(n) - torch.diag(torch.ones(n - 1), 1) - torch.diag(torch.ones(n - 1), -1)
    s = KroneckerProduct([line] * 3) + KroneckerProduct([torch.eye(n) + 0.1] * 3)
    b = torch.randn(n**3)
    assert (s @ s.solve(b) - b).norm() < 1e-3 * b.norm()
    assert s.convergence is None
    assert s.logdet().isfinite()
    potential = KroneckerSum([line] * 3).add_diagonal(1 + torch.rand(n**3))
    assert (potential @ potential.solve(b) - b).norm() < 2e-4 * b.norm()
    assert potential.convergence.converged


def test_empty_and_one_by_one() -> None:
    one = KroneckerProduct([torch.full((1, 1), 2.0)]) + KroneckerProduct([torch.full((1, 1), 3.0)])
    assert one.solve(torch.ones(1)).item() == pytest.approx(0.2)
    assert one.logdet().item() == pytest.approx(np.log(5))
    empty = KroneckerProduct([torch.zeros(0, 0), torch.eye(3)]) + KroneckerProduct([torch.zeros(0, 0), torch.eye(3)])
    assert empty.solve(torch.zeros(0, 2)).shape == (0, 2)
    assert empty.logdet().item() == 0
    assert (empty @ torch.zeros(0, 2)).shape == (0, 2)


REFUSED = {
    "a tensor": (lambda a, b: a + torch.ones(12, 12), TypeError, r"other: expected an operator .*; got torch.Tensor"),
    "a number": (lambda a, b: a - 1.0, TypeError, r"other: expected an operator \(add_diagonal adds numbers and vectors\); got float"),
    "another shape": (lambda a, b: a + KroneckerProduct([definite(3)]), ValueError, r"other: expected an operator of 12 x 12"),
    "another dtype": (lambda a, b: a + b.float(), TypeError, r"terms\[1\].factors\[0\]: expected terms\[0\].factors\[0\]'s dtype"),
    "arrays": (lambda a, b: a + KroneckerProduct([np.eye(12)]), TypeError, r"terms\[1\].factors\[0\]: expected a torch tensor"),
    "batches": (
        lambda a, b: a.add_diagonal(torch.ones(2, 12).double()) + b.add_diagonal(torch.ones(3, 12).double()),
        ValueError,
        "terms: expected batch",
    ),
    "right side": (lambda a, b: (a + b).solve(torch.ones(11).double()), ValueError, "b: expected dimension -1 of size 12"),
    "half": (lambda a, b: (a + b).to(torch.float16).solve(torch.ones(12).half()), TypeError, "factors: expected a dtype among"),
    "factors": (lambda a, b: (a + b).factors, AttributeError, "a sum of operators has no factors"),
    "a vector's size": (lambda a, b: (a + b).add_diagonal(torch.ones(11).double()), ValueError, r"s: expected a vector \[12\]"),
    "an operator": (lambda a, b: (a + b) @ a, TypeError, "x: expected an array"),
    "probes of general ones": (
        lambda a, b: (a + b + KroneckerProduct([general(3), general(4)])).logdet(probes=3),
        ValueError,
        "terms: expected Hermitian operators for logdet with probes",
    ),
    "rectangles": (
        lambda a, b: (KroneckerProduct([torch.ones(2, 3)]) - KroneckerProduct([torch.ones(2, 3)])).solve(torch.ones(3)),
        ValueError,
        "terms: expected square operators for solve",
    ),
    "not finite": (
        lambda a, b: (a + b + KroneckerProduct([general(3), general(4)])).solve(torch.full((12,), torch.nan).double()),
        ValueError,
        "b: expected finite",
    ),
    "singular": (
        lambda a, b: (a + KroneckerProduct([-a.factors[0], a.factors[1]])).solve(torch.ones(12).double()),
        torch.linalg.LinAlgError,
        "terms: expected an invertible matrix",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call(*products(2))


def test_rectangles_and_arrays_multiply() -> None:
    f, g = torch.randn(2, 3), torch.randn(2, 3)
    s = KroneckerProduct([f, g]) - KroneckerProduct([g, f])
    assert_close(s @ torch.ones(9), (torch.kron(f, g) - torch.kron(g, f)).double() @ torch.ones(9).double(), steps=4)
    of_arrays = KroneckerProduct([f.numpy(), g.numpy()]) + KroneckerProduct([g.numpy(), f.numpy()])
    assert isinstance(of_arrays @ np.ones(9, dtype=np.float32), np.ndarray)
    near(torch.as_tensor(of_arrays.mT.to_dense()), (torch.kron(f, g) + torch.kron(g, f)).mT)
