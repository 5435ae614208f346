"""Launching a kernel again and again: everything but tensors and scalars is worked out once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from triton.runtime.errors import OutOfResources


class Ready(NamedTuple):
    """A compiled kernel for aligned pointers."""

    kernel: Any
    grid: tuple[int]
    between: tuple[Any, ...]  # arguments between the tensors and the integers that a launch gives
    after: tuple[Any, ...]


class Launch(Protocol):
    """What launches a kernel on tensors, tuples of tensors and, last, integers."""

    def __call__(self, *given: Any) -> None:
        """Launch."""

    def ready(self) -> Ready | None:
        """The compiled kernel, once there is one."""


class Recorder(Protocol):
    """What is told of launches."""

    def launch(self, launch: Launch, given: tuple[Any, ...]) -> None:
        """Take note of a launch, and do it."""


class Recording(threading.local):
    """The recorder of this thread's launches."""

    recorder: Recorder | None = None


RECORDING = Recording()


class LaunchConfig(NamedTuple):
    """A kernel, its grid, and its arguments but for the first ones, which each launch gives."""

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]


class Launcher:
    """Launch configurations in order of preference; the first that the device has shared memory for is kept."""

    def __init__(self, configs: Sequence[LaunchConfig]) -> None:
        self._configs = configs
        self._first = 0
        self._compiled: Any = None  # of that configuration on its grid, for aligned pointers
        self._rest: tuple[Any, ...] = ()
        self._ready: Ready | None = None

    def __call__(self, *given: Any) -> None:
        """Launch with the kernel's first arguments: tensors, tuples of tensors, integers."""
        if RECORDING.recorder is not None:
            RECORDING.recorder.launch(self, given)
            return
        # Triton compiles for pointers on a 16-byte boundary or not.
        aligned = all([_is_aligned(g) for g in given])
        if aligned and self._compiled is not None:
            # Several times faster than through the JIT function, which looks at every argument.
            self._compiled(*given, *self._rest)
            return
        while True:
            kernel, grid, arguments = self._configs[self._first]
            try:
                compiled = kernel[grid](*given, **arguments)
            except OutOfResources:
                if self._first + 1 == len(self._configs):
                    raise
                self._first += 1
                continue
            if aligned and compiled is not None:  # the interpreter compiles nothing
                self._rest = tuple([arguments[name] for name in kernel.arg_names[len(given) :]])
                self._compiled = compiled[(*grid, 1, 1)]
                self._ready = Ready(compiled, grid, (), self._rest)
            return

    def ready(self) -> Ready | None:
        """See `Launch`."""
        return self._ready


def _is_aligned(given: Any) -> bool:
    if isinstance(given, Tensor):
        return given.data_ptr() & 15 == 0
    return not isinstance(given, tuple) or all([t.data_ptr() & 15 == 0 for t in given])
