"""Conjugate and negative views, which torch makes without touching memory, and tensors of transforms, which have more than their memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from products import block, grid_for, multiply, planned, single
from rank_pool import RankPool
from torch.autograd import forward_ad

from fastkron_py.distributed import KroneckerProduct, KroneckerSum, ProcessGrid, kron_matmul

SIZES = ((4, 4), (2, 2), (4, 4))
PLANS = {"stages": (2, 1), "whole rows": "rows"}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, (2, *shape), generator=torch.Generator().manual_seed(seed)).double()


def views(shape, plan, left, kind):
    """Products of views, and the gradients of losses whose gradients are views."""
    if (grid := grid_for(shape)) is None:
        return None
    m, n = 8, 32
    given = [numbers(*s, seed=i) for i, s in enumerate([(n, m) if left else (m, n), *SIZES])]

    def operands(device):
        """Leaves, and views of them: x and the factors."""
        leaves = [torch.complex(*t.to(device)).requires_grad_() for t in given]
        if kind == "conj":
            return leaves, [t.conj() for t in leaves]
        return leaves, [t.conj().imag for t in leaves]  # negative views of real tensors

    leaves, (x, *factors) = operands(grid.device)
    x = (x.conj().resolve_conj() if kind == "conj" else -x.resolve_neg()).detach()
    own = block(x, grid).clone().requires_grad_()
    view = own.conj() if kind == "conj" else torch._neg_view(own)
    assert view.is_conj() or view.is_neg()
    options = {"plan": planned(m, SIZES, shape, PLANS[plan], 1, left, view.dtype)} if shape[0 if left else 1] > 1 else {}
    y = multiply(view, factors, left, grid=grid, **options)
    loss = (y * y.conj()).real.sum() + y.conj().imag.sum() if kind == "conj" else (y * torch._neg_view(y)).sum()
    mine = torch.autograd.grad(loss, [own, *leaves[1:]])

    wholes, (x, *factors) = operands("cpu")
    wanted = single(x, factors, left)
    loss = (wanted * wanted.conj()).real.sum() + wanted.conj().imag.sum() if kind == "conj" else -(wanted * wanted).sum()
    at_x, *at_factors = torch.autograd.grad(loss, [x, *wholes[1:]])
    at_x = at_x.conj() if kind == "conj" else -at_x
    assert torch.equal(y.detach(), block(wanted.detach(), grid))
    assert torch.equal(mine[0], block(at_x, grid))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mine[1:], at_factors, strict=True))
    return True


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_views(ranks: RankPool, grid_shape: tuple[int, int], kind: str) -> None:
    for plan, left in itertools.product(PLANS, (False, True)):
        assert set(ranks.run(views, grid_shape, plan, left, kind)) <= {True, None}, (plan, left)


def solves_of_views():
    """A complex sum's solve of a conjugate view, and the gradient of a complex loss."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    factors = [torch.complex(*numbers(p, p, seed=p)) + 20 * torch.eye(p) for p in (4, 3)]
    S = KroneckerSum([f.to(grid.device).conj() for f in factors], grid=grid)
    b = torch.complex(*numbers(12, 2, seed=7))
    own = block(b, grid).clone().requires_grad_()
    x = S.solve(own.conj())
    torch.autograd.grad(x.conj().imag.sum(), own)
    a = torch.kron(factors[0], torch.eye(3)) + torch.kron(torch.eye(4), factors[1])
    torch.testing.assert_close(x.detach(), block(torch.linalg.solve(a, b).conj(), grid), rtol=1e-12, atol=1e-12)


def test_solves_of_views(ranks: RankPool) -> None:
    ranks.run(solves_of_views)


# ---- transforms -----------------------------------------------------------------------------------


def transformed(what, plan, alone):
    """A product under a transform, on every rank or on rank 1 alone."""
    size = dist.get_world_size()
    grid = ProcessGrid((1, size))
    m, n = 8, 32
    chosen = planned(m, SIZES, (1, size), PLANS[plan], 1, False)
    factors = [numbers(*s, seed=i)[0].to(grid.device) for i, s in enumerate(SIZES)]
    x = block(numbers(m, n, seed=5)[0], grid)

    def product(x, *given):
        return kron_matmul(x, given or factors, grid=grid, plan=chosen)

    if alone and dist.get_rank() != 1:
        product(x)
    elif what == "jvp":
        torch.func.jvp(product, (x,), (x,))
    elif what == "jvp of factors":
        torch.func.jvp(lambda *given: product(x, *given), tuple(factors), tuple(factors))
    elif what == "dual":
        with forward_ad.dual_level():
            product(forward_ad.make_dual(x, x))
    elif what == "vmap":
        torch.func.vmap(product)(torch.stack([x, x]))
    elif what == "grad":
        torch.func.grad(lambda x: product(x).sum())(x)
    elif what == "batched gradients":
        y = product(x.requires_grad_())
        torch.autograd.grad(y, x, torch.stack([y, y]).detach(), is_grads_batched=True)


@pytest.mark.parametrize("plan", PLANS)
def test_transforms_are_refused(ranks: RankPool, plan: str) -> None:
    for what in ("jvp", "jvp of factors", "dual", "vmap", "grad", "batched gradients"):
        for outcome in ranks.outcomes(transformed, what, plan, False):
            assert outcome.error == "NotImplementedError", (what, outcome.trace)
            assert outcome.message.startswith("kron_matmul")
            assert "expected plain tensors, since no exchange between ranks carries tangents or batches; got one of a " in outcome.message


def test_a_transform_on_one_rank(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(transformed, "vmap", "stages", True):
        assert outcome.error == "ValueError", outcome.trace
        assert outcome.message.startswith("under a transform of torch.func: expected the same on every rank; got ")


def batched_sum():
    """Gradients of factors in a batch, where no block is exchanged."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    f = torch.eye(4, dtype=torch.float64, device=grid.device).requires_grad_()
    y = kron_matmul(torch.ones(2, 16, dtype=torch.float64, device=grid.device), [f, f], grid=grid)
    torch.autograd.grad(y, f, torch.stack([y, y]).detach(), is_grads_batched=True)


def test_batches_of_gradients_are_not_summed(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(batched_sum):
        assert outcome.error == "NotImplementedError", outcome.trace
        assert outcome.message.startswith("sum of the factors' gradients")


def under_a_level():
    """Operators of plain tensors, while a forward-mode level is open."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    K = KroneckerProduct([2 * torch.eye(4, dtype=torch.float64, device=grid.device)] * 2, grid=grid)
    b = block(torch.ones(16, 1, dtype=torch.float64), grid)
    with forward_ad.dual_level():
        torch.testing.assert_close(K.add_diagonal(1.0).solve(b), b / 5)


def test_plain_tensors_under_a_forward_mode_level(ranks: RankPool) -> None:
    ranks.run(under_a_level)
