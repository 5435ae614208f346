"""Some points of a grid: they are taken from tensors on the whole grid, and put there again, by operator `fastkron::take_points`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.backend import choose_backend, requested_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.program import Program

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
    """The points of dimension -1 or -2, which is the whole grid, in new memory; None stands for all, and copies nothing."""
    return t if points is None else _moved(t, points, False, dim)


def scattered(t: Tensor, points: Points | None, dim: int) -> Tensor:
    """Dimension -1 or -2 on the whole grid, with zeros at the points that are not kept; the transpose of `gathered`."""
    return t if points is None else _moved(t, points, True, dim)


def _moved(t: Tensor, points: Points, spread: bool, dim: int) -> Tensor:
    backend = "" if torch.compiler.is_compiling() else requested_backend()
    moved: Tensor = take_points(t, points.index, list(points.tables), spread, dim, backend)
    return moved


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
    from fastkron_py.kron.points_launch import operand_of, points_launch

    if operand_of(x, dim) is None:
        x = build.contiguous(x)
    operand: Any = operand_of(x, dim)
    y = build.empty(shape, x.dtype)
    offsets, bases = tables[2:] if spread else tables[:2]
    build.launch(points_launch(operand, shape[dim], x.dtype, _SPAN), (x, offsets, bases, y))
    return build.program([y])


def _backward(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    _, index, *tables = saved.tensors
    spread, dim, backend = saved.options
    return take_points(dy, index, tables, not spread, dim, backend), None, *[None] * len(tables)


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
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
    unsaved=(0,),
)
