"""Calls that were made before, recognised in the fewest steps: what was found out then is used again.

A small problem's eager call is all overhead, and most of that is finding out that its arguments are right and ordinary. A record is
found by a key of plain values and by guards on the tensors (`guards`), and holds what repeats the call's launches. Whatever differs
goes the long way, where every check is made and every error raised. Each operator's keys and records are in a file of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from logging import DEBUG
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.runtime import torch_internals as guards
from fastkron_py.runtime.backend import logger, requested_backend
from fastkron_py.runtime.eager import is_ordinary, transforms_active

MOST_KEYS: Final = 1024  # of calls of one operator that differ in more than strides; beyond, all are forgotten
MOST_TRIES: Final = 16  # records, or failures to make one, that a key is granted

_ALIGNED: Final = 15  # bits of an address that are zero, as descriptors want it

# Asked at every call: by one name, since each dot of a longer one takes its time.
_watching_functions = torch._C._len_torch_function_stack
_is_grad_enabled = torch.is_grad_enabled


class Guarded:
    """A call, by guards on its tensors; what repeats it is added by each operator."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Guards know which tensors require a gradient, but not whether gradients are recorded.
        self._indifferent = not any([t.requires_grad for t in tensors])
        self._enabled = torch.is_grad_enabled()
        self.with_gradient = self._enabled and not self._indifferent
        self._check = guards.guard(tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the call would do with these tensors what it did when it was recorded."""
        return self._check(*tensors) and (self._indifferent or self._enabled == _is_grad_enabled())


G = TypeVar("G", bound=Guarded)


class Slot(Generic[G]):
    """Records of one key, and how many attempts to make one there were."""

    def __init__(self) -> None:
        self.records: list[G] = []
        self.tries = 0

    def close(self) -> None:
        """Grant no further attempt."""
        self.tries = MOST_TRIES


class Records(Generic[G]):
    """Calls of one operator."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, Slot[G]] = {}

    def forget(self) -> None:
        """Forget every call: to be called when the backends would now plan or launch one differently."""
        self._slots.clear()

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> G | None:
        """The call that was made on tensors like these, of which nothing has been checked yet."""
        slot = self._slots.get(key)
        if slot is None or is_watched():
            return None
        for record in slot.records:
            if record.fits(tensors):
                return record
        return None

    def grant(self, key: Hashable) -> Slot[G] | None:
        """Where a record of a call may be added, of which `is_recordable` is true; None where enough attempts were made."""
        slot = self._slots.get(key)
        if slot is None:
            if len(self._slots) >= MOST_KEYS:
                self.forget()
            slot = self._slots[key] = Slot()
        if slot.tries >= MOST_TRIES:
            return None
        slot.tries += 1
        return slot


def is_watched() -> bool:
    """Whether something in this thread that guards do not tell of wants to see every call."""
    return _watching_functions() > 0 or forward_ad._current_level >= 0 or logger.isEnabledFor(DEBUG)


def may_repeat_backward() -> bool:
    """Whether a backward pass may be one that was recorded: nothing watches it, and its gradients are not derived further."""
    return not (torch.compiler.is_compiling() or _is_grad_enabled() or is_watched())


def is_recordable(tensors: Sequence[Tensor], in_autocast: bool = False) -> bool:
    """Whether guards tell of all that a call on these tensors, which were checked, depends on.

    Args:
        tensors: the call's.
        in_autocast: whether the call may be one under autocast, of whose dtype its key tells.
    """
    if guards.GUARDS is None or transforms_active() or not is_ordinary(tensors):
        return False
    return in_autocast or not torch.is_autocast_enabled(tensors[0].device.type)


def may_be_triton(x: Tensor) -> bool:
    """Whether the Triton backend is likely to be chosen; asked at every call that no record fits."""
    requested = requested_backend()
    return requested == "triton" or (requested == "auto" and x.is_cuda)


def is_here(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors begin where descriptors can, on the current device."""
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    if addresses & _ALIGNED:
        return False
    device = tensors[0].device
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def only_launch(seen: Sequence[Any], addresses: Sequence[int]) -> Any:
    """The plan of the one launch that was made, if it read what begins at these addresses, in this order; else None."""
    if len(seen) != 1:
        return None
    read = [t.data_ptr() for t in seen[0].operands if t is not None]
    return seen[0].plan if read == list(addresses) else None
