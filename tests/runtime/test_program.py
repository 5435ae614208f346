"""Programs: steps on other operands, the memory they are given, and whom they let see their launches.

The kernels here are made up: sums of vectors of float64, by addresses as a compiled kernel would, or on tensors. Sums of a few numbers
near one are right to 1e-12. Memory that nobody wrote is NaN (`poison` in conftest).
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from fastkron_py.runtime.builder import Builder, Spanning, _places, describe
from fastkron_py.runtime.program import FARTHEST, Program, Scalar, order_of

COUNT = 1000
F64 = torch.float64
RUNS = pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "not compiled"])


def near(address: int, count: int) -> Tensor:
    """The memory at an address."""
    return torch.frombuffer((ctypes.c_double * count).from_address(address), dtype=F64)


class Add:
    """``out = a + scale * b`` with scale a float64's bits, on (a, (b, out)): a launcher as `runtime/launch.py` has it."""

    def __init__(self, is_compiled: bool, count: int = COUNT) -> None:
        self.count, self.is_compiled = count, is_compiled
        self.launched: list[str] = []

    def __call__(self, *given: Any) -> None:
        from fastkron_py.runtime.launch import _only_compiles

        if _only_compiles.get():
            return
        a, (b, out), scale = given
        self.launched.append("tensors")
        spans = [t.as_strided((self.count,), (1,), t.storage_offset()) for t in (a, b, out)]
        self._add(spans, scale)

    @property
    def ready(self) -> Any:
        from fastkron_py.runtime.launch import Ready

        def run(a: int, others: tuple[int, int], between: str, scale: int, after: str) -> None:
            b, out = others
            assert (between, after) == ("between", "after")
            self.launched.append("addresses")
            self._add([near(address, self.count) for address in (a, b, out)], scale)

        return Ready(lambda stream: run, ("between",), ("after",)) if self.is_compiled else None

    def _add(self, tensors: Sequence[Tensor], scale: int) -> None:
        a, b, out = tensors
        out.copy_(a + torch.tensor(scale).view(F64) * b)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*(shape or (COUNT,)), dtype=F64)


def chain(add: Add, shared: int | None = None) -> Program:
    """x + 3 s y, and that plus s x as two rows, by way of buffers that come and go."""
    build = Builder((drawn(), drawn()), shared)
    x, y = build.inputs
    source = x
    for shape in ((COUNT,), (COUNT,), (10, COUNT // 10)):
        target = build.empty(shape, F64)
        build.launch(add, (source, (y, target)), (Scalar(0),))
        source = target
    out = build.empty((COUNT,), F64)
    build.launch(add, (source.view(-1), (x, out)), (Scalar(0),))
    return build.program([source, out], [(COUNT,), (2, COUNT // 2)])


def assert_chain(found: Sequence[Tensor], x: Tensor, y: Tensor, scale: float) -> None:
    w, out = found
    assert w.shape == (COUNT,)
    assert out.shape == (2, COUNT // 2)
    wanted = x + 3 * scale * y
    torch.testing.assert_close(w, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.flatten(), wanted + scale * x, rtol=1e-12, atol=1e-12)


@RUNS
@pytest.mark.parametrize("shared", [0, None], ids=["one by one", "pooled"])
def test_on_other_operands(shared: int | None, is_compiled: bool) -> None:
    add = Add(is_compiled)
    program = chain(add, shared)
    assert (program._pool.nbytes > 0) == (shared is None)
    for scale in (0.5, 0.5, -2.0, 1.0, 0.0):
        add.launched.clear()
        x, y = drawn(), drawn()
        before = x.clone(), y.clone()
        assert_chain(program((x, y), (scale,)), x, y, scale)
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])
        assert add.launched == ["addresses" if is_compiled else "tensors"] * 4


def test_unaligned_operands_go_through_the_launchers() -> None:
    add = Add(True)
    program = chain(add)
    x, y = drawn(COUNT + 1)[1:], drawn()
    assert x.data_ptr() % 16 == 8
    assert program.takes((x, y))
    assert_chain(program((x, y), (0.5,)), x, y, 0.5)
    assert add.launched == ["tensors"] * 4


# ---- memory ----------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Weak references to what is allocated inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.sizes: list[int] = []
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.views += "as_strided" in str(func)
        if "new_empty" in str(func):
            self.made.append(weakref.ref(found))
            self.sizes.append(found.numel() * found.element_size())
        return found

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.made)


@RUNS
def test_buffers_live_from_their_first_use_to_their_last(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    inner = Add._add

    def noted(add: Add, *given: Any) -> None:
        seen.append(mode.alive())
        inner(add, *given)

    program = chain(Add(is_compiled), shared=0)
    x, y = drawn(), drawn()
    with Allocations() as mode:
        monkeypatch.setattr(Add, "_add", noted)
        found = program((x, y), (0.5,))
    assert_chain(found, x, y, 0.5)
    assert seen == [1, 2, 2, 2]
    assert set(mode.sizes) == {COUNT * 8}
    assert len(mode.sizes) in (4, 8)  # where there is a compiler, a first run of kernels comes after one that compiles them


def test_results_of_calls_alone_live_until_their_last_use() -> None:
    made: list[weakref.ref[Tensor]] = []
    seen: list[int] = []

    def doubled(t: Tensor) -> Tensor:
        seen.append(sum(ref() is not None for ref in made))
        y = 2 * t
        made.append(weakref.ref(y))
        return y

    build = Builder((drawn(),))
    (t,) = build.inputs
    for _ in range(4):
        t = build.call(doubled, (t,), describe((COUNT,), F64))
    program, x = build.program([t]), drawn()
    made.clear()
    seen.clear()
    assert torch.equal(program((x,))[0], 16 * x)
    assert seen == [0, 1, 1, 1]


def test_small_buffers_are_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    program = chain(Add(True))
    with Allocations() as mode:
        program((drawn(), drawn()), (0.5,))
    assert mode.sizes == [COUNT * 8, COUNT * 8, 8192 + COUNT * 8]  # two results; u and v, which are alive together


def test_buffers_alive_together_are_apart() -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(high: int) -> int:
        return int(torch.randint(1, high, (), generator=generator))

    for _ in range(30):
        buffers = [(draw(3000), (first, first + draw(4))) for first in (draw(12) for _ in range(12))]
        offsets, size = _places(buffers)
        assert all(offset % 512 == 0 for offset in offsets)
        assert size <= sum(-(-n // 512) * 512 for n, _ in buffers)
        for (at, (n, span)), (other, (m, other_span)) in itertools.combinations(zip(offsets, buffers, strict=True), 2):
            assert at + n <= size
            if span[0] <= other_span[1] and other_span[0] <= span[1]:
                assert at + n <= other or other + m <= at
    offsets, size = _places([(1000, (0, 1)), (1000, (1, 2)), (1000, (2, 3))])
    assert offsets == [0, 1024, 0]  # the first one's memory is used again


# ---- operands --------------------------------------------------------------------------------


@RUNS
@pytest.mark.parametrize("first", [2, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("shared", [0, None], ids=["one by one", "pooled"])
def test_places_inside_of_values(shared: int | None, first: int, is_compiled: bool) -> None:
    """Views of inputs and of buffers, and a result whose halves are written by two launches; compiled kernels take aligned places."""
    size = COUNT // 4
    add = Add(is_compiled, size)
    given = drawn(4, size), drawn(COUNT)
    build = Builder(given, shared)
    x, y = build.inputs
    buffer, out = build.empty((2, size), F64), build.empty((2, size), F64)
    build.launch(add, (x[2], (y[size : 2 * size], buffer[0])), (Scalar(0),))
    build.launch(add, (x[3], (y[first : first + size], buffer[1])), (Scalar(0),))
    build.launch(add, (buffer[1], (buffer[0], out[0])), (Scalar(0),))
    build.launch(add, (buffer[0], (x.mT[0].expand(size, 4)[:, 0], out[1])), (Scalar(0),))  # a view that begins at the beginning
    program = build.program([out])
    for _ in range(2):
        x, y = drawn(4, size), drawn(COUNT)
        (found,) = program((x, y), (2.0,))
        low, high = x[2] + 2 * y[size : 2 * size], x[3] + 2 * y[first : first + size]
        torch.testing.assert_close(found, torch.stack([high + 2 * low, low + 2 * x[0]]), rtol=1e-12, atol=1e-12)
    assert set(add.launched) == {"addresses" if is_compiled and first == 2 else "tensors"}


@RUNS
@pytest.mark.parametrize("shared", [0, None], ids=["one by one", "pooled"])
def test_calls_of_torch_between_launches(shared: int | None, is_compiled: bool) -> None:
    """Of one result and of several, of views, with scalars, and one that writes to a buffer; autograd sees none of them."""
    add = Add(is_compiled)
    given = drawn().requires_grad_(), drawn()
    build = Builder(given, shared)
    x, y = build.inputs
    early = build.empty((COUNT,), F64)
    build.launch(add, (x, (y, early)), (Scalar(0),))
    scaled = build.call(lambda t, s: t * s, (early.view(2, -1)[1],), describe((COUNT // 2,), F64), scalars=(Scalar(1),))
    low, high = build.call(torch.aminmax, (y,), describe((), F64), describe((), F64))
    late = build.empty((COUNT,), F64)

    def write(t: Tensor, low: Tensor, high: Tensor, target: Tensor) -> None:
        target.copy_(t.repeat(2) + low * high)

    build.call(write, (scaled, low, high, late))
    out = build.empty((COUNT,), F64)
    build.launch(add, (late, (early, out)), (Scalar(0),))
    program = build.program([scaled, out], [(2, COUNT // 4), (COUNT,)])
    for x, y in (given, (drawn(), drawn())):
        with torch.autocast("cpu", torch.bfloat16):
            scaled, out = program((x, y), (0.5, 3.0))
        first = (x + 0.5 * y).detach()
        wanted = 3 * first[COUNT // 2 :]
        torch.testing.assert_close(scaled, wanted.view(2, -1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out, wanted.repeat(2) + y.min() * y.max() + 0.5 * first, rtol=1e-12, atol=1e-12)
        assert not scaled.requires_grad
        scaled.mul_(2.0)


@RUNS
def test_buffers_are_made_as_torch_is_handed_them(is_compiled: bool) -> None:
    """In the shape of the one view of all of it; a part, two views, or a result's shape are views of what was built."""
    add = Add(is_compiled)
    build = Builder((drawn(), drawn()))
    x, y = build.inputs
    buffers = [build.empty((COUNT,), F64) for _ in range(3)]
    for buffer in buffers:
        build.launch(add, (x, (y, buffer)), (Scalar(0),))
    once, part, twice = buffers
    taken = [
        build.call(torch.clone, (t,), describe(t.shape, F64)) for t in (once.view(8, -1), part[:10], twice.view(4, -1), twice.view(2, -1))
    ]
    program = build.program([*taken, build.call(torch.clone, (x.view(2, -1),), describe((2, COUNT // 2), F64))])
    for _ in range(3):
        x, y = drawn(), drawn()
        with Allocations() as mode:
            found = program((x, y), (2.0,))
        want = x + 2 * y
        assert mode.views == 4 or not is_compiled  # on tensors, this launcher itself makes views
        for t, shape in zip(found, [(8, -1), (10,), (4, -1), (2, -1)], strict=False):
            torch.testing.assert_close(t, want[: t.numel()].view(shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [lambda t: t.clone()[1:], torch.mm], ids=["a view", "no view"])
def test_results_of_calls_may_be_changed_in_place(function: Any) -> None:
    """Where autograd records, too: none is known to it as a view that was made without it."""
    a, b = drawn(5, 4), drawn(4, 3)
    build = Builder((a, b))
    operands, shape = (build.inputs, (5, 3)) if function is torch.mm else (build.inputs[:1], (4, 4))
    program = build.program([build.call(function, operands, describe(shape, F64))])
    weight = torch.ones((), dtype=F64, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            (y,) = program((a, b))
        wanted = 2 * (a @ b if function is torch.mm else a[1:])
        (slope,) = torch.autograd.grad(y.mul_(2 * weight).sum(), weight)
        torch.testing.assert_close(y.detach(), wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(slope, wanted.sum(), rtol=1e-12, atol=1e-12)


def test_a_result_is_what_a_step_makes() -> None:
    assert Builder((drawn(),)).program([])((drawn(),)) == []
    build = Builder((drawn(),))
    for wrong in (build.inputs[0], build.empty((3,), F64)):
        with pytest.raises(ValueError, match="results: expected"):
            build.program([wrong])


# ---- descriptors -----------------------------------------------------------------------------

ROWS, COLUMNS = 6, 8


class Sum:
    """``out = the sum of a described matrix's blocks of rows``: what a launch is told of descriptors is all that it reads by."""

    def __init__(self, is_compiled: bool) -> None:
        self.is_compiled = is_compiled
        self.seen: list[tuple[bool, list[int], list[int]]] = []

    def __call__(self, descriptor: Any, out: Tensor) -> None:
        self._sum(descriptor, out.data_ptr())

    @property
    def ready(self) -> Any:
        from fastkron_py.runtime.launch import Ready

        return Ready(lambda stream: self._sum, (), ()) if self.is_compiled else None

    def _sum(self, descriptor: Any, out: int) -> None:
        self.seen.append((isinstance(descriptor.base, Tensor), list(descriptor.shape), list(descriptor.strides)))
        reach = 1 + sum((n - 1) * s for n, s in zip(descriptor.shape, descriptor.strides, strict=True))
        blocks = near(descriptor.base.data_ptr(), reach).as_strided(descriptor.shape, descriptor.strides)
        near(out, 1).copy_(blocks.sum())


def described(t: Tensor) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1] * (t.ndim - 1) + [8])


@RUNS
def test_descriptors(is_compiled: bool) -> None:
    """Of an input's part and of a buffer."""
    total = Sum(is_compiled)
    build = Builder((drawn(ROWS, COLUMNS), drawn(COUNT)))
    x, y = build.inputs
    buffer, first, second = build.empty((2, COUNT // 2), F64), build.empty((1,), F64), build.empty((1,), F64)
    build.launch(Add(is_compiled), (y, (y, buffer)), (Scalar(0),))
    build.launch(total, (described(x[2:]), first))
    build.launch(total, (described(buffer), second))
    program = build.program([first, second], [(), ()])
    for _ in range(2):
        x, y = drawn(ROWS, COLUMNS), drawn(COUNT)
        assert program.takes((x, y))
        first, second = program((x, y), (1.0,))
        torch.testing.assert_close(torch.stack([first, second]), torch.stack([x[2:].sum(), 2 * y.sum()]), rtol=1e-12, atol=1e-11)
    assert total.seen[:2] == [(not is_compiled, [4, 8], [8, 1]), (not is_compiled, [2, 500], [500, 1])]
    assert not program.takes((drawn(ROWS * COLUMNS + 1)[1:].view(ROWS, COLUMNS), y))
    assert program.takes((x, drawn(COUNT + 1)[1:]))  # a descriptor cannot be made of it


@RUNS
def test_descriptors_that_go_on_at_another_tensor(is_compiled: bool) -> None:
    """Two matrices under one descriptor, wherever the second lies behind the first."""
    total = Sum(is_compiled)
    base = drawn(40, COLUMNS)
    given = base[:ROWS], base[10 : 10 + ROWS]
    build = Builder(given)
    low, high = build.inputs
    assert build.order(low, high) == 1
    out = build.empty((1,), F64)
    build.launch(total, (Spanning(described(low.expand(2, ROWS, COLUMNS)), high), out))
    program = build.program([out])
    for start in (10, 6, 32):
        given = base[:ROWS], base[start : start + ROWS]
        assert program.takes(given)
        (found,) = program(given)
        torch.testing.assert_close(found[0], given[0].sum() + given[1].sum(), rtol=1e-12, atol=1e-12)
        assert total.seen[-1][2] == [start * COLUMNS, COLUMNS, 1]
    assert not program.takes(given[::-1])


# ---- where inputs lie -----------------------------------------------------------------------------


def unaligned(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def apart(count: int, *shape: int) -> list[Tensor]:
    """Tensors in memory of their own, the one of the lowest address first."""
    return sorted([torch.randn(shape) for _ in range(count)], key=Tensor.data_ptr)


def test_alignment_counts_where_it_was_asked_for() -> None:
    x, bias = torch.randn(4, 8), torch.randn(8)
    for first in (x, unaligned(x)):
        build = Builder([first, bias])
        assert build.is_aligned(build.inputs[0]) is (first is x)
        assert not build.is_aligned(build.inputs[0][:, 1:])
        program = build.program([build.call(torch.add, build.inputs, describe((4, 8), x.dtype))])
        assert [program.takes(given) for given in ((x, bias), (unaligned(x), bias))] == [first is x, first is not x]
        assert program.takes((first, unaligned(bias)))


def test_order() -> None:
    assert [order_of(n) for n in (-16, 0, 16, FARTHEST, -FARTHEST)] == [-1, 0, 1, 0, 0]
    low, high = apart(2, 4, 8)
    build = Builder([high, low])
    first, second = build.inputs
    assert [build.order(first, second), build.order(second, first)] == [-1, 1]
    assert build.order(first[:2], first[2:]) == 1
    assert build.order(first, build.empty((4, 8), low.dtype)) == 0  # nobody knows
    program = build.program([build.call(torch.add, (first, second), describe((4, 8), low.dtype))])
    assert [program.takes(given) for given in ((high, low), (low, high), (low, low))] == [True, False, False]
