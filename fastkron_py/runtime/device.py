"""What kernels can count on, device by device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from triton import knobs

logger = logging.getLogger("fastkron_py")

# Programs to start where there are no multiprocessors: Triton's interpreter.
_INTERPRETED_PROGRAMS: Final = 2
# The version of CUDA from which on a graph has edges for launches that overlap; a driver can be older than torch's libraries.
_GRAPHS_OVERLAP: Final = 12030


@lru_cache(maxsize=64)
def multiprocessor_count(device: torch.device) -> int:
    """How many programs a device runs at a time, one on each multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; make it the tensor's."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)


@lru_cache(maxsize=8)
def _gluon_kernel(module: str, name: str) -> Any:
    """A kernel, or None where this Triton lacks a part of Gluon, which it calls experimental, that it is written in."""
    try:
        return getattr(importlib.import_module(f"fastkron_py.{module}"), name)
    except (ImportError, AttributeError) as error:
        logger.warning("this version of Triton has no Gluon as %s for Hopper GPUs needs it (%s): slower kernels are used", module, error)
        return None


def chained_kernel() -> Any:
    """The register-chained kernel, or None where this Triton cannot compile it."""
    return _gluon_kernel("kron.hopper.multiply", "_chained_multiply_fwd_kernel")


def gradient_kernels() -> Any:
    """(for one step, for a chain of two) of the backward pass, or None where this Triton cannot compile them."""
    step = _gluon_kernel("kron.hopper.backward", "_chained_step_bwd_kernel")
    pair = _gluon_kernel("kron.hopper.pair_backward", "_chained_pair_bwd_kernel")
    return None if step is None or pair is None else (step, pair)


def has_approximations(device: torch.device) -> bool:
    """Whether functions can be approximated in one of PTX's instructions each, on float32, with errors of some units in the last place."""
    return device.type == "cuda" and torch.version.hip is None and not knobs.runtime.interpret


def _driver_version() -> int:
    """Of CUDA, as the driver knows it, such as 12040; 0 where that cannot be told."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


@lru_cache(maxsize=64)
def has_overlap(device: torch.device) -> bool:
    """Whether a launch can let the next one begin before its own end, captured in a graph or not ("programmatic dependent launch")."""
    if not has_approximations(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return _driver_version() >= _GRAPHS_OVERLAP


@lru_cache(maxsize=64)
def has_chained(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the register-chained kernel, which is written for Hopper's tensor cores, can multiply here."""
    if dtype == torch.float64 or not has_approximations(device):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and chained_kernel() is not None


def has_chained_gradients(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the register-chained kernels of the backward pass can run here."""
    return dtype == torch.float32 and has_chained(device, dtype) and gradient_kernels() is not None


def pipelined_kernels() -> Any:
    """(forward, dx, dC) of polynomial KAN layers for Hopper GPUs, or None where this Triton cannot compile them."""
    names = {"forward": "fwd", "dx": "dx", "dcoef": "dcoef"}
    kernels = []
    for module, name in names.items():
        kernel = _gluon_kernel(f"kan.hopper.{module}", f"_poly_kan_pipelined_{name}_kernel")
        if kernel is None:
            return None
        kernels.append(kernel)
    return tuple(kernels)


def has_pipelined(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the polynomial KAN kernels for Hopper GPUs can run here."""
    return has_chained(device, dtype) and pipelined_kernels() is not None
