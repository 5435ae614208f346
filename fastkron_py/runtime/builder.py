"""Building a program: operands are tensors without memory, whose views say where in a value a step reads or writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.program import Descriptor, Make, Pool, Program, Shift, Step, View, order_of, template_of

_ALIGNMENT: Final = 512  # of a buffer in the pool, as torch's own allocations on a GPU
_SMALL: Final = 1 << 20  # bytes of a buffer that may live as long as all steps take, however small the inputs are


class Spanning(NamedTuple):
    """A descriptor whose outermost dimension continues in another tensor, anywhere behind the first one; see `Builder.order`."""

    descriptor: Any
    other: Tensor


@dataclass(eq=False)
class _Value:
    """An input, a buffer, or a tensor that a call returns."""

    number: int  # in the program
    tensor: Tensor  # without memory, of its shape, strides and dtype
    steps: list[int] = field(default_factory=list)  # that use it, by index
    is_called: bool = False  # a call of torch, which wants tensors, reads or makes it: it is not in the pool
    is_returned: bool = False  # a call returns it, so no memory is allocated for it
    result: tuple[int, ...] | None = None  # its shape as a result of the program, if it is one


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
        self.device, self._dtype = given[0].device, given[0].dtype
        self._addresses = [t.data_ptr() for t in given]
        self._alignments: dict[int, bool] = {}
        self._orders: dict[tuple[int, int, int], int] = {}
        self._shared = max(_SMALL, max([t.nbytes for t in given]) // 2) if shared is None else shared
        self._numbers = itertools.count()
        self._values: dict[int, _Value] = {}  # by the storage of their tensors, which views share
        self._steps: list[Step] = []
        bare = [None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        self.inputs: list[Any] = [None if t is None else self._add(t).tensor for t in bare]

    # ---- operands --------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """A buffer that a later step writes."""
        return self._add(describe(shape, dtype, strides)).tensor

    def empty_like(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `torch.empty_like`."""
        return self._add(torch.empty_like(t, dtype=dtype)).tensor

    def contiguous(self, t: Tensor) -> Tensor:
        """The tensor itself, or a contiguous copy."""
        if t.is_contiguous():
            return t
        return self.call(Tensor.contiguous, (t,), describe(t.shape, t.dtype))

    def reshape(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """As `torch.reshape`: a view, or a contiguous copy where there can be none."""
        try:
            return t.view(tuple(shape))
        except RuntimeError:
            whole = torch.empty(t.shape, dtype=t.dtype, device="meta").reshape(tuple(shape)).shape  # without a -1
            return self.call(lambda t: t.reshape(whole), (t,), describe(whole, t.dtype))

    def copy(self, t: Tensor, like: Tensor) -> Tensor:
        """A copy that lies in memory as another tensor without gaps does."""
        shape, strides = tuple(like.shape), like.stride()

        def copy(t: Tensor) -> Tensor:
            return t.new_empty_strided(shape, strides).copy_(t)

        return self.call(copy, (t,), describe(shape, t.dtype, strides))

    def is_aligned(self, t: Tensor) -> bool:
        """Whether a tensor begins at a 16-byte boundary, in every call that the program is for."""
        number, offset = self._value(t).number, t.storage_offset() * t.element_size()
        if offset % 16 or number >= len(self._addresses):
            return offset % 16 == 0
        self._alignments[number] = self._addresses[number] % 16 == 0
        return self._alignments[number]

    def order(self, first: Tensor, second: Tensor) -> int:
        """1 if the second tensor begins behind the first one, of the same dtype, -1 if ahead of it, else 0: in every call of the program.

        It is 0 where a descriptor cannot span both: at the same place, too far apart, or in buffers of their own. Where these are two
        inputs, the operator's `places` have to tell their orders apart.
        """
        one, other = self._value(first).number, self._value(second).number
        apart = int(second.storage_offset() - first.storage_offset()) * first.element_size()
        if one == other:
            return order_of(apart)
        if max(one, other) >= len(self._addresses):
            return 0
        found = order_of(self._addresses[other] - self._addresses[one] + apart)
        self._orders[one, other, apart] = found
        return found

    # ---- steps -----------------------------------------------------------------------------------

    def launch(self, launcher: Any, operands: Sequence[Any], scalars: Sequence[Any] = ()) -> None:
        """Add a launch.

        Args:
            launcher: a `Launcher`.
            operands: tensors, tuples of tensors, descriptors, `Spanning`s.
            scalars: integers and `Scalar`s.
        """
        step = Step(launcher, (), tuple(scalars), None)
        step.operands = tuple([self._operand(o, step) for o in operands])
        self._steps.append(step)

    def call(self, function: Callable[..., Any], operands: Sequence[Tensor | None], *results: Tensor, scalars: Sequence[Any] = ()) -> Any:
        """Add a call of torch; return its results, which are tensors without memory, as operands of later steps.

        Args:
            function: of the operands and scalars, to a tensor or a tuple of tensors; None if it writes to an operand.
            operands: tensors; those that are None are left out.
            results: tensors without memory, as `describe` makes them.
            scalars: numbers and `Scalar`s.
        """
        given = [t for t in operands if t is not None]
        read, made = [self._value(t) for t in given], [self._add(t) for t in results]
        for value in made:
            value.is_returned = True
        for value in (*read, *made):
            value.is_called = True
            value.steps.append(len(self._steps))
        views = tuple([_view(value, t) for value, t in zip(read, given, strict=True)])
        self._steps.append(Step(function, views, tuple(scalars), tuple([value.number for value in made])))
        return results[0] if len(results) == 1 else list(results)

    def program(
        self,
        results: Sequence[Tensor],
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        differentiable: Callable[..., Tensor] | None = None,
        saved: int = 0,
    ) -> Program:
        """The program that returns these tensors; each all of a value, in the shape given if there is one.

        Args:
            results: of the program.
            shapes: of the results.
            differentiable: the program's `Program.differentiable`.
            saved: the program's `Program.saved`.

        Raises:
            ValueError: a result is an input, or no step uses it.
        """
        returned = [self._value(t) for t in results]
        for value, shape in zip(returned, shapes or [t.shape for t in results], strict=True):
            if not value.steps or value.number < len(self._addresses):
                raise value_error("results", "tensors that steps make", "an input" if value.steps else "one that no step uses")
            value.result = tuple(shape)
        used = [v for v in self._values.values() if v.steps and v.number >= len(self._addresses)]
        # One allocation for small buffers. Of a large one, which may be one of few that are alive at a time, the
        # memory is had when it is needed and no longer.
        pooled = [v for v in used if not v.is_called and v.result is None and v.tensor.nbytes <= self._shared and v.tensor.is_contiguous()]
        for value in used:
            if value not in pooled:
                self._allocate(value)
        offsets, nbytes = _places([(v.tensor.nbytes, (v.steps[0], v.steps[-1])) for v in pooled])
        parts = [(v.number, at, tuple(v.tensor.shape), v.tensor.dtype) for v, at in zip(pooled, offsets, strict=True)]
        found = [(v.number, v.result if v.is_called and v.result != v.tensor.shape else None) for v in returned]
        places, small = (self._alignments, self._orders, self.device), min(self._shared, _SMALL)
        made = Program(self._steps, [t for t in self.inputs if t is not None], Pool(nbytes, tuple(parts)), found, *places, small)
        made.differentiable, made.saved = differentiable, saved
        return made

    # ---- inside ----------------------------------------------------------------------------------

    def _add(self, t: Tensor) -> _Value:
        """A new value."""
        value = self._values[t.untyped_storage()._cdata] = _Value(next(self._numbers), t)
        return value

    def _value(self, t: Tensor) -> _Value:
        """The value that a tensor is a view of."""
        return self._values[t.untyped_storage()._cdata]

    def _operand(self, operand: Any, step: Step) -> int:
        """The number of a launch's operand: of a value, or of a place, a tuple or a descriptor that the step derives from values."""
        if isinstance(operand, Tensor):
            value, offset = self._value(operand), int(operand.storage_offset())
            value.steps.append(len(self._steps))
            if not offset:
                return value.number
            step.shifts.append(Shift(next(self._numbers), value.number, offset * operand.element_size(), offset))
            return step.shifts[-1].number
        if isinstance(operand, tuple) and not isinstance(operand, Spanning):
            step.tuples.append((next(self._numbers), tuple([self._operand(t, step) for t in operand])))
            return step.tuples[-1][0]
        return self._descriptor(operand, step)

    def _descriptor(self, operand: Any, step: Step) -> int:
        """The number of a descriptor, which the step makes."""
        descriptor, other = operand if isinstance(operand, Spanning) else (operand, None)
        base = descriptor.base
        if not self.is_aligned(base):
            raise ValueError(f"operands: expected a descriptor of memory from a 16-byte boundary on; got {descriptor}")
        if other is not None and self._value(other) is self._value(base):  # in one value, the same in every call
            descriptor = replace(descriptor, strides=[other.storage_offset() - base.storage_offset(), *descriptor.strides[1:]])
            other = None
        source, end = self._operand(base, step), None if other is None else self._operand(other, step)
        template = template_of(descriptor)
        step.descriptors.append(Descriptor(next(self._numbers), source, type(descriptor), template, end, base.element_size()))
        return step.descriptors[-1].number

    def _allocate(self, value: _Value) -> None:
        """Let the first step that uses a buffer allocate it, in the shape of a result where it is one, and the last one drop it."""
        t = value.tensor
        if not value.is_returned:
            shape = tuple(t.shape) if value.is_called or value.result is None else value.result
            strides = None if t.is_contiguous() else t.stride()
            self._steps[value.steps[0]].makes.append(Make(value.number, shape, strides, None if t.dtype == self._dtype else t.dtype))
        if value.result is None:
            self._steps[value.steps[-1]].drops.append(value.number)


def describe(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor without memory, as `Builder.call` wants its results described."""
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")


def _view(value: _Value, t: Tensor) -> View:
    """A tensor that torch is handed, by its value."""
    if t.shape == value.tensor.shape and t.stride() == value.tensor.stride() and not t.storage_offset():
        return View(value.number)
    return View(value.number, tuple(t.shape), t.stride(), int(t.storage_offset()))


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
