"""Programs: the launches, torch calls and buffers of a call as data, and running them.

A slice builds a `Program` for a problem (`runtime/builder.py`). The first call on such a problem runs it, and so does every later one.
Values are numbered: the inputs first, then buffers, places inside of values, tuples and descriptors, as steps are added. A run makes
the buffers, and hands addresses to compiled kernels and tensors to torch. Tensor descriptors for the copy engine are made again from
fields that Triton checked once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime.eager import unseen_by_autograd

Template = dict[str, Any]  # the fields of a descriptor besides the matrix
FARTHEST: Final = 1 << 40  # bytes from one index of a dimension to the next, which are fewer
_new: Final = object.__new__


def order_of(distance: int) -> int:
    """The sign of a number of bytes from one matrix to another, 0 if one descriptor cannot reach both."""
    if abs(distance) >= FARTHEST:
        return 0
    return (distance > 0) - (distance < 0)


class Place:
    """Memory that is no tensor's first element."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """As of a tensor: all that a launch asks of a descriptor's memory."""
        return self._address


def template_of(descriptor: Any) -> Template:
    """The fields of a checked descriptor besides the matrix."""
    return {name: value for name, value in vars(descriptor).items() if name != "base"}


def remade(cls: Any, template: Template, base: Any) -> Any:
    """A descriptor of this class, equal to one that is made of the same and checked; base begins at a 16-byte boundary."""
    made = _new(cls)
    made.__dict__ = {**template, "base": base}
    return made


def bits(value: float) -> int:
    """The float64 pattern of a scalar, as the kernels' int64 argument."""
    pattern: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return pattern


@dataclass(frozen=True)
class Scalar:
    """One of the numbers that a program is run with."""

    index: int


class Make(NamedTuple):
    """A buffer that is allocated right before its first use."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None for a contiguous one
    dtype: torch.dtype | None  # None for the first input's


class Shift(NamedTuple):
    """A place inside a value."""

    number: int
    source: int
    nbytes: int
    elements: int


class Descriptor(NamedTuple):
    """A tensor descriptor of a value."""

    number: int
    source: int
    type: Any  # the descriptor's class
    template: Template
    other: int | None  # the value where the outermost dimension goes on: how far away it is differs from call to call
    itemsize: int


class View(NamedTuple):
    """A tensor that torch is handed; no shape for all of the value as it is."""

    source: int
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0


@dataclass
class Step:
    """One launch of a kernel, or one call of torch, with the buffers, places and descriptors that it needs.

    Attributes:
        run: a `Launcher`, or the function of torch.
        operands: numbers of values, for a launch; for a call, views.
        scalars: integers and `Scalar`s.
        results: numbers of the tensors that a call returns; None for a launch.
        makes: buffers that are allocated before it.
        shifts: places that are worked out before it.
        tuples: tuples of addresses, by number.
        descriptors: tensor descriptors that are made before it.
        drops: buffers that no later step uses.
    """

    run: Any
    operands: tuple[Any, ...]
    scalars: tuple[Any, ...]
    results: tuple[int, ...] | None
    makes: list[Make] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    tuples: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    descriptors: list[Descriptor] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)


class _Ready(NamedTuple):
    """A step with its kernel compiled: a launch past everything that looks at arguments."""

    makes: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype | None], ...]  # as of `Make`, with strides
    launch: Callable[..., None] | None  # of the kernel's arguments; None for a call of torch, which has none of the three fields below
    operands: Callable[[Any], tuple[Any, ...]]
    rest: tuple[Any, ...]  # the kernel's arguments after the operands: strides, scalars, constants
    tuples: tuple[tuple[int, Callable[[Any], tuple[Any, ...]]], ...]  # as of `Step`
    derives: bool  # whether places and descriptors are worked out before it
    step: Step
    drops: Sequence[int]


class Pool(NamedTuple):
    """One allocation for small buffers: its size, and (number, offset, shape, dtype) of each."""

    nbytes: int
    parts: tuple[tuple[int, int, tuple[int, ...], torch.dtype], ...]


class Result(NamedTuple):
    """A value that is returned, in another shape or as it is."""

    number: int
    shape: tuple[int, ...] | None


class Places(NamedTuple):
    """The properties of its inputs' addresses that a program depends on.

    Attributes:
        aligned: for some inputs, whether they begin at a 16-byte boundary.
        orders: for pairs of inputs, and bytes that are added to the second one's address: which is ahead, as `order_of` says.
    """

    aligned: tuple[tuple[int, bool], ...] = ()
    orders: tuple[tuple[tuple[int, int, int], int], ...] = ()


_MOST_COMPILED: Final = 8  # pairs of scalars and a stream
_ALIGNED: Final = 15  # bits of an address that are zero, as compiled kernels and descriptors want it


class Program:
    """Steps over numbered values; any thread may run it.

    Inputs are taken for tensors of the shapes, strides, dtypes and device that it was built for.

    Attributes:
        differentiable: a function of the inputs and scalars to the one result, of few operations that autograd differentiates in less time
            than an autograd function and its backward pass take.
        saved: the number of its results, the last ones, that are intermediates for the backward pass.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        count: int,
        inputs: int,
        pool: Pool,
        results: Sequence[Result],
        places: Places,
        device: torch.device,
    ) -> None:
        """Steps over values.

        Args:
            steps: in order.
            count: of all values.
            inputs: how many of them, the first, are inputs.
            pool: of small buffers.
            results: of the program.
            places: of the inputs.
            device: of all values.
        """
        self._steps = tuple(steps)
        self.differentiable: Callable[..., Tensor] | None = None
        self.saved = 0
        self._inputs, self._pool, self._results = inputs, pool, tuple(results)
        self._blank = [None] * (count - inputs)
        self._offsets = [(number, offset) for number, offset, *_ in pool.parts]
        self._has_calls = any([step.results is not None for step in steps])
        launches = [step for step in steps if step.results is None]
        self._is_calls_alone = not launches and not pool.parts
        self._is_unaligned = any([shift.nbytes & _ALIGNED for step in launches for shift in step.shifts])
        self.has_scalars = any([isinstance(s, Scalar) for step in steps for s in step.scalars])
        self._aligned, self._orders = places
        self.has_places = bool(self._aligned or self._orders)
        self._compiled: dict[tuple[tuple[int, ...], int], tuple[_Ready, ...]] = {}  # by patterns of scalars, and stream
        self._device = -1
        self._get_device: Callable[[], int] = _no_device
        self._get_stream: Callable[[int], int] = _no_device
        self._is_hooked: Callable[[], bool] = bool
        if launches:
            from fastkron_py.runtime import launch  # Triton, which torch's backend does without

            self._get_device, self._get_stream, self._is_hooked = launch.driver()
            self._device = device.index if device.type == "cuda" else self._get_device()

    def takes(self, given: Sequence[Tensor]) -> bool:
        """Whether the inputs lie in memory as those did that it was built for."""
        for number, is_aligned in self._aligned:
            if (given[number].data_ptr() & _ALIGNED == 0) is not is_aligned:
                return False
        for (first, second, more), order in self._orders:
            if order_of(given[second].data_ptr() + more - given[first].data_ptr()) != order:
                return False
        return True

    def __call__(self, given: Sequence[Tensor], scalars: tuple[float, ...] = ()) -> list[Tensor]:
        """The results on these inputs.

        Args:
            given: the inputs.
            scalars: the numbers that `Scalar`s stand for.
        """
        if self._has_calls:
            run = self._run_calls if self._is_calls_alone else self._run
            with unseen_by_autograd(given[0]):
                # Another context costs as much as a small product.
                if not torch.is_grad_enabled() or not any([t.requires_grad for t in given]):
                    return run(given, scalars)
                with torch.no_grad():
                    return run(given, scalars)
        return self._run(given, scalars)

    def _run_calls(self, given: Sequence[Tensor], scalars: tuple[float, ...]) -> list[Tensor]:
        """The results of a program that launches nothing, and so needs no addresses."""
        like, count = given[0], len(given)
        held: dict[int, Tensor] = {}
        for step in self._steps:
            for make in step.makes:
                held[make.number] = _made(make, like)
            for number, made in zip(step.results or (), _called(step, given, held, scalars), strict=True):
                held[number] = made
            for number in step.drops:
                del held[number]
        results = []
        for number, shape in self._results:
            t = given[number] if number < count else held[number]
            results.append(t if shape is None else t.view(shape))
        return results

    def _run(self, given: Sequence[Tensor], scalars: tuple[float, ...]) -> list[Tensor]:
        if self._get_device() != self._device:
            with torch.cuda.device(self._device):
                return self._run(given, scalars)
        addresses: list[Any] = [t.data_ptr() for t in given]
        unaligned = 0
        for address in addresses:
            unaligned |= address
        patterns = tuple([bits(s) for s in scalars]) if self.has_scalars else ()
        stream = self._get_stream(self._device)
        steps = self._compiled.get((patterns, stream)) or self._compile(patterns, stream)
        if steps is None or unaligned & _ALIGNED or self._is_unaligned or self._is_hooked():
            return self._run_by_tensors(given, scalars, patterns)
        like = given[0]
        held: dict[int, Tensor] = {}
        addresses += self._blank
        if self._offsets:
            pool = like.new_empty(self._pool.nbytes, dtype=torch.uint8)
            base = pool.data_ptr()
            for number, offset in self._offsets:
                addresses[number] = base + offset
        for makes, launch, operands, rest, tuples, derives, step, drops in steps:
            for number, shape, strides, dtype in makes:  # each argument takes its time
                made = like.new_empty_strided(shape, strides) if dtype is None else like.new_empty_strided(shape, strides, dtype=dtype)
                held[number] = made
                addresses[number] = made.data_ptr()
            if launch is None:
                for number, made in zip(step.results or (), _called(step, given, held, scalars), strict=True):
                    held[number] = made
                    addresses[number] = made.data_ptr()
            else:
                if derives:
                    _derive(step, addresses)
                for number, parts in tuples:
                    addresses[number] = parts(addresses)
                launch(*operands(addresses), *rest)
            for number in drops:  # held until its last reader is launched: from then on, the stream's order guards it
                del held[number]
        return [held[number] if shape is None else held[number].view(shape) for number, shape in self._results]

    def _compile(self, patterns: tuple[int, ...], stream: int) -> tuple[_Ready, ...] | None:
        """The steps with compiled kernels, which a first run sees to where there is a compiler; else None."""
        found = []
        for step in self._steps:
            makes = tuple([(m.number, m.shape, contiguous(m.shape) if m.strides is None else m.strides, m.dtype) for m in step.makes])
            if step.results is not None:
                found.append(_Ready(makes, None, tuple, (), (), False, step, step.drops))
                continue
            ready = step.run.ready()
            if ready is None:
                return None
            launch = partial(ready.launch, ready.grid, 1, 1, stream, *ready.first)
            rest = (*ready.between, *_with_scalars(step.scalars, patterns), *ready.after)
            tuples = tuple([(number, _picker(parts)) for number, parts in step.tuples])
            derives = bool(step.shifts or step.descriptors)
            found.append(_Ready(makes, launch, _picker(step.operands), rest, tuples, derives, step, step.drops))
        if len(self._compiled) >= _MOST_COMPILED:
            self._compiled.clear()
        self._compiled[patterns, stream] = steps = tuple(found)
        return steps

    def _run_by_tensors(self, given: Sequence[Tensor], scalars: tuple[float, ...], patterns: tuple[int, ...]) -> list[Tensor]:
        """The same through Triton's JIT functions, which also compile, and take any alignment."""
        like = given[0]
        values: list[Any] = [*given, *self._blank]
        if self._pool.parts:
            pool = like.new_empty(self._pool.nbytes, dtype=torch.uint8)
            for number, offset, shape, dtype in self._pool.parts:
                size = dtype.itemsize * math.prod(shape)
                values[number] = pool[offset : offset + size].view(dtype).view(shape)
        for step in self._steps:
            for make in step.makes:
                values[make.number] = _made(make, like)
            if step.results is not None:
                for number, made in zip(step.results, _called(step, given, dict(enumerate(values)), scalars), strict=True):
                    values[number] = made
            else:
                for number, source, _, elements in step.shifts:
                    t = values[source]
                    values[number] = t.as_strided((1,), (1,), t.storage_offset() + elements)
                for number, parts in step.tuples:
                    values[number] = tuple([values[part] for part in parts])
                for descriptor in step.descriptors:
                    values[descriptor.number] = _made_descriptor(descriptor, values)
                step.run(*[values[number] for number in step.operands], *_with_scalars(step.scalars, patterns))
            derived: tuple[Any, ...] = (*step.shifts, *step.tuples, *step.descriptors)
            for number in (*step.drops, *[one[0] for one in derived]):
                values[number] = None
        return [values[number] if shape is None else values[number].view(shape) for number, shape in self._results]


def _called(step: Step, given: Sequence[Tensor], held: dict[int, Any], scalars: tuple[float, ...]) -> Sequence[Tensor]:
    """The results of a call of torch."""
    count = len(given)
    operands: list[Any] = []
    for source, shape, strides, offset in step.operands:
        t = given[source] if source < count else held[source]
        operands.append(t if shape is None else t.as_strided(shape, strides, t.storage_offset() + offset))
    for s in step.scalars:
        operands.append(scalars[s.index] if isinstance(s, Scalar) else s)
    found = step.run(*operands)
    return (found,) if isinstance(found, Tensor) else () if found is None else found


def _derive(step: Step, addresses: list[Any]) -> None:
    """Work out the places and descriptors of a launch."""
    for number, source, nbytes, _ in step.shifts:
        addresses[number] = addresses[source] + nbytes
    for descriptor in step.descriptors:
        addresses[descriptor.number] = _made_descriptor(descriptor, addresses)


def _made_descriptor(descriptor: Descriptor, values: Sequence[Any]) -> Any:
    """A descriptor of a value, which is an address or a tensor."""
    base, template = values[descriptor.source], descriptor.template
    is_address = isinstance(base, int)
    if descriptor.other is not None:
        begin, end = (v if is_address else v.data_ptr() for v in (base, values[descriptor.other]))
        template = {**template, "strides": [(end - begin) // descriptor.itemsize, *template["strides"][1:]]}
    return remade(descriptor.type, template, Place(base) if is_address else base)


def _made(make: Make, like: Tensor) -> Tensor:
    """A buffer, like a tensor on the device."""
    _, shape, strides, dtype = make
    return like.new_empty(shape, dtype=dtype) if strides is None else like.new_empty_strided(shape, strides, dtype=dtype)


def _no_device(_: int = -1) -> int:
    return -1


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch has them."""
    return tuple([math.prod([max(n, 1) for n in shape[i + 1 :]]) for i in range(len(shape))])


def _picker(numbers: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """The function from a list to a tuple of these elements of it."""
    if len(numbers) == 1:
        (number,) = numbers
        return lambda values: (values[number],)
    return itemgetter(*numbers)


def _with_scalars(scalars: tuple[Any, ...], patterns: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([patterns[s.index] if isinstance(s, Scalar) else s for s in scalars])
