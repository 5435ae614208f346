"""All ranks agree on the call that they are about to make, or all of them raise the same error.

Every call exchanges a digest of its description, 16 bytes and up to four numbers, over the grid's `Control`: on the host, over Gloo,
beside the work queued on a GPU. It is not left out for descriptions that were agreed on before: a rank that left it out because it knows
its own would go on into an exchange of data, while one whose description is new, or that has met an error, waited here for it. Where
digests differ, and only there, the descriptions follow.

A description has the grid's layout in it: the same ranks in other rows and columns would exchange other blocks, or wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.distributed.failures import CollectiveError, connections, group_timeout, rank_text, stage
from fastkron_py.runtime.errors import value_error

if TYPE_CHECKING:
    from fastkron_py.distributed.grid import ProcessGrid

LOCAL: Final = 4
"""Numbers that each rank may send along with its digest."""
STAGE: Final = "check that all ranks do the same"
REFUSALS: Final = (TypeError, ValueError, LinAlgError)
"""Errors that a rank may find in its own arguments and sends to the others."""
_KINDS: Final[dict[str, type[Exception]]] = {
    k.__name__: k for k in (TypeError, ValueError, NotImplementedError, RuntimeError, torch.OutOfMemoryError, LinAlgError)
}


class Control:
    """Gathers small arrays in host memory from all ranks of a grid: ascending ranks of the default group, with this one among them.

    Made by its members alone, through the job's store: torch's `new_group` would ask every rank of the job. Never used
    for data, so that a rank which goes another way than the others meets no collective of theirs by accident.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._failure = ""
        name = f"fastkron_py/control/{'_'.join(map(str, self.ranks))}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        with stage("ProcessGrid: connecting", self.ranks):
            # Any: torch's stubs leave out inherited methods of a backend.
            self._group: Any = dist.ProcessGroupGloo(store, self.ranks.index(dist.get_rank()), len(self.ranks), group_timeout())
        connections.add(self)

    def close(self, failure: str) -> None:
        """Break the connections, so that ranks which wait here for this one learn at once that it will not come.

        Later calls name the first failure.
        """
        self._group, self._failure = None, self._failure or failure

    def gathered(self, own: NDArray[Any]) -> NDArray[Any]:
        """Every rank's ``[n]`` array, as ``[ranks, n]``."""
        if self._group is None:
            raise RuntimeError(f"the process group is unusable after an earlier failure: {self._failure}")
        if len(self.ranks) == 1:
            return own[None]
        everything = np.zeros((len(self.ranks), own.size), own.dtype)
        with torch._C._DisableFuncTorch():  # it would wrap the tensors that Gloo makes
            work = self._group.allgather([[torch.from_numpy(row) for row in everything]], [torch.from_numpy(own)])
        try:
            work.wait()
        finally:
            del work  # which would keep the connections, in an error's stack
        return everything


def agree(grid: ProcessGrid, description: Mapping[str, Any] | Exception, *, local: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Return when all ranks of a grid are known to be about to do the same, or raise on all of them. Collective.

    Args:
        grid: the ranks.
        description: values that have to be the same everywhere, by name, as JSON has it (numbers, strings, lists), with the
            call's name as "call"; or the error that this rank met when it looked at its arguments, for all to raise.
        local: up to four numbers that may differ, for all to know.

    Returns:
        The numbers that each rank sent along, in the grid's order.

    Raises:
        ValueError: descriptions differ; the message names the field and who had what.
        Exception: one or more ranks came with an error; every rank raises it.
        CollectiveError: a rank has died or not come.
    """
    control, error = grid.control, description if isinstance(description, Exception) else None
    name = f"{description['call']}: {STAGE}" if isinstance(description, Mapping) and "call" in description else STAGE
    said = {"grid": grid.layout} | ({"fields": description} if error is None else {"error": pack_error(error)})
    own = np.zeros(2 + LOCAL, np.int64)
    own[:2] = np.frombuffer(blake2b(repr(said).encode(), digest_size=16).digest(), np.int64)
    own[2 : 2 + len(local)] = local
    with stage(name, control.ranks):
        rows: list[list[int]] = control.gathered(own).tolist()
    if any(row[:2] != rows[0][:2] for row in rows):
        found = difference(_gathered_text(control, json.dumps(said, separators=(",", ":"))), control.ranks)
        raise found or value_error("description", "fields in the same order on every rank", "the same in another order") from error
    if error is not None:  # the same on every rank
        raise error
    return [tuple(rows[control.ranks.index(rank)][2:]) for rank in grid.ranks]


def refuse(grid: ProcessGrid, error: Exception) -> NoReturn:
    """Raise an error that this rank met, on every rank: the others learn of it in the check that they make or are about to make."""
    agree(grid, error)
    raise error  # not reached: all ranks have raised


@contextmanager
def refused_by_all(grid: ProcessGrid, kinds: tuple[type[Exception], ...] = REFUSALS) -> Iterator[None]:
    """Errors of these types, which this rank finds in its own arguments inside, are raised on every rank, as by `refuse`."""
    try:
        yield
    except CollectiveError:  # the others know
        raise
    except kinds as error:
        refuse(grid, error)


def _gathered_text(control: Control, text: str) -> list[Any]:
    """Every rank's description. Entered by all ranks or none, since all have seen the same digests."""
    data = np.frombuffer(text.encode(), np.uint8)
    with stage("exchange of the ranks' descriptions", control.ranks):
        lengths = control.gathered(np.array([data.size])).flatten().tolist()
        rows = control.gathered(np.pad(data, (0, max(lengths) - data.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, lengths, strict=True)]


def difference(contents: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> Exception | None:
    """The error that says how descriptions differ, or the one that a rank came with; else None. The same on every rank.

    Contents are, by rank, ``{"grid": ..., "fields": ...}`` or ``{"grid": ..., "error": ...}``.
    """
    known = [(rank, content["grid"]) for rank, content in zip(ranks, contents, strict=True) if content.get("grid")]
    # Before errors, which may come from it: blocks of one grid do not fit another.
    if error := _differing("grid", [grid for _, grid in known], [rank for rank, _ in known]):
        return error
    errors = [(r, c["error"]) for r, c in zip(ranks, contents, strict=True) if "error" in c]
    if errors:
        (kind, message), same = errors[0][1], [r for r, e in errors if e == errors[0][1]]
        others = [r for r, e in errors if e != errors[0][1]]
        more = f"; other errors on {rank_text(others)}" if others else ""
        return _KINDS[kind](message if len(same) == len(ranks) else f"{message} (on {rank_text(same)}{more})")
    fields = [c["fields"] for c in contents]
    for name in dict.fromkeys(name for f in fields for name in f):
        if error := _differing(name, [json.dumps(f[name]) if name in f else "nothing" for f in fields], ranks):
            return error
    return None


def _differing(name: str, values: Sequence[str], ranks: Sequence[int]) -> Exception | None:
    """The error that says who has what, if not all have the same."""
    kinds = list(dict.fromkeys(values))
    shown = [f"{kind} on {rank_text(r for r, v in zip(ranks, values, strict=True) if v == kind)}" for kind in kinds]
    return value_error(name, "the same on every rank", "; ".join(shown)) if len(kinds) > 1 else None


def pack_error(error: Exception) -> list[str]:
    """The name of an error's type and its message, for other ranks to raise; other types become a RuntimeError that names them."""
    kind = type(error).__name__
    return [kind, str(error)] if kind in _KINDS else ["RuntimeError", f"{kind}: {error}"]
