"""Launches that are watched, and made again: the memory they are given, and when a recording is refused.

The kernels here are made up: sums of two vectors of float64, by addresses as a compiled kernel would, or on tensors.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def replay():
    """Imported here: it imports Triton, which reads TRITON_INTERPRET."""
    from fastkron_py.runtime import program as replay

    return replay


@pytest.fixture(scope="module")
def recorder():
    from fastkron_py.runtime import recorder

    return recorder


def as_tensor(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_double * count).from_address(address), dtype=torch.float64)


class Add:
    """``out = a + scale * b`` with scale a float64's bits; a launch as `kernels.launcher` says."""

    def __init__(self, count: int, is_compiled: bool) -> None:
        self.count, self.is_compiled = count, is_compiled
        self.launched: list[str] = []

    def __call__(self, *given: Any) -> None:
        from fastkron_py.runtime.launch import RECORDING

        if RECORDING.recorder is not None:
            RECORDING.recorder.launch(self, given)
            return
        a, (b, out), scale = given
        self.launched.append("tensors")
        out.view(-1).copy_(a.view(-1) + torch.tensor(scale).view(torch.float64) * b.view(-1))

    def ready(self) -> Any:
        from fastkron_py.runtime.launch import Ready

        def run(x: int, y: int, z: int, stream: int, function: Any, metadata: Any, _m: None, _e: None, _x: None, *arguments: Any) -> None:
            assert (x, y, z, function, metadata) == (7, 1, 1, "function", "metadata")
            a, (b, out), between, scale, after = arguments
            assert (between, after) == ("between", "after")
            self.launched.append("addresses")
            left, right = as_tensor(a, self.count), as_tensor(b, self.count)
            as_tensor(out, self.count).copy_(left + torch.tensor(scale).view(torch.float64) * right)

        kernel = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
        return Ready(kernel, (7,), ("between",), ("after",)) if self.is_compiled else None


COUNT = 1000


def chain(x: Tensor, y: Tensor, scale: int, add: Add) -> tuple[Tensor, Tensor]:
    """x + 3 scale y, and that plus scale x, by way of buffers that come and go."""
    u = torch.empty_like(x)
    add(x, (y, u), scale)
    v = x.new_empty(COUNT)
    add(u, (y, v), scale)
    del u
    w = torch.empty((10, COUNT // 10), dtype=torch.float64)
    add(v, (y, w), scale)
    del v
    out = torch.empty(COUNT, dtype=torch.float64)
    add(w.view(-1), (x, out), scale)
    return w, out


def reference(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    w = x + 3 * scale * y
    return w, w + scale * x


def recorded(recorder, replay, add: Add, alpha: float, function: Callable[..., Any] = chain) -> Any:
    x, y = torch.randn(COUNT, dtype=torch.float64), torch.randn(COUNT, dtype=torch.float64)
    with recorder.Recorder((x, y), alpha) as watching:
        results = function(x, y, replay.bits(alpha), add)
    if function is chain:
        for got, want in zip(results, reference(x, y, alpha), strict=True):
            torch.testing.assert_close(got.view(-1), want)
    return watching.replay(results, [(COUNT,), (2, COUNT // 2)])


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("small", [0, 1 << 20], ids=["one by one", "pooled"])
def test_again_on_other_operands(recorder, replay, monkeypatch, small: int, is_compiled: bool) -> None:
    monkeypatch.setattr(replay, "_SMALL", small)
    add = Add(COUNT, is_compiled)
    found = recorded(recorder, replay, add, 0.5)
    assert (found._pool > 0) == (small > 0)
    for alpha in (0.5, 0.5, -2.0, 1.0, 0.0):
        add.launched.clear()
        x, y = torch.randn(COUNT, dtype=torch.float64), torch.randn(COUNT, dtype=torch.float64)
        before = x.clone(), y.clone()
        w, out = found((x, y), alpha)
        assert w.shape == (COUNT,)
        assert out.shape == (2, COUNT // 2)
        for got, want in zip((w, out), reference(x, y, alpha), strict=True):
            torch.testing.assert_close(got.reshape(-1), want)
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])
        assert add.launched == ["addresses" if is_compiled else "tensors"] * 4


def test_threads_at_once(recorder, replay) -> None:
    """A replay is shared by autograd's threads; each has its own buffers, results and alpha."""
    found = recorded(recorder, replay, Add(COUNT, True), 0.5)
    wrong: list[float] = []

    def work(alpha: float) -> None:
        for _ in range(200):
            x, y = torch.randn(COUNT, dtype=torch.float64), torch.randn(COUNT, dtype=torch.float64)
            pairs = zip(found((x, y), alpha), reference(x, y, alpha), strict=True)
            if not all(torch.allclose(got.reshape(-1), want) for got, want in pairs):
                wrong.append(alpha)

    threads = [threading.Thread(target=work, args=(alpha,)) for alpha in (0.5, 1.0, -3.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_unaligned_operands_go_through_the_launches(recorder, replay) -> None:
    add = Add(COUNT, True)
    found = recorded(recorder, replay, add, 0.5)
    x, y = torch.randn(COUNT + 1, dtype=torch.float64)[1:], torch.randn(COUNT, dtype=torch.float64)
    assert x.data_ptr() % 16 == 8
    add.launched.clear()
    for got, want in zip(found((x, y), 0.5), reference(x, y, 0.5), strict=True):
        torch.testing.assert_close(got.reshape(-1), want)
    assert add.launched == ["tensors"] * 4


def test_a_profiler_sees_the_launches(recorder, replay, monkeypatch) -> None:
    """Launches past Triton's front door tell no hook, so with one there are none."""
    add = Add(COUNT, True)
    found = recorded(recorder, replay, add, 0.5)
    add.launched.clear()
    monkeypatch.setattr(replay.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    x, y = torch.randn(COUNT, dtype=torch.float64), torch.randn(COUNT, dtype=torch.float64)
    found((x, y), 0.5)
    assert add.launched == ["tensors"] * 4


def test_buffers_alive_together_are_apart(replay) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(high: int) -> int:
        return int(torch.randint(1, high, (), generator=generator))

    for _ in range(30):
        buffers = [(draw(3000), (first, first + draw(4))) for first in (draw(12) for _ in range(12))]
        offsets, size = replay._places(buffers)
        assert all(offset % 512 == 0 for offset in offsets)
        assert size <= sum(-(-n // 512) * 512 for n, _ in buffers)
        for (at, (n, span)), (other, (m, other_span)) in itertools.combinations(zip(offsets, buffers, strict=True), 2):
            assert at + n <= size
            if span[0] <= other_span[1] and other_span[0] <= span[1]:
                assert at + n <= other or other + m <= at
    offsets, size = replay._places([(1000, (0, 1)), (1000, (1, 2)), (1000, (2, 3))])
    assert offsets == [0, 1024, 0]  # the first one's memory is used again


def test_another_thread_is_not_watched(recorder, replay) -> None:
    add = Add(COUNT, False)
    x = torch.randn(COUNT, dtype=torch.float64)

    def other() -> None:
        out = torch.zeros(COUNT, dtype=torch.float64)
        add(x, (x, out), replay.bits(1.0))

    def function(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return chain(x, y, scale, add)

    found = recorded(recorder, replay, add, 0.5, function)
    assert len(found._tape.steps) == 4


def with_torch(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    return chain(x * 2, y, scale, add)


def with_a_value_looked_at(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    return chain(x, y, scale, add) if x.sum() == x.sum() else (x, y)


def with_torch_in_place(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    w, out = chain(x, y, scale, add)
    return w, out.neg_()


def with_a_foreign_tensor(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    return chain(x, FOREIGN, scale, add)


def with_an_offset(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    w, _ = chain(x, y, scale, add)
    longer = torch.empty(2 * COUNT, dtype=torch.float64)
    add(x, (y, longer[COUNT:]), scale)
    return w, longer[COUNT:]


def with_lost_memory(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    """What is left of a tensor that is gone could be a later tensor in its place."""
    base = torch.empty((10, COUNT // 10), dtype=torch.float64)
    view = base.detach()
    del base
    add(x, (y, view), scale)
    return chain(x, y, scale, add)


def with_an_operand_as_result(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    return chain(x, y, scale, add)[0], x


def with_one_result_twice(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    w, _ = chain(x, y, scale, add)
    return w, w


def with_nothing_written(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
    return chain(x, y, scale, add)[0], torch.empty(COUNT, dtype=torch.float64)


FOREIGN = torch.ones(COUNT, dtype=torch.float64)
REFUSED = [f for name, f in sorted(globals().items()) if name.startswith("with_")]


def test_questions_without_tensors_are_allowed(recorder, replay) -> None:
    def function(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
        assert torch.promote_types(x.dtype, torch.float32) == torch.float64
        return chain(x.view(10, -1).view(-1), y, scale, add)

    assert recorded(recorder, replay, Add(COUNT, False), 0.5, function) is not None


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_is_more_than_launches_is_not_replayed(recorder, replay, function) -> None:
    add = Add(COUNT, False)
    assert recorded(recorder, replay, add, 0.5) is not None
    assert recorded(recorder, replay, add, 0.5, function) is None


@pytest.mark.parametrize("alpha", [0.0, 5e-324])
def test_scalars_that_look_like_other_arguments(recorder, replay, alpha: float) -> None:
    """Alpha's pattern among a launch's integers stands for alpha; zero's could be beta's."""
    assert recorded(recorder, replay, Add(COUNT, False), alpha) is None


def test_operands_at_one_address(recorder, replay) -> None:
    x = torch.randn(COUNT, dtype=torch.float64)
    with recorder.Recorder((x, x), 0.5) as watching:
        results = chain(x, x, replay.bits(0.5), Add(COUNT, False))
    assert watching.replay(results, [(COUNT,), (COUNT,)]) is None


def test_an_error_ends_the_recording(recorder, replay) -> None:
    from fastkron_py.runtime.launch import RECORDING

    def fails(x: Tensor, y: Tensor, scale: int, add: Add) -> Any:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        recorded(recorder, replay, Add(COUNT, False), 0.5, fails)
    assert RECORDING.recorder is None
    assert recorded(recorder, replay, Add(COUNT, False), 0.5) is not None
