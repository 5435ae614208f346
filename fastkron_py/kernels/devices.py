"""What kernels can count on, device by device."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton import knobs


@lru_cache(maxsize=64)
def has_fragments(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fragment kernel, which is written for Hopper's tensor cores, can multiply here."""
    if device.type != "cuda" or dtype == torch.float64 or torch.version.hip is not None or knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
