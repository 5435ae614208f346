"""Launches made once, made again on other operands of the same kind, with nothing worked out anew.

A `Tape` says which kernels were launched, in which order, and on what: operands are *slots*, numbers for the tensors that
were given, and for the buffers that were made on the way. A `Replay` makes a tape's launches on other tensors: it makes the buffers,
and hands addresses to compiled kernels.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from fastkron_py.runtime.descriptors import Place, Template, remade
from fastkron_py.runtime.launch import Launch, Ready


@dataclass(frozen=True)
class Box:
    """A slot that a launch gets a descriptor of."""

    slot: int
    kind: Any  # the descriptor's class
    template: Template


Operand = int | tuple[int, ...] | Box  # a slot, or several for a tuple of tensors

_ALIGNMENT: Final = 512  # of a buffer in the pool, as torch's own allocations on a GPU
_SMALL: Final = 1 << 20  # bytes of a buffer that may be in the pool, however small the operands are


def bits(value: float) -> int:
    """The float64 pattern of a scalar, as the kernels' int64 argument."""
    pattern: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return pattern


_ONE: Final = bits(1.0)
# The versions of Triton whose compiled kernels are launched past their front door, which takes several times as long.
_HAS_LAUNCHER: Final = re.match(r"3\.[6-9]\.", triton.__version__) is not None


class _Alpha:
    """Stands for alpha's bit pattern among a launch's integers."""


ALPHA: Final = _Alpha()


class Buffer(NamedTuple):
    """Contiguous memory that launches write."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class Step(NamedTuple):
    """One launch."""

    launch: Launch
    operands: tuple[Operand, ...]
    scalars: tuple[Any, ...]  # integers, or ALPHA

    def slots(self) -> set[int]:
        """The slots that it reads or writes."""
        return {slot for operand in self.operands for slot in _slots(operand)}


def _slots(operand: Operand) -> tuple[int, ...]:
    if isinstance(operand, Box):
        return (operand.slot,)
    return operand if isinstance(operand, tuple) else (operand,)


class Tape:
    """What was launched on which slots; slots 0, 1, ... are the tensors given."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = len(given)
        self.dtype = given[0].dtype
        self.largest = max(t.numel() * t.element_size() for t in given)
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """A new buffer's slot."""
        self.buffers.append(Buffer(tuple(shape), dtype))
        return self.given + len(self.buffers) - 1

    def launch(self, launch: Launch, operands: Sequence[Operand], scalars: Sequence[Any]) -> None:
        """Add a launch."""
        self.steps.append(Step(launch, tuple(operands), tuple(scalars)))

    def spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last step that use each buffer, for those that are used."""
        found: dict[int, tuple[int, int]] = {}
        for i, step in enumerate(self.steps):
            for slot in step.slots():
                if slot >= self.given:
                    found[slot] = (found.get(slot, (i, i))[0], i)
        return found


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
            at = max(at, -(-stop // _ALIGNMENT) * _ALIGNMENT)
        offsets.append(at)
    return offsets, max((offset + size for offset, (size, _) in zip(offsets, buffers, strict=True)), default=0)


def _picker(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """The function from a list to a tuple of these elements of it."""
    if len(indices) == 1:
        (index,) = indices
        return lambda values: (values[index],)
    return itemgetter(*indices)


class _Move(NamedTuple):
    """A step made ready: what happens around its launch."""

    makes: tuple[tuple[int, tuple[int, ...], torch.dtype | None], ...]  # slot, shape, dtype if it is not the operands'
    tuples: tuple[tuple[int, Callable[[Any], tuple[Any, ...]]], ...]
    boxes: tuple[tuple[int, int, Any, Template], ...]  # of a descriptor: place among values, its matrix's, class, template
    launch: Any  # a Launch, or its compiled kernel's launcher
    grid: int
    compiled: tuple[Any, ...]  # what that launcher asks for besides the grid, the stream and the kernel's arguments
    operands: Callable[[Any], tuple[Any, ...]]
    rest: tuple[Any, ...]  # scalars; of a compiled kernel all other arguments
    drops: tuple[int, ...]


class Replay:
    """A tape on other operands: each is taken for one of the shape, strides, dtype and device of the tape's.

    Only its address matters, so it need not have the canonical form's four dimensions. Any thread may call it.
    """

    def __init__(self, tape: Tape, results: Sequence[int], shapes: Sequence[Sequence[int]], most: int | None = None) -> None:
        """Of a tape, with the slots of the results and the shapes that they shall have.

        Args:
            tape: the launches.
            results: slots.
            shapes: of the results.
            most: bytes of a buffer that may be in one piece of memory with others, for as long as all launches take; None for a
                megabyte, or half of what the largest operand has.
        """
        self._results = tuple(results)
        self._tape = tape
        spans = tape.spans()
        wanted = dict(zip(results, (tuple(s) for s in shapes), strict=True))
        sized = {slot: tape.buffers[slot - tape.given] for slot in spans}
        # One allocation for small buffers. Of a large one, which may be one of few that are alive at a time, the
        # memory is had when it is needed and no longer.
        most = max(_SMALL, tape.largest // 2) if most is None else most
        pooled = [slot for slot in sorted(spans) if slot not in wanted and sized[slot].nbytes <= most]
        self._offsets, self._pool = _places([(sized[slot].nbytes, spans[slot]) for slot in pooled])
        self._pooled = [sized[slot] for slot in pooled]
        self._moves = self._ready(tape, spans, pooled, wanted)
        self._is_described = any([move.boxes for move in self._moves])
        self._compiled: tuple[int, tuple[_Move, ...]] | None = None  # for a value of alpha
        self._device = -1
        self._get_device: Callable[[], int] = _no_device
        self._get_stream: Callable[[int], int] = _no_device
        if not knobs.runtime.interpret:
            active = driver.active
            self._get_device, self._get_stream = active.get_current_device, active.get_current_stream
            self._device = self._get_device()

    def _ready(
        self, tape: Tape, spans: dict[int, tuple[int, int]], pooled: Sequence[int], wanted: dict[int, tuple[int, ...]]
    ) -> tuple[_Move, ...]:
        """The steps, with values in this order: what is given, the pool's buffers, the others, tuples."""
        others = [slot for slot in sorted(spans) if slot not in pooled]
        number = {slot: i for i, slot in enumerate([*range(tape.given), *pooled, *others])}
        count = len(number)
        moves = []
        for i, step in enumerate(tape.steps):
            makes, drops, tuples, boxes, operands = [], [], [], [], []
            for slot in others:
                buffer = tape.buffers[slot - tape.given]
                if spans[slot][0] == i:
                    dtype = None if buffer.dtype == tape.dtype else buffer.dtype
                    makes.append((number[slot], wanted.get(slot, buffer.shape), dtype))
                if spans[slot][1] == i and slot not in wanted:
                    drops.append(number[slot])
            for operand in step.operands:
                if isinstance(operand, tuple):
                    tuples.append((count, _picker([number[slot] for slot in operand])))
                    operands.append(count)
                    count += 1
                elif isinstance(operand, Box):
                    boxes.append((count, number[operand.slot], operand.kind, operand.template))
                    operands.append(count)
                    count += 1
                else:
                    operands.append(number[operand])
            around = (tuple(makes), tuple(tuples), tuple(boxes))
            moves.append(_Move(*around, step.launch, 0, (), _picker(operands), step.scalars, tuple(drops)))
        self._blank = [None] * (count - tape.given - len(pooled))
        self._results = tuple(number[slot] for slot in self._results)
        return tuple(moves)

    def is_here(self) -> bool:
        """Whether Triton's current device is the one that it was when this was made; else it is not to be called."""
        return self._get_device() == self._device

    def takes(self, given: Sequence[Tensor]) -> bool:
        """Whether `is_here`, and these tensors begin where descriptors can, if there are any."""
        if self._is_described:
            unaligned = 0
            for t in given:
                unaligned |= t.data_ptr()
            if unaligned & 15:
                return False
        return self._get_device() == self._device

    def __call__(self, given: Sequence[Tensor], alpha: float) -> list[Tensor]:
        """The results on these operands."""
        pattern = _ONE if alpha == 1.0 else bits(alpha)
        addresses: list[Any] = [t.data_ptr() for t in given]
        unaligned = 0
        for address in addresses:
            unaligned |= address
        compiled = self._compiled
        if compiled is None or compiled[0] != pattern:
            compiled = self._compiled_for(pattern)
        if compiled is None or unaligned & 15 or is_hooked():
            return self._with_tensors(given, pattern)
        stream = self._get_stream(self._device)
        like = given[0]
        held: dict[int, Tensor] = {}
        if self._pool:
            pool = like.new_empty(self._pool, dtype=torch.uint8)
            base = pool.data_ptr()
            addresses += [base + offset for offset in self._offsets]
        addresses += self._blank
        for makes, tuples, boxes, launch, grid, more, operands, rest, drops in compiled[1]:
            for slot, shape, dtype in makes:
                held[slot] = made = like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
                addresses[slot] = made.data_ptr()
            for slot, pick in tuples:
                addresses[slot] = pick(addresses)
            for slot, source, kind, template in boxes:
                addresses[slot] = remade(kind, template, Place(addresses[source]))
            launch(grid, 1, 1, stream, *more, *operands(addresses), *rest)
            for slot in drops:  # held until its last reader is launched: from then on, the stream's order guards it
                del held[slot]
        return [held[slot] for slot in self._results]

    def _compiled_for(self, pattern: int) -> tuple[int, tuple[_Move, ...]] | None:
        """The moves with compiled kernels, which the first run sees to where there is a compiler; else None."""
        found = []
        for move in self._moves:
            ready = move.launch.ready()
            if ready is None:
                return None
            launch, more = launcher_of(ready)
            rest = (*ready.between, *_with_alpha(move.rest, pattern), *ready.after)
            found.append(move._replace(launch=launch, grid=ready.grid[0], compiled=more, rest=rest))
        self._compiled = (pattern, tuple(found))
        return self._compiled

    def _with_tensors(self, given: Sequence[Tensor], pattern: int) -> list[Tensor]:
        """The same by way of the launches themselves, which also compile, and take any alignment."""
        like = given[0]
        pool = like.new_empty(self._pool, dtype=torch.uint8)
        pooled = [pool[at : at + b.nbytes].view(b.dtype) for at, b in zip(self._offsets, self._pooled, strict=True)]
        tensors: list[Any] = [*given, *pooled, *self._blank]
        for makes, tuples, boxes, launch, _, _, operands, scalars, drops in self._moves:
            for slot, shape, dtype in makes:
                tensors[slot] = like.new_empty(shape, dtype=dtype or like.dtype)
            for slot, pick in tuples:
                tensors[slot] = pick(tensors)
            for slot, source, kind, template in boxes:
                tensors[slot] = remade(kind, template, tensors[source].as_strided(template["shape"], template["strides"]))
            launch(*operands(tensors), *_with_alpha(scalars, pattern))
            for slot in drops:
                tensors[slot] = None
        return [tensors[slot] for slot in self._results]


def _with_alpha(scalars: tuple[Any, ...], pattern: int) -> tuple[int, ...]:
    return tuple([pattern if scalar is ALPHA else scalar for scalar in scalars])


def launcher_of(ready: Ready) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches a compiled kernel when it is given the grid, the stream, these, and the kernel's arguments."""
    kernel = ready.kernel
    if _HAS_LAUNCHER:  # launched as its JIT function does it, but without hooks, and without what they would be told
        return kernel.run, (kernel.function, kernel.packed_metadata, None, None, None)
    runner = kernel[(*ready.grid, 1, 1)]
    return lambda x, y, z, stream, *arguments: runner(*arguments, stream=stream), ()


def is_hooked() -> bool:
    """Whether somebody wants to be told of launches: a profiler."""
    runtime = knobs.runtime
    return bool(getattr(runtime.launch_enter_hook, "calls", True) or getattr(runtime.launch_exit_hook, "calls", True))


def _no_device(_: int = -1) -> int:
    return -1
