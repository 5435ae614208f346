"""The kernel of this process: compiled in the background of a first call, or loaded from numba's cache on disk, and run by torch's threads.

Threads are those of the OpenMP library that torch itself calls, by its entry ``GOMP_parallel``: as many as torch uses, no others beside
them, none where torch has one, as in the workers of a DataLoader. In a forked process, which has no threads but its own, one serves.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

logger = logging.getLogger("fastkron_py")
waits = False  # whether a first call waits for the compiler; else torch's products serve meanwhile
_lock: Final = threading.Lock()
_found: Final[dict[int, Any]] = {}  # by bytes of an element: the kernel, or None while it is compiled or where it cannot be
_is_forked = False


class Kernel(NamedTuple):
    """The C functions of the integers at an address (`layout`).

    Attributes:
        form: writes matrices.
        split: writes gradients of factors.
        stage: runs a stage in this thread.
        parallel: runs it in a number of threads.
    """

    form: Callable[[int], None]
    split: Callable[[int], None]
    stage: Callable[[int], None]
    parallel: Callable[[int, int], None]


def kernel(itemsize: int) -> Kernel | None:
    """The kernel of float32 or float64, if numba is installed and has compiled it."""
    try:
        found: Kernel | None = _found[itemsize]
        return found
    except KeyError:
        return _begin(itemsize)


def is_installed() -> bool:
    """Whether numba can be imported."""
    return importlib.util.find_spec("numba") is not None


def _begin(itemsize: int) -> Kernel | None:
    with _lock:
        is_first = itemsize not in _found
        _found.setdefault(itemsize, None)
    if is_first and is_installed():
        if waits or torch.are_deterministic_algorithms_enabled():  # equal calls give equal bits, the first one too
            _compile(itemsize)
        else:  # the interpreter waits for it when it ends: LLVM must not be torn down while it works
            with suppress(Exception):  # `_compile` tells of it; imports change sys.modules, which other code may be going through
                importlib.import_module(".kernels", __package__)
            threading.Thread(target=_compile, args=(itemsize,), name="fastkron_py compiles its CPU kernel").start()
    found: Kernel | None = _found[itemsize]
    return found


def _compile(itemsize: int) -> None:
    try:
        from fastkron_py.kron.cpu import kernels

        stage, form, split = (kernels.compiled(function, itemsize) for function in (kernels.stage, kernels.form, kernels.split))
    except Exception as error:  # torch's products serve
        logger.warning("fastkron_py's CPU kernel cannot be compiled: %s", error)
        return
    function, threads = ctypes.CFUNCTYPE(None, ctypes.c_void_p), openmp()

    def parallel(address: int, count: int) -> None:
        threads(stage.address, address, count, 0)

    run = function(stage.address)
    one = lambda address, count: run(address)  # noqa: E731
    _found[itemsize] = Kernel(function(form.address), function(split.address), run, one if threads is None else parallel)


@lru_cache(maxsize=1)
def openmp() -> Any:
    """The entry of torch's OpenMP library: ``(function, argument, threads, 0)``; None in builds of torch without it."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        entry = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    entry.argtypes, entry.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return entry


def threads() -> int:
    """Threads that share a stage."""
    return 1 if _is_forked else torch.get_num_threads()


def _forked() -> None:
    """In the child of a fork: a compiler that was at work in the parent is not."""
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_forked)
