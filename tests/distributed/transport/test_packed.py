"""What an all-to-all of packed parts copies."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from products import Copied, block, grid_for, make, planned, single
from rank_pool import RankPool

from fastkron_py.distributed import kron_matmul
from fastkron_py.distributed.transport import copies
from fastkron_py.distributed.transport.packed import Transfer


def copied_bytes(stages):
    """Bytes copied by the exchanges of a product, as multiples of this rank's block."""
    grid, copied = grid_for((1, dist.get_world_size())), Copied()
    m, sizes = 16, ((8, 8),) * 3
    x, factors, _ = make(m, sizes, torch.float32)
    local, placed = block(x, grid), [f.to(grid.device) for f in factors]
    how = planned(m, sizes, grid.shape, stages, 2, False, torch.float32)

    def inside(function):
        def call(*args):
            with copied:
                return function(*args)

        return call

    with (
        mock.patch.object(copies, "WIDE_BYTES", 0),
        mock.patch.object(Transfer, "send", inside(Transfer.send)),
        mock.patch.object(Transfer, "receive", inside(Transfer.receive)),
    ):
        found = kron_matmul(local, placed, grid=grid, plan=how)
    assert torch.equal(found, block(single(x, factors), grid))
    return copied.bytes / local.nbytes


def test_copies_beside_the_exchanges(ranks: RankPool) -> None:
    """Whole rows are packed before one exchange and unpacked after the other; between stages both times."""
    assert set(ranks.run(copied_bytes, "rows")) == {2}
    assert set(ranks.run(copied_bytes, (2, 1))) == {4}
