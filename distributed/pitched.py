"""Copies of matrices whose rows lie apart, each by one call: what CUDA's driver offers, and torch does not.

torch copies such a matrix by a kernel, which takes multiprocessors from multiplies, or row by row, each of which costs the processor what
this does.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

_UNIFIED: Final = 4  # CU_MEMORYTYPE_UNIFIED: the address says where it is
_MOST_PITCH: Final = 2**31 - 1


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D, as of cuMemcpy2DAsync_v2."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@lru_cache(maxsize=1)
def _driver() -> Any:
    """The function of CUDA's driver; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    except (OSError, AttributeError):
        return None


def copy_matrix(to: Tensor, of: Tensor) -> bool:
    """Copy ``[rows, columns]`` of the same dtype and shape on the current stream, with neighbouring columns next to each other.

    Returns:
        Whether it was done: on NVIDIA GPUs, where rows are less than 2 GiB apart.
    """
    if not (to.is_cuda and of.is_cuda) or torch.version.hip is not None or of.numel() == 0:
        return False
    if of.is_conj() or of.is_neg() or to.is_conj() or to.is_neg():  # memory holds other numbers than the tensor
        return False
    height, width = of.shape
    size = of.element_size()
    pitches = [t.stride(0) * size if height > 1 else width * size for t in (of, to)]
    if min(pitches) < width * size or max(pitches) > _MOST_PITCH or (function := _driver()) is None:
        return False
    arguments = _Copy(
        source_type=_UNIFIED,
        source=of.data_ptr(),
        source_pitch=pitches[0],
        target_type=_UNIFIED,
        target=to.data_ptr(),
        target_pitch=pitches[1],
        width=width * size,
        height=height,
    )
    stream = torch.cuda.current_stream(to.device).cuda_stream
    return bool(function(ctypes.byref(arguments), ctypes.c_void_p(stream)) == 0)
