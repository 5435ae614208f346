"""Some points of a grid: they are taken from tensors on the whole grid, and put there again, by operator `fastkron::take_points`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime.backend import backend_of_call, choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.operator import GradientCall, Operator, Saved
from fastkron_py.runtime.program import Program

if TYPE_CHECKING:
    from fastkron_py.runtime.launch import Launcher

_SPAN: Final = 32  # neighbours whose entries in a table are offsets from one base: of one byte each where most points are kept
_DTYPES: Final = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Points:
    """Points of a grid, as indices and as tables for the kernel.

    A table says for each element of a result which element it is: ``bases[i // 32] + offsets[i]``, or none where the offset is -1.

    Attributes:
        index: int64 ``[m]``, each point once, in any order.
        tables: (offsets, bases) of the points among the grid, then (offsets, bases) of the grid among the points.
    """

    index: Tensor
    tables: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, index: Tensor, size: int) -> Points:
        """Points by their indices in a grid of this size."""
        place = index.new_full((size,), -1)
        place[index] = torch.arange(index.shape[0], device=index.device)
        return cls(index, (*_table(index), *_table(place)))

    @property
    def is_kept(self) -> Tensor:
        """Whether a point of the grid is one of these; bool, of the grid's size."""
        return self.tables[2] >= 0

    def to(self, device: torch.device) -> Points:
        """On a device."""
        if self.index.device == device:
            return self
        offsets, bases, other_offsets, other_bases = (t.to(device) for t in self.tables)
        return Points(self.index.to(device), (offsets, bases, other_offsets, other_bases))


def _table(places: Tensor) -> tuple[Tensor, Tensor]:
    """(Offsets, bases) of places; a place of -1 is none."""
    count = places.shape[0]
    spans = torch.nn.functional.pad(places, (0, -count % _SPAN), value=-1).view(-1, _SPAN)
    exists = spans >= 0
    bases = torch.where(exists, spans, torch.iinfo(torch.int64).max).amin(1)
    bases = torch.where(exists.any(1), bases, 0)
    offsets = torch.where(exists, spans - bases[:, None], -1).view(-1)[:count]
    most = int(offsets.max())
    return offsets.to(next(d for d in _DTYPES if most <= torch.iinfo(d).max)), bases


def gathered(t: Tensor, points: Points | None, dim: int) -> Tensor:
    """The points of dimension -1 or -2, which is the whole grid, in new memory; None means all, and copies nothing."""
    return t if points is None else _moved(t, points, False, dim)


def scattered(t: Tensor, points: Points | None, dim: int) -> Tensor:
    """Dimension -1 or -2 on the whole grid, with zeros at the points that are not kept; the transpose of `gathered`."""
    return t if points is None else _moved(t, points, True, dim)


def _moved(t: Tensor, points: Points, spread: bool, dim: int) -> Tensor:
    moved: Tensor = take_points(t, points.index, list(points.tables), spread, dim, backend_of_call())
    return moved


# ---- the launch ------------------------------------------------------------------------------------

_TILE: Final = 1024  # words of a program
_THREADS: Final = 128
_WIDEST: Final = 256  # words of a point that a program takes


class Operand(NamedTuple):
    """A tensor ``[B, n, points, I]`` of words, whose I are neighbours.

    Attributes:
        sizes: of the dimensions.
        strides: of the first three.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def operand_of(x: Tensor, dim: int) -> Operand | None:
    """A tensor with its points in dimension -1 or -2; None where the kernels do not take its strides.

    Neighbours of the last dimension have to be neighbours in memory, and the dimensions before the points two runs at most. A complex
    number is a word of 64 bits, or two of float64.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    outer: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:dim], x.stride()[:dim], strict=True):
        if outer and outer[-1][1] == size * stride:
            outer[-1] = (outer[-1][0] * size, stride)
        elif size > 1:
            outer.append((size, stride))
    if len(outer) > 2:
        return None
    words = 2 if x.dtype == torch.complex128 else 1
    runs = [*[(1, 0)] * (2 - len(outer)), *outer, (x.shape[dim], x.stride(dim))]
    width = x.shape[-1] if dim == -2 else 1
    return Operand((*[size for size, _ in runs], width * words), tuple([stride * words for _, stride in runs]))


def points_launch(x: Operand, points: int, dtype: torch.dtype) -> Launcher:
    """The launch from x, the offsets and bases of a table, and y, which is contiguous.

    Args:
        x: whose points are taken.
        points: of y.
        dtype: of both.
    """
    import triton.language as tl

    from fastkron_py.kron.kernels.take_points import _take_points_kernel, _take_runs_kernel
    from fastkron_py.kron.problem import parts_of
    from fastkron_py.runtime.kernels import LaunchConfig
    from fastkron_py.runtime.launch import Launcher

    batches, rows, count, width = x.sizes
    run = min(next_power_of_two(width), _WIDEST)
    block = min(next_power_of_two(points), _TILE // run)
    is_long = width == 1 and (batches * rows == 1 or points >= _TILE)
    touched = 0 if is_long or width > 1 else min(rows, _TILE)  # rows after a program's first one
    reach = max(x.strides[1] * touched + x.strides[2] * count + width, block * width)  # in x, and in a tile of y
    common: dict[str, Any] = {
        "x_strides": x.strides,
        "SPAN": _SPAN,
        "INDEX": tl.int32 if reach < 2**31 else tl.int64,
        "PARTS": parts_of(dtype),
        "num_warps": _THREADS // 32,
    }
    if width == 1:
        tiles = batches * rows * math.ceil(points / _TILE) if is_long else batches * math.ceil(rows * points / _TILE)
        arguments = common | {"sizes": (rows, points), "BLOCK": _THREADS, "STEPS": _TILE // _THREADS, "LONG": is_long}
        return Launcher([LaunchConfig(_take_points_kernel, (tiles,), arguments)])
    tiles = batches * rows * math.ceil(points / block) * math.ceil(width / run)
    arguments = common | {"sizes": (rows, points, width), "BLOCK_P": block, "BLOCK_I": run}
    return Launcher([LaunchConfig(_take_runs_kernel, (tiles,), arguments)])


# ---- the operator ---------------------------------------------------------------------------------


def _shape(x: Sequence[Any], index: Tensor, tables: Sequence[Tensor], spread: bool, dim: int) -> list[Any]:
    """The result's shape, of x's."""
    shape = list(x)
    shape[dim] = tables[2].shape[0] if spread else index.shape[0]
    return shape


def _fake(x: Tensor, index: Tensor, tables: Sequence[Tensor], spread: bool, dim: int, backend: str) -> Tensor:
    return x.new_empty(_shape(x.shape, index, tables, spread, dim))


def _program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    spread, dim, backend = options
    build = Builder(tensors)
    x, index, *tables = build.inputs
    shape = _shape(x.shape, index, tables, spread, dim)
    if x.numel() == 0 or choose_backend(backend, tensors[0]) == "torch":

        def by_torch(x: Tensor, index: Tensor) -> Tensor:
            return x.new_zeros(shape).index_copy_(dim, index, x) if spread else x.index_select(dim, index)

        return build.program([build.call(by_torch, (x, index), describe(shape, x.dtype))])
    if operand_of(x, dim) is None:
        x = build.contiguous(x)
    operand: Any = operand_of(x, dim)
    y = build.empty(shape, x.dtype)
    offsets, bases = tables[2:] if spread else tables[:2]
    build.launch(points_launch(operand, shape[dim], x.dtype), (x, offsets, bases, y))
    return build.program([y])


def _gradient_call(saved: Saved, dy: Tensor) -> GradientCall:
    _, index, *tables = saved.tensors
    spread, dim, backend = saved.options
    return GradientCall(take_points, (dy, index, *tables), (not spread, dim, backend), (0, *[None] * (1 + len(tables))))


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor | None:
    _, index, *tables = saved.tensors
    tx = tangents[0]
    return None if tx is None else take_points(tx, index, tables, *saved.options)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    x, index, *tables = tensors
    return take_points(x.movedim(dims[0], 0), index, tables, *options), 0


take_points = Operator(
    "take_points(Tensor x, Tensor index, Tensor[] tables, bool spread, int dim, str backend) -> Tensor",
    program=_program,
    fake=_fake,
    gradient_call=_gradient_call,
    jvp=_jvp,
    vmap=_vmap,
    unsaved=(0,),
)
