"""Building a program: operands are tensors without memory, whose views say where in a value a step reads or writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime.descriptors import order_of, template_of
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.program import Box, Make, Places, Pool, Program, Result, Shift, Step, View

_ALIGNMENT: Final = 512  # of a buffer in the pool, as torch's own allocations on a GPU
_SMALL: Final = 1 << 20  # bytes of a buffer that may be in the pool, however small the inputs are


class Spanning(NamedTuple):
    """A descriptor whose outermost dimension goes on at another tensor, wherever that lies behind the first; see `Builder.order`."""

    descriptor: Any
    other: Tensor


@dataclass
class _Value:
    """A buffer, or a tensor that a call returns."""

    tensor: Tensor
    called: bool = False  # read or made by a call of torch, which wants tensors: not in the pool
    span: list[int] = field(default_factory=list)  # the steps that use it
    result: bool = False

    nbytes: int = 0


class _Use(NamedTuple):
    """A launch or a call as it was added."""

    run: Any
    operands: tuple[Any, ...]
    scalars: tuple[Any, ...]
    results: tuple[int, ...] | None


class Builder:
    """Collects the steps of a call on tensors like those given.

    Attributes:
        inputs: tensors without memory, of the given ones' shapes, strides and dtypes: operands of steps, as are their views.
        device: of all.
    """

    def __init__(self, tensors: Sequence[Tensor | None], shared: int | None = None) -> None:
        """Begin.

        Args:
            tensors: of the call; those that are None have no input.
            shared: bytes of a buffer that may be in one piece of memory with others, for as long as all steps take; None for a
                megabyte, or half of the largest input's.
        """
        given = [t for t in tensors if t is not None]
        self.device = given[0].device
        self._addresses = [t.data_ptr() for t in given]
        self._alignments: dict[int, bool] = {}
        self._orders: dict[tuple[int, int, int], int] = {}
        self.inputs: list[Any] = []
        self._values: list[_Value] = []
        self._numbers: dict[int, int] = {}
        for t in tensors:
            self.inputs.append(None if t is None else self._add(_meta(t.shape, t.dtype, t.stride())))
        self._given = len(self._values)
        self._shared = max(_SMALL, max([v.nbytes for v in self._values]) // 2) if shared is None else shared
        self._uses: list[_Use] = []

    # ---- operands --------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """A buffer that a later step writes."""
        return self._add(_meta(shape, dtype, strides))

    def empty_like(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `torch.empty_like`."""
        return self._add(torch.empty_like(t, dtype=dtype))

    def contiguous(self, t: Tensor) -> Tensor:
        """The tensor itself, or a contiguous copy."""
        if t.is_contiguous():
            return t
        made: Tensor = self.call(Tensor.contiguous, (t,), _meta(t.shape, t.dtype))
        return made

    def reshape(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """As `torch.reshape`: a view, or a contiguous copy where there can be none."""
        try:
            return t.view(tuple(shape))
        except RuntimeError:
            copied: Tensor = self.call(lambda t: t.reshape(shape), (t,), describe(shape, t.dtype))
            return copied

    def copy(self, t: Tensor, like: Tensor) -> Tensor:
        """A copy that lies in memory as another tensor without gaps does."""
        shape, strides = tuple(like.shape), like.stride()

        def copy(t: Tensor) -> Tensor:
            return t.new_empty_strided(shape, strides).copy_(t)

        copied: Tensor = self.call(copy, (t,), _meta(shape, t.dtype, strides))
        return copied

    def is_aligned(self, t: Tensor) -> bool:
        """Whether a tensor begins at a 16-byte boundary, in every call that the program is for."""
        number, offset, _ = self._place(t)
        if offset % 16 or number >= self._given:
            return offset % 16 == 0
        self._alignments[number] = self._addresses[number] % 16 == 0
        return self._alignments[number]

    def order(self, first: Tensor, second: Tensor) -> int:
        """1 if the second tensor begins behind the first one, -1 if ahead of it, in every call that the program is for; else 0.

        It is 0 where a descriptor cannot span both: at the same place, too far apart, or in buffers of their own. Where these are two
        inputs, the operator's `places` have to tell their orders apart.
        """
        (one, begin, _), (other, end, _) = self._place(first), self._place(second)
        if one == other:
            return order_of(end - begin)
        if max(one, other) >= self._given:
            return 0
        found = order_of(self._addresses[other] + end - self._addresses[one] - begin)
        self._orders[one, other, end - begin] = found
        return found

    # ---- steps -----------------------------------------------------------------------------------

    def launch(self, launcher: Any, operands: Sequence[Any], scalars: Sequence[Any] = ()) -> None:
        """Add a launch.

        Args:
            launcher: a `Launcher`.
            operands: tensors, tuples of tensors, descriptors, `Spanning`s.
            scalars: integers and `Scalar`s.
        """
        self._use(_Use(launcher, tuple(operands), tuple(scalars), None))

    def call(self, function: Callable[..., Any], operands: Sequence[Tensor], *results: Tensor, scalars: Sequence[Any] = ()) -> Any:
        """Add a call of torch, which returns tensors like the results described; gives these as operands of later steps.

        Args:
            function: of the operands and scalars, to a tensor or a tuple of tensors; None if it writes to an operand.
            operands: tensors.
            results: tensors without memory, as `describe` makes them.
            scalars: numbers and `Scalar`s.
        """
        for t in operands:
            self._values[self._number(t)].called = True
        made = [self._add(t) for t in results]
        numbers = [self._number(t) for t in made]
        for number in numbers:
            self._values[number].called = True
        self._use(_Use(function, tuple(operands), tuple(scalars), tuple(numbers)))
        return made[0] if len(made) == 1 else made

    def program(self, results: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> Program:
        """The program that returns these tensors; each all of a value, in the shape given if there is one.

        Raises:
            ValueError: a result is an input, or no step uses it.
        """
        wanted = {}
        for i, t in enumerate(results):
            value = self._values[self._number(t)]
            if not value.span or self._number(t) < self._given:
                raise value_error("results", "tensors that steps make", "an input" if value.span else "one that no step uses")
            value.result = True
            wanted[self._number(t)] = tuple(t.shape if shapes is None else shapes[i])
        places = Places(tuple(self._alignments.items()), tuple(self._orders.items()))
        numbering = _Numbering(self._values, self._given, self._uses, self._shared, wanted)
        return numbering.program([self._number(t) for t in results], places, self.device)

    # ---- inside ----------------------------------------------------------------------------------

    def _add(self, t: Tensor) -> Tensor:
        self._numbers[t.untyped_storage()._cdata] = len(self._values)
        self._values.append(_Value(t, nbytes=t.numel() * t.element_size()))
        return t

    def _number(self, t: Tensor) -> int:
        return self._numbers[t.untyped_storage()._cdata]

    def _use(self, use: _Use) -> None:
        step = len(self._uses)
        self._uses.append(_Use(use.run, tuple([self._resolved(o) for o in use.operands]), use.scalars, use.results))
        for operand in self._uses[-1].operands:
            for number, *_ in operand.parts if operand.other is None else (*operand.parts, operand.other):
                self._values[number].span.append(step)
        for number in use.results or ():
            self._values[number].span.append(step)

    def _resolved(self, operand: Any) -> _Operand:
        if isinstance(operand, tuple) and not isinstance(operand, Spanning):
            return _Operand(parts=tuple([self._place(t) for t in operand]))
        if isinstance(operand, Tensor):
            return _Operand(parts=(self._place(operand),), single=True, view=operand)
        descriptor = operand.descriptor if isinstance(operand, Spanning) else operand
        if not self.is_aligned(descriptor.base):
            raise ValueError(f"operands: expected a descriptor of memory from a 16-byte boundary on; got {descriptor}")
        place = self._place(descriptor.base)
        if not isinstance(operand, Spanning):
            return _Operand(parts=(place,), single=True, descriptor=descriptor)
        other = self._place(operand.other)
        if other[0] != place[0]:
            return _Operand(parts=(place,), single=True, descriptor=descriptor, other=other)
        apart = replace(descriptor, strides=[other[2] - place[2], *descriptor.strides[1:]])  # in one value, the same in every call
        return _Operand(parts=(place,), single=True, descriptor=apart)

    def _place(self, t: Tensor) -> tuple[int, int, int]:
        """(value, bytes, elements) where a tensor begins."""
        elements = int(t.storage_offset())
        return self._number(t), elements * t.element_size(), elements


def describe(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor without memory, as `Builder.call` wants its results described."""
    return _meta(shape, dtype, strides)


def _meta(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    shape = tuple(shape)
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, tuple(strides), dtype=dtype, device="meta")


@dataclass(frozen=True)
class _Operand:
    """An operand by numbers of values."""

    parts: tuple[tuple[int, int, int], ...]
    single: bool = False
    descriptor: Any = None
    other: tuple[int, int, int] | None = None
    view: Tensor | None = None


class _Numbering:
    """The final numbers of values: inputs, the pool's buffers, others, and what steps derive from them."""

    def __init__(self, values: list[_Value], given: int, uses: list[_Use], shared: int, wanted: dict[int, tuple[int, ...]]) -> None:
        self._values, self._given, self._uses, self._wanted = values, given, uses, wanted
        used = [i for i in range(given, len(values)) if values[i].span]
        small = [i for i in used if not values[i].called and not values[i].result and values[i].nbytes <= shared]
        # One allocation for small buffers. Of a large one, which may be one of few that are alive at a time, the
        # memory is had when it is needed and no longer.
        self._pooled = [i for i in small if values[i].tensor.is_contiguous()]
        pooled = set(self._pooled)
        self._others = [i for i in used if i not in pooled]
        order = [*range(given), *self._pooled, *self._others]
        self._final = {value: number for number, value in enumerate(order)}
        self._count = len(order)

    def program(self, results: Sequence[int], places: Places, device: torch.device) -> Program:
        """The program with these results."""
        steps = [self._step(i, use) for i, use in enumerate(self._uses)]
        spans = [(self._values[i].nbytes, (min(self._values[i].span), max(self._values[i].span))) for i in self._pooled]
        offsets, nbytes = _places(spans)
        parts = [
            (at, tuple(self._values[i].tensor.shape), self._values[i].tensor.dtype) for at, i in zip(offsets, self._pooled, strict=True)
        ]
        returned = [self._result(i) for i in results]
        return Program(steps, self._count, self._given, Pool(nbytes, tuple(parts)), returned, places, device)

    def _is_made(self, value: int) -> bool:
        """Whether a value is a buffer, not what a call returns."""
        return not any([value in (use.results or ()) for use in self._uses])

    def _result(self, value: int) -> Result:
        same = self._wanted[value] == tuple(self._values[value].tensor.shape) or self._is_made(value)
        return Result(self._final[value], None if same else self._wanted[value])

    def _step(self, index: int, use: _Use) -> Step:
        makes = [self._make(i) for i in self._others if self._is_made(i) and min(self._values[i].span) == index]
        drops = [self._final[i] for i in self._others if max(self._values[i].span) == index and not self._values[i].result]
        if use.results is not None:
            views = tuple([self._view(operand) for operand in use.operands])
            found = tuple([self._final[i] for i in use.results])
            return Step(use.run, views, use.scalars, found, tuple(makes), drops=tuple(drops))
        shifts: list[Shift] = []
        tuples: list[tuple[int, tuple[int, ...]]] = []
        boxes: list[Box] = []
        operands = []
        for operand in use.operands:
            places = [self._placed(part, shifts) for part in operand.parts]
            if operand.descriptor is not None:
                descriptor = operand.descriptor
                other = None if operand.other is None else self._placed(operand.other, shifts)
                itemsize = descriptor.base.element_size()
                boxes.append(Box(self._next(), places[0], type(descriptor), template_of(descriptor), other, itemsize))
                operands.append(boxes[-1].number)
            elif operand.single:
                operands.append(places[0])
            else:
                tuples.append((self._next(), tuple(places)))
                operands.append(tuples[-1][0])
        return Step(use.run, tuple(operands), use.scalars, None, tuple(makes), tuple(shifts), tuple(tuples), tuple(boxes), tuple(drops))

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _placed(self, place: tuple[int, int, int], shifts: list[Shift]) -> int:
        value, nbytes, elements = place
        if not nbytes:
            return self._final[value]
        shifts.append(Shift(self._next(), self._final[value], nbytes, elements))
        return shifts[-1].number

    def _view(self, operand: _Operand) -> View:
        (value, _, offset), t = operand.parts[0], operand.view
        whole = self._values[value].tensor
        if t is None or (t.shape == self._wanted.get(value, whole.shape) and t.stride() == whole.stride() and not offset):
            return View(self._final[value])
        return View(self._final[value], tuple(t.shape), t.stride(), offset)

    def _make(self, value: int) -> Make:
        t = self._values[value].tensor
        shape = self._wanted.get(value, tuple(t.shape))
        strides = None if t.is_contiguous() else t.stride()
        return Make(self._final[value], shape, strides, None if t.dtype == self._values[0].tensor.dtype else t.dtype)


def _places(buffers: Sequence[tuple[int, tuple[int, int]]]) -> tuple[list[int], int]:
    """Offsets in one piece of memory for buffers of (size, span of steps), and its size; those alive together are apart."""
    offsets: list[int] = []
    for size, (first, last) in buffers:
        taken = sorted(
            (offset, offset + other)
            for offset, (other, (begin, end)) in zip(offsets, buffers, strict=False)
            if begin <= last and first <= end
        )
        at = 0
        for start, stop in taken:
            if at + size <= start:
                break
            at = max(at, math.ceil(stop / _ALIGNMENT) * _ALIGNMENT)
        offsets.append(at)
    return offsets, max((offset + size for offset, (size, _) in zip(offsets, buffers, strict=True)), default=0)
