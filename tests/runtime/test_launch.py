"""Launching past Triton's front door: only as the installed Triton does it itself, whatever its version is called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton import knobs

from fastkron_py.runtime import launch
from fastkron_py.runtime.launch import ready_of


class Compiled:
    """A compiled kernel, as Triton launches its own."""

    packed_metadata = (4, 1, 0)
    function = 12345

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.launched.append(given)

    def launch_metadata(self, grid: Any, stream: int, *given: Any) -> str:
        return "metadata"

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def runner(*given: Any, stream: int) -> None:
            hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            metadata = self.launch_metadata(grid, stream, *given)
            self.run(*grid, stream, self.function, self.packed_metadata, metadata, *hooks, *given)

        return runner


class Ordered(Compiled):
    """Of a Triton with the arguments in another order."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given, stream: self.run(self.function, stream, *grid, self.packed_metadata, *given)


class Fewer(Compiled):
    """Of a Triton that tells hooks otherwise."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given, stream: self.run(*grid, stream, self.function, self.packed_metadata, *given)


class Nameless(Compiled):
    """Of a Triton that keeps its metadata elsewhere."""

    packed_metadata = property(lambda self: self.metadata)  # type: ignore[assignment]


class Closed(Compiled):
    """Of a Triton whose compiled kernels are launched by their JIT function alone."""

    __getitem__ = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_obstacles", {})


def test_a_kernel_that_is_launched_as_expected(caplog: pytest.LogCaptureFixture) -> None:
    compiled = Compiled()
    ready = ready_of(compiled, (7,), ("stride",), ("constant",))
    assert ready is not None
    assert not compiled.launched  # asking launches nothing
    ready.launch(11)("pointer", *ready.between, 5, *ready.after)
    assert compiled.launched == [(7, 1, 1, 11, 12345, (4, 1, 0), None, None, None, "pointer", "stride", 5, "constant")]
    assert not caplog.records


@pytest.mark.parametrize("kind", [Ordered, Fewer, Nameless, Closed])
def test_kernels_that_are_not_go_through_the_front_door(kind: type[Compiled], caplog: pytest.LogCaptureFixture) -> None:
    """With one warning for all of them."""
    with caplog.at_level(logging.WARNING, logger="fastkron_py"):
        assert [ready_of(kind(), (7,), (), ()) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "front door" in caplog.text


class Kernel:
    """A JIT function that adds one, compiled to a kernel of this class."""

    arg_names = ("x_ptr", "y_ptr")

    def __init__(self, kind: type[Compiled]) -> None:
        self.compiled, self.calls = kind(), 0
        self.options: list[dict[str, Any]] = []

    def run(self, x_ptr: torch.Tensor, y_ptr: torch.Tensor, *, grid: Any, warmup: bool, **options: Any) -> Compiled:
        self.options.append(options)
        if not warmup:
            self.calls += 1
            torch.add(x_ptr, 1, out=y_ptr)
        return self.compiled


def test_programs_run_by_the_front_door(caplog: pytest.LogCaptureFixture) -> None:
    """Every call of theirs, and right."""
    from fastkron_py.runtime.builder import Builder
    from fastkron_py.runtime.kernels import LaunchConfig
    from fastkron_py.runtime.launch import Launcher

    for kind, calls in ((Compiled, 1), (Ordered, 3)):
        kernel = Kernel(kind)
        build = Builder((torch.zeros(4),))
        y = build.empty((4,), torch.float32)
        build.launch(Launcher([LaunchConfig(kernel, (1,), {})]), (build.inputs[0], y))
        program = build.program([y])
        for _ in range(3):
            x = torch.randn(4)
            (y,) = program((x,))
            assert kernel.compiled.launched or torch.equal(y, x + 1)
        assert kernel.calls == calls
        assert len(kernel.compiled.launched) == 3 - calls
    assert len(caplog.records) == 1
