"""Watching a function's launches, so that they can be made again without it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastkron_py.runtime.descriptors import template_of
from fastkron_py.runtime.launch import RECORDING, Launch
from fastkron_py.runtime.program import ALPHA, Box, Operand, Replay, Tape, bits

_ATEN: Final = torch.ops.aten
_ALLOCATIONS: Final = (
    _ATEN.empty.memory_format,
    _ATEN.new_empty.default,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty_strided.default,
)
# Patterns of numbers that could be taken for another integer among a launch's arguments: of zero and the tiniest.
_AMBIGUOUS: Final = 1 << 32


class Recorder(TorchDispatchMode):
    """Keeps a `Tape` of what is launched inside its ``with`` block, in this thread.

    The tape is complete as long as torch itself does nothing but allocate and look at memory in another way, and as
    every operand of a launch is a tensor that was given, or one allocated inside that still exists.
    """

    def __init__(self, given: Sequence[Tensor], alpha: float) -> None:
        """To watch what is done to these tensors, no two of which may begin at the same address."""
        super().__init__()
        self._tape = Tape(given)
        self._alpha = bits(alpha)
        self._device = given[0].device
        self._slots: dict[int, tuple[int, weakref.ref[Tensor] | None]] = {t.data_ptr(): (i, None) for i, t in enumerate(given)}
        self._complete = len(self._slots) == len(given) and abs(self._alpha) >= _AMBIGUOUS
        self._launching = False

    def __enter__(self) -> Recorder:
        """Watch from now on."""
        super().__enter__()
        RECORDING.recorder = self
        return self

    def __exit__(self, *error: Any) -> None:
        """Watch no more."""
        RECORDING.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Do it, and take note of new memory."""
        result = func(*args, **(kwargs or {}))
        if self._launching:  # the interpreter's doing
            return result
        if func in _ALLOCATIONS:
            if result.is_contiguous() and result.device == self._device:
                self._slots[result.data_ptr()] = self._tape.buffer(result.shape, result.dtype), weakref.ref(result)
            else:
                self._complete = False
        elif not func.is_view and _has_tensor((*args, *(kwargs or {}).values(), result)):
            self._complete = False
        return result

    def launch(self, launch: Launch, given: tuple[Any, ...]) -> None:
        """Take note of a launch, and do it."""
        operands = [g for g in given if not isinstance(g, int)]
        slots = [self._operand(g) for g in operands]
        scalars = [ALPHA if g == self._alpha else g for g in given[len(operands) :]]
        self._tape.launch(launch, slots, scalars)
        RECORDING.recorder, self._launching = None, True
        try:
            launch(*given)
        finally:
            RECORDING.recorder, self._launching = self, False

    def _operand(self, given: Any) -> Operand:
        if isinstance(given, tuple):
            return tuple([self._slot(t) for t in given])
        if isinstance(given, Tensor):
            return self._slot(given)
        return Box(self._slot(given.base), type(given), template_of(given))

    def _slot(self, t: Tensor) -> int:
        slot, alive = self._slots.get(t.data_ptr(), (-1, None))
        # What is gone may have left its memory to something else.
        if slot < 0 or (alive is not None and alive() is None):
            self._complete = False
        return slot

    def replay(self, results: Sequence[Tensor], shapes: Sequence[Sequence[int]], most: int | None = None) -> Replay | None:
        """What makes the launches again for results in these shapes; None where there was more than launches; most as of `Replay`."""
        slots = [self._slot(t) for t in results]
        if not self._complete or len(set(slots)) < len(slots) or not set(slots) <= set(self._tape.spans()):
            return None
        return Replay(self._tape, slots, shapes, most)


def _has_tensor(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tensor) or (isinstance(v, list | tuple) and _has_tensor(v)) for v in values)
