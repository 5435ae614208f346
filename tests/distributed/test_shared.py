"""What ranks have to share, bases above all, where their linear algebra differs: as LAPACK does by its number of threads."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import block, grid_for, placed, random
from rank_pool import RankPool, assert_refused

import fastkron_py
from fastkron_py.distributed import KroneckerProduct, KroneckerSum, Plan, ProcessGrid, api

SIZES = (4, 6, 5)
N = 120


def rings(shift: float) -> list[torch.Tensor]:
    """Second differences on rings: their eigenvalues come in pairs, whose eigenvectors may be turned."""
    eyes = [torch.eye(p, dtype=torch.float64) for p in SIZES]
    return [(2 + shift) * e - e.roll(1, 0) - e.roll(-1, 0) for e in eyes]


@contextmanager
def own_linear_algebra():
    """Each rank turns eigenvectors of equal eigenvalues by an angle of its own, and rounds other results in its own way."""
    rank, eigh = dist.get_rank(), torch.linalg.eigh

    def turned(a):
        values, vectors = eigh(a)
        angle, turn = torch.tensor(0.7 * rank, dtype=a.dtype), torch.eye(len(a), dtype=a.dtype, device=a.device)
        for i in range(len(a) - 1):
            if values[i + 1] - values[i] < 1e-9:
                turn[i, i] = turn[i + 1, i + 1] = angle.cos()
                turn[i, i + 1], turn[i + 1, i] = angle.sin(), -angle.sin()
        return values, vectors @ turn

    def rounded(name):
        plain = getattr(torch.linalg, name)

        def function(a, *options):
            found = plain(a, *options)
            return (found[0], found[1] * (1 + rank * 1e-13)) if name == "slogdet" else found * (1 + rank * 1e-13)

        return mock.patch.object(torch.linalg, name, function)

    def staged(problem, shape, *_):  # whole rows of so few points would be multiplied by one rank alone
        return Plan(problem, shape, (2, 1), 1)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.linalg, "eigh", turned))
        stack.enter_context(mock.patch.object(api, "_planned", staged))
        for name in ("inv", "cholesky", "matrix_exp", "slogdet", "matrix_norm", "matrix_power"):
            stack.enter_context(rounded(name))
        yield


def solutions(shape):
    """Relative errors of solves, determinants and their gradients."""
    if (grid := grid_for(shape)) is None:
        return None
    own = [f.to(grid.device).requires_grad_() for f in rings(0.1)]
    whole = [f.clone().requires_grad_() for f in rings(0.1)]
    S, K = KroneckerSum(own, grid=grid), KroneckerProduct(own, grid=grid)
    s, k = fastkron_py.KroneckerSum(whole).to_dense(), fastkron_py.KroneckerProduct(whole).to_dense()
    b, shifted = random(N, 1, seed=1), k + 0.3 * torch.eye(N, dtype=torch.float64)
    mine, pairs = block(b, grid), {}
    with own_linear_algebra():
        A = K.add_diagonal(0.3)
        iterative = A.solve(mine, mask=torch.ones(len(mine), dtype=torch.bool, device=grid.device))
        for name, x, a in [
            ("sum", S.solve(mine), s),
            ("product", K.solve(mine), k),
            ("shift", A.solve(mine), shifted),
            ("preconditioner", iterative, shifted),
        ]:
            pairs[name] = x, block(torch.linalg.solve(a, b), grid)
        for name, log, a in [("sum", S.logdet(), s), ("product", K.logdet(), k), ("shift", A.logdet(), shifted)]:
            pairs[f"{name}, logdet"] = log, a.logdet()
            gradients = zip(torch.autograd.grad(log, own), torch.autograd.grad(a.logdet(), whole, retain_graph=True), strict=True)
            pairs |= {f"{name}, gradient {i}": pair for i, pair in enumerate(gradients)}
    assert A.convergence.iterations == 1
    return {name: float((x.detach().cpu() - y.detach().cpu()).norm() / y.detach().norm()) for name, (x, y) in pairs.items() if x.numel()}


def test_solutions(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for found in ranks.run(solutions, grid_shape):
        assert max((found or {"": 0.0}).values()) < 1e-11, found


def values():
    """What each rank has of functions of the factors, and of their gradients."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    own = [f.to(grid.device).requires_grad_() for f in rings(0.1)]
    S, K = KroneckerSum(own, grid=grid), KroneckerProduct(own, grid=grid)
    with own_linear_algebra():
        found = [*K.inverse().factors, *K.cholesky().factors, *K.matrix_power(-2).factors, *S.expm(-0.1).factors]
        found += [*K.slogdet(), K.logdet(), K.det(), K.norm(), *S.slogdet()]
        nuclear = K.norm("nuc")  # whose second derivative needs distinct singular values
        loss = sum([t.sin().sum() for t in found])
        first = torch.autograd.grad(loss, own, create_graph=True)
        second = torch.autograd.grad(sum([g.sin().sum() for g in first]), own)
    assert all(t.isfinite().all() for t in (*found, *first, *second))
    return [*found, *first, *second, nuclear]


def test_values_are_equal_on_every_rank(ranks: RankPool) -> None:
    first, *others = ranks.run(values)
    for other in others:
        assert all((a == b).all() for a, b in zip(first, other, strict=True))


def fails(call, where):
    """An error of one rank's own."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    factors = placed(rings(0.1), grid)
    S, K = KroneckerSum(factors, grid=grid), KroneckerProduct(factors, grid=grid)
    b = block(torch.ones(N, 1, dtype=torch.float64), grid)
    wrong, everywhere = dist.get_rank() == where, b[:, 0] > 0

    def failing(a, *_):
        raise torch.linalg.LinAlgError("of this rank alone")

    def preconditioner(r):
        if wrong and call == "preconditioner":
            raise OSError("of this rank alone")
        return r[:-1] if wrong else r

    with ExitStack() as stack:
        for name in ("inv", "cholesky", "matrix_exp", "eigh", "slogdet") if wrong else ():
            stack.enter_context(mock.patch.object(torch.linalg, name, failing))
        calls = {
            "inverse": K.inverse,
            "cholesky": K.cholesky,
            "logdet": K.logdet,
            "K.solve": lambda: K.solve(b),
            "expm": S.expm,
            "expm_multiply": lambda: S.expm_multiply(b),
            "S.solve": lambda: S.solve(b),
            "S.logdet": S.logdet,
            "shift": lambda: K.add_diagonal(1.0).solve(b),
            "preconditioner": lambda: K.add_diagonal(0.0).solve(b, mask=everywhere, preconditioner=preconditioner),
            "preconditioned shape": lambda: K.add_diagonal(0.0).solve(b, mask=everywhere, preconditioner=preconditioner),
        }
        return calls[call]()


@pytest.mark.parametrize("call", ["inverse", "cholesky", "logdet", "K.solve", "expm", "expm_multiply"])
def test_an_error_on_one_rank(ranks: RankPool, call: str) -> None:
    assert_refused(ranks.outcomes(fails, call, 1), "_LinAlgError", "factors[0] of shape (4, 4): of this rank alone", alone=True)


def test_an_error_of_a_preconditioner_on_one_rank(ranks: RankPool) -> None:
    assert_refused(ranks.outcomes(fails, "preconditioner", 1), "RuntimeError", "OSError: of this rank alone", alone=True)
    assert_refused(ranks.outcomes(fails, "preconditioned shape", 1), "ValueError", "preconditioner: expected a function to ", alone=True)


@pytest.mark.parametrize("call", ["S.solve", "S.logdet", "shift"])
def test_the_first_rank_alone_looks_for_eigenvectors(ranks: RankPool, call: str) -> None:
    for outcome in ranks.outcomes(fails, call, 0):
        assert (outcome.error, outcome.message) == ("_LinAlgError", "factors[0] of shape (4, 4): of this rank alone (on rank 0)")
    assert all(outcome.error is None for outcome in ranks.outcomes(fails, call, 1))
