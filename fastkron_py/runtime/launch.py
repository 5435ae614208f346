"""Launching kernels: through Triton, which compiles them, and past its front door once they are compiled."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver as triton_driver
from triton.runtime.errors import OutOfResources

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.kernels import LaunchConfig

logger = logging.getLogger("fastkron_py")

# Of every launch. Kernels are written and timed for products and sums in one instruction; Triton's default depends on its version.
_OPTIONS: Final = {"enable_fp_fusion": True}
_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)
_obstacles: dict[type, str | None] = {}  # why compiled kernels of a class are launched by Triton alone, None if they are not


class Ready(NamedTuple):
    """A compiled kernel for aligned pointers."""

    launch: Callable[[int | None], Callable[..., None]]  # from a stream to the launch there, of the kernel's arguments
    between: tuple[Any, ...]  # arguments between the tensors and the scalars that a launch gives
    after: tuple[Any, ...]


def ready_of(compiled: Any, grid: tuple[int], between: tuple[Any, ...], after: tuple[Any, ...]) -> Ready | None:
    """A compiled kernel, launched as its JIT function does it, but without hooks; None where that is not known how."""
    cls = type(compiled)
    if cls not in _obstacles:
        _obstacles[cls] = found = _obstacle(compiled)
        if found is not None:
            logger.warning("kernels are launched by the slower front door of Triton %s: %s", triton.__version__, found)
    if _obstacles[cls] is not None:
        return None
    run = compiled.run.__call__  # the method, which Python calls in less time than the object
    first = (compiled.function, compiled.packed_metadata, None, None, None)
    return Ready(lambda stream: partial(run, grid[0], 1, 1, stream, *first), between, after)


def _obstacle(compiled: Any) -> str | None:
    """Why a kernel cannot be launched past Triton's front door: it is launched there by another call than the one known."""
    try:
        first, taken = (compiled.function, compiled.packed_metadata), list[tuple[Any, ...]]()
        witness = SimpleNamespace(function=first[0], packed_metadata=first[1], run=lambda *given: taken.append(given))
        witness._init_handles = witness.launch_metadata = lambda *_: None
        type(compiled).__getitem__(witness, (2, 3, 5))(operand := object(), stream=7)
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if taken != [(2, 3, 5, 7, *first, None, *hooks, operand)] or not callable(compiled.run):
            return "a compiled kernel takes other arguments than expected"
    except Exception as error:  # whatever another version does
        return f"{type(error).__name__}: {error}"
    return None


def is_hooked() -> bool:
    """Whether somebody wants to be told of launches: a profiler."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


@lru_cache(maxsize=1)
def driver() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Triton's functions for the current device, and for a device's stream; the interpreter has none."""
    if knobs.runtime.interpret:
        return lambda: -1, lambda device: 0
    active = triton_driver.active
    get_device = active.get_current_device
    if get_device is torch.cuda.current_device:  # which looks first whether CUDA is up: with tensors there, it is
        get_device = torch_internals.device_getter()
    return get_device, active.get_current_stream


def compile_side_by_side(launchers: Sequence[Launcher], run: Callable[[], Any]) -> None:
    """Compile the kernels that a run would compile one after the other; it launches nothing meanwhile.

    Errors are left to the launches that follow: they meet the same ones, or take their next configuration.

    Args:
        launchers: of the run.
        run: calls each launcher, on operands of its own.
    """
    count = len([launcher for launcher in launchers if launcher.ready is None])
    if count < 2 or knobs.runtime.interpret:
        return
    was = _only_compiles.set(True)
    try:
        with ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            run()
    finally:
        _only_compiles.reset(was)


class Launcher:
    """Launch configurations in order of preference; the first that the device has shared memory for is kept.

    A launch gives the kernel's arguments that configurations do not name, in the kernel's order: tensors, tuples of tensors and
    descriptors, then integers.

    Attributes:
        ready: the compiled kernel for aligned pointers, once there is one.
    """

    def __init__(self, configs: Sequence[LaunchConfig]) -> None:
        self.configs = configs
        self._first = 0
        self.ready: Ready | None = None

    def __call__(self, *given: Any) -> None:
        """Launch through Triton's JIT function, which compiles the kernel first."""
        while True:
            kernel, grid, arguments = self.configs[self._first]
            names, is_dry = [name for name in kernel.arg_names if name not in arguments], _only_compiles.get()
            first = dict(zip(names, _in_reals(given), strict=True))
            try:
                compiled = kernel.run(grid=grid, warmup=is_dry, **first, **arguments, **_OPTIONS)  # None by the interpreter
                if is_dry:
                    return
            except OutOfResources:
                if self._first + 1 == len(self.configs):
                    raise
                self._first += 1
                continue
            # Triton compiles for pointers on a 16-byte boundary or not; the interpreter compiles nothing.
            if self.ready is None and compiled is not None and all([_is_aligned(g) for g in given]):
                scalars = [name for name, g in zip(names, given, strict=True) if isinstance(g, int)]
                self.ready = ready_of(compiled, grid, *_around(kernel.arg_names, names, scalars, arguments))
            return

    @property
    def fell_back(self) -> bool:
        """Whether the device has too little shared memory for the first configuration."""
        return self._first > 0


def _around(order: Sequence[str], names: Sequence[str], scalars: Sequence[str], arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments that stand between a launch's operands and its scalars, and those after."""
    operands = len(names) - len(scalars)
    first = order.index(scalars[0]) if scalars else operands
    spans = order[operands:first], order[first + len(scalars) :]
    between, after = (tuple([arguments[name] for name in span]) for span in spans)
    return between, after


def _in_reals(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with complex tensors as real ones with a dimension of two, which Triton has dtypes for; also those in tuples."""
    reals = [torch.view_as_real(g) if isinstance(g, Tensor) and g.is_complex() else g for g in given]
    return tuple([_in_reals(g) if type(g) is tuple else g for g in reals])


def _is_aligned(given: Any) -> bool:
    """Whether the tensors begin at a 16-byte boundary; those of descriptors do."""
    if isinstance(given, Tensor):
        return given.data_ptr() & 15 == 0
    return not isinstance(given, tuple) or all([t.data_ptr() & 15 == 0 for t in given])
