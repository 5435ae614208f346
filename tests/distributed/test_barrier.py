"""The barrier that ranks of one host tell each other numbers at, and Gloo where there is none."""

from __future__ import annotations

import errno
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import CollectiveError, ProcessGrid
from fastkron_py.distributed.agreement import agree
from fastkron_py.distributed.barrier import FOLDER, NUMBERS, Barrier, _opened, _size, open_barrier

pytestmark = pytest.mark.skipif(not Path(FOLDER).is_dir(), reason="no shared memory to hold a barrier")


@contextmanager
def over(transport: str) -> Iterator[ProcessGrid]:
    """A grid whose control has a barrier, or does without."""
    grid = ProcessGrid()
    assert grid.control._barrier is not None
    with mock.patch.object(grid.control, "_barrier", grid.control._barrier if transport == "barrier" else None):
        yield grid


def many_posts(transport):
    """Entries of ranks that come early or late; some are read late, when the next one has been made."""
    rank, wait, before = dist.get_rank(), random.Random(dist.get_rank()), None
    with over(transport) as grid:
        for i in range(200):
            entered = grid.control.tell([i, -(2**63) + rank, 2**63 - 1 - i])
            if wait.random() < 0.02:
                time.sleep(0.002)
            for told, made in [(i, entered)] if i % 3 else [(i - 1, before)] if before else []:
                assert [row[:3] for row in made.wait()] == [[told, -(2**63) + r, 2**63 - 1 - told] for r in range(grid.world_size)]
            before = entered
        grid.barrier()


@pytest.mark.parametrize("transport", ["barrier", "gloo"])
def test_numbers_of_all_ranks(ranks: RankPool, transport: str) -> None:
    ranks.run(many_posts, transport)


def nothing_stays():
    with over("barrier") as grid:
        descriptor = grid.control._barrier._descriptor
        return os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_mode & 0o777


def test_the_file_has_no_name_and_is_the_owners(ranks: RankPool) -> None:
    for name, mode in ranks.run(nothing_stays):
        assert name.startswith(f"{FOLDER}/fastkron_py-")
        assert name.endswith("(deleted)")
        assert mode == 0o600


def lose(transport, how):
    with over(transport) as grid:
        agree(grid, {"call": "kron_matmul"})
        if dist.get_rank() == 3 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 3:
            grid.control.close(RuntimeError("an exchange failed"))
            return
        agree(grid, {"call": "kron_matmul"})


@pytest.mark.parametrize(("transport", "how"), [("barrier", "killed"), ("barrier", "closed"), ("gloo", "killed"), ("gloo", "closed")])
def test_survivors_learn_at_once(own_ranks: RankPool, transport: str, how: str) -> None:
    outcomes = own_ranks.outcomes(lose, transport, how, expect_dead=[3] if how == "killed" else [])
    for outcome in outcomes[:3]:
        assert outcome.error == "CollectiveError"
        assert outcome.stage == "kron_matmul: check that all ranks do the same"
        if transport == "barrier":
            assert "rank 3 ended" in outcome.message or "closed the connection after a failure" in outcome.message


def leave_after_an_entry():
    """Rank 3 makes its entry and ends; the others look for it first when it is gone."""
    with over("barrier") as grid:
        agree(grid, {"call": "kron_matmul"})
        if dist.get_rank() == 3:
            grid.control.tell([7])
            os.kill(os.getpid(), signal.SIGKILL)
        entered = grid.control.tell([7])
        while not grid.control._barrier.ended():
            time.sleep(0.01)
        grid.control._barrier._look([3], entered._sequence, 0.0)
        return [row[0] for row in entered.wait()]


def test_the_last_post_of_a_rank_counts(own_ranks: RankPool) -> None:
    assert [o.value for o in own_ranks.outcomes(leave_after_an_entry, expect_dead=[3])] == [[7] * 4] * 3


@pytest.fixture
def file() -> tuple[int, str]:
    descriptor, path = tempfile.mkstemp(prefix="fastkron_py-", dir=FOLDER)
    os.ftruncate(descriptor, _size(1))
    yield descriptor, path
    Path(path).unlink(missing_ok=True)


def test_an_entry_that_is_half_there_is_not_read(file: tuple[int, str]) -> None:
    barrier = Barrier(file[0], 0, [0], 1.0)
    numbers = list(range(NUMBERS))
    assert barrier.tell(numbers).wait() == [numbers]
    assert barrier._read(0, 1) == numbers
    assert barrier._read(0, 2) is None
    barrier._words[barrier._at(0, 1) + 3] = 7
    assert barrier._read(0, 1) is None


def test_another_file_is_refused(file: tuple[int, str]) -> None:
    name = Path(file[1]).name
    opened = _opened(name, _size(1))
    assert opened is not None
    os.close(opened)
    assert _opened(name, _size(2)) is None
    assert _opened("../" + name, _size(1)) is None
    assert _opened(name[:-1] + ("a" if name[-1] != "a" else "b"), _size(1)) is None
    link = Path(FOLDER) / f"fastkron_py-{random.Random().randrange(10**8):08d}"
    link.symlink_to(file[1])
    try:
        assert _opened(link.name, _size(1)) is None
    finally:
        link.unlink()
    os.close(file[0])


def without_memory():
    """A file system that is full, on the rank that makes the file."""
    group, full = ProcessGrid().control, OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full):
        return open_barrier(group.gathered, dist.get_rank(), group.ranks, 5.0)


def test_full_shared_memory_leaves_it_to_gloo(ranks: RankPool) -> None:
    before = set(Path(FOLDER).glob("fastkron_py-*"))
    assert ranks.run(without_memory) == [None] * ranks.world_size
    assert set(Path(FOLDER).glob("fastkron_py-*")) <= before


def come_late(folder):
    """Rank 1 comes when the others have given it up, whose entries are there. All try again."""
    with over("barrier") as grid:
        while dist.get_rank() == 1 and len(list(Path(folder).iterdir())) < grid.world_size - 1:
            time.sleep(0.01)
        messages = []
        for _ in range(4):
            try:
                grid.barrier()
            except CollectiveError as error:
                messages.append(str(error))
            Path(folder, str(dist.get_rank())).touch()
        return messages


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    pool = RankPool(3, "gloo", group_timeout=1)
    try:
        found = pool.run(come_late, str(tmp_path))
    finally:
        pool.stop()
    assert "ranks 0, 2 closed the connection after a failure" in found[1][0]
    for messages in found:
        assert len(messages) == 4
        assert {m.partition("(")[2] for m in messages[2:]} == {messages[1].partition("(")[2]}  # no longer with each retry


def without_locks():
    """A system on which one rank does not see the others' locks."""
    group = ProcessGrid().control
    with mock.patch("fastkron_py.distributed.barrier._is_locked", return_value=dist.get_rank() != 1):
        return open_barrier(group.gathered, dist.get_rank(), group.ranks, 5.0)


def test_locks_that_do_not_show_leave_it_to_gloo(ranks: RankPool) -> None:
    assert ranks.run(without_locks) == [None] * ranks.world_size
