"""Functions of CUDA's driver that torch does not offer."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=8)
def driver_function(name: str) -> Any:
    """A function of the driver by its name, such as ``cuMemcpy2DAsync_v2``; None where there is none."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
