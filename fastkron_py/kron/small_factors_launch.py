"""Launches of the kernel for small factors, and where it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fastkron_py.kron.plan.small_factors import small_factors
from fastkron_py.kron.plan.steps import Step
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig


def _kernel() -> Any:
    return devices.gluon_kernel("kron.kernels.small_factors", "_small_factors_fwd_kernel")


def has_small_factors(device: torch.device, dtype: torch.dtype, precision: str) -> bool:
    """Whether the kernel for small factors may multiply here: on GPUs it was timed on, where TF32 is not asked for."""
    if dtype != torch.float64 and (dtype != torch.float32 or precision != "highest"):
        return False
    gpu = devices.gpu_of(device)
    return gpu.has_wgmma and gpu.is_measured and _kernel() is not None


def small_factors_launch(
    steps: Sequence[Step], strides: Sequence[tuple[int, int, int]], itemsize: int, batches: int, common: dict[str, Any]
) -> LaunchConfig:
    """The launch configuration.

    Args:
        steps: one for each factor.
        strides: (B, P, Q) of each.
        itemsize: bytes of an element.
        batches: of factors.
        common: the arguments that every kernel of a multiply has.
    """
    found = small_factors(tuple([step.p for step in steps]), itemsize)
    at_once = 1 << found.tile - found.bits
    programs = math.ceil(common["num_slices"] / at_once)
    arguments = common | {
        "programs": programs,
        "BITS": found.bits,
        "TILE": found.tile,
        "PHASES": tuple([(*phase[:3], tuple([(*group, *strides[group.factor][1:]) for group in phase.modes])) for phase in found.phases]),
        "COUNT": len(found.phases),
        "EVEN": common["num_slices"] % at_once == 0,
        "num_warps": found.num_warps,
    }
    return LaunchConfig(_kernel(), (batches * programs,), arguments)
