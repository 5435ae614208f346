"""All ranks agree on the call that they are about to make, or all of them raise the same error.

Every call exchanges a digest of its description, 16 bytes and up to four numbers, over the grid's `Control`. It is not
left out for descriptions that were agreed on before: a rank that left it
out because it knows its own would go on into an exchange of data, while one whose description is new waited here
for it, and both would hang; no rank can know alone that another one's call differs. So nothing is decided but by
digests that all have seen. Repeated calls do save making the description's digest, which is kept.

A description has the grid's layout in it: the same ranks in other rows and columns would exchange other blocks, or wait for each other.

The exchange runs on the host, beside the work queued on a GPU: within a host through shared memory, in microseconds, else over
Gloo. It can be started before a call's first local step and settled before its first exchange of data (`Agreement`, `Agreement.settle`);
a product without exchanges is multiplied meanwhile. Where digests differ, and only there, the descriptions follow.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.barrier import Barrier, Round, open_barrier
from fastkron_py.distributed.failures import PackedError, after_failure, differing, pack_error, rank_text, stage, unpack_error
from fastkron_py.runtime.errors import value_error

if TYPE_CHECKING:
    from fastkron_py.distributed.grid import ProcessGrid

LOCAL: Final = 4
"""Numbers that each rank may send along with its digest."""

STAGE: Final = "check that all ranks do the same"
FALLBACK_TIMEOUT: Final = timedelta(minutes=10)


class Control:
    """Gathers small tensors in host memory from all ranks of a grid; a few numbers, where all are on one host, over a `Barrier`.

    Made by its members alone, through the job's store: torch's `new_group` would ask every rank of the job. Never used
    for data, so that a rank which goes another way than the others meets no collective of theirs by accident.

    Args:
        ranks: the members in the default group, ascending; this rank is one of them.
        number: of the private grid that it is for, among all grids of these ranks; 0 for the one that the others share.
    """

    layout: tuple[str, ...] = ()  # of no grid

    def __init__(self, ranks: Sequence[int], number: int = 0) -> None:
        self.ranks = tuple(ranks)
        self.grids = number  # that have been made over it
        self._busy = threading.RLock()
        self._failure = ""
        self._barrier: Barrier | None = None
        position = self.ranks.index(dist.get_rank())
        name = f"fastkron_py/control/{'_'.join(map(str, self.ranks))}/{number}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        with stage("ProcessGrid: connecting", self.ranks):
            with _lock:
                _living.add(self)
            # Any: torch's stubs leave out inherited methods of a backend.
            self._group: Any = dist.ProcessGroupGloo(store, position, len(self.ranks), group_timeout())
            self._barrier = (
                None if len(self.ranks) == 1 else open_barrier(self.gathered, position, self.ranks, group_timeout().total_seconds())
            )

    @property
    def control(self) -> Control:
        """Itself."""
        return self

    @contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """For the length of a call no other thread may begin one: ranks would take the two in different orders.

        Raises:
            RuntimeError: another thread is in a call. The ranks cannot know any more who waits for whom, so the connections are broken.
        """
        if not self._busy.acquire(blocking=False):
            expected = "one thread at a time in calls over a grid, or over grids that share their groups"
            error = RuntimeError(f"{call}: expected {expected}; got a second one; give each thread a ProcessGrid(..., private=True)")
            self.close(error)
            raise error
        try:
            yield
        finally:
            self._busy.release()

    def tell(self, numbers: Sequence[int]) -> Round | Gathering:
        """Begin to gather up to six numbers of 64 bits of every rank; waited for, it gives a list of each rank's."""
        if self._group is not None and self._barrier is not None:
            return self._barrier.tell(numbers)
        return Gathering(*self.gather(torch.tensor(numbers, dtype=torch.int64)))

    def gather(self, own: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begin to gather every rank's ``[n]`` tensor as ``[ranks, n]``, complete when the work is waited for."""
        if self._group is None:
            raise RuntimeError(f"the process group is unusable after an earlier failure: {self._failure}")
        everything = torch.zeros(len(self.ranks), own.numel(), dtype=own.dtype)
        if len(self.ranks) == 1:
            everything[0] = own
            return everything, None
        return everything, self._group.allgather([list(everything.unbind())], [own])

    def close(self, failure: Exception, *, orderly: bool = False) -> None:
        """Break the connections, so that ranks which wait here for this one learn at once that it will not come.

        Args:
            failure: that later calls name.
            orderly: all ranks have agreed to: slower ones may still read what this one has told, and are not to take it for a failure.
        """
        if self._barrier is not None and not orderly:
            self._barrier.close()
        # The first failure: later ones repeat it. Not the error, whose stack has the group.
        self._group, self._barrier, self._failure = None, None, self._failure or str(failure)

    def gathered(self, own: Tensor) -> Tensor:
        """Every rank's tensor."""
        everything, work = self.gather(own)
        if work is not None:
            work.wait()
        return everything


class Gathering:
    """Numbers under way over Gloo, as a `Round` is over shared memory."""

    def __init__(self, everything: Tensor, work: dist.Work | None) -> None:
        self._everything, self._work = everything, work

    def wait(self) -> list[list[int]]:
        """Every rank's numbers."""
        if self._work is not None:
            work, self._work = self._work, None  # which would keep the connections, in an error's stack
            work.wait()
        found: list[list[int]] = self._everything.tolist()
        return found


_living: WeakSet[Control] = WeakSet()
_lock = threading.Lock()
"""Guards the set above, which another thread reads (`ended_ranks`)."""


def _all() -> list[Control]:
    with _lock:
        return list(_living)


def _close_all(failure: Exception) -> None:
    """After a collective failed: who knows passes it on, and ranks far from the one that died need not wait for the timeout."""
    for control in _all():
        control.close(failure)


after_failure(_close_all)


def ended_ranks() -> list[int]:
    """Ranks of this host, in grids of this process, whose processes have ended, or that have given up after a failure."""
    barriers = [control._barrier for control in _all()]
    return sorted({rank for barrier in barriers if barrier is not None for rank in barrier.ended()})


def group_timeout() -> timedelta:
    """The default group's timeout, which torch does not pass on to new groups."""
    world: Any = dist.group.WORLD
    for kind in ("cuda", "cpu"):
        try:
            return timedelta(seconds=world._get_backend(torch.device(kind)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return FALLBACK_TIMEOUT


class Agreement:
    """A comparison, under way, of the calls that all ranks of a grid are about to make. Collective: every rank makes one for each step.

    Args:
        grid: the ranks, or their control.
        description: values that have to be the same everywhere, by name, as JSON has it (numbers, strings, lists), with the
            call's name as "call"; or the error that this rank met when it looked at its arguments, for all to raise.
        local: up to four numbers that may differ, for all to know.

    Raises:
        ValueError: more than four numbers in local.
        CollectiveError: a rank has died.
    """

    def __init__(self, grid: ProcessGrid | Control, description: Mapping[str, Any] | Exception, *, local: Sequence[int] = ()) -> None:
        if len(local) > LOCAL:
            raise value_error("local", f"at most {LOCAL} numbers", len(local))
        self._control, self._ranks = grid.control, grid.ranks
        self._error = description if isinstance(description, Exception) else None
        said = {"fields": description} if self._error is None else {"error": pack_error(self._error)}
        self._said = {"grid": grid.layout} | said
        self._stage = _stage(description)
        with stage(self._stage, self._control.ranks):
            self._under_way = self._control.tell([*_digest(repr(self._said)), *local, *[0] * (LOCAL - len(local))])

    def settle(self) -> list[tuple[int, ...]]:
        """Wait for all ranks' digests.

        Returns:
            The numbers that each rank sent along, in the grid's order.

        Raises:
            ValueError: descriptions differ; the message names the field and who had what.
            Exception: one or more ranks came with an error; every rank raises it.
            CollectiveError: a rank has died or not come.
        """
        with stage(self._stage, self._control.ranks):
            rows = self._under_way.wait()
        if any(row[:2] != rows[0][:2] for row in rows):
            error = compare(_gather_text(self._control, json.dumps(self._said, separators=(",", ":"))), self._control.ranks)
            raise error from self._error
        if self._error is not None:  # the same on every rank
            raise self._error
        if self._ranks != self._control.ranks:
            rows = [rows[self._control.ranks.index(rank)] for rank in self._ranks]
        return [tuple(row[2:]) for row in rows]


def agree(grid: ProcessGrid | Control, description: Mapping[str, Any] | Exception, *, local: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """An `Agreement` that is settled at once: returns when all ranks are known to do the same, or raises on all of them.

    Args:
        grid: the ranks.
        description: values that have to be the same everywhere, or an error for all to raise.
        local: up to four numbers that may differ, for all to know.

    Returns:
        The numbers that each rank sent along, in the grid's order.

    Raises:
        ValueError: descriptions differ; the message names the field and who had what.
        Exception: a rank's error.
        CollectiveError: a rank has died or not come.

    Example:
        >>> agree(grid, {"call": "kron_matmul", "factors": [[8, 8], [8, 8]], "dtype": "float32"}, local=(rows,))
    """
    with grid.control.alone(_stage(description)):
        return Agreement(grid, description, local=local).settle()


def _stage(description: Mapping[str, Any] | Exception) -> str:
    return f"{description['call']}: {STAGE}" if isinstance(description, Mapping) and "call" in description else STAGE


def refuse(grid: ProcessGrid | Control, error: Exception) -> NoReturn:
    """Raise an error that this rank met, on every rank: the others learn of it in the check that they make or are about to make.

    Args:
        grid: the ranks.
        error: the error, if there is one.
    """
    agree(grid, error)
    raise error  # not reached: all ranks have raised


@lru_cache(maxsize=1024)
def _digest(text: str) -> tuple[int, int]:
    data = blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(data[:8], "little", signed=True), int.from_bytes(data[8:], "little", signed=True)


def _gather_text(control: Control, text: str) -> list[Any]:
    """Every rank's description. Entered by all ranks or none, since all have seen the same digests."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = _gather(control, torch.tensor([data.numel()])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = _gather(control, padded)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, lengths, strict=True)]


def _gather(control: Control, own: Tensor) -> Tensor:
    with stage("exchange of the ranks' descriptions", control.ranks):
        return control.gathered(own)


def compare(contents: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> Exception:
    """The error that says how descriptions differ. Plain Python, the same on every rank.

    Args:
        contents: by rank, ``{"grid": ..., "fields": ...}`` or ``{"grid": ..., "error": ...}``.
        ranks: how the ranks are called.
    """
    known = [(rank, content["grid"]) for rank, content in zip(ranks, contents, strict=True) if content.get("grid")]
    # Before errors, which may come from it: blocks of one grid do not fit another.
    for texts in zip(*[grid for _, grid in known], strict=True):
        if error := differing("grid", texts, [rank for rank, _ in known]):
            return error
    errors: list[tuple[int, PackedError]] = [(r, c["error"]) for r, c in zip(ranks, contents, strict=True) if "error" in c]
    if errors:
        first = errors[0][1]
        same = [r for r, e in errors if e == first]
        others = [r for r, e in errors if e != first]
        more = f"; other errors on {rank_text(others)}" if others else ""
        return unpack_error({**first, "message": f"{first['message']} (on {rank_text(same)}{more})"})
    fields = [c["fields"] for c in contents]
    names = list(dict.fromkeys(name for f in fields for name in f))
    for name in names:
        values = [json.dumps(f[name]) if name in f else "nothing" for f in fields]
        if error := differing(name, values, ranks):
            return error
    return value_error("description", "fields in the same order on every rank", "the same fields in another order")
