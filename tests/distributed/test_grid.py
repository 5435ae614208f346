"""`ProcessGrid` on real ranks: who is where, which groups there are, and what all ranks refuse alike."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import block, grid_for
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastkron_py
from fastkron_py.distributed import KroneckerProduct, ProcessGrid, init_process_group, kron_matmul
from fastkron_py.distributed.failures import rank_text
from fastkron_py.distributed.grid import grid_of


def place(shape, ranks=None, from_mesh=False):
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    if from_mesh:
        shape = init_device_mesh(init_process_group().device.type, shape)
    grid = ProcessGrid(shape, ranks=ranks)
    sums = []
    for group in (grid.row_group, grid.col_group, grid.group):
        one_hot = torch.zeros(dist.get_world_size(), device=grid.device)
        one_hot[dist.get_rank()] = 1 + dist.get_rank(group)
        dist.all_reduce(one_hot, group=group)
        sums.append({r: int(v) - 1 for r, v in enumerate(one_hot.tolist()) if v})
    assert grid.mesh.shape == grid.shape
    assert grid.mesh.get_coordinate() == [grid.row, grid.col] or tuple(grid.mesh.get_coordinate()) == (grid.row, grid.col)
    local = torch.full((2, 3), float(grid.rank), device=grid.device)
    whole = DTensor.from_local(local, grid.mesh, [Shard(0), Shard(1)]).full_tensor()
    return {"row": grid.row, "col": grid.col, "rank": grid.rank, "sums": sums, "whole": whole, "repr": repr(grid)}


def expected_sums(rank: int, shape: tuple[int, int]) -> list[dict[int, int]]:
    row, col = divmod(rank, shape[1])
    return [
        {row * shape[1] + c: c for c in range(shape[1])},
        {r * shape[1] + col: r for r in range(shape[0])},
        {r: r for r in range(shape[0] * shape[1])},
    ]


def test_ranks_lie_along_rows(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    count = grid_shape[0] * grid_shape[1]
    found = ranks.run(place, grid_shape, list(range(count)))
    blocks = torch.arange(float(count)).view(grid_shape).repeat_interleave(2, 0).repeat_interleave(3, 1)
    for rank, info in enumerate(found[:count]):
        assert (info["row"], info["col"], info["rank"]) == (*divmod(rank, grid_shape[1]), rank)
        assert info["sums"] == expected_sums(rank, grid_shape)
        torch.testing.assert_close(torch.from_numpy(info["whole"]), blocks, rtol=0, atol=0)
    assert found[count:] == [None] * (ranks.world_size - count)


def test_a_mesh_becomes_a_grid(ranks: RankPool) -> None:
    shape = (ranks.world_size // 2, 2)
    for rank, info in enumerate(ranks.run(place, shape, None, from_mesh=True)):
        assert info["sums"] == expected_sums(rank, shape)


def test_some_of_the_ranks(ranks: RankPool) -> None:
    last = ranks.world_size - 1
    found = ranks.run(place, (1, 2), [0, last])
    assert found[1:last] == [None] * (last - 1)
    assert [(info["row"], info["col"]) for info in (found[0], found[last])] == [(0, 0), (0, 1)]
    assert found[0]["sums"][0] == {0: 0, last: 1}


def test_without_a_shape_each_rank_is_a_row(ranks: RankPool) -> None:
    assert [i["row"] for i in ranks.run(place, None)] == list(range(ranks.world_size))


def grids_of_slices():
    """A mesh's slice is another object each time, and its grid the same."""
    size = dist.get_world_size()
    root = init_device_mesh(init_process_group().device.type, (1, 1, size), mesh_dim_names=("replicas", "rows", "cols"))
    found = [grid_of(root["rows", "cols"]) for _ in range(3)]
    return len({id(grid.mesh) for grid in found}), root["rows", "cols"] is not found[0].mesh


def test_slices_of_a_mesh_share_a_grid(ranks: RankPool) -> None:
    assert set(ranks.run(grids_of_slices)) == {(1, True)}


def versions():
    with mock.patch.object(fastkron_py, "__version__", f"0.{int(dist.get_rank() == 1)}"):
        ProcessGrid()


def test_versions_that_differ(ranks: RankPool) -> None:
    others = rank_text(r for r in range(ranks.world_size) if r != 1)
    for outcome in ranks.outcomes(versions):
        assert outcome.error == "ValueError"
        assert outcome.message == f'version of fastkron_py: expected the same on every rank; got "0.0" on {others}; "0.1" on rank 1'


def copied():
    """A copy of a module that holds a grid and an operator, and a grid on a device with an index."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    factor = torch.eye(4, device=grid.device) + 1
    module = torch.nn.Linear(2, 2)
    module.grid, module.operator = grid, KroneckerProduct([factor, factor], grid=grid)
    twin = copy.deepcopy(module)
    assert twin.grid is grid
    assert twin.operator.factors[0] is not factor
    x = torch.ones(module.operator.shape[1] // grid.world_size, 3, device=grid.device)
    torch.testing.assert_close(twin.operator @ x, module.operator @ x)
    on_host = ProcessGrid((grid.world_size, 1), device="cpu:0")
    assert on_host.device == torch.device("cpu")
    factors = [torch.eye(4, device="cpu:0")] * 2
    x = torch.ones(2, 16, device="cpu:0")
    return (kron_matmul(x, factors, grid=on_host) == x).all().item()


def test_copies_and_devices_with_an_index(ranks: RankPool) -> None:
    assert all(ranks.run(copied))


def closed(fails):
    """A product in a block, and what a product and a second close do after it."""
    size = dist.get_world_size()

    def product(grid):
        return kron_matmul(torch.ones(2, 16 // size, device=grid.device), [torch.ones(4, 4, device=grid.device)] * 2, grid=grid)

    other = ProcessGrid((1, size))
    with contextlib.suppress(KeyError), ProcessGrid((1, size)) as grid:
        assert (product(grid) == 16).all()
        if fails:
            dist.barrier()  # a rank that is still in its product would be told of the failure
            raise KeyError
    grid.close()
    with pytest.raises(ValueError, match="grid: expected an open ProcessGrid; got one that has been closed"):
        product(grid)
    return bool((product(other) == 16).all())


@pytest.mark.parametrize("fails", [False, True])
def test_closed_grids(ranks: RankPool, fails: bool) -> None:
    assert all(ranks.run(closed, fails))


def there_and_back(shape, m, n):
    if (grid := grid_for(shape)) is None:
        return
    whole = torch.arange(float(m * n), dtype=torch.float64, device=grid.device).view(m, n)
    x = grid.scatter(whole if grid.rank == 0 else torch.full_like(whole, torch.nan))
    assert torch.equal(x, block(whole, grid))
    assert torch.equal(grid.gather(x), whole)
    assert torch.equal(grid.gather(x.mT.contiguous().mT), whole)


def test_scatter_and_gather(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for m, n in ((7, 5), (8, 12), (3, 2), (1, 9)):
        ranks.run(there_and_back, grid_shape, m, n)
