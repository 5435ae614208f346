"""What the launches of a polynomial KAN layer depend on, and the passes that all of them share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kan.config import Sizes
from fastkron_py.kan.spec import Spec
from fastkron_py.runtime.device import multiprocessor_count
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.program import bits
from fastkron_py.tiling.partials import _sum_partials_kernel
from fastkron_py.tiling.products import _low_halves_kernel, _turn_kernel

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
        self._launch = Launcher([LaunchConfig(_sum_partials_kernel, (-(-size // _SUM_BLOCK),), arguments)])

    def __call__(self, partial: Tensor, out: Tensor) -> None:
        """Add up."""
        self._launch(partial, out, _ONE)


@lru_cache(maxsize=1024)
def _launcher(kernel: Any, programs: int, device: torch.device, dtypes: tuple[torch.dtype, ...], arguments: Any) -> Launcher:
    return Launcher([LaunchConfig(kernel, (programs,), dict(arguments))])


def launch(kernel: Any, programs: int, given: tuple[Tensor, ...], **arguments: Any) -> None:
    """Launch a kernel on tensors and, by name, what else it takes."""
    dtypes = tuple([t.dtype for t in given])
    _launcher(kernel, programs, given[0].device, dtypes, tuple(arguments.items()))(*given)


def forget_launches() -> None:
    """Compile every kernel anew when it is next needed."""
    _launcher.cache_clear()


def low_halves(t: Tensor) -> Tensor:
    """What TF32 leaves of every number of a contiguous tensor."""
    low = torch.empty_like(t)
    launch(_low_halves_kernel, -(-t.numel() // 1024), (t, low), size=t.numel(), BLOCK=1024, num_warps=4)
    return low


class Turned(NamedTuple):
    """Matrices transposed, for a tensor core that cuts off what TF32 does not hold; rows are runs of memory."""

    itself: Tensor  # [..., N, M], or a few columns more
    low: Tensor  # its low halves, where they were asked for, else the same
    sums: Tensor  # [..., parts of M, N], each part's columns of the original summed up, where asked for


def turned(t: Tensor, with_low: bool, rounds: bool) -> Turned:
    """Of contiguous ``[B, M, N]`` in float32, in one pass; rounds: numbers become such that cutting rounds them."""
    batches, rows, columns = t.shape
    out = torch.empty((batches, columns, rows), dtype=t.dtype, device=t.device)
    low = torch.empty_like(out) if with_low else out
    _turn(t, out, low, out, rows, {"LOW": with_low, "ROUND": rounds})
    return Turned(out, low, out)


def turned_gradient(dy: Tensor, with_low: bool, rounds: bool, with_sums: bool) -> Turned:
    """Of ``[M, N]`` in float32 whose rows are runs, likewise, in `whole_vectors` of columns, the last of which are not written."""
    rows, columns = dy.shape
    stride = whole_vectors(rows)
    out = torch.empty((columns, stride), dtype=dy.dtype, device=dy.device)
    low = torch.empty_like(out) if with_low else out
    sums = torch.empty((-(-rows // _TURNED), columns), dtype=dy.dtype, device=dy.device) if with_sums else out
    _turn(dy[None], out, low, sums, stride, {"LOW": with_low, "ROUND": rounds, "SUMS": with_sums})
    return Turned(out, low, sums)


def turned_in_blocks(t: Tensor, first: int, width: int, batches: int, rounds: bool) -> Tensor:
    """Of ``[B, M, N]`` from matrix first on, in one pass, ``[blocks * batches * width, M]``: blocks of width columns, of each all matrices.

    Nothing is written where there is no column, or, from B - first up to batches, no matrix.
    """
    rows, columns = t.shape[1:]
    out = torch.empty((-(-columns // width) * batches * width, rows), dtype=t.dtype, device=t.device)
    _turn(t, out, out, out, rows, {"FIRST": first, "ROUND": rounds, "WIDTH": width, "BATCHES": batches})
    return out


def whole_vectors(count: int) -> int:
    """So many float32 numbers or a few more, that are vectors of 16 bytes."""
    return -(-count // 4) * 4


def _turn(t: Tensor, out: Tensor, low: Tensor, sums: Tensor, stride: int, flags: dict[str, Any]) -> None:
    batches, rows, columns = t.shape
    flags = {"FIRST": 0, "LOW": False, "ROUND": False, "SUMS": False, "WIDTH": 0, "BATCHES": 0, **flags}
    sizes = {"rows": rows, "columns": columns, "stride_b": t.stride(0), "stride_m": t.stride(1), "stride_n": stride}
    programs = (batches - flags["FIRST"]) * -(-rows // _TURNED) * -(-columns // _TURNED)
    launch(_turn_kernel, programs, (t, out, low, sums), **sizes, **flags, BLOCK=_TURNED, num_warps=8)


def aligned(t: Tensor) -> Tensor:
    """The same numbers on a boundary of 16 bytes, from which copies to shared memory start."""
    return t if t.data_ptr() & 15 == 0 else t.clone()
