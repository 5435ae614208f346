"""A discrete-event simulation of a plan, chunk by chunk and rank by rank.

Each rank has a processor, which issues tasks in order and never waits for its GPU. It has a compute stream for multiplies and for copies
that pack, and an exchange stream, or copy engines that push and pull. An exchange is one task of all ranks of a row group. It begins when
the task before it on its stream is done and its blocks are ready on all these ranks. Pushes and pulls that move bytes at the same time
share the links. Beside an exchange, multiplies and copies go on at a share of their speed (`Links.beside`).

The figures are those of the plan's own model (`cost`), which adds times up and does not know their order. The order is the pipeline's
(`tasks`).

Row groups do not wait for each other, so one of several equal row groups is simulated. In a row group whose exchanges are uniform, one of
the equal ranks is simulated (`_stand_ins`). 4,096 equal ranks therefore take as long as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchmarks.distributed.tasks import COMPUTE, Schedule, Task
from fastkron_py.distributed.plan.cost import sampled_ranks
from fastkron_py.distributed.plan.layout import chunk_offsets, widths
from fastkron_py.distributed.plan.planner import Plan
from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import value_error

NEVER: Final = math.inf


class Event(NamedTuple):
    """A task of a rank as it took place, from start to stop in seconds; an exchange without its barriers."""

    rank: int
    stream: str
    what: str
    chunk: int
    start: float
    stop: float


@dataclass
class Usage:
    """A rank's time, in seconds of all calls.

    Attributes:
        rank: the rank.
        ranks: how many have the same to do, with itself.
        multiplies: during which it multiplies, slowed down where an exchange moves bytes.
        copies: during which it packs or unpacks.
        exchanges: during which exchanges move bytes.
        hidden: of these, during which it multiplies or copies.
        idle: during which it neither multiplies nor copies, up to its own end.
        lost: by which exchanges have made multiplies and copies longer.
    """

    rank: int
    ranks: int
    multiplies: float = 0.0
    copies: float = 0.0
    exchanges: float = 0.0
    hidden: float = 0.0
    idle: float = 0.0
    lost: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """A plan as simulated.

    Attributes:
        seconds: of one call, on the slowest rank; of several in a loop their mean.
        usages: of the simulated ranks, by rank.
        events: of the same, by start.
    """

    seconds: float
    usages: tuple[Usage, ...]
    events: tuple[Event, ...]


def simulate(plan: Plan, *, calls: int = 1, scale: float = 1.0, slow: Mapping[int, float] | None = None) -> Simulation:
    """Simulate the schedule that `fastkron_py.distributed.pipeline` runs.

    Args:
        plan: of the simulated product; of gradients, the forward pass.
        calls: how often the product is computed, one call after the other: while a GPU works, its processor begins the next.
        scale: of the modelled time of multiplies, where they have been measured on one GPU.
        slow: how many times longer multiplies and copies take, by rank; 1 where it is not given.

    Returns:
        Seconds, usage of ranks, and events.

    Raises:
        TypeError: calls is not an integer.
        ValueError: calls or scale that are not positive, or slow with a rank that the plan does not have, or a factor that is not positive.

    Example:
        >>> found = simulate(plan(Problem(128, (64,) * 4, (64,) * 4), (1, 2)), slow={1: 1.5})
        >>> [usage.rank for usage in found.usages]
        [0, 1]
    """
    if check_integer("calls", calls) < 1:
        raise value_error("calls", "a positive number", calls)
    if not 0 < scale < NEVER:
        raise value_error("scale", "a positive number", scale)
    slow = dict(slow or {})
    for rank, slowdown in slow.items():
        if rank not in range(plan.world_size) or not 0 < slowdown < NEVER:
            raise value_error("slow", f"positive factors of ranks 0 to {plan.world_size - 1}", slow)
    seconds, usages, events = 0.0, list[Usage](), list[Event]()
    for group, count in _groups(plan, slow).items():
        own = {position: slow[rank] for position in range(plan.parts) if (rank := plan.rank(group, position)) in slow} if slow else {}
        ranks = _stand_ins(plan, group, own)
        made = Schedule(plan, group, list(ranks), [own.get(r, 1.0) for r in ranks], scale)
        for _ in range(calls):
            made.call()
        run = _Run(made.tasks, [Usage(plan.rank(group, r), count * number) for r, number in ranks.items()])
        run.finish()
        seconds = max(seconds, run.now)
        usages += run.usages
        events += run.events
    return Simulation(seconds / calls, tuple(sorted(usages, key=lambda u: u.rank)), tuple(sorted(events, key=lambda e: (e.start, e.rank))))


def _groups(plan: Plan, slow: Mapping[int, float]) -> dict[int, int]:
    """Row groups that are simulated, and how many each stands for: those with slow ranks, and one of each number of rows."""
    found = {plan.place(rank)[0]: 1 for rank in slow}
    first: dict[int, int] = {}
    for group, rows in enumerate(widths(chunk_offsets(plan.problem.m, plan.row_groups))):
        if group not in found or group in first.values():
            equal = first.setdefault(rows, group)
            found[equal] = found.get(equal, 0) + 1
    return found


def _stand_ins(plan: Plan, group: int, slow: Mapping[int, float]) -> dict[int, int]:
    """Positions in a row group that are simulated, and how many each stands for.

    Where all exchanges are uniform, one rank stands for all but the slow ones. Else all of 64 ranks are simulated, and of more some: each
    stands for itself and those up to the next.
    """
    if plan.is_local:
        found = {0} if len(set(widths(plan.way.stages[0].offsets))) == 1 else set(range(plan.parts))
    else:
        found = {r for legs in plan.legs(group) for leg in legs for r in sampled_ranks(leg.exchange)}
    if found == {0}:
        plain = next((r for r in range(plan.parts) if r not in slow), None)
        return ({} if plain is None else {plain: plan.parts - len(slow)}) | dict.fromkeys(slow, 1)
    ordered = sorted(found | set(slow))
    return {r: following - r for r, following in zip(ordered, [*ordered[1:], plan.parts], strict=True)}


class _Running(NamedTuple):
    """A task at work on a lane."""

    number: int
    start: float


class _Run:
    """The tasks of one row group, done.

    A *lane* takes tasks one after the other: the compute stream of each simulated rank, by its index; an exchange's stream, by name.
    """

    def __init__(self, tasks: list[Task], usages: list[Usage]) -> None:
        self.now = 0.0
        self.usages = usages
        self.events: list[Event] = []
        self._tasks = tasks
        self._ranks = range(len(usages))
        self._done: list[dict[int | str, float]] = [{} for _ in tasks]  # by lane, when
        streams = dict.fromkeys(task.stream for task in tasks if task.stream != COMPUTE)
        self._queues: dict[int | str, list[int]] = {r: self._of(COMPUTE) for r in self._ranks} | {s: self._of(s) for s in streams}
        self._running: dict[int | str, _Running] = {}
        self._free: dict[int | str, float] = {}  # by lane, when its latest barrier has passed
        self._left: dict[int | str, float] = {}  # undisturbed seconds of the running tasks

    def _of(self, stream: str) -> list[int]:
        """Numbers of a stream's tasks, the last first."""
        return [i for i, task in reversed(list(enumerate(self._tasks))) if task.stream == stream]

    def finish(self) -> None:
        """Do all tasks."""
        while any(self._queues.values()) or self._running:
            following = self._begin()
            rates = self._rates()
            ends = {lane: self._seconds_left(lane, rate) for lane, rate in rates.items()}
            step = min([following - self.now, *ends.values()])
            if step == NEVER:
                raise RuntimeError("tasks wait for each other")
            self._advance(step, rates)
            for lane in [lane for lane, seconds in ends.items() if seconds <= step]:
                self._end(lane)
        last: dict[int | str, float] = {}
        for done in self._done:
            for lane, time in done.items():
                last[lane] = max(last.get(lane, 0.0), time)
        self.now = max([self.now, *last.values()])
        for r in self._ranks:
            usage = self.usages[r]
            usage.idle = last.get(r, 0.0) - usage.multiplies - usage.copies

    def _begin(self) -> float:
        """Begin all tasks that can begin; the time of the next that will, of those that are known."""
        following = NEVER
        for lane, queue in self._queues.items():
            if queue and lane not in self._running:
                ready = self._ready(lane, self._tasks[queue[-1]])
                if ready <= self.now:
                    number = queue.pop()
                    task = self._tasks[number]
                    self._running[lane] = _Running(number, self.now)
                    self._left[lane] = task.seconds[lane] if isinstance(lane, int) else task.seconds[0]
                else:
                    following = min(following, ready)
        return following

    def _ready(self, lane: int | str, task: Task) -> float:
        """When a task's stream may begin it; never, while a task before it is not done."""
        found = task.issued
        for number in task.after:
            done, stream = self._done[number], self._tasks[number].stream
            if stream != COMPUTE:
                found = max(found, done.get(stream, NEVER))
            elif isinstance(lane, int):
                found = max(found, done.get(lane, NEVER))
            else:
                found = max(found, max(done.values())) if len(done) == len(self._ranks) else NEVER
        return max(found, self._free.get(lane, 0.0)) + task.barrier

    def _rates(self) -> dict[int | str, float]:
        """Speed of each running task: a share of its own."""
        moving = [lane for lane in self._running if isinstance(lane, str)]
        taken = sum([self._tasks[self._running[lane].number].taken for lane in moving]) / max(1, len(moving))
        return {lane: 1 - taken if isinstance(lane, int) else 1 / len(moving) for lane in self._running}

    def _seconds_left(self, lane: int | str, rate: float) -> float:
        left = self._left[lane]
        return left / rate if rate else NEVER if left else 0.0

    def _advance(self, step: float, rates: Mapping[int | str, float]) -> None:
        moves = any(isinstance(lane, str) for lane in self._running)
        for r in self._ranks:
            usage = self.usages[r]
            usage.exchanges += step * moves
            if r in self._running:
                is_multiply = self._tasks[self._running[r].number].what == "multiply"
                usage.multiplies += step * is_multiply
                usage.copies += step * (not is_multiply)
                usage.hidden += step * moves
                usage.lost += step * (1 - rates[r])
        for lane, rate in rates.items():
            self._left[lane] -= step * rate
        self.now += step

    def _end(self, lane: int | str) -> None:
        number, start = self._running.pop(lane)
        task = self._tasks[number]
        self._done[number][lane] = self._free[lane] = self.now + task.barrier
        if task.what != "wait":
            ranks = [lane] if isinstance(lane, int) else self._ranks
            self.events += [Event(self.usages[r].rank, task.stream, task.what, task.chunk, start, self.now) for r in ranks]
