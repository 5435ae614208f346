"""Integers among the factors of distributed products, for identities: forms of a call, what ranks send for them, refusals."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from products import (
    IDENTITIES,
    block,
    counted_bytes,
    dense,
    make,
    matrices,
    placed,
    planned,
    with_identities,
)
from rank_pool import RankPool
from torch.distributed.tensor import DTensor, Shard

from fastkron_py.distributed import Problem, ProcessGrid, kron_matmul

# ---- products ------------------------------------------------------------------------------------


def forms():
    """DTensors and NumPy's integers; a wrong identity is seen."""
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
    kron_matmul(leaf, own, grid=grid, plan=how).sum().backward()
    assert torch.equal(leaf.grad, block(dense(factors).sum(1).expand_as(x), grid))
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
