"""Errors of collectives: which step failed, on which rank, for how long it had waited."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from types import TracebackType
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.eager import transforms_active
from fastkron_py.runtime.errors import value_error

_when_failing: list[Callable[[str], str]] = []


def when_failing(function: Callable[[str], str]) -> None:
    """Have a function called with the message of every collective that fails, before its error is raised; what it returns is added."""
    _when_failing.append(function)


class CollectiveError(RuntimeError):
    """A collective failed: a peer has died, left, or not come in time.

    The group that it failed in cannot be used any more; a job restarts from a checkpoint (torchrun's
    ``--max-restarts``) or ends.

    Attributes:
        stage: the step that failed, as the message names it.
        rank: this process in the default group.
        seconds: how long this rank had been in the stage.
    """

    def __init__(self, stage: str, rank: int, seconds: float, reason: str) -> None:
        super().__init__(f"{stage}: failed on rank {rank} after {seconds:.2f} s: {reason}")
        self.stage = stage
        self.rank = rank
        self.seconds = seconds


class stage:  # noqa: N801  # used as a function is; a generator would take several times as long, for every exchange of every chunk
    """Give errors inside the name of the stage. For collectives alone, whose failures are RuntimeErrors: tensors are prepared outside.

    Args:
        name: the operation, for example ``"kron_matmul: exchange 2 of 3"``.
        group: the group it is done in, or its ranks, for the message.

    Raises:
        CollectiveError: from any RuntimeError but those of memory and of what is not implemented, which pass as they are.
    """

    __slots__ = ("_group", "_name", "_start")

    def __init__(self, name: str, group: dist.ProcessGroup | Sequence[int] | None = None) -> None:
        self._name, self._group = name, group

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, (torch.OutOfMemoryError, NotImplementedError, CollectiveError)):
            return
        seconds = time.perf_counter() - self._start
        ranks = dist.get_process_group_ranks(self._group) if isinstance(self._group, dist.ProcessGroup) else self._group
        peers = "" if ranks is None else f" among {rank_text(ranks)}"
        reason = f"a peer{peers} has died, left, or not come in time ({_first_line(error)})"
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        text = f"{self._name}: failed on rank {rank} after {seconds:.2f} s: {reason}"
        failure = CollectiveError(self._name, rank, seconds, reason + "".join([function(text) for function in _when_failing]))
        try:
            raise failure from error
        finally:
            del failure, error, trace  # else this frame and the error would keep each other, and through the stack the group


def check_plain(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise NotImplementedError for tensors of a transform: an exchange would leave their tangents or batches behind.

    Args:
        name: the operation, for the message.
        tensors: that it sends, or that it makes of what it sends.
    """
    if not (transforms_active() or torch_internals.is_batching()):
        return
    for t in tensors:
        if torch.func.debug_unwrap(t) is not t or torch_internals.has_batches(t) or forward_ad.unpack_dual(t).tangent is not None:
            wanted = "plain tensors, since no exchange between ranks carries tangents or batches"
            raise NotImplementedError(f"{name}: expected {wanted}; got one of a transform such as torch.func.jvp or torch.func.vmap")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks in few words: ``rank 3``, ``ranks 0-2, 5``."""
    listed = sorted(set(ranks))
    runs = [[r for _, r in run] for _, run in groupby(enumerate(listed), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(listed) == 1 else f"ranks {text}"


def differing(name: str, values: Sequence[str], ranks: Sequence[int]) -> Exception | None:
    """The error that says who has what, if not all have the same."""
    kinds = list(dict.fromkeys(values))
    if len(kinds) < 2:
        return None
    shown = "; ".join(f"{kind} on {rank_text(r for r, v in zip(ranks, values, strict=True) if v == kind)}" for kind in kinds)
    return value_error(name, "the same on every rank", shown)


REFUSALS: Final = (TypeError, ValueError, LinAlgError)
"""Errors that a rank may find in its own arguments and sends to the others."""
_KINDS: Final[dict[str, type[Exception]]] = {
    k.__name__: k for k in (TypeError, ValueError, NotImplementedError, RuntimeError, torch.OutOfMemoryError, LinAlgError)
}


def pack_error(error: Exception) -> list[str]:
    """The name of an error's type and its message, for other ranks to raise; other types become a RuntimeError that names them."""
    kind = type(error).__name__
    return [kind, str(error)] if kind in _KINDS else ["RuntimeError", f"{kind}: {error}"]


def unpack_error(kind: str, message: str) -> Exception:
    """The error to raise, made anew from another rank's."""
    return _KINDS[kind](message)
