"""Solves of a distributed product in the corners: under autocast, of matrices that are not positive definite, of numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from products import block, dense, placed, random
from rank_pool import RankPool

from fastkron_py.distributed import KroneckerProduct, ProcessGrid

SIZES = (4, 5, 3)
N = math.prod(SIZES)


def symmetric(dtype=torch.float64, sign: float = 1.0) -> list[torch.Tensor]:
    """Positive definite, of condition below 10; the first one with another sign."""
    roots = [random(p, p, seed=p).to(dtype) for p in SIZES]
    found = [r @ r.mT / len(r) + torch.eye(len(r), dtype=dtype) for r in roots]
    return [sign * found[0], *found[1:]]


def under_autocast(shape):
    """The largest relative error of solves in float32 and of their gradients, with autocast on in both passes."""
    grid = ProcessGrid(shape)
    factors, b = symmetric(torch.float32), random(N, 3, seed=1, dtype=torch.float32)
    own, mine = [f.to(grid.device).requires_grad_() for f in factors], block(b, grid).requires_grad_()
    K = KroneckerProduct(own, grid=grid)
    A, everywhere = K.add_diagonal(0.5), torch.ones(len(mine), dtype=torch.bool, device=grid.device)
    whole = [f.double().requires_grad_() for f in factors]
    shifted = dense(whole) + 0.5 * torch.eye(N, dtype=torch.float64)
    worst = 0.0
    with torch.autocast(grid.device.type, torch.bfloat16):
        calls = {
            "solve": (lambda: K.solve(mine), dense(whole)),
            "shift": (lambda: A.solve(mine), shifted),
            "iterative": (lambda: A.solve(mine, mask=everywhere, preconditioner=False, tolerance=1e-6), shifted),
            "preconditioned": (lambda: A.solve(mine, mask=everywhere, tolerance=1e-6), shifted),
        }
        for name, (call, a) in calls.items():
            x = call()
            # The derivatives of torch.linalg.inv are torch's, whose products are in bfloat16 where autocast is on in the backward pass.
            with torch.autocast(grid.device.type, torch.bfloat16, enabled=name != "solve"):
                got = torch.autograd.grad((x * x).sum(), own)
            with torch.autocast(grid.device.type, enabled=False):
                y = torch.linalg.solve(a, b.double())
                wanted = torch.autograd.grad((y * y).sum(), whole, retain_graph=True)
                pairs = [(x.detach(), block(y.detach(), grid)), *zip(got, wanted, strict=True)]
                assert all(p.dtype == torch.float32 for p, _ in pairs), name
                errors = [float((p.cpu() - q.cpu()).norm() / q.norm()) for p, q in pairs if p.numel()]
                worst = max(worst, *errors)
        log = float(A.logdet().detach())
    return max(worst, abs(log / float(shifted.logdet().detach()) - 1))


@pytest.mark.parametrize("by_rows", [True, False])
def test_autocast(ranks: RankPool, by_rows: bool) -> None:
    shape = (ranks.world_size, 1) if by_rows else (1, ranks.world_size)
    assert max(ranks.run(under_autocast, shape)) < 1e-4


def signs(times):
    """Log determinants of ``K + shift I`` with negative eigenvalues: an even or an odd number of them, with identities too."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    found = []
    for factors, shift in [
        ([-f for f in symmetric()], 0.1),
        (symmetric(sign=-1.0), 0.0),
        ([torch.diag(torch.tensor([-2.0, 1.0, 3.0])).double()], 0.5),
        ([torch.diag(torch.tensor([-2.0, -1.0, 3.0])).double()], 0.5),
    ]:
        whole = dense([*factors, times])
        shifted = whole + shift * torch.eye(len(whole), dtype=torch.float64)
        given = placed(factors, grid)
        K = KroneckerProduct([*given[:1], times, *given[1:]] if times > 1 else given, grid=grid)
        found.append((float(K.add_diagonal(shift).logdet()), float(torch.logdet(shifted))))
    return found


@pytest.mark.parametrize("times", [1, 2, 3])
def test_signs_of_determinants(ranks: RankPool, times: int) -> None:
    for pairs in ranks.run(signs, times):
        assert any(math.isfinite(wanted) for _, wanted in pairs)
        assert times == 2 or any(math.isnan(wanted) for _, wanted in pairs)
        for got, wanted in pairs:
            assert got == pytest.approx(wanted, rel=1e-12, nan_ok=True)


def general(kind, with_identity):
    """A solve with factors that are not symmetric, its gradients, and a determinant; relative errors."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    dtype = torch.complex128 if kind == "complex" else torch.float64
    given = [random(p, p, seed=p).to(dtype) + 3 * torch.eye(p, dtype=dtype) for p in (4, 3)]
    if kind == "complex":
        given = [f + 1j * random(len(f), len(f), seed=9).to(dtype) for f in given]
    if kind == "defective":  # without a basis of eigenvectors
        given[0] = 2 * torch.eye(4, dtype=dtype) + torch.ones(3, dtype=dtype).diag(1)
    b, s = random(24 if with_identity else 12, 3, seed=1).to(dtype), torch.tensor(0.5, dtype=dtype)

    def placed_as(factors):
        return [factors[0], 2, factors[1]] if with_identity else factors

    own, mine = [t.to(grid.device).requires_grad_() for t in (*given, s)], block(b, grid).requires_grad_()
    A = KroneckerProduct(placed_as(own[:2]), grid=grid).add_diagonal(own[2])
    x = A.solve(mine)
    found = [x, *torch.autograd.grad((x * x.conj()).real.sum(), [*own, mine]), *torch.autograd.grad(A.logdet().real, own)]

    whole, b = [t.requires_grad_() for t in (*given, s)], b.requires_grad_()
    a = dense(placed_as(whole[:2])) + whole[2] * torch.eye(len(b), dtype=dtype)
    y = torch.linalg.solve(a, b)
    *of_own, of_b = torch.autograd.grad((y * y.conj()).real.sum(), [*whole, b], retain_graph=True)
    wanted = [block(y.detach(), grid), *of_own, block(of_b, grid), *torch.autograd.grad(torch.linalg.slogdet(a).logabsdet, whole)]
    return max(float((p.detach().cpu() - q.cpu()).norm() / q.norm()) for p, q in zip(found, wanted, strict=True) if p.numel())


@pytest.mark.parametrize("with_identity", [False, True])
def test_general_factors(ranks: RankPool, with_identity: bool) -> None:
    for kind in ("real", "complex", "defective"):
        assert max(ranks.run(general, kind, with_identity)) < 1e-9, kind


def eigenvalues(shape):
    """Relative errors of the gradient of a function of eigenvalues, which each rank has for its rows."""
    grid = ProcessGrid(shape)
    own, whole = [f.to(grid.device).requires_grad_() for f in symmetric()], [f.requires_grad_() for f in symmetric()]
    values = KroneckerProduct(own, grid=grid).eigvalsh()
    found = torch.autograd.grad(values.sin().sum(), own)
    expected = torch.autograd.grad(torch.linalg.eigvalsh(dense(whole)).sin().sum(), whole)
    times = grid.shape[1]  # the same rows on each rank of a row, whose losses add up
    return max(float((p.cpu() - times * q).norm() / q.norm()) for p, q in zip(found, expected, strict=True))


@pytest.mark.parametrize("by_rows", [True, False])
def test_gradients_of_eigenvalues(ranks: RankPool, by_rows: bool) -> None:
    assert max(ranks.run(eigenvalues, (ranks.world_size, 1) if by_rows else (1, ranks.world_size))) < 1e-12


def missing():
    """A right-hand side with NaN where the mask leaves equations out."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    mask, b = random(N, seed=2) > -0.5, random(N, 2, seed=1)
    b[~mask] = math.nan
    rows, own = grid.block(b.shape)[0], block(b, grid).requires_grad_()
    A = KroneckerProduct(placed(symmetric(), grid), grid=grid).add_diagonal(0.0)
    x = A.solve(own, mask=mask[rows].to(grid.device), tolerance=1e-12)
    expected = torch.zeros_like(b)
    expected[mask] = torch.linalg.solve(dense(symmetric())[mask][:, mask], b[mask])
    torch.testing.assert_close(x.detach(), block(expected, grid), rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(x.sum(), own)
    assert gradient.isfinite().all()
    assert not gradient[~mask[rows].to(grid.device)].any()


def test_missing_numbers(ranks: RankPool) -> None:
    ranks.run(missing)
