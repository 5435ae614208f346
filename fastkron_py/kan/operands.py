"""Steps that prepare the operands of a polynomial KAN layer's products, and degree 0 of a basis that begins with a constant.

Degree 0 is taken out of large products: it is a bias, and its gradient is sums of dy's columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kan.kernels.operands import _low_halves_kernel, _spread_sums_kernel, _transpose_kernel
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
from fastkron_py.tiling.torch_products import column_sums

_TILE: Final = 64  # rows and columns of a tile that is transposed
_LOW_BLOCK: Final = 1024
_PARTS, _OUTPUTS, _INPUTS = 128, 16, 256  # of a block of dC[0]


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


class Transposition(NamedTuple):
    """What `_transpose_kernel` makes of matrices ``[B, M, N]`` beside their transposes: see `transposed` and `transposed_in_blocks`."""

    first: int
    with_low: bool
    rounds: bool
    width: int = 0
    batches: int = 0


class Transposed(NamedTuple):
    """Matrices in float32, transposed for a tensor core that cuts off the bits TF32 does not hold."""

    original: Tensor
    itself: Tensor
    low: Tensor  # its low halves, or the same where there are none
    plan: Transposition


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
    found = _empty_transposed(build, t, Transposition(first, with_low, rounds), pads)
    _transpose(build, [found])
    return found.itself, found.low


def transposed_gradient(build: Builder, dy: Tensor, with_low: bool, rounds: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`transposed` of ``dy [M, O]``, with whole vectors; and sums ``[parts, O]`` of its rows."""
    found, sums = _empty_transposed(build, dy[None], Transposition(0, with_low, rounds), True), _empty_sums(build, dy)
    _transpose(build, [found], sums=sums)
    return (found.itself, found.low), sums


class Prepared(NamedTuple):
    """Operands of both gradients in three passes, whose rows TMA takes: each with its low halves."""

    coefficients: tuple[Tensor, Tensor]  # transposed
    dy: tuple[Tensor, Tensor]
    transposed_dy: tuple[Tensor, Tensor]
    sums: Tensor  # of dy's rows, [parts, O]


def prepared(build: Builder, coefficients: Tensor, dy: Tensor, first: int) -> Prepared:
    """`transposed` coefficients, `halves` of dy and `transposed_gradient`, in one launch."""
    c = _empty_transposed(build, coefficients, Transposition(first, True, False), True)
    across, sums = _empty_transposed(build, dy[None], Transposition(0, True, False), True), _empty_sums(build, dy)
    low = build.empty((dy.shape[0], whole_vectors(dy.shape[1])), dy.dtype)
    upright = build.empty_like(low) if dy.stride(0) % 4 else dy
    _transpose(build, [c, across], (low,) if upright is dy else (low, upright), sums)
    return Prepared((c.itself, c.low), (upright, low), (across.itself, across.low), sums)


def transposed_in_blocks(build: Builder, t: Tensor, first: int, width: int, batches: int, rounds: bool) -> Tensor:
    """``[B, M, N]`` from matrix first on as ``[blocks * batches * width, M]``: blocks of width columns, of each all matrices.

    Nothing is written where there is no column, or, from B - first up to batches, no matrix.
    """
    rows, columns = t.shape[1:]
    out = build.empty((-(-columns // width) * batches * width, rows), t.dtype)
    _transpose(build, [Transposed(t, out, out, Transposition(first, False, rounds, width, batches))])
    return out


def _empty_transposed(build: Builder, t: Tensor, plan: Transposition, pads: bool) -> Transposed:
    batches, rows, columns = t.shape
    out = build.empty((batches - plan.first, columns, whole_vectors(rows) if pads else rows), t.dtype)
    return Transposed(t, out, build.empty_like(out) if plan.with_low else out, plan)


def _empty_sums(build: Builder, dy: Tensor) -> Tensor:
    return build.empty((-(-dy.shape[0] // _TILE), dy.shape[1]), dy.dtype)


def _transpose(build: Builder, made: Sequence[Transposed], upright: tuple[Tensor, ...] = (), sums: Tensor | None = None) -> None:
    """Launch the transpositions; of the last matrix also what is made of it as it lies, and sums of its rows."""
    sizes = []
    for t, out, _, plan in made:
        batches, rows, columns = t.shape
        programs = (batches - plan.first) * -(-rows // _TILE) * -(-columns // _TILE)
        sizes.append((rows, columns, t.stride(0), t.stride(1), out.shape[-1], programs))
    arguments = {
        "sizes": tuple(sizes),
        "upright_stride": upright[0].shape[1] if upright else 1,
        "PLANS": tuple([each.plan for each in made]),
        "SUMS": sums is not None,
        "BLOCK": _TILE,
        "num_warps": 8,
    }
    each = tuple([tuple([getattr(t, name) for t in made]) for name in ("original", "itself", "low")])
    operands = (*each, upright, made[-1].itself if sums is None else sums)
    build.launch(Launcher([LaunchConfig(_transpose_kernel, (sum([s[-1] for s in sizes]),), arguments)]), operands)


# ---- degree 0 ------------------------------------------------------------------------------------


def constant(build: Builder, coefficients: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers ``[O]`` that degree 0 and the bias add to every row of y, of contiguous coefficients ``[terms, O, I]``."""

    def call(c: Tensor, bias: Tensor | None = None) -> Tensor:
        sums = c[0].sum(-1, dtype=dtype)
        return sums if bias is None else sums + bias

    return build.call(call, (coefficients, bias), describe(coefficients.shape[1:2], dtype))


def spread_sums(build: Builder, parts: Tensor, out: Tensor) -> None:
    """Store sums of ``parts [parts, O]``, of few rows, as ``out[0]`` of ``out [terms, O, I]``."""
    count, num_out = parts.shape
    num_in = out.shape[2]
    blocks = {"BLOCK_R": min(_PARTS, next_power_of_two(count)), "BLOCK_N": _OUTPUTS, "BLOCK_K": min(_INPUTS, next_power_of_two(num_in))}
    sizes = {"parts": count, "num_out": num_out, "num_in": num_in}
    programs = -(-num_out // blocks["BLOCK_N"]) * -(-num_in // blocks["BLOCK_K"])
    _launch(build, _spread_sums_kernel, programs, (parts, out), **sizes, **blocks, num_warps=4)


def store_column_sums(build: Builder, x: Tensor, out: Tensor) -> None:
    """Store sums of the columns of ``x [M, O]`` as ``out[0]`` of ``out [terms, O, I]``."""

    def call(x: Tensor, out: Tensor) -> None:
        out[0] = column_sums(x).unsqueeze(-1)

    build.call(call, (x, out))
