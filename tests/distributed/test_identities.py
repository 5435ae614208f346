"""Integers among the factors of distributed products, for identities: against dense matrices in float64, and what ranks send for them."""

from __future__ import annotations

import math
from functools import reduce
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from products import (
    IDENTITIES,
    block,
    counted_bytes,
    grid_for,
    make,
    matrices,
    multiply,
    placed,
    planned,
    problem,
    single,
    whole_numbers,
    with_identities,
)
from rank_pool import RankPool, assert_refused
from torch.distributed.tensor import DTensor, Shard

from fastkron_py.distributed import KroneckerProduct, Problem, ProcessGrid, kron_matmul, plan
from fastkron_py.kron.operators.algebra import kron_range

# ---- products ------------------------------------------------------------------------------------


def dense(factors) -> torch.Tensor:
    """The Kronecker product, by torch.kron of matrices."""
    return reduce(torch.kron, [torch.eye(f, dtype=torch.float64) if isinstance(f, int) else f for f in factors])


def plans(m, sizes, stages, shape, left):
    """The closed form's, the given stages, and whole rows, in one chunk and in several."""
    return None, planned(m, sizes, shape, stages, 1, left), planned(m, sizes, shape, "rows", 2, left)


def gradients(shape, left, names):
    """Values, and gradients of first and second order of x, matrices, z, alpha and beta, bit for bit: all are whole numbers or halves."""
    if (grid := grid_for(shape)) is None:
        return
    for name in names:
        m, sizes, stages = IDENTITIES[name]
        x, factors, z = make(m, sizes, left=left)
        scalars = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)]
        whole = [t.clone().requires_grad_() for t in (x, z, *scalars, *matrices(factors))]
        k = dense(with_identities(sizes, whole[4:]))
        expected_y = whole[2] * (k @ whole[0] if left else whole[0] @ k) + whole[3] * whole[1]
        g = torch.Generator().manual_seed(1)
        weights = whole_numbers(g, *expected_y.shape)
        # An identity alone has no matrix, and its product no second derivative but those of scalars.
        expected = torch.autograd.grad((expected_y.square() * weights).sum(), whole, create_graph=True)
        directions = [whole_numbers(g, *t.shape) for t in expected]
        second = torch.autograd.grad(sum((a * v).sum() for a, v in zip(expected, directions, strict=True)), whole)

        def own(tensors):
            """What this rank has of x-like and z-like tensors, and all of the others."""
            return [block(tensors[0], grid), block(tensors[1], grid), *[t.to(grid.device) for t in tensors[2:]]]

        for how in plans(m, sizes, stages, shape, left):
            mine = [t.clone().requires_grad_() for t in own([t.detach() for t in whole])]
            alpha, beta, *given = mine[2:]
            y = multiply(mine[0], with_identities(sizes, given), left, grid=grid, plan=how, alpha=alpha, beta=beta, z=mine[1])
            assert torch.equal(y, block(expected_y, grid)), (name, how)
            found = torch.autograd.grad((y.square() * block(weights, grid)).sum(), mine, create_graph=True)
            for a, b in zip(found, own(expected), strict=True):
                assert torch.equal(a, b), (name, how)
            h = sum((a * v).sum() for a, v in zip(found, own(directions), strict=True))
            for a, b in zip(torch.autograd.grad(h, mine), own(second), strict=True):
                assert torch.equal(a, b), (name, how)


SHOWN = ("identities before and after", "slices that blocks cut", "an identity between", "an identity alone")


def test_gradients_of_first_and_second_order(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for left in (False, True):
        ranks.run(gradients, grid_shape, left, SHOWN)


@pytest.mark.full
def test_gradients_of_every_problem(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for left in (False, True):
        ranks.run(gradients, grid_shape, left, tuple(IDENTITIES))


def forms():
    """DTensors, NumPy's integers, operands computed again, and autocast; a wrong identity is seen."""
    grid = ProcessGrid((1, dist.get_world_size()))
    m, sizes, _ = IDENTITIES["identities before and after, exchanged"]
    x, factors, _ = make(m, sizes)
    expected = x @ dense(factors)
    own = placed(factors, grid)
    mixed = [np.int64(f) if isinstance(f, int) else f for f in own]
    assert torch.equal(kron_matmul(block(x, grid), mixed, grid=grid), block(expected, grid))
    shards = DTensor.from_local(block(x, grid), grid.mesh, [Shard(0), Shard(1)], run_check=False, shape=x.shape, stride=x.stride())
    found = kron_matmul(shards, own)
    assert found.shape == expected.shape
    assert torch.equal(found.to_local(), block(expected, grid))
    leaf = block(x, grid).clone().requires_grad_()
    how = planned(m, sizes, grid.shape, (1, 1, 1), 2, False)
    kron_matmul(leaf, own, grid=grid, plan=how, recompute=True).sum().backward()
    assert torch.equal(leaf.grad, block(dense(factors).sum(1).expand_as(x), grid))
    with torch.autocast(grid.device.type, torch.bfloat16):
        half = kron_matmul(block(x, grid).float(), [f if isinstance(f, int) else f.float() for f in own], grid=grid)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.double(), block(expected, grid))  # small whole numbers
    turned = kron_matmul(block(x, grid), [own[0] // 2, own[1], own[2] * 2], grid=grid)
    assert not torch.equal(turned, block(expected, grid)) or not turned.numel()


def test_forms_of_a_call(ranks: RankPool) -> None:
    ranks.run(forms)


def linear_in_x():
    """The second derivative of a product in x, 0; one rank multiplies two rows, the others one, by other operations of torch's."""
    grid = ProcessGrid((1, dist.get_world_size()))
    x, factors, _ = make(grid.world_size + 1, ((3, 3), grid.world_size))
    how = planned(len(x), ((3, 3), grid.world_size), grid.shape, "rows", 1, False)
    leaf = block(x, grid).clone().requires_grad_()
    y = kron_matmul(leaf, placed(factors, grid), grid=grid, plan=how)
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    assert torch.equal(first, block(dense(factors).sum(1).expand_as(x), grid))
    (second,) = torch.autograd.grad(first.sum(), leaf)
    return float(second.abs().max())


def test_derivatives_reach_the_same_exchanges_on_every_rank(ranks: RankPool) -> None:
    assert set(ranks.run(linear_in_x)) == {0.0}


def in_place():
    """A result that needs gradients may be written to, with and without an exchange."""
    grid = ProcessGrid((1, dist.get_world_size()))
    for sizes in ((grid.world_size, (3, 3)), ((3, 3), grid.world_size)):
        x, factors, _ = make(4, sizes)
        leaf = block(x, grid).clone().requires_grad_()
        y = kron_matmul(leaf, placed(factors, grid), grid=grid)
        y += 1
        assert torch.equal(y, block(x @ dense(factors) + 1, grid))
        y.sum().backward()
        assert torch.equal(leaf.grad, block(dense(factors).sum(1).expand_as(x), grid))


def test_results_in_place(ranks: RankPool) -> None:
    ranks.run(in_place)


def every_dtype(shape, left):
    if (grid := grid_for(shape)) is None:
        return
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128):
        for m, sizes, stages in IDENTITIES.values():
            x, factors, z = make(m, sizes, dtype, left=left)
            expected = block(single(x, factors, left, alpha=0.5, beta=-2.0, z=z), grid)
            for how in plans(m, sizes, stages, shape, left):
                found = multiply(block(x, grid), placed(factors, grid), left, grid=grid, alpha=0.5, beta=-2.0, z=block(z, grid), plan=how)
                assert torch.equal(found, expected), (dtype, sizes, how)


@pytest.mark.full
def test_every_dtype(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for left in (False, True):
        ranks.run(every_dtype, grid_shape, left)


# ---- what is sent --------------------------------------------------------------------------------


def sent(sizes):
    """Exchanges of a product and its gradient by the closed form's plan, and numbers that an all-reduce of gradients sums."""
    grid = ProcessGrid((1, dist.get_world_size()))
    x, factors, _ = make(4, sizes)
    own = with_identities(sizes, [t.clone().requires_grad_() for t in matrices(placed(factors, grid))])
    counts: list = []
    with counted_bytes(counts), mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
        kron_matmul(block(x, grid).clone().requires_grad_(), own, grid=grid).sum().backward()
    return len(counts), [call.args[0].numel() for call in summed.call_args_list]


def test_an_identity_that_comes_first_takes_no_exchange(ranks: RankPool) -> None:
    n = ranks.world_size
    assert set(map(str, ranks.run(sent, (n, (3, 2), 4)))) == {str((0, [6]))}
    assert set(map(str, ranks.run(sent, (2, n // 2, 1, (3, 2))))) == {str((0, [6]))}
    for exchanges, _ in ranks.run(sent, ((3, 2), n)):  # the control: an identity after the matrix
        assert exchanges >= 2


def test_plans_of_identities() -> None:
    local = plan(Problem(128, (64, 8, 64), (64, 8, 64), identities=(0, 2)), (1, 4))
    assert local.is_local
    assert (local.bytes_total, local.cuts) == (0, (3,))
    assert "I_64 8 I_64, float32: 1 x 4 grid, one chunk of rows\n" in str(local)
    cut = plan(Problem(1 << 14, (66, 8, 64), (66, 8, 64), identities=(0, 2)), (1, 4))
    assert cut.cuts == (3,)
    whole = plan(Problem(1 << 14, (66, 8, 64), (66, 8, 64)), (1, 4))
    assert 0 < cut.bytes_total < whole.bytes_total / 40  # halves of slices
    assert cut.problem.flops == 2 * (1 << 14) * 66 * 8 * 8 * 64
    assert cut.seconds < whole.seconds
    stages = plan(Problem(1, (64,) * 5, (64,) * 5, identities=(1, 2, 4)), (1, 4))  # a row for one of four ranks
    assert [s.factors for s in stages.steps] == [(3, 4), (0, 3)]
    assert stages.steps[0].multiply_seconds == 0
    forced = plan(Problem(1, (3, 4), (3, 4), identities=(0,)), (1, 4), stages=(1, 1))
    assert (forced.cuts, forced.is_local) == ((1, 1), False)


def test_problems_merge_identities() -> None:
    given = Problem(8, (2, 3, 1, 5, 7, 1), (2, 3, 1, 4, 7, 1), identities=[0, 1, 2, 4, 5])
    assert given == Problem(8, (6, 5, 7), (6, 4, 7), identities=(0, 2))
    assert Problem(8, (1, 1), (1, 1), identities=(0, 1)).ps == (1,)
    for wrong, kind, message in (
        ((3,), ValueError, r"identities: expected indices of square factors, among \[0, 2\]; got \(3,\)"),
        ((1,), ValueError, r"identities: expected indices of square factors, among \[0, 2\]; got \(1,\)"),
        ((True,), TypeError, r"identities: expected a sequence of integers; got \(True,\)"),
        (0, TypeError, "identities: expected a sequence of integers; got int"),
    ):
        with pytest.raises(kind, match=message):
            Problem(8, (2, 3, 2), (2, 4, 2), identities=wrong)


def test_a_range_beside_identities() -> None:
    vectors = [3, torch.arange(1.0, 6), 4, torch.tensor([2.0, -1]), 2]
    whole = reduce(torch.kron, [torch.ones(v) if isinstance(v, int) else v for v in vectors])
    for start, stop in [(0, 240), (0, 0), (7, 8), (13, 187), (239, 240), (80, 160)]:
        assert torch.equal(kron_range(vectors, start, stop), whole[start:stop])


# ---- the operator --------------------------------------------------------------------------------


def operator(shape):
    if (grid := grid_for(shape)) is None:
        return None
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, c = root @ root.mT / 4 + 0.1 * torch.eye(4), torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    sizes = [3, (4, 4), 2, (2, 2)]
    whole = [a.clone().requires_grad_(), c.clone().requires_grad_()]
    mine = [t.detach().to(grid.device).requires_grad_() for t in whole]
    K = KroneckerProduct(with_identities(sizes, mine), grid=grid)
    assert (K.shape, K.dtype, K.factors[0]) == ((48, 48), torch.float64, 3)
    assert "I_3 (x) 4x4 (x) I_2" in repr(K)
    k, eye = dense(with_identities(sizes, whole)), torch.eye(48, dtype=torch.float64)
    b = torch.randn(48, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = block(b, grid)
    wanted = {
        "K @ x": (K @ own, k @ b),
        "K.mT @ x": (K.mT @ own, k.mT @ b),
        "solve": (K.solve(own), torch.linalg.solve(k, b)),
        "solve with a shift": (K.solve(own, shift=0.3), torch.linalg.solve(k + 0.3 * eye, b)),
        "conjugate gradients": (K.conjugate_gradients(own, shift=0.3, tolerance=1e-13).x, torch.linalg.solve(k + 0.3 * eye, b)),
        "inverse": (K.inverse() @ own, torch.linalg.solve(k, b)),
        "2 * K": ((2 * K) @ own, 2 * k @ b),
        "K @ K": ((K @ K) @ own, k @ (k @ b)),
    }
    for name, (x, y) in wanted.items():
        torch.testing.assert_close(x, block(y, grid), rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    for x, y in ((K.logdet(), k.logdet()), (K.logdet(shift=0.3), (k + 0.3 * eye).logdet()), (K.trace(), k.trace())):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-12, atol=0)
    loss = (K.solve(own, shift=0.3) ** 2).sum() + K.logdet(shift=0.3) / grid.world_size
    expected = torch.autograd.grad((torch.linalg.solve(k + 0.3 * eye, b) ** 2).sum() + (k + 0.3 * eye).logdet() / grid.world_size, whole)
    for x, y in zip(torch.autograd.grad(loss, mine), expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-7, atol=1e-9)
        assert not torch.allclose(x.cpu(), y * (1 + 1e-5), rtol=1e-7)  # the tolerance can fail
    return True


def test_the_operator(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    assert set(ranks.run(operator, grid_shape)) <= {True, None}


# ---- refusals ------------------------------------------------------------------------------------


def refused(verb, which, alone):
    """One rank, or all, with a wrong integer."""
    grid = ProcessGrid((1, dist.get_world_size()))
    good: list = [4, torch.eye(3, device=grid.device)]
    factors = WRONG[which][0](good) if not alone or dist.get_rank() == 1 else good
    if verb == "KroneckerProduct":
        KroneckerProduct(factors, grid=grid)
    else:
        how = plan(problem(2, (4, (3, 3))), grid.shape) if which == "another plan" else None
        kron_matmul(
            torch.ones(grid.block((2, 12))[0].stop, math.ceil(12 / grid.shape[1]), device=grid.device), factors, grid=grid, plan=how
        )


WRONG = {
    "zero": (
        lambda good: [0, *good[1:]],
        "ValueError",
        "factors[0]: expected a matrix with rows and columns, or a positive integer n for the identity I_n; got 0",
    ),
    "negative": (
        lambda good: [*good[1:], -4],
        "ValueError",
        "factors[1]: expected a matrix, or an integer n of 0 or more for the identity I_n; got -4",
    ),
    "bool": (lambda good: [True, *good[1:]], "TypeError", "factors[0]: expected a matrix, or an integer n for the identity I_n; got bool"),
    "float": (lambda good: [4.0, *good[1:]], "TypeError", "factors[0]: expected a torch tensor"),
    "another size": (lambda good: [8, *good[1:]], "ValueError", "x: expected "),
    "another plan": (lambda good: [good[1], 4], "ValueError", "plan: expected a plan for factors (3, 4) x (3, 4) with identities (1,), "),
}


@pytest.mark.parametrize("alone", [False, True])
def test_every_rank_refuses(ranks: RankPool, alone: bool) -> None:
    for which, (_, kind, message) in WRONG.items():
        for verb in ("kron_matmul", "KroneckerProduct") if which not in ("another size", "another plan") else ("kron_matmul",):
            assert_refused(ranks.outcomes(refused, verb, which, alone), kind, message, alone)


def identities_alone():
    grid = ProcessGrid()
    KroneckerProduct([3, 4], grid=grid)


def test_an_operator_needs_a_matrix(ranks: RankPool) -> None:
    message = "factors: expected at least one matrix, whose dtype and device the operator has; got identities"
    assert_refused(ranks.outcomes(identities_alone), "ValueError", message)
