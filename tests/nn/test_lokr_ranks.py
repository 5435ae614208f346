"""LoKr layers on two ranks: DistributedDataParallel, and a pair of layers that tensor-parallel ranks share."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch

JOB = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastkron_py.nn import LoKrLinear, load_lokr, lokr_state, shard_lokr

rank, store = arguments
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
whole = nn.ModuleDict({"up": LoKrLinear(24, 48, 2, alpha=3.0), "down": LoKrLinear(48, 24, 2, alpha=3.0)}).double()
for n, p in whole.named_parameters():
    nn.init.normal_(p, std=0.3) if "lokr" in n else None
x = torch.randn(8, 24).double()


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = whole

    def forward(self, x):
        return self.layers["down"](self.layers["up"](x).relu())


# The gradients of a mean over both ranks' rows.
chain = Chain()
own = [p for p in chain.parameters() if p.requires_grad]
want = torch.autograd.grad(chain(x).square().mean(), own)
parallel = DistributedDataParallel(chain)
parallel(x.chunk(2)[rank]).square().mean().backward()
of_data = max([float((p.grad - g).abs().max() / g.abs().max()) for p, g in zip(own, want)])

# Each rank has a part of the hidden features; results are summed.
state = shard_lokr(lokr_state(whole), {"*_up": "colwise", "*_down": "rowwise"}, rank, 2)
local = nn.ModuleDict({"up": nn.Linear(24, 24), "down": nn.Linear(24, 24, bias=False)}).double()
for name, dim in (("up", 0), ("down", 1)):
    local[name].weight.data.copy_(whole[name].base_layer.weight.chunk(2, dim)[rank])
local["up"].bias.data.copy_(whole["up"].bias.chunk(2)[rank])
load_lokr(local, state, adapter_dtype=torch.float64)
y = local["down"](local["up"](x).relu()).detach()
dist.all_reduce(y)
expected = chain(x).detach()
of_tensors = float((y + whole["down"].bias.detach() - expected).abs().max() / expected.abs().max())
alone = float((local["down"](local["up"](x).relu()) - expected).abs().max() / expected.abs().max())
dist.destroy_process_group()
parent.send((of_data, of_tensors, alone))
"""


@pytest.mark.dist
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
def test_two_ranks(tmp_path: Path) -> None:
    started = [forked.start(JOB, rank, str(tmp_path / "store")) for rank in range(2)]
    for process, connection in started:
        assert connection.poll(120)
        of_data, of_tensors, alone = connection.recv()
        process.join(60)
        assert of_data < 1e-12
        assert of_tensors < 1e-12
        assert alone > 1e-2  # the control: one rank's part is not the sum
