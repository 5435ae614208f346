"""What the launches of a polynomial KAN layer depend on, and the passes that all of them share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastkron_py.kernels.devices import multiprocessor_count
from fastkron_py.kernels.kron.partials import _sum_partials_kernel
from fastkron_py.kernels.launcher import Launcher, Way
from fastkron_py.kernels.poly_kan.spec import Spec
from fastkron_py.kernels.products import _low_halves_kernel, _turn_kernel
from fastkron_py.kernels.replay import bits
from fastkron_py.tuning.poly_kan import Sizes

ALIGNED = 16  # elements: more makes no load wider
_SUM_BLOCK = 256
_TURNED = 64  # rows and columns of a tile that is transposed
_ONE = bits(1.0)


class Kind(NamedTuple):
    """Everything that a layer's launches depend on, as plain values; strides are of rows."""

    rows: int
    num_in: int
    num_out: int
    stride_x: int
    stride_g: int  # of dy; 0 in the forward pass
    has_bias: bool
    spec: Spec
    precision: str
    dtype: torch.dtype
    device: torch.device

    @property
    def wide(self) -> torch.dtype:
        """What sums are kept in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def is_split(self) -> bool:
        """Whether float32 products take three passes."""
        return self.dtype == torch.float32 and self.precision == "highest"

    def sizes(self) -> Sizes:
        """What the closed form chooses by."""
        passes = 3 if self.is_split else 1
        return Sizes(self.rows, self.num_in, self.num_out, self.spec.terms, self.dtype.itemsize, passes, multiprocessor_count(self.device))


class Sum:
    """The second stage: partial results ``[splits, ...]`` added in order."""

    def __init__(self, splits: int, size: int) -> None:
        # stride_b is of a batch of sums, of which there is one here.
        arguments = {"stride_b": 0, "stride_r": size, "programs": splits, "SIZE": size, "BLOCK_R": 4, "BLOCK": _SUM_BLOCK, "num_warps": 4}
        self._launch = Launcher([Way(_sum_partials_kernel, (-(-size // _SUM_BLOCK),), arguments)])

    def __call__(self, partial: Tensor, out: Tensor) -> None:
        """Add up."""
        self._launch(partial, out, _ONE)


def low_halves(t: Tensor) -> Tensor:
    """What TF32 leaves of every number of a contiguous tensor."""
    low = torch.empty_like(t)
    _low_halves_kernel[(-(-t.numel() // 1024),)](t, low, t.numel(), BLOCK=1024, num_warps=4)
    return low


class Turned(NamedTuple):
    """Matrices transposed, contiguous, for a tensor core that cuts off what TF32 does not hold."""

    itself: Tensor  # [..., N, M]
    low: Tensor  # its low halves, where they were asked for, else the same
    sums: Tensor  # [..., parts of M, N], each part's columns of the original summed up, where asked for


def turned(t: Tensor, with_low: bool, rounds: bool, with_sums: bool = False) -> Turned:
    """Of ``[M, N]`` or ``[B, M, N]`` in float32 whose rows are runs, in one pass; rounds: numbers become such that cutting rounds them."""
    rows, columns = t.shape[-2:]
    batches = t.shape[0] if t.ndim == 3 else 1
    parts = -(-rows // _TURNED)
    out = torch.empty((*t.shape[:-2], columns, rows), dtype=t.dtype, device=t.device)
    low = torch.empty_like(out) if with_low else out
    sums = torch.empty((*t.shape[:-2], parts, columns), dtype=t.dtype, device=t.device) if with_sums else out
    grid = (batches * parts * -(-columns // _TURNED),)
    strides = (t.stride(0) if t.ndim == 3 else 0, t.stride(-2))
    flags = {"LOW": with_low, "ROUND": rounds, "SUMS": with_sums, "WIDTH": 0, "BATCHES": 0}
    _turn_kernel[grid](t, out, low, sums, rows, columns, *strides, **flags, BLOCK=_TURNED, num_warps=8)
    return Turned(out, low, sums)


def turned_in_blocks(t: Tensor, width: int, batches: int, rounds: bool) -> Tensor:
    """Of ``[B, M, N]``, in one pass, ``[blocks * batches * width, M]``: blocks of width columns, of each all matrices, transposed.

    Nothing is written where there is no column, or, from B up to batches, no matrix.
    """
    rows, columns = t.shape[1:]
    out = torch.empty((-(-columns // width) * batches * width, rows), dtype=t.dtype, device=t.device)
    grid = (t.shape[0] * -(-rows // _TURNED) * -(-columns // _TURNED),)
    flags = {"LOW": False, "ROUND": rounds, "SUMS": False, "WIDTH": width, "BATCHES": batches}
    _turn_kernel[grid](t, out, out, out, rows, columns, t.stride(0), t.stride(1), **flags, BLOCK=_TURNED, num_warps=8)
    return out


def aligned(t: Tensor) -> Tensor:
    """The same numbers on a boundary of 16 bytes, from which copies to shared memory start."""
    return t if t.data_ptr() & 15 == 0 else t.clone()
