"""The running range of a layer's inputs, and operator `fastkron::running_range`, which compiled graphs call for it.

running_range      [2, 2, features]: the bounds of a batch, and the running range after it

Activation checkpoints run a layer's forward a second time, inside the backward pass. Gradients are those of the result only
if the second run has the bounds of the first, and other batches may have moved the range since. So a layer keeps the bounds that its
latest batches got. It finds those of a batch by the batch's own smallest and largest numbers, which the second run computes again.

Whether a run is a second one is known when it runs, not when it is compiled: one compiled graph may serve both. So a graph holds the
operator, which asks then. It writes to none of its arguments: the layer stores the moved range, which after a second run is the same.
"""

from __future__ import annotations

import math
import secrets
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastkron_py.runtime.eager import transforms_active
from fastkron_py.runtime.operator import LIBRARY

LEAST_CALLS: Final = 64  # of a layer between a batch's forward pass and its second run, that are remembered
MOST_CALLS: Final = 4096
MOST_BYTES: Final = 2**20  # of a layer's memory beyond the least

# A CUDA graph would keep the range that the operator found when it was captured.
_TAGS: Final = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
LIBRARY.define("running_range(Tensor own, Tensor running, Tensor after, Tensor handle) -> Tensor", tags=_TAGS)


class RecentBounds:
    """Bounds of a layer's recent training batches. A copy of the layer, or one that is loaded, has none.

    Attributes:
        handle: a number ``[]`` by which the operator finds these calls. As a tensor on the CPU: graphs are not compiled again for the
            next layer, and nothing waits for a GPU. Chosen at random, since a graph may be run by another process, with layers of its own.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[Any, ...], _Latest] = {}
        number = secrets.randbits(63)
        with _disable_current_modes():  # a layer made of fake tensors may get real ones later
            self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        _recent[number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy."""
        return RecentBounds, ()

    def follow(self, own: Tensor, running: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
        """The bounds ``[2, features]`` of a batch whose own are ``own [2, features]``, and the running range after it, of the same shape.

        Without a host's look at the numbers.
        """
        after = moved(running, own, momentum)  # in the graph: of a number among an operator's arguments, graphs are compiled again
        if torch.compiler.is_compiling() and not _is_exporting():  # an exported graph is no part of this layer
            bounds, after = torch.ops.fastkron.running_range(own, running, after, self.handle)
            return bounds, after
        return self.decide(own, running, after)

    def decide(self, own: Tensor, running: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """As `follow`, of the range after a first run: remember that, or, in a second run, find the first's and stay."""
        key = (own.device, own.dtype, own.shape)
        if is_second_run():
            latest = self._latest.get(key) if _is_real(own) else None
            return (running if latest is None else latest.find(own)), running
        if _is_real(own):
            if key not in self._latest:
                self._latest[key] = _Latest(own)
            self._latest[key].keep(own, after)
        return after, after


_recent: WeakValueDictionary[int, RecentBounds] = WeakValueDictionary()


class _Latest:
    """Each batch's own bounds and the bounds it was given, on one device, in a ring that overwrites the oldest."""

    def __init__(self, own: Tensor) -> None:
        size = 2 * own.numel() * own.element_size()
        self._most = max(LEAST_CALLS, min(MOST_CALLS, MOST_BYTES // max(1, size)))
        self._count = 0
        with torch.inference_mode(False):  # so that later calls may write to it
            self._rows = own.new_empty((LEAST_CALLS, 2, *own.shape))

    def keep(self, own: Tensor, bounds: Tensor) -> None:
        """Copy them: a compiled graph uses the memory of its tensors again."""
        size = len(self._rows)
        if self._count == size < self._most:
            with torch.inference_mode(False):
                rows = self._rows.new_empty((min(2 * size, self._most), *self._rows.shape[1:]))
            rows[:size] = self._rows
            self._rows = rows
        torch.stack((own, bounds), out=self._rows[self._count % len(self._rows)])
        self._count += 1

    def find(self, own: Tensor) -> Tensor:
        """The bounds ``[2, features]`` of the batch whose own are nearest, of equal ones the latest."""
        count = min(self._count, len(self._rows))
        latest = (self._count - 1) % count
        # Nearest, since a second run may round differently; inf - inf, of inputs without a finite number, is no distance.
        distances = (self._rows[:count, 0] - own).abs().nan_to_num(0.0).sum((1, 2))
        age = distances.roll(count - 1 - latest).flip(0).argmin()
        return self._rows[:, 1].index_select(0, ((latest - age) % count).reshape(1))[0]


def _is_real(t: Tensor) -> bool:
    """Whether a tensor may outlive the call: not one of a compiler, of a fake mode or of a transform."""
    return type(t) is Tensor and not t.is_meta and not torch.compiler.is_compiling() and not transforms_active()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """As torch's function, which torch 2.11 takes for True wherever it compiles."""
    return torch.compiler.is_exporting()


def is_second_run() -> bool:
    """Whether a backward pass runs this forward pass, as checkpoints do; torch's own ask the same."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_set(low: Tensor, high: Tensor) -> Tensor:
    """Which inputs have a range, ``[features]``: finite bounds with low not above high."""
    return (low <= high) & (low > -math.inf) & (high < math.inf)  # isfinite() is four launches on a GPU


def moved(running: Tensor, own: Tensor, momentum: float) -> Tensor:
    """The running range ``[2, features]`` after a batch with these bounds of its own; the first batch sets it.

    Inputs without a finite number in the batch keep theirs.
    """
    step = torch.where(is_set(*running), own + (1 - momentum) * (running - own), own)  # of momentum 1 to the last bit
    return torch.where(is_set(*own), step, running)


def _running_range(own: Tensor, running: Tensor, after: Tensor, handle: Tensor) -> Tensor:
    """The operator; arguments as in `RecentBounds.decide`, whose two results lie one after the other in ``[2, 2, features]``."""
    calls = _recent.get(int(handle))
    if calls is None:
        raise RuntimeError(
            "running_range: the layer whose range this compiled graph follows is gone; keep it until after the backward pass"
        )
    with torch.no_grad():
        return torch.stack(calls.decide(own, running, after))


LIBRARY.impl("running_range", _running_range, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::running_range", lib=LIBRARY)
def _(own, running, after, handle):  # type: ignore[no-untyped-def]
    return own.new_empty((2, *own.shape))
