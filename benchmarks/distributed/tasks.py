"""The tasks of a plan in the order in which ranks begin them, with modelled times, for `simulator`.

`fastkron_py.distributed.plan.schedule.wave` is the order itself. The pipeline runs it with tensors; `Schedule` with tasks. Its generators
pause where those of the pipeline do, so a task has the stream and the waits of the real work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fastkron_py.distributed.plan.cost import copies_seconds, links_of, load, multiply_seconds, site_of, transport_for
from fastkron_py.distributed.plan.layout import even_offsets, widths
from fastkron_py.distributed.plan.planner import Plan
from fastkron_py.distributed.plan.schedule import Work, wave

# The streams of a rank. Copies to and from the peers' memory have two, which share the links.
COMPUTE: Final = "compute"
EXCHANGE: Final = "exchange"
PUSH: Final = "push"
PULL: Final = "pull"


class Task(NamedTuple):
    """Work of one stream, which takes its tasks in the order in which the processor issues them.

    Attributes:
        stream: `COMPUTE`, each rank's own; or an exchange's, of all ranks of the row group together.
        what: "multiply", "copy", "exchange"; or "wait", which takes no time.
        chunk: of the rows.
        issued: when the processor has begun it, in seconds; it does not wait for the GPU.
        after: tasks that have to be done before, by their numbers: `COMPUTE` waits for its own rank's, an exchange for those of all ranks.
        seconds: of each rank, undisturbed; of an exchange one figure for all.
        barrier: seconds before an exchange moves bytes, and again after; exchanges of other streams move theirs meanwhile.
        taken: share of the speed of multiplies and copies that an exchange takes while it moves bytes.
    """

    stream: str
    what: str
    chunk: int
    issued: float
    after: tuple[int, ...]
    seconds: tuple[float, ...]
    barrier: float = 0.0
    taken: float = 0.0


class _Move(NamedTuple):
    """The exchange of one chunk.

    Attributes:
        before: copies of each rank, which pack.
        after: copies of each rank, which unpack.
        seconds: of the links.
        barrier: as in `Task`.
        taken: as in `Task`.
        cpu: seconds of the processor.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    seconds: float
    barrier: float
    taken: float
    cpu: float


@dataclass
class Schedule:
    """A row group's product, or several one after the other, as tasks in the order in which every rank issues them.

    Attributes:
        plan: of the product.
        group: the row group.
        ranks: positions in it, of the ranks whose tasks these are.
        slowdowns: of each of these ranks: how many times longer its multiplies and copies take.
        scale: of the modelled time of multiplies, where they have been measured.
        tasks: so far.
    """

    plan: Plan
    group: int
    ranks: Sequence[int]
    slowdowns: Sequence[float]
    scale: float = 1.0
    tasks: list[Task] = field(default_factory=list)
    _clock: float = 0.0  # the processor's
    _last: tuple[int, ...] = ()  # the latest task of the compute stream
    _taken: int = 0  # slots, counted on and on
    _free: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot: the task after which it may be written
    _moves: dict[tuple[int, int], _Move] = field(default_factory=dict)  # by exchange and rows
    _multiplies: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)  # by step and rows

    def __post_init__(self) -> None:
        plan, problem = self.plan, self.plan.problem
        self._site = site_of(problem, plan.grid)
        self._sizes = [plan.rows(self.group)] if plan.is_local else plan.chunk_rows(plan.rows(self.group))
        self._legs = [] if plan.is_local else plan.legs(self.group)
        self._multiplying = sum([step.factors is not None for step in plan.steps])

    def call(self) -> None:
        """Add a product, whose processor time begins where that of the one before has ended."""
        plan = self.plan
        if not plan.rows(self.group):
            return
        self._clock += plan.links.cpu_call
        if plan.is_local:
            self._multiply(0, 0, ())
            return
        ready, ends = self._last, list[int]()
        chunks = range(len(self._sizes))
        if plan.by_rows and plan.transport_model.multiplies and not plan.problem.identities:  # as in `Pipeline._is_taken_over`
            wave([self._taken_over(c, ready, ends) for c in chunks])
        else:
            wave([self._exchanged(c) for c in chunks])
        for number in ends:
            self._receive(len(plan.steps) - 1, number)

    def _exchanged(self, c: int) -> Work:
        """As `Pipeline._by_stages` and `_by_rows`."""
        for i, step in enumerate(self.plan.steps):
            if step.factors is not None:
                self._multiply(i, c, ())
            self._compute("copy", c, self._move(i, c).before, ())
            number = self._exchange(EXCHANGE, i, c, self._last)
            yield
            self._receive(i, number)

    def _taken_over(self, c: int, ready: tuple[int, ...], ends: list[int]) -> Work:
        """As `WholeRows.forward`: columns are pushed to a slot, and the product is pulled from another."""
        slots = self.plan.transport_model.slots
        operand, product = self._taken % slots, (self._taken + 1) % slots
        self._taken += 2
        pushed = self._exchange(PUSH, 0, c, (*ready, *self._free.get(operand, ())))
        yield
        self._multiply(1, c, (pushed, *self._free.get(product, ())))
        self._free[operand] = self._last
        pulled = self._exchange(PULL, 1, c, self._last)
        self._free[product] = (pulled,)
        ends.append(pulled)

    def _compute(self, what: str, c: int, seconds: tuple[float, ...], after: tuple[int, ...]) -> None:
        """Add a task of the compute stream; none where there is nothing to do or to wait for."""
        if after or any(seconds):
            self._last = (len(self.tasks),)
            self.tasks.append(Task(COMPUTE, what, c, self._clock, after, seconds))

    def _multiply(self, i: int, c: int, after: tuple[int, ...]) -> None:
        self._clock += self.plan.links.cpu_chunk / self._multiplying
        self._compute("multiply", c, self._multiply_seconds(i, self._sizes[c]), after)

    def _exchange(self, stream: str, i: int, c: int, after: tuple[int, ...]) -> int:
        move = self._move(i, c)
        self._clock += move.cpu
        self.tasks.append(Task(stream, "exchange", c, self._clock, after, (move.seconds,), move.barrier, move.taken))
        return len(self.tasks) - 1

    def _receive(self, i: int, number: int) -> None:
        """Wait for an exchange, and unpack; of rows that are taken over nothing is packed."""
        task = self.tasks[number]
        unpacked = self._move(i, task.chunk).after
        self._compute("copy" if any(unpacked) else "wait", task.chunk, unpacked, (number,))

    def _multiply_seconds(self, i: int, rows: int) -> tuple[float, ...]:
        """Of each rank, for a chunk of these rows."""
        found = self._multiplies.get((i, rows))
        if found is None:
            plan = self.plan
            start, stop = plan.steps[i].factors or (0, 0)
            if plan.by_rows:
                each = widths(even_offsets(rows, plan.parts))
            else:
                stage = next(s for s in plan.way.stages if s.start == start)
                each = [rows * width // stage.p for width in widths(stage.offsets)]
            ranks = zip(self.ranks, self.slowdowns, strict=True)
            times = [slow * self.scale * multiply_seconds(each[r], plan.problem, start, stop, plan.links) for r, slow in ranks]
            found = self._multiplies[i, rows] = tuple(times)
        return found

    def _move(self, i: int, c: int) -> _Move:
        """Exchange i of a chunk, by the same figures as `cost.Step`."""
        key = i, self._sizes[c]
        if key not in self._moves:
            self._moves[key] = self._new_move(i, c)
        return self._moves[key]

    def _new_move(self, i: int, c: int) -> _Move:
        plan, leg = self.plan, self._legs[i][c]
        unit = plan.problem.dtype.itemsize
        transport = transport_for(plan.transport_model, leg.exchange)
        paid = links_of(transport, plan.links, plan.parts)
        rounds = transport.rounds(self._sizes[c] if leg.exchange.transposed else -(-self._sizes[c] // plan.parts))
        loads = [load(leg, r, self._site, unit, plan.links) for r in self.ranks]
        seconds = max([each.seconds(paid) for each in loads]) + rounds * paid.round
        # Bytes for other hosts go slowly, and take as much from multiplies as if they stayed in this one.
        inside = max([paid.exchange_seconds(each.near + each.far, 0, each.near_messages + each.far_messages, 0) for each in loads])
        taken = (1 - paid.beside) * min(1.0, (inside + rounds * paid.round) / seconds) if seconds else 0.0
        runs, transposes = transport.copies(leg.exchange.transposed)
        blocks = list(zip([each.block for each in loads], self.slowdowns, strict=True))
        before = tuple([slow * copies_seconds((runs * leg.back, transposes), size, unit, plan.links) for size, slow in blocks])
        after = tuple([slow * copies_seconds((runs * (not leg.back), 0), size, unit, plan.links) for size, slow in blocks])
        # Copies between barriers do not keep the links from others; a collective does, with its latency.
        barrier = paid.latency / 2 if transport.slots and seconds else 0.0
        return _Move(before, after, seconds - 2 * barrier, barrier, taken, paid.cpu_exchange + rounds * paid.cpu_message)
