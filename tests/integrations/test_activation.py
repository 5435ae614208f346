"""`use_fastkron`: where it is in force, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpytorch.kernels import GridKernel
from linear_operator.operators import InterpolatedLinearOperator, KroneckerProductLinearOperator

from fastkron_py.integrations import versions
from fastkron_py.integrations.gpytorch import KroneckerLinearOperator, use_fastkron
from fastkron_py.integrations.gpytorch.activation import is_active

PLACES = (
    (KroneckerProductLinearOperator, "__init__"),
    *((InterpolatedLinearOperator, name) for name in ("_matmul", "_t_matmul", "_bilinear_derivative", "_diagonal")),
    (GridKernel, "forward"),
)
ORIGINALS = [vars(owner)[name] for owner, name in PLACES]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    assert not is_active()
    yield
    assert not is_active()
    gc.collect()  # pytest keeps the frames of expected exceptions alive
    assert [vars(owner)[name] for owner, name in PLACES] == ORIGINALS


def made() -> type:
    """The class of a Kronecker product that linear_operator makes now."""
    return type(KroneckerProductLinearOperator(torch.eye(2), torch.eye(3)))


OURS, STOCK = KroneckerLinearOperator, KroneckerProductLinearOperator


def test_blocks_and_plain_calls() -> None:
    """Blocks nest, and end with an exception, too; what a plain call changes inside of a block ends with it."""
    with use_fastkron():
        assert [vars(owner)[name] for owner, name in PLACES] != ORIGINALS
        with use_fastkron():
            assert made() is OURS
        assert made() is OURS
        with use_fastkron(False):
            assert made() is STOCK
            use_fastkron()
            assert made() is OURS
        assert made() is OURS
        use_fastkron(False)
        assert made() is STOCK
    assert made() is STOCK
    with pytest.raises(ZeroDivisionError), use_fastkron():
        _ = 1 / 0
    switch = use_fastkron()
    assert made() is OURS
    for _ in range(2):
        switch.close()
        assert made() is STOCK


def test_a_decorator() -> None:
    @use_fastkron()
    def decorated(depth: int) -> list[type]:
        """Its doc."""
        return [made(), *(decorated(depth - 1) if depth else [])]

    assert made() is STOCK
    assert decorated(2) == [OURS] * 3
    assert decorated.__doc__ == "Its doc."
    assert made() is STOCK


def test_a_decorated_coroutine() -> None:
    seen: list[type] = []

    @use_fastkron()
    async def decorated() -> type:
        await asyncio.sleep(0)
        return made()

    async def beside() -> None:
        seen.append(made())
        await asyncio.sleep(0)
        seen.append(made())

    async def main() -> list[Any]:
        found = await asyncio.gather(decorated(), beside())
        return [found[0], await decorated(), made()]

    assert inspect.iscoroutinefunction(decorated)
    assert asyncio.run(main()) == [OURS, OURS, STOCK]
    assert seen == [STOCK, STOCK]


def test_a_decorated_generator() -> None:
    ended: list[type] = []

    @use_fastkron()
    def decorated() -> Iterator[Any]:
        try:
            sent = yield made()
            try:
                yield made(), sent
            except KeyError:
                yield made(), "thrown"
            return "returned"
        finally:
            ended.append(made())

    steps: Any = decorated()
    assert next(steps) is OURS
    assert made() is STOCK  # between the steps
    assert steps.send(3) == (OURS, 3)
    assert steps.throw(KeyError()) == (OURS, "thrown")
    with pytest.raises(StopIteration) as caught:
        next(steps)
    assert caught.value.value == "returned"
    steps = decorated()
    next(steps)
    steps.close()
    assert ended == [OURS, OURS]
    assert made() is STOCK


def test_a_decorated_asynchronous_generator_is_refused() -> None:
    async def steps() -> Any:
        yield made()

    with pytest.raises(TypeError, match="function: expected no asynchronous generator: use a with block"):
        use_fastkron()(steps)
    assert made() is STOCK


def test_other_threads_are_not_touched() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[type] = []

    def other() -> None:
        inside.wait()
        seen.append(made())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_fastkron():
        inside.set()
        done.wait()
        assert made() is OURS
    thread.join()
    assert seen == [STOCK]


def test_tasks_keep_what_was_in_force_when_they_began() -> None:
    async def main() -> tuple[type, type, type]:
        async def later() -> type:
            await asyncio.sleep(0.01)
            return made()

        with use_fastkron():
            task = asyncio.create_task(later())
            inside = made()
        return inside, made(), await task

    assert asyncio.run(main()) == (OURS, STOCK, OURS)


def test_somebody_else_s_hook_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with use_fastkron():
        ours = KroneckerProductLinearOperator.__init__

        def theirs(self: Any, *args: Any) -> None:
            calls.append(1)
            ours(self, *args)

        KroneckerProductLinearOperator.__init__ = theirs
    try:
        assert made() is STOCK
        assert KroneckerProductLinearOperator.__init__ is theirs
        assert calls
    finally:
        KroneckerProductLinearOperator.__init__ = ORIGINALS[0]


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("linear_operator", "0.5.3", r"linear_operator 0.5.3 \(tested: >=0.6,<0.7\)"),
        ("linear_operator", "0.7.0", r"linear_operator 0.7.0 \(tested: >=0.6,<0.7\)"),
        ("gpytorch", "2.0.dev1+g1234567", r"gpytorch 2.0.dev1\+g1234567 \(tested: >=1.14,<1.16\)"),
    ],
)
def test_untested_versions_warn_and_change_nothing(monkeypatch: pytest.MonkeyPatch, name: str, found: str, said: str) -> None:
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda asked: found if asked == name else installed(asked))
    with pytest.warns(UserWarning, match=f"use_fastkron has no effect: it does not support {said}"):
        switch = use_fastkron()
    assert made() is STOCK
    with switch:
        assert made() is STOCK


def test_refuses_what_is_no_bool() -> None:
    with pytest.raises(TypeError, match=r"enabled: expected a bool .*without the model.*; got int"):
        use_fastkron(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"enabled: expected a bool .*; got function"):
        use_fastkron(made)  # type: ignore[arg-type]
