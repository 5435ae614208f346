"""Parts of a canonical problem that stay in cache while every factor passes over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.plan.torch_costs import IN_PLACE
from fastkron_py.kron.plan.torch_plan import AS_IT_IS, Plan
from fastkron_py.tiling.cpu_costs import VECTOR

CHUNK_BYTES_PER_THREAD = 1 << 20  # of one intermediate: much less, and calls into torch cost more than they do
COLUMNS = 4  # a chunk of columns, whose pieces of rows are short, has this many times the bytes
CHUNK_BYTES_CPU = 1 << 24  # at most: two intermediates share the last level of cache with their part of x and y
CHUNK_BYTES_OTHER = 1 << 26  # on other devices chunks only bound the memory
CHUNK_BYTES_OTHER_LEAST = 1 << 22
MATRICES = 4  # a chunk has this many times the elements of the largest matrix at least
UNCACHED = 64  # columns of a chunk where a vector of them does not fit: cuts would cost copies, and only bound the memory
GROUP_ELEMENTS = 1 << 13  # below this, one batched product serves many factor batches


class Chunk(NamedTuple):
    """A part of ``[B, L, :, R]``."""

    groups: slice
    rows: slice
    columns: slice

    def of(self, t: Tensor) -> Tensor:
        """The part of a four-dimensional tensor, as a view."""
        return t if self == WHOLE else t[self.groups, self.rows, :, self.columns]


ALL: Final = slice(None)
WHOLE: Final = Chunk(ALL, ALL, ALL)


def _pieces(total: int, most: int) -> Iterator[slice]:
    """Cut range(total) into the fewest pieces of at most this size, of nearly equal sizes."""
    if total <= most:
        yield ALL
        return
    size = -(-total // -(-total // most))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _chunk_bytes(x: Tensor) -> int:
    if x.device.type != "cpu":  # of up to four buffers: together never more than one whole intermediate
        return min(CHUNK_BYTES_OTHER, max(CHUNK_BYTES_OTHER_LEAST, x.numel() * x.element_size() // 4))
    return min(CHUNK_BYTES_PER_THREAD * torch.get_num_threads(), CHUNK_BYTES_CPU)


def _buffered(chosen: Plan, is_direct: bool) -> int:
    """Elements, of each row and column, of the widest buffer: operands and results that are neither copied nor converted take none."""
    steps = chosen.steps
    found = [s.size_out for s in steps[:-1]]
    found += [max(s.size_in, s.size_out) for s in steps if {s.way, s.back, s.gradient} != {IN_PLACE}]
    if not is_direct or chosen.layout != AS_IT_IS or chosen.rotates:
        found += [steps[0].size_in, steps[-1].size_out]
    return max(found, default=1)


def chunks(x: Tensor, chosen: Plan, dtype: torch.dtype, backward: bool = False) -> Iterator[Chunk]:
    """Cut ``[B, L, K, R]`` so that no intermediate of a chunk exceeds the device's chunk size, if possible.

    Many groups go together only when each is small; then a chunk holds all of their rows. On a CPU large matrices take larger chunks:
    each product packs its matrix anew; and columns are cut as little as possible: their pieces are copied. A product reads x once and
    writes the result once, so that these need no cache.
    """
    steps = chosen.steps
    groups, length, _, width = x.shape
    on_cpu = x.device.type == "cpu"
    limit = _chunk_bytes(x) // dtype.itemsize
    if on_cpu:
        limit = max(limit, MATRICES * max(s.p * s.q for s in steps))
    widest = max(max(s.size_in, s.size_out) for s in steps)
    buffered = _buffered(chosen, x.dtype == dtype)
    held = buffered if on_cpu and not backward else widest
    rows, columns, together = length, width, 1
    if not on_cpu and widest * width > limit:
        rows, columns = 1, max(1, limit // widest)
    elif widest * width > COLUMNS * limit:
        fitting = COLUMNS * limit // buffered // VECTOR * VECTOR
        rows, columns = 1, min(width, fitting or UNCACHED)
    elif length * held * width > limit:
        rows = max(1, limit // (held * width))
    elif length * widest * width <= GROUP_ELEMENTS:
        together = limit // (length * widest * width)
    for g in _pieces(groups, together):
        for r in _pieces(length, rows):
            for c in _pieces(width, columns):
                yield Chunk(g, r, c)
