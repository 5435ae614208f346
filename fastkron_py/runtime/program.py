"""Programs: the launches, torch calls and buffers of a call as data, and running them.

A slice builds a `Program` for a problem (`runtime/builder.py`). The first call on such a problem runs it, and so does every later one.
Values are numbered: the inputs first, then buffers, places inside of values, tuples and descriptors, as steps are added. A run makes
the buffers, and hands addresses to compiled kernels and tensors to torch. Tensor descriptors for the copy engine are made again from
fields that Triton checked once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter, methodcaller
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


class Place(int):
    """The address of memory that is no tensor's first element."""

    data_ptr = int.__int__  # as of a tensor: all that a launch asks of a descriptor's memory


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
    return struct.unpack("<q", struct.pack("<d", value))[0]


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
    """One launch of a kernel, or one call of torch, with the buffers, places and descriptors that it needs."""

    run: Any  # a `Launcher`, or the function of torch
    operands: tuple[Any, ...]  # numbers of values, for a launch; for a call, views
    scalars: tuple[Any, ...]  # integers and `Scalar`s
    results: tuple[int, ...] | None  # numbers of the tensors that a call returns; None for a launch
    makes: list[Make] = field(default_factory=list)  # buffers that are allocated before it
    shifts: list[Shift] = field(default_factory=list)  # places that are worked out before it
    tuples: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # tuples of addresses, by number
    descriptors: list[Descriptor] = field(default_factory=list)  # tensor descriptors that are made before it
    drops: list[int] = field(default_factory=list)  # buffers that no later step uses


class Pool(NamedTuple):
    """One allocation for small buffers: its size, and (number, offset, shape, dtype) of each."""

    nbytes: int
    parts: tuple[tuple[int, int, tuple[int, ...], torch.dtype], ...]


_POOL: Final = -1  # the number of the pool among a run's tensors
_MOST_KEPT: Final = 8  # runs of a program: pairs of a stream and scalars
_FRESH: Final = (torch.mm, torch.bmm)  # functions of torch whose results are no views
_ALIGNED: Final = 15  # bits of an address that are zero, as compiled kernels and descriptors want it

Run = Callable[[Sequence[Tensor], tuple[float, ...]], Sequence[Tensor]]  # of the inputs and the scalars


class Program:
    """Steps over numbered values; any thread may run it.

    Inputs are taken for tensors of the shapes, strides, dtypes and device that it was built for.

    Attributes:
        differentiable: a function of the inputs and scalars to the one result, of few operations that autograd differentiates in less time
            than an autograd function and its backward pass take.
        plain: a function of the inputs to the one result, which is one product of torch and no view: called in place of the program, and
            differentiated by autograd.
        saved: the number of its results, the last ones, that are intermediates for the backward pass.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[Tensor],
        pool: Pool,
        results: Sequence[tuple[int, tuple[int, ...] | None]],
        aligned: dict[int, bool],
        orders: dict[tuple[int, int, int], int],
        device: torch.device,
        small: int,
    ) -> None:
        """Steps over values.

        Args:
            steps: in order.
            inputs: the first values, as tensors without memory.
            pool: of small buffers.
            results: numbers of the values that are returned, each with another shape, or None where it is as it is.
            aligned: for some inputs, whether they begin at a 16-byte boundary.
            orders: for pairs of inputs, and bytes that are added to the second one's address: which is ahead, as `order_of` says.
            device: of all values.
            small: bytes of a buffer that may be allocated before its first use, and live until the end.
        """
        self._steps, self._pool, self._results = tuple(steps), pool, tuple(results)
        self._inputs, self._itemsize, self._small = len(inputs), inputs[0].element_size(), small
        self.differentiable: Callable[..., Tensor] | None = None
        self.plain: Callable[..., Tensor] | None = None
        self.saved = 0
        self.has_scalars = any([isinstance(s, Scalar) for step in steps for s in step.scalars])
        self._has_calls = any([step.results is not None for step in steps])
        made = {number for step in steps if step.results and step.run not in _FRESH for number in step.results}
        self._may_view = any([number in made or shape is not None for number, shape in results])  # whether a result may be a view
        self._aligned, self._orders = tuple(aligned.items()), tuple(orders.items())
        self.has_places = bool(self._aligned or self._orders)
        self._device_type = "cpu" if device.type == "meta" else device.type
        self._runs: dict[Any, Run] = {}  # by the stream and the scalars; of None in place of a stream, by tensors
        self._alone = None if any([step.results is None for step in steps]) else _Straight(self).run()  # calls of torch alone
        if self._alone is None:
            from fastkron_py.runtime import launch  # Triton, which torch's backend does without

            self._is_hooked, (self._get_device, self._get_stream) = launch.is_hooked, launch.driver()
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

    def __call__(self, given: Sequence[Tensor], scalars: tuple[float, ...] = ()) -> Sequence[Tensor]:
        """The results on these inputs.

        Args:
            given: the inputs.
            scalars: the numbers that `Scalar`s stand for.
        """
        run = self._alone
        if run is None:
            if self._get_device() != self._device:
                with torch.cuda.device(self._device):
                    return self(given, scalars)
            key: Any = self._get_stream(self._device)
            if self.has_scalars:
                key = (key, scalars) if all(scalars) else (key, *map(bits, scalars))  # 0.0 and -0.0 are equal
            run = self._runs.get(key) or self._compiled(key, scalars)
            if run is None or self._is_hooked():
                run = self.by_tensors
        if not self._has_calls:
            return run(given, scalars)
        # A context costs as much as a small product.
        is_recorded = torch.is_grad_enabled() and any([t.requires_grad for t in given])
        if not (is_recorded or self._may_view or torch.is_autocast_enabled(self._device_type)):
            return run(given, scalars)
        with unseen_by_autograd(self._device_type):
            if not is_recorded:
                return run(given, scalars)
            with torch.no_grad():
                return run(given, scalars)

    def by_tensors(self, given: Sequence[Tensor], scalars: tuple[float, ...]) -> Sequence[Tensor]:
        """The results by way of Triton's JIT functions, which also compile, and take any alignment."""
        key = (None, *map(bits, scalars)) if self.has_scalars else None
        run = self._runs.get(key)
        if run is None:
            from fastkron_py.runtime.launch import compile_side_by_side

            run = _Straight(self, scalars).run()
            # Side by side before the first run; what calls of torch would see then has not been computed.
            if not self._runs and not self._has_calls:  # else the kernels are there, whatever the scalars are
                compile_side_by_side([step.run for step in self._steps], lambda: run(given, scalars))
            self._keep(key, run)
        return run(given, scalars)

    def _compiled(self, key: Any, scalars: tuple[float, ...]) -> Run | None:
        """The run with compiled kernels, which a first run by tensors sees to where there is a compiler; else None."""
        launches = [step.run.ready for step in self._steps if step.results is None]
        is_unaligned = any([shift.nbytes & _ALIGNED for step in self._steps for shift in step.shifts])
        if None in launches or is_unaligned:
            return None
        return self._keep(key, _Straight(self, scalars, launches, key[0] if self.has_scalars else key).run())

    def _keep(self, key: Any, run: Run) -> Run:
        if len(self._runs) >= _MOST_KEPT:
            self._runs.clear()
        self._runs[key] = run
        return run


# ---- a program as one straight run ---------------------------------------------------------------

Op = tuple[Callable[..., Any] | None, Callable[..., Any], tuple[Any, ...]]
"""A launch, the function that picks its operands from the slots, its other arguments; or None, and a function of both lists."""
Derived = Shift | Descriptor | tuple[int, tuple[int, ...]]
"""A place, a descriptor or a tuple."""


class _Straight:
    """A program's run: closures over positions in two lists, so that a run looks nothing up.

    Slots are what launches are handed: addresses, or tensors where kernels are not compiled. Tensors are what torch is handed. A run
    begins both with the inputs, the small buffers and the pool, and what launches derive from these alone, and appends to both in the
    order of the steps. A view that several calls of torch are handed is made once.
    """

    def __init__(
        self, program: Program, scalars: Sequence[float] = (), launches: Sequence[Any] | None = None, stream: int | None = None
    ) -> None:
        """Collect the operations.

        Args:
            program: whose steps they are.
            scalars: that its launches are given.
            launches: the `Ready`s of the launches, for aligned addresses; None to launch through `Step.run`, on tensors.
            stream: of compiled kernels.
        """
        self._program, self._by_address, pool = program, launches is not None, program._pool
        self._stream, self._patterns = stream, [bits(value) for value in scalars]
        self._slots = {i: i for i in range(program._inputs)}
        self._tensors: dict[Any, int] = dict(self._slots)  # by number, and by view
        self._views: dict[int, set[View]] = {}  # that torch is handed, of each value; none for one that is made as it is handed
        for view in [view for step in program._steps if step.results is not None for view in step.operands]:
            self._views.setdefault(view.source, set()).add(view)
        most = program._small // program._itemsize  # elements
        early = [make for step in program._steps for make in step.makes if make.dtype is None and math.prod(make.shape) <= most]
        self._kept = {make.number for make in early}
        self._made = [self._layout(make) for make in early]
        for make in early:
            self._add(make.number)
        if pool.parts:
            self._made.append(((math.ceil(pool.nbytes / program._itemsize),), (1,)))
            self._add(_POOL)
        for number, *_ in pool.parts:
            self._slots[number] = len(self._slots)
        self._derivations = [function for step in program._steps for function in self._derived(step)]
        ready = iter(launches or ())
        self._ops = [op for step in program._steps for op in self._ops_of(step, ready)]

    def _layout(self, make: Make) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and strides of a buffer: those of its one view, if torch is handed that alone, and the view is all of it."""
        shape, strides = make.shape, make.strides or torch.empty(make.shape, device="meta").stride()
        views = self._views.get(make.number, set())
        if len(views) == 1 and make.number not in [number for number, _ in self._program._results]:
            (view,) = views
            reach = 1 + sum([(n - 1) * s for n, s in zip(view.shape or (), view.strides, strict=True)])
            if view.shape is not None and not view.offset and reach == math.prod(shape):
                views.clear()
                return view.shape, view.strides
        return shape, strides

    def _add(self, number: int) -> None:
        """A tensor, and its place among the slots."""
        self._tensors[number], self._slots[number] = len(self._tensors), len(self._slots)

    def _picker(self, numbers: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
        """The function from the slots to a tuple of these values."""
        picks = picker([self._slots[number] for number in numbers])
        return picks if len(numbers) > 1 else lambda slots: tuple(picks(slots))

    # ---- operations ------------------------------------------------------------------------------

    def _ops_of(self, step: Step, ready: Iterator[Any]) -> Iterator[Op]:
        for make in step.makes:
            if make.number not in self._kept:
                self._add(make.number)
                yield None, self._allocation(make), ()
        drops: list[Any] = [number for number in step.drops if number not in self._kept]
        if step.results is not None:
            yield None, self._call(step), ()
        else:
            for function in self._derived(step):
                yield None, lambda slots, *_, function=function: slots.append(function(slots)), ()
            rest = [self._patterns[s.index] if isinstance(s, Scalar) else s for s in step.scalars]
            if self._by_address:
                kernel = next(ready)
                yield kernel.launch(self._stream), self._picker(step.operands), (*kernel.between, *rest, *kernel.after)
            else:
                yield step.run, self._picker(step.operands), tuple(rest)
            drops = drops if self._by_address else [*drops, *[number for number, *_ in (*step.shifts, *step.tuples, *step.descriptors)]]
        if drops:
            yield None, self._drop(drops), ()

    def _allocation(self, make: Make) -> Callable[..., None]:
        """Make a large buffer, or one of another dtype than the first input's."""
        by_address, options = self._by_address, {} if make.dtype is None else {"dtype": make.dtype}
        empty = methodcaller("new_empty_strided", *self._layout(make), **options)

        def allocate(slots: list[Any], tensors: list[Any], _: Any) -> None:
            t = empty(tensors[0])
            tensors.append(t)
            slots.append(t.data_ptr() if by_address else t)

        return allocate

    def _call(self, step: Step) -> Callable[..., None]:
        """Call torch, on views of tensors."""
        function, by_address, has_results = step.run, self._by_address, bool(step.results)
        fresh, places = [], []
        for view in step.operands:
            is_whole = view.shape is None or not self._views[view.source]
            if not is_whole and view not in self._tensors:
                fresh.append((self._tensors[view.source], view.shape, view.strides, view.offset))
                self._tensors[view] = len(self._tensors)
            places.append(self._tensors[view.source if is_whole else view])
        operands = picker(places)
        numbers = [(s.index, None) if isinstance(s, Scalar) else (None, s) for s in step.scalars]
        constants = tuple([number for _, number in numbers]) if not any([isinstance(s, Scalar) for s in step.scalars]) else None
        for number in step.results or ():
            self._add(number)

        def call(slots: list[Any], tensors: list[Any], scalars: tuple[float, ...]) -> None:
            for source, shape, strides, offset in fresh:
                t = tensors[source]
                tensors.append(t.as_strided(shape, strides, t.storage_offset() + offset) if offset else t.as_strided(shape, strides))
            rest = [number if index is None else scalars[index] for index, number in numbers] if constants is None else constants
            found = function(*operands(tensors), *rest)
            if has_results:
                made: Sequence[Tensor] = (found,) if isinstance(found, Tensor) else found
                tensors += made
                slots += map(Tensor.data_ptr, made) if by_address else made

        return call

    def _derived(self, step: Step) -> Iterator[Callable[[list[Any]], Any]]:
        """Functions from the slots to the places, tuples and descriptors of a launch which are not there yet, and whose values are."""
        derived: list[Derived] = [*step.shifts, *step.tuples, *step.descriptors]
        for one in derived:
            if one[0] not in self._slots and all([source in self._slots for source in _sources(one)]):
                yield self._derivation(one)
                self._slots[one[0]] = len(self._slots)

    def _derivation(self, derived: Derived) -> Callable[[list[Any]], Any]:
        """The function from the slots to one of these."""
        at = self._slots
        if isinstance(derived, Shift):
            _, source, nbytes, elements = derived._replace(source=at[derived.source])
            if self._by_address:
                return lambda slots: slots[source] + nbytes
            return lambda slots: slots[source].as_strided((1,), (1,), slots[source].storage_offset() + elements)
        if isinstance(derived, Descriptor):
            other = None if derived.other is None else at[derived.other]
            return partial(_made_descriptor, derived._replace(source=at[derived.source], other=other))
        return self._picker(derived[1])

    def _drop(self, numbers: Sequence[int]) -> Callable[..., None]:
        """Let go of values after their last reader is launched: from then on, the stream's order guards them."""
        of_slots = [] if self._by_address else [self._slots[number] for number in numbers]  # addresses keep no memory
        sources = {key: key.source if isinstance(key, View) else key for key in self._tensors}
        of_tensors = [place for key, place in self._tensors.items() if sources[key] in numbers]

        def drop(slots: list[Any], tensors: list[Any], _: Any) -> None:
            for i in of_slots:
                slots[i] = None
            for i in of_tensors:
                tensors[i] = None

        return drop

    # ---- the run ---------------------------------------------------------------------------------

    def _one_call(self) -> Run | None:
        """The run, without lists of values, of one call of torch on inputs and to results as they are; None for another program."""
        if len(self._ops) != 1 or self._made or self._ops[0][0] is not None:
            return None
        (step,), results = self._program._steps, self._program._results
        is_whole = step.results == tuple([number for number, _ in results]) and not any([shape is not None for _, shape in results])
        if not is_whole or any([view.shape is not None for view in step.operands]):
            return None
        function, operands = step.run, picker([self._tensors[view.source] for view in step.operands])
        constants = tuple([s for s in step.scalars if not isinstance(s, Scalar)])
        at = iter(range(-len(constants), 0))
        numbers = picker([s.index if isinstance(s, Scalar) else next(at) for s in step.scalars])

        def run(given: Sequence[Tensor], scalars: tuple[float, ...]) -> Sequence[Tensor]:
            found = function(*operands(given), *numbers(scalars + constants))
            return [found] if isinstance(found, Tensor) else found

        return run

    def run(self) -> Run:
        """The function that runs them."""
        alone = self._one_call()
        if alone is not None:
            return alone
        program, ops, by_address, pool, data_ptr = self._program, self._ops, self._by_address, self._program._pool, Tensor.data_ptr
        shapes, strides = [shape for shape, _ in self._made], [strides for _, strides in self._made]
        offsets = [offset for _, offset, *_ in pool.parts]
        derivations, shapes_of_results = self._derivations, [shape for _, shape in program._results]
        results = picker([self._tensors[number] for number, _ in program._results])
        are_reshaped = any([shape is not None for shape in shapes_of_results])

        def run(given: Sequence[Tensor], scalars: tuple[float, ...]) -> Sequence[Tensor]:
            tensors: list[Any] = [*given, *map(given[0].new_empty_strided, shapes, strides)]
            if by_address:
                slots: list[Any] = [*map(data_ptr, tensors)]
                if any(map(_ALIGNED.__and__, slots)):
                    return program.by_tensors(given, scalars)
                if offsets:
                    slots += map(slots[-1].__add__, offsets)
            else:
                slots = [*tensors, *_parts(pool, tensors[-1])] if offsets else [*tensors]
            for derivation in derivations:
                slots.append(derivation(slots))
            for launch, function, rest in ops:
                if launch is None:
                    function(slots, tensors, scalars)
                else:
                    launch(*function(slots) + rest)
            found: Sequence[Tensor] = results(tensors)
            if not are_reshaped:
                return found
            return [t if shape is None else t.view(shape) for t, shape in zip(found, shapes_of_results, strict=True)]

        return run


def _sources(derived: Derived) -> tuple[int, ...]:
    """The values that a place, a descriptor or a tuple is derived from."""
    if isinstance(derived, Descriptor):
        return (derived.source,) if derived.other is None else (derived.source, derived.other)
    return (derived.source,) if isinstance(derived, Shift) else derived[1]


def _parts(pool: Pool, t: Tensor) -> list[Tensor]:
    """The pool's buffers as tensors."""
    spans = [(offset, dtype.itemsize * math.prod(shape), shape, dtype) for _, offset, shape, dtype in pool.parts]
    return [t.view(torch.uint8)[offset : offset + size].view(dtype).view(shape) for offset, size, shape, dtype in spans]


def _made_descriptor(descriptor: Descriptor, values: Sequence[Any]) -> Any:
    """A descriptor of a value, which is an address or a tensor."""
    base, template = values[descriptor.source], descriptor.template
    is_address = isinstance(base, int)
    if descriptor.other is not None:
        begin, end = (v if is_address else v.data_ptr() for v in (base, values[descriptor.other]))
        template = {**template, "strides": [(end - begin) // descriptor.itemsize, *template["strides"][1:]]}
    return remade(descriptor.type, template, Place(base) if is_address else base)


def picker(indices: Sequence[int]) -> Callable[[Any], Any]:
    """The function from a list or a tuple to these elements of it: to a tuple, or as a slice if there are less than two."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1 or None) if indices else slice(0))  # -1 is the last one
