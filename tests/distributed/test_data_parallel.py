"""Distributed products in modules that DDP and FSDP2 wrap: gradients of the mean loss, beside those of one process in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from products import block
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastkron_py
from fastkron_py.distributed import KroneckerProduct, ProcessGrid, kron_matmul

ROWS, SIZE = 4, 8  # of each replica, and of two factors [8, 8]


class Model(nn.Module):
    """A parameter before two products of the same factors, one between them, and one behind. Without a grid on whole matrices."""

    def __init__(self, grid=None, reduction="sum"):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        device = "cpu" if grid is None else grid.device
        self.grid, self.options = grid, {"grid": grid, "reduction": reduction}
        self.gains = nn.ParameterList([torch.randn(1, generator=g).double().to(device) for _ in range(3)])
        self.factors = nn.ParameterList([torch.randn(SIZE, SIZE, generator=g).double().to(device) / 3 for _ in range(2)])

    def forward(self, x):
        before, between, behind = self.gains
        if self.grid is None:
            y = fastkron_py.kron_matmul(before * x, list(self.factors))
            return fastkron_py.kron_matmul((between * y).sin(), list(self.factors)) * behind
        y = kron_matmul(before * x, list(self.factors), **self.options)
        return (between * y).sin() @ KroneckerProduct(list(self.factors), **self.options) * behind


def gradients(wrapper, shape, replicas, reduction):
    """Of each parameter, and of the mean loss in one process."""
    size = dist.get_world_size() // replicas
    own = dist.get_rank() // size
    grid = ProcessGrid(shape, ranks=range(own * size, (own + 1) * size))
    x = torch.randn(replicas * ROWS, SIZE**2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Model(grid, reduction)
    if wrapper == "DDP":
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = fully_shard(model, mesh=init_device_mesh(grid.device.type, (dist.get_world_size(),)))
    wrapped(block(x[own * ROWS : (own + 1) * ROWS], grid)).square().mean().backward()
    alone = Model()
    alone(x).square().mean().backward()
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [g.cpu() for g in found], [p.grad for p in alone.parameters()]


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_gradients_are_those_of_the_mean_loss(ranks: RankPool, wrapper: str) -> None:
    """With sums the factors' are as many times as large as a grid has ranks, whatever the wrapper averages again."""
    if ranks.world_size != 4:
        pytest.skip("grids of four ranks")
    for (columns, replicas), reduction in itertools.product(((1, 1), (2, 1), (4, 1), (2, 2)), ("sum", "mean")):
        size = ranks.world_size // replicas
        for found, expected in ranks.run(gradients, wrapper, (size // columns, columns), replicas, reduction):
            for i, (g, e) in enumerate(zip(found, expected, strict=True)):
                times = size if reduction == "sum" and i >= 3 else 1
                torch.testing.assert_close(torch.as_tensor(g), times * torch.as_tensor(e), rtol=1e-12, atol=1e-14)


def is_view(shape):
    """Whether the result of a product is a view of another tensor."""
    factors = [torch.nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(2)]
    grid = ProcessGrid(shape)
    return kron_matmul(block(torch.randn(ROWS, SIZE**2), grid), factors, grid=grid)._is_view()


def test_a_result_is_no_view(ranks: RankPool) -> None:
    """FSDP2 warns about a module that returns a view."""
    assert not any(ranks.run(is_view, (1, ranks.world_size)))
