"""Runs a Gluon kernel on a CPU, one program after the other, with NumPy: Gluon has no interpreter of its own.

Layouts mean nothing here: this shows that addresses, masks, buffers and sums are right, not that an element sits in a certain thread.
What the hardware does on its own time is done as late as the kernel allows: a copy when it is waited for, and a product, from
what its operands' memory holds by then. So a buffer that is filled too early, or a wait for too little, gives a wrong result. Memory
begins as NaN, and so does what a thread stores for tensor cores, until its fence. Products read TF32 operands cut off, and cut off their
sums too, as an H100's tensor cores do. Partitions of warps: see `gluon_partitions`.
"""

from __future__ import annotations

import builtins
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from gluon_partitions import Barrier, Barriers, Partition, run_partitions
from torch import Tensor
from triton.experimental.gluon import language as gl

_NUMPY = {gl.float32: np.float32, gl.bfloat16: np.float32, gl.float16: np.float32, gl.int32: np.int64, gl.int64: np.int64}
_NUMPY |= {gl.float64: np.float64}
_OF_TORCH = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float64: gl.float64}
_IN_TORCH = {v: k for k, v in _OF_TORCH.items()}


def _rounded(a: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype in (gl.bfloat16, gl.float16):
        return torch.from_numpy(np.ascontiguousarray(a)).to(_IN_TORCH[dtype]).float().numpy()
    return a


def _cut(a: np.ndarray, low_bits: int) -> np.ndarray:
    return (np.ascontiguousarray(a, np.float32).view(np.int32) & np.int32(-(1 << low_bits))).view(np.float32)


def _toward_zero(exact: np.ndarray) -> np.ndarray:
    nearest = exact.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest).astype(np.float32)


def _number(value: Any) -> Any:
    if isinstance(value, gl.constexpr):
        return value.value
    return value.a if isinstance(value, Tile) else value


class Tile:
    """A tensor or a number of the running kernel."""

    def __init__(self, a: Any, dtype: Any = None) -> None:
        self.a = np.asarray(a)
        self.dtype = dtype or (gl.float32 if self.a.dtype.kind == "f" else gl.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.a.shape

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        """Of another type."""
        if bitcast:
            return Tile(self.a.astype(np.int32).view(np.float32) if dtype == gl.float32 else self.a.view(np.int32).astype(np.int64), dtype)
        return Tile(_rounded(self.a.astype(_NUMPY[dtype]), dtype), dtype)

    def __getitem__(self, index: Any) -> Tile:
        return Tile(self.a[index], self.dtype)

    def __index__(self) -> int:
        return int(self.a)

    def __bool__(self) -> bool:
        return bool(self.a)

    def __neg__(self) -> Tile:
        return Tile(-self.a)


def _operator(name: str) -> Callable[[Any, Any], Any]:
    def call(self: Tile, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        other = _number(other)
        if isinstance(other, float):
            other = np.float32(other)
        return Tile(getattr(self.a, name)(np.asarray(other, self.a.dtype) if isinstance(other, int) else other))

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "rshift", "lshift"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Tile, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))


class _Memory(types.SimpleNamespace):
    """A pointer's type."""


class Pointer:
    """Addresses in one tensor, counted in elements."""

    def __init__(self, memory: np.ndarray, dtype: Any, at: Any = 0) -> None:
        self.memory, self.at = memory, np.asarray(at)
        self.dtype = _Memory(element_ty=dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.dtype.element_ty, self.at + _number(other))


class Described:
    """A matrix, copied in boxes; beyond its end there is 0."""

    def __init__(self, memory: np.ndarray, descriptor: Any) -> None:
        size = descriptor.base.element_size()
        assert list(descriptor.strides) == list(descriptor.base.stride())
        assert descriptor.strides[1] == 1
        assert descriptor.strides[0] * size % 16 == 0
        self.a = memory.reshape(descriptor.shape)
        self.dtype = _OF_TORCH[descriptor.base.dtype]
        self.box = descriptor.block_shape
        self.block_type = types.SimpleNamespace(nbytes=self.box[0] * self.box[1] * size)

    def part(self, row: int, column: int) -> np.ndarray:
        """A box."""
        found = np.zeros(self.box, np.float32)
        inside = self.a[row : row + self.box[0], column : column + self.box[1]]
        found[: inside.shape[0], : inside.shape[1]] = inside
        return found


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, a: np.ndarray, dtype: Any, machine: Machine) -> None:
        self.a, self.dtype, self._machine = a, dtype, machine

    def index(self, i: Any) -> Shared:
        """One of several buffers."""
        return Shared(self.a[int(_number(i))], self.dtype, self._machine)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Some of its rows, or columns."""
        start, length = int(_number(start)), int(_number(length))
        part = self.a[start : start + length] if dim == 0 else self.a[:, start : start + length]
        assert part.shape[dim] == length
        return Shared(part, self.dtype, self._machine)

    def permute(self, order: Sequence[int]) -> Shared:
        """Dimensions in another order."""
        return Shared(self.a.transpose(order), self.dtype, self._machine)

    def store(self, value: Tile) -> None:
        """Write all of it, for tensor cores to see after a fence."""
        self.a[...] = np.nan
        self._machine.warps.stores.append((self.a, value.a))


class _Warps:
    """What is under way of a program's warps, or of a partition of them."""

    def __init__(self, partition: Partition | None = None) -> None:
        self.partition = partition
        self.copies: deque[list[Callable[[], None]]] = deque()
        self.copying: list[Callable[[], None]] = []
        self.products: deque[Callable[[], None]] = deque()
        self.stores: list[tuple[np.ndarray, np.ndarray]] = []


class Machine:
    """One program."""

    def __init__(self, program: int, programs: int) -> None:
        self.program, self.programs = program, programs
        self.warps = self._all_warps = _Warps()

    def warp_specialize(self, functions: Sequence[Any], warps: Sequence[int], registers: Any) -> None:
        """Each function in warps of its own."""
        assert len(functions) == len(warps) + 1 == len(registers) + 1

        def chosen(partition: Partition | None) -> None:
            if partition is None:
                self.warps = self._all_warps
                return
            partition.state = partition.state or _Warps(partition)
            self.warps = partition.state

        run_partitions([lambda f=f, args=args: f(*args) for f, args in functions], self.program, chosen)

    def fence_async_shared(self) -> None:
        """What these warps stored is there."""
        for a, value in self.warps.stores:
            a[...] = value
        self.warps.stores.clear()

    def init(self, barrier: Barrier, count: int) -> None:
        """Begin a barrier's first phase."""
        barrier.begin(count)

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        """Tell it so; others may run now."""
        if bool(_number(pred)):
            barrier.arrive(count)
            self.pause()

    def expect(self, barrier: Barrier, size: int) -> None:
        """Arrive, and announce bytes."""
        barrier.arrive(1, size)
        self.pause()

    def wait(self, barrier: Barrier, parity: Any) -> None:
        """Until its phase of this parity has ended."""
        parity = int(_number(parity))
        self.pause(lambda: barrier.has_ended(parity))

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let other partitions run."""
        if self.warps.partition is not None:
            self.warps.partition.pass_on(until)
        else:
            assert until(), "nobody else is there to wait for"

    def begin_described_copy(self, source: Described, at: Sequence[Any], barrier: Barrier, shared: Shared) -> None:
        """A box to shared memory."""
        row, column = (int(_number(i)) for i in at)
        assert shared.a.shape == tuple(source.box)
        shared.a[...] = np.nan

        def copy() -> None:
            shared.a[...] = source.part(row, column)

        barrier.copy(source.block_type.nbytes, copy)

    def begin_copy(self, shared: Shared, pointer: Pointer, mask: Any = None) -> None:
        """To shared memory; 0 where the mask is false."""
        shared.a[...] = np.nan

        def copy() -> None:
            inside = np.broadcast_to(_number(mask), shared.a.shape)
            shared.a[...] = np.where(inside, pointer.memory[np.where(inside, pointer.at, 0)], 0)

        self.warps.copying.append(copy)

    def commit_group(self) -> None:
        """What was begun since the last one is a group."""
        self.warps.copies.append(self.warps.copying)
        self.warps.copying = []

    def wait_group(self, left: int) -> None:
        """Until this number of groups is left."""
        while len(self.warps.copies) > left:
            for copy in self.warps.copies.popleft():
                copy()

    def warpgroup_mma(self, a: Shared, b: Shared, acc: Tile, use_acc: Any = True, is_async: bool = False) -> Tile:
        """A product, begun; the tile that it returns holds the sum once it is waited for."""
        result = Tile(np.full(acc.a.shape, np.nan, np.float32))
        keep, is_tf32 = bool(use_acc), a.dtype == gl.float32

        def multiply() -> None:
            left, right = (_cut(t.a, 13) if is_tf32 else t.a for t in (a, b))
            total = acc.a if keep else np.zeros_like(acc.a)
            step = 8 if is_tf32 else 16
            for k in range(0, left.shape[1], step):
                part = left[:, k : k + step].astype(np.float64) @ right[k : k + step].astype(np.float64)
                total = _toward_zero(total + part)
            result.a[...] = total

        self.warps.products.append(multiply)
        return result

    def warpgroup_mma_wait(self, left: int, deps: Sequence[Tile]) -> Tile:
        """Until this number of products is left."""
        while len(self.warps.products) > left:
            self.warps.products.popleft()()
        return deps[0]


class _MBarrier:
    """As much of `mbarrier` as the kernels use."""

    def __init__(self, machine: Machine) -> None:
        self.init, self.arrive, self.expect, self.wait = machine.init, machine.arrive, machine.expect, machine.wait

    def MBarrierLayout(self) -> None:
        """Means nothing here."""


class _Language:
    """As much of `gl` and `tl` as the kernels use."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)

    def program_id(self, axis: int) -> Tile:
        return Tile(self._machine.program)

    def num_programs(self, axis: int) -> Tile:
        return Tile(self._machine.programs)

    def arange(self, start: int, end: int, layout: Any = None) -> Tile:
        return Tile(np.arange(start, end))

    def zeros(self, shape: Sequence[int], dtype: Any, layout: Any = None) -> Tile:
        return Tile(np.zeros(shape, _NUMPY[dtype]), dtype)

    def cdiv(self, a: Any, b: Any) -> Tile:
        return Tile(-(-_number(a) // _number(b)))

    def minimum(self, a: Any, b: Any) -> Tile:
        return Tile(np.minimum(_number(a), _number(b)))

    def maximum(self, a: Any, b: Any) -> Tile:
        return Tile(np.maximum(_number(a), _number(b)))

    def where(self, condition: Tile, a: Any, b: Any) -> Tile:
        a, b = (np.float32(v) if isinstance(v, float) else _number(v) for v in (a, b))
        return Tile(np.where(condition.a, a, b))

    def abs(self, x: Tile) -> Tile:
        return Tile(np.abs(x.a))

    def exp(self, x: Tile) -> Tile:
        return Tile(np.exp(x.a))

    def floor(self, x: Tile) -> Tile:
        return Tile(np.floor(x.a))

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tile:
        inside = np.broadcast_to(True if mask is None else _number(mask), pointer.at.shape)
        return Tile(np.where(inside, pointer.memory[np.where(inside, pointer.at, 0)], np.float32(other)), pointer.dtype.element_ty)

    def store(self, pointer: Pointer, value: Tile, mask: Any = None) -> None:
        inside = np.broadcast_to(True if mask is None else _number(mask), value.a.shape)
        assert np.isnan(pointer.memory[np.broadcast_to(pointer.at, value.a.shape)[inside]]).all(), "written twice"
        pointer.memory[np.broadcast_to(pointer.at, value.a.shape)[inside]] = value.a[inside]

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype == gl.int64:
            return Barriers(shape[0])
        return Shared(np.full(shape, np.nan, np.float32), dtype, self._machine)

    def warp_specialize(self, functions: Sequence[Any], warps: Sequence[int], registers: Any) -> None:
        self._machine.warp_specialize(functions, warps, registers)

    def reshape(self, x: Tile, shape: Sequence[int]) -> Tile:
        return Tile(x.a.reshape(shape), x.dtype)

    def permute(self, x: Tile, order: Sequence[int]) -> Tile:
        return Tile(x.a.transpose(order), x.dtype)

    def join(self, a: Tile, b: Tile) -> Tile:
        return Tile(np.stack([a.a, b.a], -1), a.dtype)

    def split(self, x: Tile) -> tuple[Tile, Tile]:
        return Tile(x.a[..., 0].copy(), x.dtype), Tile(x.a[..., 1].copy(), x.dtype)

    def convert_layout(self, x: Tile, layout: Any, assert_trivial: bool = False) -> Tile:
        return x

    def static_range(self, *bounds: Any) -> Any:
        return builtins.range(*bounds)


def _range(*bounds: Any) -> Iterator[Tile]:
    return (Tile(i) for i in builtins.range(*[int(_number(b)) for b in bounds]))


def _nearest_tf32(x: Tile) -> Tile:
    return Tile(_cut((np.ascontiguousarray(x.a).view(np.int32) + 4096).view(np.float32), 13))


def _quick_parts(x: Tile) -> tuple[Tile, Tile]:
    e = np.exp(-2 * np.abs(x.a))
    return Tile(e), Tile(1 / (1 + e))


def _scalar(bits: Any, dtype: Any) -> Tile:
    return Tile(np.asarray(_number(bits), np.int64).view(np.float64).astype(_NUMPY[dtype]), dtype)


def _mma_v2(a: Tile, b: Tile, acc: Tile) -> Tile:
    return Tile((acc.a + a.a.astype(np.float64) @ b.a.astype(np.float64)).astype(np.float32), gl.float32)


_BY_NAME = {"round_to_tf32": _nearest_tf32, "_quick_parts": _quick_parts, "scalar": _scalar}


def _on(machine: Machine) -> Callable[[Any], Any]:
    """What makes plain functions of jit functions, for one program."""
    language = _Language(machine)
    given = {
        "gl": language,
        "tl": language,
        "range": _range,
        "async_copy": machine,
        "begin_copy": machine.begin_copy,
        "warpgroup_mma": machine.warpgroup_mma,
        "warpgroup_mma_wait": machine.warpgroup_mma_wait,
        "fence_async_shared": machine.fence_async_shared,
        "begin_described_copy": machine.begin_described_copy,
        "mbarrier": _MBarrier(machine),
        "barrier": lambda: None,
        "in_order": language.permute,
        "mma_v2": _mma_v2,
    }
    made: dict[Any, Any] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, gl.constexpr):
            return value.value
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        function = getattr(value, "fn", None)
        if not isinstance(function, types.FunctionType):
            return value
        if function.__name__ in _BY_NAME:
            return _BY_NAME[function.__name__]
        if function not in made:
            names = dict(function.__globals__)
            made[function] = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
            for name in function.__code__.co_names:
                if name in given:
                    names[name] = given[name]
                elif name in names:
                    names[name] = convert(names[name])
        return made[function]

    return convert


def _base(t: Any) -> Tensor:
    return t if isinstance(t, Tensor) else t.base


def _run(t: Tensor) -> Tensor:
    """All memory from a tensor's first element to its last."""
    t = t.detach()
    return t.as_strided((1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)),), (1,))


def launch(kernel: Any, programs: int, tensors: Sequence[Any], arguments: dict[str, Any]) -> None:
    """Run all programs of a kernel on tensors, tuples of them, or descriptors of contiguous ones. The last is written; it begins as NaN."""
    held: dict[int, np.ndarray] = {}
    for t in [t for given in tensors for t in (given if isinstance(given, tuple) else (given,))]:
        memory = _run(t) if isinstance(t, Tensor) else t.base.reshape(-1)
        held.setdefault(_base(t).data_ptr(), (memory if memory.dtype == torch.float64 else memory.float()).numpy().copy())
    held[tensors[-1].data_ptr()][...] = np.nan

    def operand(t: Any) -> Any:
        if isinstance(t, tuple):
            return tuple(map(operand, t))
        return Pointer(held[t.data_ptr()], _OF_TORCH[t.dtype]) if isinstance(t, Tensor) else Described(held[t.base.data_ptr()], t)

    names = [n for n in kernel.arg_names[len(tensors) :]]
    for program in range(programs):
        convert = _on(Machine(program, programs))
        values = [arguments[name] for name in names]
        numbers = [Tile(v) if not name.isupper() else convert(v) for name, v in zip(names, values, strict=True)]
        convert(kernel)(*map(operand, tensors), *numbers)
    tensors[-1].copy_(torch.from_numpy(held[tensors[-1].data_ptr()]).reshape(tensors[-1].shape))
