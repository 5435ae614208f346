"""A multiply of one mode, as the closed forms of times see it."""

from __future__ import annotations

from typing import Final, NamedTuple

from fastkron_py.runtime.gpu import GPU

BLOCK_K: Final = 32  # terms of a step of the kernel for Hopper: a producer's registers hold a tile, and the next one
LAUNCH: Final = 3e-6  # seconds between two launches that wait for each other


class Mode(NamedTuple):
    """A multiply of one mode ``[.., P, after]``, or the gradient of its factor.

    Attributes:
        batches: of factors.
        runs: of the mode in one batch: rows times the modes before.
        after: elements after the mode.
        p: rows of the factor.
        q: columns of the factor.
        itemsize: bytes of an element.
        passes: over the tensor cores; 3 for float32 as such, 1 for TF32 and other dtypes.
        gpu: that it runs on.
        adds: whether z is added to the result.
    """

    batches: int
    runs: int
    after: int
    p: int
    q: int
    itemsize: int
    passes: int
    gpu: GPU
    adds: bool = False

    @property
    def slices(self) -> int:
        """Slices of one batch."""
        return self.runs * self.after

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.batches * self.slices * self.p * self.q

    @property
    def is_scattered(self) -> bool:
        """Whether blocks of neighbouring slices are not one run of memory."""
        return self.after > 1 and self.after % BLOCK_K != 0

    def traffic(self, passes: float = 1.0) -> float:
        """Seconds to read the operand and write the result this many times, with the factors."""
        moved = passes * self.slices * (self.p + self.q) + self.p * self.q
        return self.batches * moved * self.itemsize / self.gpu.bandwidth

    def result_seconds(self, passes: float) -> float:
        """Seconds to read or write the result this many times."""
        return passes * self.batches * self.slices * self.q * self.itemsize / self.gpu.bandwidth


def ceil(n: int, block: int) -> int:
    """Blocks that cover n."""
    return -(-n // block)


def filled(size: int, block: int) -> float:
    """The share of whole blocks that a size fills."""
    return size / (ceil(size, block) * block)
