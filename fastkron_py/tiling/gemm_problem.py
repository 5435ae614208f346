"""The problem of a launch of the linear layers' main loop: operands in memory, and the operator's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.descriptors import FARTHEST
from fastkron_py.tiling.gemm import begin_nothing, prologue_plain, value_plain
from fastkron_py.tiling.gemm_config import GemmSizes

_LONGEST: Final = 1 << 31  # sizes of a descriptor, and indices in tiles


class Gemm(NamedTuple):
    """The jit functions and constants that an operator passes to the main loop: see `tiling/gemm.py`."""

    epilogue: Any
    prologue: Any = prologue_plain
    value: Any = value_plain
    slope: Any = value_plain
    params: tuple[Any, ...] = ()
    pairs: str = ""  # "stacked" or "interleaved": b's rows in twos
    divisible: bool = False  # nothing passed in asks for a column's number, or others' results: launches of some columns may overlap
    functions: tuple[Any, ...] = ()  # further jit functions for the epilogue
    begin: Any = begin_nothing
    sums: int = 1  # of the product, that the epilogue makes one column of the result of; pairs are two
    light: bool = False  # without a bias, programs of two launches fit a multiprocessor's registers together: see `tiling/gemm_config.py`

    @property
    def fan(self) -> int:
        """Columns of the product for each of the result."""
        return 2 if self.pairs else self.sums


class Operand(NamedTuple):
    """A matrix, as far as a launch depends on it."""

    stride: int  # of rows
    has_descriptor: bool
    dtype: torch.dtype
    share: int = 1  # columns for each column of the result


class Problem(NamedTuple):
    """Everything that a launch depends on, as plain values."""

    rows: int
    columns: int
    depth: int
    a: Operand
    b: Operand
    swapped: bool  # a descriptor of "stacked" pairs begins with b2, which has the lower address
    bias: tuple[int, int] | None  # strides of a column, and between the two of a pair
    others: tuple[Operand | None, ...]  # out, pair, pair2, side
    gemm: Gemm
    precision: str
    device: torch.device

    def overlaps(self) -> bool:
        """Whether one of several launches may begin while the one ahead ends."""
        return self.gemm.divisible and devices.gpu_of(self.device).has_overlap

    def sizes(self) -> GemmSizes:
        """The sizes that tiles are chosen by."""
        passes = 3 if self.a.dtype == torch.float32 and self.precision == "highest" else 1
        # Stores go through shared memory: those of descriptors by design, those by pointers to become runs.
        stored = sum(o.dtype.itemsize * o.share for o in self.others if o is not None)
        stored = -(-stored // self.gemm.fan)
        itemsize = self.a.dtype.itemsize
        has_descriptors = self.a.has_descriptor and self.b.has_descriptor
        stores_by_descriptors = all([o is None or o.has_descriptor for o in self.others])  # pointers take more registers
        beside = self.gemm.light and self.bias is None and has_descriptors and stores_by_descriptors and itemsize == 2 and self.overlaps()
        return GemmSizes(
            self.rows,
            self.columns,
            self.depth,
            itemsize,
            passes,
            stored,
            self.gemm.pairs != "",
            devices.gpu_of(self.device),
            has_descriptors,
            beside,
        )


def _operand(build: Builder, t: Tensor, share: int = 1) -> Operand:
    """A matrix ``[R, C]`` as an operand; a single row has a stride that a descriptor takes."""
    size = t.element_size()
    rows, columns = t.shape
    stride = t.stride(0) if rows > 1 else -(-columns // 8) * 8
    step = stride * size
    has_descriptor = (
        devices.gpu_of(build.device).has_descriptors
        and build.is_aligned(t)
        and columns * size % 16 == 0  # copies are of 16 bytes, also beyond a last column that ends elsewhere: seen on an H100
        and stride >= columns
        and 0 < step < FARTHEST
        and step % 16 == 0
        and rows < _LONGEST
        and columns < _LONGEST
    )
    return Operand(stride, has_descriptor, t.dtype, share)


def takes_descriptor(build: Builder, t: Tensor) -> bool:
    """Whether a matrix can have a descriptor."""
    return _operand(build, t).has_descriptor


def _pair(build: Builder, b: Tensor, b2: Tensor) -> tuple[Operand, bool]:
    """(both as one operand ``[2, R, C]``, whether b2 comes first there), of matrices of the same strides anywhere in memory."""
    operand = _operand(build, b)
    # The stride from one to the other is an ordinary one to the copy engine, which asks for no common allocation.
    order = build.order(b, b2) if operand.has_descriptor and takes_descriptor(build, b2) else 0
    return operand._replace(has_descriptor=order != 0), order < 0


def problem_of(
    build: Builder,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    others: Sequence[Tensor | None],
    call: Gemm,
    precision: str,
    b2: Tensor | None = None,
) -> Problem:
    """The problem of a launch on these operands; arguments as of `gemm_launch.add_gemm`, rows of a, b and b2 being runs of memory."""
    columns = b.shape[0] if b2 is None else 2 * b.shape[0]
    width = columns // call.fan
    operand_b, swapped = (_operand(build, b), False) if b2 is None else _pair(build, b, b2)
    strides = None
    if bias is not None:
        strides = (bias.stride(-1), bias.stride(0) if bias.ndim == 2 else 0)
    return Problem(
        a.shape[0],
        columns,
        a.shape[1],
        _operand(build, a),
        operand_b,
        swapped,
        strides,
        tuple([None if t is None else _operand(build, t, -(-t.shape[1] // width)) for t in others]),
        call,
        precision,
        build.device,
    )
