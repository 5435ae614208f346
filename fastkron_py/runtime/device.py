"""Devices of torch: their GPU's record."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache
from typing import Final

import torch

from fastkron_py.runtime.backend import is_interpreting
from fastkron_py.runtime.gpu import AMD, GPU, INTERPRETER, NAMED, nvidia

# The version of CUDA from which on a graph has edges for launches that overlap; a driver can be older than torch's libraries.
_GRAPHS_OVERLAP: Final = 12030


@lru_cache(maxsize=64)
def gpu_of(device: torch.device) -> GPU:
    """Features and figures of a device, with as many multiprocessors as this one has; of one of `absent`, its record."""
    if device.type == "meta" and device.index is not None:
        return list(NAMED.values())[device.index]
    if device.type != "cuda":
        return INTERPRETER
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    if torch.version.hip is not None:
        return replace(AMD, multiprocessors=count)
    found = nvidia(*torch.cuda.get_device_capability(device))
    if is_interpreting():
        return replace(found, multiprocessors=count, has_wgmma=False, has_overlap=False, has_approximations=False)
    return replace(found, multiprocessors=count, has_overlap=found.has_overlap and _driver_version() >= _GRAPHS_OVERLAP)


def absent(name: str) -> torch.device:
    """The device in place of a GPU of this name, one of `gpu.NAMED`, for plans: nothing can be stored or launched there."""
    return torch.device("meta", list(NAMED).index(name))


def _driver_version() -> int:
    """Of CUDA, as the driver knows it, such as 12040; 0 where that cannot be told."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
