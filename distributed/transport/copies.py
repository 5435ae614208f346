"""Copies between blocks and buffers on a GPU: in words as wide as the layouts allow, in long runs.

Strided (2D) copies, of matrices whose rows lie apart, are one call to CUDA's driver, which torch does not offer: torch copies such a matrix
by a kernel, which takes multiprocessors from multiplies, or row by row, and each row costs the processor as much as this.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

# torch copies strided tensors element by element: wide ones move more bytes with as many instructions. For copies from this size on.
WIDE_BYTES: Final = 1 << 20
WORD: Final = torch.complex128
# Runs of memory from this size on are copied by the driver: between GPUs by copy engines, which leave the multiprocessors to multiplies.
RUN_BYTES: Final = 1 << 18

_UNIFIED: Final = 4  # CU_MEMORYTYPE_UNIFIED: the address says where it is
_MOST_PITCH: Final = 2**31 - 1


@lru_cache(maxsize=8)
def driver_function(name: str) -> Any:
    """A function of the driver by its name, such as ``cuMemcpy2DAsync_v2``; None where there is none."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


def copy(to: Tensor, of: Tensor) -> None:
    """Copy a tensor of the same shape and dtype, in words of 16 bytes where both consist of such."""
    if to.nbytes >= WIDE_BYTES and _in_words(to) and _in_words(of):
        to, of = to.view(WORD), of.view(WORD)
    to.copy_(of)


def _in_words(t: Tensor) -> bool:
    """Whether every run of a tensor's last dimension is one of whole, aligned words."""
    size = t.element_size()
    many = WORD.itemsize // size
    if many < 2 or t.is_complex() or t.stride(-1) != 1 or t.data_ptr() % WORD.itemsize:
        return False
    return not any([n % many for n in (t.shape[-1], t.storage_offset(), *t.stride()[:-1])])


_SIDE: Final = (
    *(("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_uint), ("host", ctypes.c_void_p)),
    *(("", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t)),
)


class _Parameters(ctypes.Structure):
    """CUDA_MEMCPY2D, as of cuMemcpy2DAsync_v2."""

    _fields_ = (
        *((f"{side}_{name}".rstrip("_"), kind) for side in ("source", "target") for name, kind in _SIDE),
        *(("width", ctypes.c_size_t), ("height", ctypes.c_size_t)),
    )


class Copy:
    """A copy of a matrix in one block to another block, worked out once for blocks of these layouts, wherever they lie.

    The driver copies long runs, all of them in one call: between GPUs by copy engines. Kernels copy short ones. Given are views
    ``[rows, columns]``, of one shape and dtype, of flat blocks that begin their memory; meta tensors do.
    """

    def __init__(self, to: Tensor, of: Tensor) -> None:
        self._is_empty = to.numel() == 0
        self._views = [(tuple(t.shape), t.stride(), int(t.storage_offset())) for t in (to, of)]
        self._matrix = None if self._is_empty else _matrix(to, of)

    def run(self, to: Tensor, of: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Copy between flat blocks, on a stream, or on the current one."""
        if self._is_empty or (self._matrix is not None and _copied(self._matrix, to, of, stream)):
            return
        pairs = zip((to, of), self._views, strict=True)
        views = [t.as_strided(shape, strides, t.storage_offset() + offset) for t, (shape, strides, offset) in pairs]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            copy(*views)


def _copied(matrix: _Parameters, to: Tensor, of: Tensor, stream: torch.cuda.Stream | None) -> bool:
    """Whether the driver, if there is one, has taken the copy of a matrix whose addresses are those in its blocks."""
    if not (to.is_cuda and of.is_cuda) or torch.version.hip is not None or of.is_conj() or of.is_neg():
        return False
    function = driver_function("cuMemcpy2DAsync_v2")
    if function is None:
        return False
    placed = _Parameters.from_buffer_copy(matrix)
    placed.source += of.data_ptr()
    placed.target += to.data_ptr()
    stream = torch.cuda.current_stream(to.device) if stream is None else stream
    return bool(function(ctypes.byref(placed), ctypes.c_void_p(stream.cuda_stream)) == 0)


def _matrix(to: Tensor, of: Tensor) -> _Parameters | None:
    """A matrix of long runs, with addresses from its block's first byte on; None if a kernel copies it, or rows are 2 GiB apart or more."""
    size = of.element_size()
    if to.is_contiguous() and of.is_contiguous():
        to, of = to.reshape(1, -1), of.reshape(1, -1)
    elif of.shape[1] * size < RUN_BYTES or of.stride(1) != 1 or to.stride(1) != 1:
        return None
    height, width = of.shape
    pitches = [t.stride(0) * size if height > 1 else width * size for t in (of, to)]
    if min(pitches) < width * size or max(pitches) > _MOST_PITCH:
        return None
    return _Parameters(
        source_type=_UNIFIED,
        source=int(of.storage_offset()) * size,
        source_pitch=pitches[0],
        target_type=_UNIFIED,
        target=int(to.storage_offset()) * size,
        target_pitch=pitches[1],
        width=width * size,
        height=height,
    )
