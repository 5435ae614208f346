"""The running range of a layer's inputs: what a batch makes of it, and the bounds of a batch that is computed again.

Activation checkpoints run a layer's forward a second time, inside the backward pass. Gradients are those of the result only
if the second run has the bounds of the first, and other batches may have moved the range since. So a layer keeps the bounds that its
latest batches got. It finds those of a batch by the batch's own smallest and largest numbers, which the second run computes again.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.eager import transforms_active

MOST_CALLS: Final = 64  # of a layer between a batch's forward pass and its second run


class Calls:
    """Bounds of a layer's latest training batches. A copy of the layer, or one that is loaded, begins without."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Tensor, Tensor]] = deque(maxlen=MOST_CALLS)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy."""
        return Calls, ()

    def keep(self, own: Tensor, bounds: Tensor) -> None:
        """Remember the bounds ``[2, features]`` of a batch whose own are ``own [2, features]``."""
        if _is_real(own):
            self._latest.appendleft((own, bounds))

    def find(self, own: Tensor) -> Tensor | None:
        """The bounds ``[2, features]`` of the batch whose own are nearest, of equal ones the latest.

        Without a host's look at the numbers.
        """
        if not _is_real(own):
            return None
        known = [pair for pair in self._latest if pair[0].device == own.device and pair[0].dtype == own.dtype]
        if not known:
            return None
        # Nearest, since a second run may round differently; inf - inf, of inputs without a finite number, is no distance.
        distances = (torch.stack([pair[0] for pair in known]) - own).abs().nan_to_num(0.0).sum((1, 2))
        return torch.stack([pair[1] for pair in known]).index_select(0, distances.argmin().reshape(1))[0]


def _is_real(t: Tensor) -> bool:
    """Whether a tensor may outlive the call: not one of a compiler, of a fake mode or of a transform."""
    return type(t) is Tensor and not t.is_meta and not torch.compiler.is_compiling() and not transforms_active()


def is_second_run() -> bool:
    """Whether a backward pass runs this forward pass, as checkpoints do; torch's own ask the same.

    A compiled graph holds both runs as functions of the range before, and stores the moved range once.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_set(low: Tensor, high: Tensor) -> Tensor:
    """Which inputs have a range, ``[features]``: finite numbers, of which low is not above high."""
    return low.isfinite() & high.isfinite() & (low <= high)


def moved(running: Tensor, own: Tensor, momentum: float) -> Tensor:
    """The running range ``[2, features]`` after a batch with these bounds of its own; the first batch sets it.

    Inputs of which the batch has no finite number keep theirs.
    """
    step = torch.where(is_set(*running), running + momentum * (own - running), own)
    return torch.where(is_set(*own), step, running)
