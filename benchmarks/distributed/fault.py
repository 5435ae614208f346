"""A line of ranks whose last one is killed in the middle of products: ``python -m benchmarks.distributed.fault HOW FILE``, once a rank.

HOW is "between" products, while the others run on, or "within" an exchange, while the others wait for its result. Each of them writes a
line of JSON: the error, its stage, and how long after the kill it came. FILE gets the time of the kill.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastkron_py.distributed import CollectiveError, ProcessGrid, init_process_group, kron_matmul
from fastkron_py.distributed.transport.peer_memory import Slots

HOWS = ("between", "within")
PRODUCTS = 12
TIMEOUT = 8.0


def main(how: str, file: str) -> None:
    """Multiply until the peer is gone."""
    info = init_process_group(timeout=TIMEOUT)
    grid, last = ProcessGrid((1, info.world_size)), info.rank == info.world_size - 1
    size = 64 if info.device.type == "cuda" else 8
    factors = [torch.randn(size, size, device=grid.device) / size for _ in range(4 if size == 64 else 3)]
    x = torch.randn(16, size ** len(factors) // info.world_size, device=grid.device)

    def end(*_: Any, **__: Any) -> Any:
        Path(file).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        for i in range(1000):
            if last and i == PRODUCTS and how == "between":
                end()
            if last and i == PRODUCTS:
                dist.all_to_all_single = Slots.exchange = end
            y = kron_matmul(x, factors, grid=grid)
            if how == "within":
                float(y.sum())
    except CollectiveError as error:
        seconds = time.time() - float(Path(file).read_text())
        print(json.dumps({"stage": error.stage, "message": str(error), "seconds": seconds}), flush=True)
        os._exit(0)  # a broken communicator has nothing to say any more


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
