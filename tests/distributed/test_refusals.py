"""What one rank alone finds wrong, or does on another grid than the others: one error on every rank, and none waits."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastkron_py.distributed import KroneckerProduct, KroneckerSum, ProcessGrid, kron_matmul
from fastkron_py.distributed.failures import rank_text

SIZES = (4, 4, 2)
N = math.prod(SIZES)


def factors(grid, first=None):
    found = [torch.eye(p, dtype=torch.float64, device=grid.device) for p in SIZES]
    return found if first is None else [first.to(grid.device), *found[1:]]


def ones(grid, *shape):
    """This rank's block."""
    return torch.ones(shape, dtype=torch.float64)[grid.block(shape)].to(grid.device)


def on_grids(call, odd_mesh=False):
    """Odd ranks have another grid of the same ranks than even ones."""
    size, odd = dist.get_world_size(), dist.get_rank() % 2
    one = ProcessGrid((size // 2, 2))
    table = torch.arange(size).view(2, -1).mT.contiguous() if odd_mesh else torch.arange(size).view(-1, 2)
    other = ProcessGrid((1, size)) if not odd_mesh else ProcessGrid(DeviceMesh(one.device.type, table))
    operators = [KroneckerProduct(factors(grid), grid=grid) for grid in (one, other)]
    grid, operator = (other, operators[1]) if odd else (one, operators[0])
    if call == "kron_matmul":
        kron_matmul(ones(grid, 8, N), factors(grid), grid=grid)
    if call == "whole":  # odd ranks' blocks do not fit the even ones' grid either
        kron_matmul(torch.ones(8, N, dtype=torch.float64, device=grid.device), factors(grid), grid=grid)
    if call == "KroneckerProduct":
        KroneckerProduct(factors(grid), grid=grid)
    if call == "solve":
        operator.solve(ones(grid, N, 8))
    if call == "solve with a shift":
        operator.add_diagonal(0.5).solve(ones(grid, N, 8))
    if call == "logdet":
        operator.add_diagonal(0.5).logdet()


@pytest.mark.parametrize("call", ["kron_matmul", "whole", "KroneckerProduct", "solve", "solve with a shift", "logdet"])
def test_other_grids_of_the_same_ranks(ranks: RankPool, call: str) -> None:
    even, odd = (rank_text(range(start, ranks.world_size, 2)) for start in (0, 1))
    layouts = f"{ranks.world_size // 2} x 2 on {even}; 1 x {ranks.world_size} on {odd}"
    for outcome in ranks.outcomes(on_grids, call):
        assert outcome.error == "ValueError", outcome.trace
        assert re.sub(r", number \d+", "", outcome.message) == f"grid: expected the same on every rank; got {layouts}"


def test_ranks_in_another_order(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(on_grids, "kron_matmul", odd_mesh=True):
        assert outcome.error == "ValueError", outcome.trace
        assert f"on {rank_text(range(0, ranks.world_size, 2))}; " in outcome.message
        assert " of a mesh, number " in outcome.message


def alone(what):
    """Rank 1 alone has something wrong."""
    size, wrong = dist.get_world_size(), dist.get_rank() == 1
    grid = ProcessGrid((size // 2, 2))
    b = ones(grid, N, 8)

    def operator(first):
        return KroneckerProduct(factors(grid, first if wrong else None), grid=grid)

    if what == "mesh":
        other = ProcessGrid((size, 1))
        part = DTensor.from_local(b, (other if wrong else grid).mesh, [Shard(0), Shard(1)], run_check=False)
        KroneckerProduct(factors(grid), grid=grid) @ part
    if what == "singular":
        operator(torch.zeros(4, 4, dtype=torch.float64)).solve(b)
    asymmetric = torch.ones(4, 4, dtype=torch.float64).triu()
    if what == "asymmetric":
        operator(asymmetric).add_diagonal(0.5).solve(b, mask=b[:, 0] > 0)
    if what == "barrier":
        (grid.barrier if wrong else lambda: operator(None))()


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("mesh", "ValueError", "x: expected a DTensor on a mesh of ranks [["),
        ("singular", "_LinAlgError", "factors[0] of shape (4, 4): linalg.inv: "),
        ("asymmetric", "ValueError", "factors[0]: expected a symmetric matrix for conjugate gradients; got one that "),
        ("barrier", "ValueError", 'call: expected the same on every rank; got "KroneckerProduct" on rank'),
    ],
)
def test_every_rank_raises_what_one_met(ranks: RankPool, what: str, kind: str, message: str) -> None:
    outcomes = ranks.outcomes(alone, what)
    assert {o.error for o in outcomes} == {kind}, outcomes[0].trace
    assert len({o.message for o in outcomes}) == 1
    assert outcomes[0].message.startswith(message)


def without_gradients(what):
    """Rank 1 alone is under no_grad."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    own = [f.requires_grad_(what == "needed") for f in factors(grid)]
    K, S, b = KroneckerProduct(own, grid=grid), KroneckerSum([2 * f for f in own], grid=grid), ones(grid, N, 2)
    with torch.set_grad_enabled(dist.get_rank() != 1):
        return [K @ b, K.solve(b), K.add_diagonal(1.0).solve(b), K.logdet(), S @ b, S.solve(b), S.logdet(), S.expm_multiply(b)]


def test_no_grad_on_one_rank(ranks: RankPool) -> None:
    ranks.run(without_gradients, "not needed")
    for outcome in ranks.outcomes(without_gradients, "needed"):
        assert outcome.error == "ValueError", outcome.trace
        assert outcome.message.startswith("arguments that need gradients: expected the same on every rank; got ")
