"""The launch that transforms rows by additions, and where it runs."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kron.plan.hadamard import takes, transform
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig, Launcher

_REGISTERS: Final = 128  # of a thread with m > 1, at most: two programs on a multiprocessor


def _kernel() -> Any:
    return devices.gluon_kernel("kron.kernels.hadamard", "_hadamard_fwd_kernel")


def has_launch(m: int, bits: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a launch for rows of m * 2^bits elements on a GPU that Triton compiles for."""
    gpu = devices.gpu_of(device)
    if gpu.capability is None or dtype.is_complex or not takes(m, bits, dtype.itemsize, gpu.shared_memory):
        return False
    return _kernel() is not None


def hadamard_launch(x: Tensor, matrix: Tensor | None, m: int, bits: int) -> Launcher:
    """The launch from x, the matrix and y, with the scale.

    Args:
        x: ``[rows, m * 2^bits]``, with neighbours in memory.
        matrix: the one of order m, padded; None where m is 1.
        m: see above.
        bits: see above.
    """
    found = transform(m, bits, x.element_size())
    at_once = (1 << found.tile) // found.row
    arguments = {
        "rows": x.shape[0],
        "x_stride": x.stride(0),
        "y_stride": x.shape[1],
        "h_strides": (0, 0) if matrix is None else matrix.stride(),
        "M": m,
        "BITS": bits,
        "TILE": found.tile,
        "ROW": found.row,
        "LOADED": tuple(found.loaded),
        "ORDER": found.order,
        "PHASES": tuple([tuple(phase) for phase in found.phases]),
        "COUNT": len(found.phases),
        "EVEN": m << bits == found.row and x.shape[0] % at_once == 0,
        "WARPS": found.num_warps,
        "num_warps": found.num_warps,
        "maxnreg": _REGISTERS if m > 1 else None,
    }
    return Launcher([LaunchConfig(_kernel(), (math.ceil(x.shape[0] / at_once),), arguments)])
