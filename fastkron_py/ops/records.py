"""Calls that were made before, by guards on their tensors: for operators whose one launch is a linear layer's main loop.

As `recorded` does it for Kronecker products: a record is found by a key of plain values and by guards on the tensors, and whatever
differs goes the long way, where every check is made and every error raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.ops import guards
from fastkron_py.ops.backend import logger, requested_backend
from fastkron_py.ops.plain import is_ordinary, transforms_active
from fastkron_py.ops.recorded import MOST_KEYS, MOST_TRIES

T = TypeVar("T")

KINDS: Final = (Tensor, torch.nn.Parameter)
_ALIGNED: Final = 15  # bits of an address that are zero, as descriptors want it


class _Record(Generic[T]):
    def __init__(self, tensors: Sequence[Tensor], call: T) -> None:
        self.call = call
        # Guards know which tensors require a gradient, but not whether gradients are recorded.
        self._indifferent = not any([t.requires_grad for t in tensors])
        self._enabled = torch.is_grad_enabled()
        self._check = guards.guard(tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        return self._check(*tensors) and (self._indifferent or self._enabled == torch.is_grad_enabled())


class Records(Generic[T]):
    """Calls of one operator."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, tuple[list[_Record[T]], list[int]]] = {}

    def forget(self) -> None:
        """Forget every call."""
        self._slots.clear()

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> T | None:
        """The call that was made on tensors like these, of which nothing has been checked yet but their types."""
        slot = self._slots.get(key)
        if slot is None or torch._C._len_torch_function_stack() or forward_ad._current_level >= 0 or logger.isEnabledFor(logging.DEBUG):
            return None
        for record in slot[0]:
            if record.fits(tensors):
                return record.call if _is_here(tensors) else None
        return None

    def has_room(self, key: Hashable, tensors: Sequence[Tensor]) -> bool:
        """Whether a call that is about to be made on these tensors, which were checked, should be recorded; counts as a try."""
        if guards.GUARDS is None or transforms_active() or not is_ordinary(tensors) or not _is_here(tensors):
            return False
        if torch.is_autocast_enabled(tensors[0].device.type):
            return False
        if key not in self._slots and len(self._slots) >= MOST_KEYS:
            self.forget()
        tries = self._slots.setdefault(key, ([], [0]))[1]
        tries[0] += 1
        return tries[0] <= MOST_TRIES

    def add(self, key: Hashable, tensors: Sequence[Tensor], call: T) -> None:
        """Record a call that has just been made."""
        self._slots.setdefault(key, ([], [1]))[0].append(_Record(tensors, call))


def may_be_triton(x: Tensor) -> bool:
    """Whether the Triton backend is likely to be chosen; asked at every call that no record fits."""
    requested = requested_backend()
    return requested == "triton" or (requested == "auto" and x.is_cuda)


def _is_here(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors begin where descriptors can, on the current device."""
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    if addresses & _ALIGNED:
        return False
    device = tensors[0].device
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def only_launch(seen: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """The plan of the one launch that was made, if it read these tensors' memory, in this order; else None."""
    if len(seen) != 1:
        return None
    read = [t.data_ptr() for t in seen[0].operands if t is not None]
    return seen[0].plan if read == [t.data_ptr() for t in tensors] else None


def undecorated(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` without what torch.autograd.Function adds for torch.func's transforms, in which nothing is replayed."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
