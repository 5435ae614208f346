"""The kernels for Hopper's tensor cores, and where they run. They are imported where they are first asked for."""

from __future__ import annotations

from typing import Any, Final

import torch

from fastkron_py.runtime import device as devices

_PASSES: Final = {"forward": "fwd", "dx": "dx", "dcoef": "dcoef"}


def pipelined_kernels() -> Any:
    """(forward, dx, dC) of polynomial KAN layers, or None where this Triton cannot compile them."""
    kernels = [devices.gluon_kernel(f"kan.hopper.{module}", f"_poly_kan_pipelined_{name}_kernel") for module, name in _PASSES.items()]
    return None if any([kernel is None for kernel in kernels]) else tuple(kernels)


def has_pipelined(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether they can run here."""
    return dtype != torch.float64 and devices.gpu_of(device).has_wgmma and pipelined_kernels() is not None
