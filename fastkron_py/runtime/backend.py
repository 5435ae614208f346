"""The backend of a call: the process's default, a context's override, and the choice of "auto"."""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import logging
import os
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fastkron_py.runtime.checks import check_choice, check_type
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.precision import LOWER, getter

BACKENDS: Final = ("auto", "triton", "torch")
# AMD's GPUs, by the beginning of their names. The second ones have no matrix cores for other products, which then spill kilobytes
# of each thread and compile for long. Between two steps, products of float16 are float32.
_AMD_OF_ALL_TYPES: Final = ("gfx90a", "gfx942", "gfx950")
_AMD_OF_BFLOAT16: Final = ("gfx11", "gfx12")

logger = logging.getLogger("fastkron_py")

_default = "auto"
_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("fastkron_py_backend", default=None)
families_in_force: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("fastkron_py_families", default=())
"""The families of kernels that may multiply in this thread, as `kron.kron_plan.families` sets them; none for all."""
_counts_host = [True]  # of the whole process, since backward passes run in threads of autograd's


def counts_host() -> bool:
    """Whether plans count the host's time."""
    return _counts_host[-1]


@contextlib.contextmanager
def host_time(counts: bool) -> Iterator[None]:
    """Plan for the device's time alone inside a ``with`` block of False, in all threads of the process.

    By default a plan is chosen for eager calls, which wait for the host or for the device, whichever takes longer: of few small launches.
    A CUDA graph's replay does not wait for the host. Put the block around both the warm-up calls and the capture, so that the capture
    finds the programs that the warm-up compiled.

    Args:
        counts: whether the host's time counts.

    Raises:
        TypeError: not a bool.

    Example:
        >>> with fastkron_py.host_time(False):
        ...     y = fastkron_py.kron_matmul(torch.ones(3, 6), [torch.eye(2), torch.eye(3)])
    """
    check_type("counts", counts, bool, "a bool")
    _counts_host.append(counts)
    try:
        yield
    finally:
        _counts_host.pop()


def set_backend(name: str) -> None:
    """Set the process's default backend.

    Args:
        name: ``"auto"`` (Triton where it can, else torch), ``"triton"`` or ``"torch"``.

    Raises:
        TypeError: name is not a string.
        ValueError: name is none of the three.

    Example:
        >>> fastkron_py.set_backend("torch")
        >>> fastkron_py.set_backend("auto")  # the default
    """
    global _default
    check_choice("backend", name, BACKENDS)
    _default = name


def backend(name: str) -> contextlib.AbstractContextManager[None]:
    """Use a backend inside a ``with`` block, in this thread (and asyncio task) only.

    Args:
        name: ``"auto"`` (Triton where it can, else torch), ``"triton"`` or ``"torch"``.

    Example:
        >>> with fastkron_py.backend("torch"):
        ...     y = fastkron_py.kron_matmul(torch.ones(3, 6), [torch.eye(2), torch.eye(3)])

    Raises:
        TypeError: name is not a string.
        ValueError: name is none of the three.
    """
    check_choice("backend", name, BACKENDS)
    return _using(name)


@contextlib.contextmanager
def _using(name: str) -> Iterator[None]:
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def settings() -> tuple[Hashable, ...]:
    """The user's settings that programs are built for, in force in this thread: in one function, since each call asks."""
    return _override.get() or _default, families_in_force.get(), _counts_host[-1], getter()("cuda", "matmul") in LOWER


def requested_backend() -> str:
    """The name in force in this thread: the innermost ``backend`` block's, else the default."""
    return _override.get() or _default


def backend_of_call() -> str:
    """The same, as operators take it: "" in a graph that is compiled, which asks when it runs, since Dynamo reads no context variable."""
    return "" if torch.compiler.is_compiling() else requested_backend()


def is_interpreting() -> bool:
    """Whether Triton kernels run in Triton's CPU interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=64)
def _gpu_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels for tensors of dtype are not compiled for a GPU, or None."""
    if torch.version.hip is None:
        return "compute capability is below 8.0" if torch.cuda.get_device_capability(device) < (8, 0) else None
    name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    if name.startswith(_AMD_OF_ALL_TYPES) or (name.startswith(_AMD_OF_BFLOAT16) and dtype == torch.bfloat16):
        return None
    if not name.startswith(_AMD_OF_BFLOAT16):
        return f"kernels were not compiled for {name}"
    return f"kernels for {str(dtype).removeprefix('torch.')} multiply in float32 or more, for which {name} has no matrix cores"


def triton_obstacle(x: Tensor) -> str | None:
    """Why Triton cannot take tensors like x, or None."""
    is_interpreted = is_interpreting()
    if x.device.type != "cuda" and not is_interpreted:
        return f"device {x.device.type} is not cuda, and TRITON_INTERPRET is not set"
    if not _has_triton():
        return "triton is not installed"
    return None if is_interpreted else _gpu_obstacle(x.device, x.dtype)


def choose_backend(name: str, x: Tensor) -> str:
    """Resolve a requested name for tensors like x to ``"triton"`` or ``"torch"``.

    Args:
        name: one of `BACKENDS`, or "" for the one in force in this thread.
        x: an operand, for its dtype and device.

    Raises:
        ValueError: "triton" was asked for and cannot take x.
    """
    name = name or requested_backend()
    if name == "torch":
        return name
    # Interpreted kernels are for tests: CPU tensors get them on request only.
    obstacle = "device cpu has the torch backend" if name == "auto" and x.device.type == "cpu" else triton_obstacle(x)
    if name == "triton" and obstacle is not None:
        raise value_error("backend", "tensors that Triton can take", f"backend 'triton', but {obstacle}")
    chosen = "torch" if obstacle else "triton"
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("backend %s for %s on %s%s", chosen, x.dtype, x.device, f" ({obstacle})" if obstacle else "")
    return chosen
