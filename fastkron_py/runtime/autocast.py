"""autocast's rule for matmul, applied before a verb checks its tensors' dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's dtype on x's device, where it is on."""
    device_type = x.device.type
    # Torch 2.11 cannot trace `is_autocast_available`, so the devices of most calls are named.
    has_autocast = device_type in ("cpu", "cuda") or (device_type != "meta" and torch.amp.is_autocast_available(device_type))
    return torch.get_autocast_dtype(device_type) if has_autocast and torch.is_autocast_enabled(device_type) else None


def cast(t: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor but float64 in autocast's dtype; anything else as it is."""
    eligible = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
    return t.to(dtype) if eligible else t


def autocasted(x: Tensor, factors: list[Tensor], z: Tensor | None) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """The operands, under autocast in its dtype."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, factors, z
    return cast(x, dtype), [cast(f, dtype) for f in factors], cast(z, dtype)
