"""Programs of the calls that were made before: found by a key and by guards on the tensors, or by all that a program depends on.

A small problem's eager call is all overhead, and most of that is checking its arguments. A verb's key of plain values and torch's own
guards on its tensors (`torch_internals`) say that the same call was checked before; then its program is run. Whatever they do not match is
checked, and its program is found by the operator's options and its tensors' sizes, strides, dtypes and device, or built.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from logging import DEBUG
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.backend import logger, settings
from fastkron_py.runtime.program import Program

MOST_KEYS: Final = 4096  # of calls that differ in more than strides, and of programs; beyond, the least recently used go
MOST_ENTRIES: Final = 16  # calls of one key

# Asked at every call: by one name, since each dot of a longer one takes its time.
_is_grad_enabled = torch.is_grad_enabled
_is_watching = torch_internals.is_watching


is_logged: Final = partial(logger.isEnabledFor, DEBUG)
"""Whether each call's choices are logged, so that none is taken from the cache."""


class Entry(NamedTuple):
    """A call that was checked before.

    Attributes:
        check: whether other tensors are like the call's.
        enabled: whether gradients were recorded; None where that makes no difference.
        takes: whether tensors lie in memory as the call's did; None where that makes no difference.
        program: that the call ran, if it was one.
        call: from (present tensors, options) to the operator's result.
        options: of the operator.
        operator: its name.
    """

    check: Callable[..., bool]
    enabled: bool | None
    takes: Callable[[Sequence[Tensor]], bool] | None
    program: Program | None
    call: Callable[..., Any]
    options: tuple[Any, ...]
    operator: str


def about(tensors: Sequence[Tensor | None]) -> list[Hashable]:
    """The properties that a program of tensors depends on, but for their device: sizes, strides, dtype, a 16-byte boundary."""
    return [(t.shape, t.stride(), t.dtype, t.data_ptr() & 15 == 0) for t in tensors if t is not None]


class CallCache:
    """Calls and programs of all operators, the least recently used first."""

    __slots__ = ("_calls", "_programs")  # so that a test that patches a method has to patch the class: pytest leaves an instance's behind

    def __init__(self) -> None:
        self._calls: OrderedDict[Hashable, list[Entry]] = OrderedDict()
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()

    def forget(self) -> None:
        """Forget all: to be called when programs would now be built differently."""
        self._calls.clear()
        self._programs.clear()

    def find(self, key: Hashable, tensors: Sequence[Any]) -> Entry | None:
        """The call of this key that was made on tensors like these, which need not have been checked."""
        try:
            full = (key, len(tensors), tensors[0].shape, settings())
            entries = self._calls.get(full)
        except (TypeError, AttributeError, RuntimeError):  # no hash, no tensor, a nested one: a check will say so
            return None
        # Guards do not tell of modes and forward-mode levels, which want to see every call; and each call's choices are logged.
        if entries is None or _is_watching() or is_logged():
            return None
        for entry in entries:
            check, enabled, takes, _, _, _, _ = entry
            if check(*tensors) and (enabled is None or enabled == _is_grad_enabled()) and (takes is None or takes(tensors)):
                if len(self._calls) > MOST_KEYS // 2:  # else none goes soon, and each touch hashes the key again
                    _touch(self._calls, full)
                return entry
        return None

    def keep(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        program: Program | None,
        call: Callable[..., Any],
        options: tuple[Any, ...],
        operator: str,
    ) -> None:
        """Keep a call of the eager fast path that was checked and has returned.

        Args:
            key: of the call.
            tensors: of the call, those that there are.
            program: that it ran; None for a call that leaves the tensors' places to others.
            call: from (tensors, options) to its result.
            options: of the operator.
            operator: its name.
        """
        if is_logged():
            return
        # Guards know which tensors require a gradient, but not whether gradients are recorded.
        enabled = torch.is_grad_enabled() if any([t.requires_grad for t in tensors]) else None
        takes = program.takes if program is not None and program.has_places else None
        entry = Entry(torch_internals.guard(tensors), enabled, takes, program, call, options, operator)
        full = (key, len(tensors), tensors[0].shape, settings())
        entries = self._calls.setdefault(full, [])
        entries.append(entry)
        del entries[:-MOST_ENTRIES]
        _shrink(self._calls)

    def program(self, key: Hashable, build: Callable[[], Program]) -> Program:
        """The program of this key, built if there is none."""
        if is_logged():  # each call says which backend it takes
            return build()
        full = (key, settings())
        found = self._programs.get(full)
        if found is None:
            found = self._programs[full] = build()
            _shrink(self._programs)
        else:
            _touch(self._programs, full)
        return found


CACHE: Final = CallCache()


def _touch(kept: OrderedDict[Hashable, Any], key: Hashable) -> None:
    try:  # contextlib.suppress takes four times as long
        kept.move_to_end(key)
    except KeyError:  # another thread has dropped it
        return


def _shrink(kept: OrderedDict[Hashable, Any]) -> None:
    while len(kept) > MOST_KEYS:
        try:
            kept.popitem(last=False)
        except KeyError:  # another thread was faster
            return
