"""Copies between blocks and buffers on a GPU: in words as wide as the layouts allow, in long runs, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.distributed.pitched import copy_matrix

# torch copies strided tensors element by element: wide ones move more bytes with as many instructions. For copies from this size on.
WIDE_BYTES: Final = 1 << 20
WORD: Final = torch.complex128
# Runs of memory from this size on are copied one by one, which leaves the multiprocessors to multiplies.
RUN_BYTES: Final = 1 << 18

_beside: dict[torch.device, torch.cuda.Stream] = {}


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
    """Copy ``[rows, q, s]`` of any strides; what is one run of memory at once, and long runs by the GPU's copy engines."""
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
