"""A job as a user would start it: prints what each rank is, and sums over its row of a grid, in the second group that it makes."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from fastkron_py.distributed import ProcessGrid, init_process_group

for _ in range(2):  # the second time in a store that has the first group's addresses
    if dist.is_initialized():
        dist.destroy_process_group()
    info = init_process_group("gloo", timeout=600)
    grid = ProcessGrid((info.world_size // 2, 2))
if sys.argv[1:] == ["raise-on-rank-1"]:
    if info.rank == 1:
        raise ValueError("only here")
    grid.barrier()
total = torch.tensor([info.rank])
dist.all_reduce(total, group=grid.row_group)
about = {k: getattr(info, k) for k in ("launcher", "rank", "world_size", "local_rank", "local_world_size", "backend")}
line = json.dumps(about | {"again": init_process_group() == info, "row": grid.row, "col": grid.col, "sum": total.tolist()})
print(line + "\n", end="", flush=True)
