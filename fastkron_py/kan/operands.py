"""Steps that prepare the operands of a polynomial KAN layer's products, and degree 0 of a basis that begins with a constant.

Degree 0 is taken out of large products: it is a bias, and its gradient is sums of dy's columns.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kan.kernels.operands import _low_halves_kernel, _transpose_kernel
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.tiling.torch_products import column_sums

_TILE: Final = 64  # rows and columns of a tile that is transposed
_LOW_BLOCK: Final = 1024


def whole_vectors(count: int) -> int:
    """The least number from count on of float32 numbers that are vectors of 16 bytes."""
    return -(-count // 4) * 4


def _launch(build: Builder, kernel: Any, programs: int, operands: tuple[Tensor, ...], **arguments: Any) -> None:
    build.launch(Launcher([LaunchConfig(kernel, (programs,), arguments)]), operands)


# ---- operands as they have to lie in memory ------------------------------------------------------


def matrix(build: Builder, t: Tensor) -> Tensor:
    """``[..., C]`` as a matrix whose rows are runs of memory, one after the other, and which begins on a boundary of 16 bytes."""
    shape = (-1, t.shape[-1])
    try:
        t = t.view(shape)
    except RuntimeError:  # its rows have no common stride
        return build.contiguous(t).view(shape)
    runs = (t.stride(1) == 1 or t.shape[1] == 1) and t.stride(0) >= t.shape[1]
    return t if runs and build.is_aligned(t) else build.copy(t, describe(t.shape, t.dtype))


def aligned(build: Builder, t: Tensor) -> Tensor:
    """The same numbers on a boundary of 16 bytes, from which copies to shared memory start."""
    return t if build.is_aligned(t) else build.copy(t, t)


def halves(build: Builder, t: Tensor, with_low: bool, pads: bool) -> tuple[Tensor, Tensor]:
    """A contiguous tensor ``[..., N]``, and the part of every number that TF32 leaves out, for which else the tensor stands in.

    Where TMA reads them (pads), both begin on boundaries of 16 bytes, and float32 rows have `whole_vectors` of columns.
    """
    columns = t.shape[-1]
    stride = whole_vectors(columns) if pads and t.dtype == torch.float32 else columns
    copies = stride != columns
    if pads and not copies:
        t = aligned(build, t)
    if not with_low and not copies:
        return t, t
    low = build.empty((*t.shape[:-1], stride), t.dtype)
    copy = build.empty_like(low) if copies else t
    sizes = {"size": low.numel(), "columns": columns, "stride": stride, "COPY": copies}
    _launch(build, _low_halves_kernel, -(-low.numel() // _LOW_BLOCK), (t, low, copy), **sizes, BLOCK=_LOW_BLOCK, num_warps=4)
    return copy, low if with_low else copy


def transposed(build: Builder, t: Tensor, with_low: bool, rounds: bool, pads: bool, first: int) -> tuple[Tensor, Tensor]:
    """(``[B, M, N]`` in float32, from matrix first on, transposed; its low halves): for a tensor core that cuts off bits beyond TF32.

    Args:
        build: of the program.
        t: the matrices, whose rows are runs of memory.
        with_low: whether to make low halves, for which else the result stands in.
        rounds: whether numbers become such that cutting rounds them.
        pads: whether rows of the result have `whole_vectors` of columns; padding columns are not written.
        first: matrix; those before are left out.
    """
    batches, rows, columns = t.shape
    out = build.empty((batches - first, columns, whole_vectors(rows) if pads else rows), t.dtype)
    low = build.empty_like(out) if with_low else out
    _transpose(build, t, (out, low), out.shape[-1], {"LOW": with_low, "ROUND": rounds, "FIRST": first})
    return out, low


def transposed_in_blocks(build: Builder, t: Tensor, first: int, width: int, batches: int, rounds: bool) -> Tensor:
    """``[B, M, N]`` from matrix first on as ``[blocks * batches * width, M]``: blocks of width columns, of each all matrices.

    Nothing is written where there is no column, or, from B - first up to batches, no matrix.
    """
    rows, columns = t.shape[1:]
    out = build.empty((-(-columns // width) * batches * width, rows), t.dtype)
    _transpose(build, t, (out, out), rows, {"FIRST": first, "ROUND": rounds, "WIDTH": width, "BATCHES": batches})
    return out


def _transpose(build: Builder, t: Tensor, results: tuple[Tensor, ...], stride: int, flags: dict[str, Any]) -> None:
    batches, rows, columns = t.shape
    flags = {"FIRST": 0, "LOW": False, "ROUND": False, "WIDTH": 0, "BATCHES": 0, **flags}
    sizes = {"rows": rows, "columns": columns, "stride_b": t.stride(0), "stride_m": t.stride(1), "stride_n": stride}
    programs = (batches - flags["FIRST"]) * -(-rows // _TILE) * -(-columns // _TILE)
    _launch(build, _transpose_kernel, programs, (t, *results), **sizes, **flags, BLOCK=_TILE, num_warps=8)


# ---- degree 0 ------------------------------------------------------------------------------------


def constant(build: Builder, coefficients: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers ``[O]`` that degree 0 and the bias add to every row of y, of contiguous coefficients ``[terms, O, I]``."""

    def call(c: Tensor, bias: Tensor | None = None) -> Tensor:
        sums = c[0].sum(-1, dtype=dtype)
        return sums if bias is None else sums + bias

    found: Tensor = build.call(call, (coefficients, bias), describe(coefficients.shape[1:2], dtype))
    return found


def store_column_sums(build: Builder, x: Tensor, out: Tensor) -> None:
    """Store sums of the columns of ``x [M, O]`` as ``out[0]`` of ``out [terms, O, I]``."""

    def call(x: Tensor, out: Tensor) -> None:
        out[0] = column_sums(x).unsqueeze(-1)

    build.call(call, (x, out))
