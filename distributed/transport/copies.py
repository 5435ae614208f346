"""Copies between blocks and buffers on a GPU: in words as wide as the layouts allow, in long runs, on a stream of their own.

Strided (2D) copies, of matrices whose rows lie apart, are one call to CUDA's driver, which torch does not offer: torch copies such a matrix
by a kernel, which takes multiprocessors from multiplies, or row by row, and each row costs the processor what this does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.distributed.transport.driver import driver_function

# torch copies strided tensors element by element: wide ones move more bytes with as many instructions. For copies from this size on.
WIDE_BYTES: Final = 1 << 20
WORD: Final = torch.complex128
# Runs of memory from this size on are copied one by one, which leaves the multiprocessors to multiplies.
RUN_BYTES: Final = 1 << 18

_UNIFIED: Final = 4  # CU_MEMORYTYPE_UNIFIED: the address says where it is
_MOST_PITCH: Final = 2**31 - 1

_beside: dict[torch.device, torch.cuda.Stream] = {}


def plain(buffer: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which every backend sends."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


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


def copy_runs(to: Tensor, of: Tensor) -> None:
    """Copy ``[rows, q, s]`` of any strides: contiguous memory at once, long runs by the GPU's copy engines."""
    run = of.shape[-1] * of.element_size()
    at_once = to.is_contiguous() and of.is_contiguous()
    if at_once or run < RUN_BYTES or of.stride(-1) != 1 or to.stride(-1) != 1:
        copy(to, of)
        return
    outer = int(to.shape[1] < to.shape[0])  # the fewest matrices
    for there, here in zip(to.unbind(outer), of.unbind(outer), strict=True):
        if not copy_matrix(there, here):
            for there_run, here_run in zip(there.unbind(), here.unbind(), strict=True):
                there_run.copy_(here_run)


def beside(device: torch.device, copies: Callable[[], Any]) -> torch.cuda.Event | None:
    """Have copies made on a stream of their own, after what the current stream has been given; the event after them."""
    if device.type != "cuda":
        copies()
        return None
    if device not in _beside:
        _beside[device] = torch.cuda.Stream(device, priority=-1)
    stream = _beside[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copies()
        done = torch.cuda.Event()
        done.record(stream)
    return done


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
    if min(pitches) < width * size or max(pitches) > _MOST_PITCH or (function := driver_function("cuMemcpy2DAsync_v2")) is None:
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
