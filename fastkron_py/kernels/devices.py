"""What kernels can count on, device by device."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from triton import knobs

logger = logging.getLogger("fastkron_py")


@lru_cache(maxsize=1)
def fragment_kernel() -> Any:
    """The fragment kernel, or None where this Triton lacks a part of Gluon, which it calls experimental, that it is written in."""
    try:
        from fastkron_py.kernels.fragment_multiply import _fragment_multiply_fwd_kernel
    except (ImportError, AttributeError) as error:
        logger.warning("this version of Triton has no Gluon as the kernel for Hopper GPUs needs it (%s): slower kernels are used", error)
        return None
    return _fragment_multiply_fwd_kernel


@lru_cache(maxsize=64)
def has_fragments(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fragment kernel, which is written for Hopper's tensor cores, can multiply here."""
    if device.type != "cuda" or dtype == torch.float64 or torch.version.hip is not None or knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and fragment_kernel() is not None


@lru_cache(maxsize=1)
def gradient_kernels() -> Any:
    """(for one step, for a chain of two) of the backward pass, or None where this Triton lacks a part of Gluon that they need."""
    try:
        from fastkron_py.kernels.fragment_backward import _fragment_step_bwd_kernel
        from fastkron_py.kernels.fragment_pair_backward import _fragment_pair_bwd_kernel
    except (ImportError, AttributeError) as error:
        logger.warning("this version of Triton has no Gluon as the backward kernels for Hopper GPUs need it (%s)", error)
        return None
    return _fragment_step_bwd_kernel, _fragment_pair_bwd_kernel


def has_gradient_fragments(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fragment kernels of the backward pass can run here."""
    return dtype == torch.float32 and has_fragments(device, dtype) and gradient_kernels() is not None
