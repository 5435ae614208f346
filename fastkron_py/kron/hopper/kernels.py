"""The kernels for Hopper's tensor cores, and where they run. They are imported where they are first asked for."""

from __future__ import annotations

from typing import Any, Final

import torch

from fastkron_py.runtime import device as devices

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def chained_kernel() -> Any:
    """The register-chained kernel, or None where this Triton cannot compile it."""
    return devices.gluon_kernel("kron.hopper.multiply", "_chained_multiply_fwd_kernel")


def gradient_kernels() -> Any:
    """(for one step, for a chain of two) of the backward pass, or None where this Triton cannot compile them."""
    step = devices.gluon_kernel("kron.hopper.backward", "_chained_step_bwd_kernel")
    pair = devices.gluon_kernel("kron.hopper.pair_backward", "_chained_pair_bwd_kernel")
    return None if step is None or pair is None else (step, pair)


def wide_kernel() -> Any:
    """The kernel for wide factors, or None where this Triton cannot compile it."""
    return devices.gluon_kernel("kron.hopper.wide", "_wide_product_kernel")


def whole_row_kernel() -> Any:
    """The kernel for whole rows in half types, or None where this Triton cannot compile it."""
    return devices.gluon_kernel("kron.hopper.whole_row", "_whole_row_fwd_kernel")


def has_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel for wide factors can run here."""
    return dtype in _DTYPES and devices.gpu_of(device).has_wgmma and wide_kernel() is not None


def has_chained(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the register-chained kernel can multiply here."""
    return dtype in _DTYPES and devices.gpu_of(device).has_wgmma and chained_kernel() is not None


_HALVES: Final = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def half_of(device: torch.device, dtype: torch.dtype) -> str:
    """The name of a half type that this device's tensor cores take from shared memory, or ""."""
    return _HALVES.get(dtype, "") if devices.gpu_of(device).has_wgmma else ""


def has_whole_row(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel for whole rows can multiply here."""
    return bool(half_of(device, dtype)) and whole_row_kernel() is not None


def has_chained_gradients(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the register-chained kernels of the backward pass can run here."""
    return dtype == torch.float32 and has_chained(device, dtype) and gradient_kernels() is not None


def small_factors_kernel() -> Any:
    """The kernel for small factors, or None where this Triton cannot compile it."""
    return devices.gluon_kernel("kron.kernels.butterfly", "_small_factors_fwd_kernel")


def has_small_factors(device: torch.device, dtype: torch.dtype, precision: str) -> bool:
    """Whether the kernel for small factors may multiply here: on GPUs it was timed on, where TF32 is not asked for."""
    if dtype != torch.float64 and (dtype != torch.float32 or precision != "highest"):
        return False
    gpu = devices.gpu_of(device)
    return gpu.has_wgmma and gpu.is_measured and small_factors_kernel() is not None
