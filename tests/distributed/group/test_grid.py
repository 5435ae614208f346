"""`ProcessGrid` on real ranks: who is where, which groups there are, and what all ranks refuse alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fastkron_py.distributed import KroneckerProduct, ProcessGrid, init_process_group, kron_matmul
from fastkron_py.distributed.group.failures import rank_text


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


def same_groups():
    first, second = ProcessGrid((1, dist.get_world_size())), ProcessGrid((1, dist.get_world_size()))
    return first.row_group is second.row_group and first.control is second.control


def test_grids_of_the_same_ranks_share_groups(ranks: RankPool) -> None:
    assert all(ranks.run(same_groups))


def refuse(arguments, own):
    """One rank's arguments differ."""
    ProcessGrid(**(own if dist.get_rank() == 1 else arguments))


REFUSED = [
    ({"shape": (3, 5)}, "ValueError", "shape: expected GM * GK = 4, the number of ranks; got 3 * 5 = 15"),
    ({"shape": (-1, -4)}, "ValueError", "shape: expected two positive numbers, GM and GK; got (-1, -4)"),
    ({"shape": (4,)}, "ValueError", "shape: expected two positive numbers, GM and GK; got (4,)"),
    ({"shape": 4}, "TypeError", "shape: expected (GM, GK), a DeviceMesh or None; got int"),
    ({"shape": (2, 2.0)}, "TypeError", "shape: expected (GM, GK), a DeviceMesh or None; got (2, 2.0)"),
    ({"device": "meta"}, "ValueError", "device: expected cuda or cpu; got meta"),
    ({"device": 0}, "TypeError", "device: expected a torch device, its name or None; got int"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED)
@pytest.mark.parametrize("alone", [False, True])
def test_every_rank_refuses(ranks: RankPool, arguments: dict, kind: str, message: str, alone: bool) -> None:
    message = message.replace("= 4", f"= {ranks.world_size}")
    for outcome in ranks.outcomes(refuse, {} if alone else arguments, arguments):
        assert outcome.error == kind
        assert outcome.message == message + (" (on rank 1)" if alone else "")


def test_shapes_that_differ(ranks: RankPool) -> None:
    n = ranks.world_size
    for outcome in ranks.outcomes(refuse, {"shape": (n, 1)}, {"shape": (1, n)}):
        assert outcome.error == "ValueError"
        others = rank_text(r for r in range(n) if r != 1)
        assert outcome.message == f"shape: expected the same on every rank; got [{n}, 1] on {others}; [1, {n}] on rank 1"


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
