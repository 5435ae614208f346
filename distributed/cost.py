"""The cost of a product for the busiest rank: steps, memory and time; and the figures of links and of a transport that a plan uses.

The figures of `NVLINK` are fitted to NCCL's all-to-all on eight H200 (1 MiB to 1 GiB a rank, within 7%), and to products on two and four
of them: memory, copies, copies to and from peers' memory with their barriers, and the speed of multiplies beside an exchange. The
processor's lie between two hosts, one of them twice as slow as the other. Those of links between hosts are a data sheet's bandwidth and a
guess at latency, meant to be replaced by the user's own.
docs/how_it_works/distributed.md has the table of modelled and measured times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from fastkron_py.distributed.layout import Exchange, Leg, Way, by_rows, chunk_offsets, chunk_rows, even_offsets, widths
from fastkron_py.distributed.problem import Problem
from fastkron_py.kron.families import fragments, tile
from fastkron_py.kron.planner import plans
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.gpu import HOPPER

if TYPE_CHECKING:
    import torch

BANDWIDTHS: Final = (
    "bandwidth", "pair_bandwidth", "host_bandwidth", "memory", "copy_memory", "ranks_per_host", "direct_bandwidth"
)  # fmt: skip
CPU: Final = ("cpu_call", "cpu_chunk", "cpu_exchange", "cpu_direct_exchange", "cpu_gradients")
# The model of launches is asked for very many rows; the cost of a launch by itself is added here.
MANY_ROWS: Final = 1 << 20
LAUNCH_SECONDS: Final = 4e-6
# Whose products take the same time in half precision as in float32: times of plans were fitted so.
PLANNED_GPU: Final = replace(HOPPER, has_shared_operands=False)
# Seconds for each element of a copy that transposes, which torch makes element by element whatever their size (on an H200).
TRANSPOSE_SECONDS: Final = 7.5e-12
# Pairs of ranks looked at for the largest cost: all of 64 ranks, some senders of more. Of a uniform exchange one tells all.
PAIRS: Final = 1 << 12
# Buffers beside x and the result: an operand and the result of one launch for the next; with several chunks also the operand of the next
# one and the product of the one before.
BUFFERS: Final = (2, 4, 5)


@dataclass(frozen=True)
class Links:
    """Bandwidth in bytes a second, each way and for each GPU, and latency in seconds.

    Attributes:
        bandwidth: inside a host.
        pair_bandwidth: of an exchange between two ranks of a host, which is slower than one among more (at most bandwidth).
        latency: of a collective.
        message: of each message in it, inside a host.
        host_bandwidth: between hosts.
        host_message: of each message between hosts.
        ranks_per_host: ranks ``i * ranks_per_host`` up to ``(i + 1) * ranks_per_host`` share host i.
        memory: of a GPU's own memory, in multiplies.
        copy_memory: of the same in copies of long runs, read and written together.
        beside: how fast multiplies go on beside an all-to-all inside a host, as a share of their speed without one.
        beside_direct: the same beside copies to and from the peers' memory.
        direct_bandwidth: of copies to and from the peers' memory, inside a host.
        direct_latency: of the barriers before and after them, beside multiplies.
        cpu_call: processor time of a product, before its first chunk.
        cpu_chunk: of each chunk of rows, for its multiplies.
        cpu_exchange: of each exchange of a chunk.
        cpu_direct_exchange: in place of cpu_exchange, where ranks reach into each other's memory.
        cpu_gradients: of a chunk's gradients, with their exchanges.
    """

    bandwidth: float = 330e9
    pair_bandwidth: float = 307e9
    latency: float = 26e-6
    message: float = 1e-6
    host_bandwidth: float = 45e9
    host_message: float = 2e-6
    ranks_per_host: int = 8
    memory: float = 3.3e12
    copy_memory: float = 4.1e12
    beside: float = 0.5
    beside_direct: float = 0.8
    direct_bandwidth: float = 380e9
    direct_latency: float = 30e-6
    cpu_call: float = 0.15e-3
    cpu_chunk: float = 0.17e-3
    cpu_exchange: float = 0.17e-3
    cpu_direct_exchange: float = 0.14e-3
    cpu_gradients: float = 1.0e-3

    def __post_init__(self) -> None:
        for name in BANDWIDTHS:
            if not getattr(self, name) > 0:
                raise value_error(name, "a positive number", getattr(self, name))
        for name in ("beside", "beside_direct"):
            if not 0 <= getattr(self, name) <= 1:
                raise value_error(name, "a share from 0 to 1", getattr(self, name))
        for name in ("latency", "message", "host_message", "direct_latency", *CPU):
            if not getattr(self, name) >= 0:
                raise value_error(name, "a number of seconds, not negative", getattr(self, name))

    def exchange_seconds(self, near: float, far: float, near_messages: int, far_messages: int) -> float:
        """Time of a rank's part in an exchange: bytes and messages to ranks of its own host, and to others."""
        if near_messages + far_messages == 0:
            return 0.0
        bandwidth = min(self.bandwidth, self.pair_bandwidth) if near_messages + far_messages == 1 else self.bandwidth
        moved = max(near / bandwidth, far / self.host_bandwidth)
        return self.latency + near_messages * self.message + far_messages * self.host_message + moved


NVLINK: Final = Links()


@lru_cache(maxsize=64)
def links_for(link_bandwidth: float, bandwidth: float) -> Links:
    """`NVLINK` for other GPUs, in the ratio of their records to Hopper's.

    Args:
        link_bandwidth: as in `runtime.gpu.GPU`.
        bandwidth: of the memory, as there.
    """
    link, memory = link_bandwidth / HOPPER.link_bandwidth, bandwidth / HOPPER.bandwidth
    return replace(
        NVLINK,
        bandwidth=NVLINK.bandwidth * link,
        pair_bandwidth=NVLINK.pair_bandwidth * link,
        direct_bandwidth=NVLINK.direct_bandwidth * link,
        memory=NVLINK.memory * memory,
        copy_memory=NVLINK.copy_memory * memory,
    )


class Site(NamedTuple):
    """The row groups of a grid, the ranks that exchange with each other; with left these are its columns."""

    groups: int
    size: int  # ranks of each
    stride: int  # from one of its ranks to the next
    rows: int  # of x that a group holds, at most


def site_of(problem: Problem, grid: tuple[int, int]) -> Site:
    """The row groups of a grid."""
    groups, size, stride = (grid[1], grid[0], grid[1]) if problem.left else (*grid, 1)
    return Site(groups, size, stride, -(-problem.m // groups))


class TransportModel:
    """The figures of a transport that a plan uses, without tensors. The defaults hold for contiguous parts sent without packing.

    Attributes:
        name: in plans, and for ``plan(transport=...)``.
        label: how parts of an exchange go, in a printed plan.
        multiplies: of whole rows it takes over the product as well, which may read and write columns in blocks.
        slots: buffers on each rank beside a product's, each as large as the most that the exchange of a chunk brings a rank.
    """

    name: str
    label: str
    multiplies: bool = False
    slots: int = 0

    def suits(self, problem: Problem, site: Site, whole_rows: bool, chunks: int, links: Links) -> bool:
        """Whether a plan may choose it, unasked, for whole rows or for stages, in this number of chunks."""
        return True

    def links(self, links: Links) -> Links:
        """The links as exchanges find them: bandwidth, latency, `Links.beside`, `Links.cpu_exchange`."""
        return links

    def copies(self, transposed: bool) -> tuple[int, int]:
        """Copies beside the exchange, in long runs and transposing: whether a multiply has left blocks transposed."""
        return 0, 0


FALLBACK: Final = "packed"
DIRECT: Final = "peer memory"
TRANSPORTS: Final[dict[str, TransportModel]] = {}
"""Transports by name, in the order in which a plan prefers them where they cost the same. `fastkron_py.distributed.transport` fills it."""


@lru_cache(maxsize=1024)
def links_of(transport: TransportModel, links: Links) -> Links:
    """`TransportModel.links`, kept."""
    return transport.links(links)


@lru_cache(maxsize=4096)
def _launches(ps: tuple[int, ...], qs: tuple[int, ...], dtype: torch.dtype) -> tuple[float, int]:
    """Modelled elements moved for each row, and the number of launches."""
    whole = contiguous_problem(list(zip(ps, qs, strict=True)), MANY_ROWS, 1, dtype, PLANNED_GPU)
    cost, launches = plans(replace(whole, families=(tile.name, fragments.name)))[0]
    return cost, len(launches)


def multiply_seconds(rows: int, problem: Problem, start: int, stop: int, links: Links) -> float:
    """Time of one rank's multiply of rows, slices of factors start to stop, on a GPU, by the model that chooses its launches."""
    itemsize, seconds = problem.dtype.itemsize, 0.0
    for run in problem.runs(start, stop):
        moved, launches = _launches(run.ps, run.qs, problem.dtype)
        seconds += rows * run.rows * moved * itemsize / links.memory + launches * LAUNCH_SECONDS
    return seconds


def copies_seconds(copies: tuple[int, int], size: float, itemsize: int, links: Links) -> float:
    """Time of copies (in long runs, transposing) of some bytes on a GPU; each reads and writes them once."""
    runs, transposes = copies
    run = 2 * size / links.copy_memory
    return runs * run + transposes * max(run, size / itemsize * TRANSPOSE_SECONDS)


@dataclass(frozen=True)
class Step:
    """One exchange with the multiply before it, of the rank that has most to do.

    Attributes:
        factors: first factor and one past the last, which are multiplied; None where blocks are only exchanged.
        leg: the exchange that follows; None without.
        links: as the exchange finds them.
        multiply_seconds: modelled.
        copy_seconds: modelled, of packing and unpacking, on the GPU that multiplies.
        exchange_seconds: modelled, of the links, all rows in one chunk.
        bytes_sent: to other ranks.
        bytes_to_hosts: of these, to ranks of other hosts.
        messages: to other ranks, of each chunk.
        messages_to_hosts: of these, to ranks of other hosts.
    """

    factors: tuple[int, int] | None
    leg: Leg | None
    links: Links
    multiply_seconds: float
    copy_seconds: float = 0.0
    exchange_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_to_hosts: int = 0
    messages: int = 0
    messages_to_hosts: int = 0


def stage_steps(problem: Problem, way: Way, site: Site, transport: TransportModel, links: Links) -> Iterator[Step]:
    """The steps of stages with exchanges between them."""
    if way.first is not None:
        yield _step(problem, None, Leg(way.first, site.rows), 0.0, site, transport, links)
    for stage in way.stages:
        most = max(widths(stage.offsets)) // stage.p
        seconds = multiply_seconds(site.rows * most, problem, stage.start, stage.stop, links)
        leg = None if stage.exchange is None else Leg(stage.exchange, site.rows)
        yield _step(problem, (stage.start, stage.stop), leg, seconds, site, transport, links)


def row_steps(problem: Problem, site: Site, transport: TransportModel, links: Links) -> Iterator[Step]:
    """The steps of a product by whole rows: an exchange to rows, the product, an exchange back."""
    there, back = by_rows(site.rows, math.prod(problem.inner), math.prod(problem.outer), site.size)
    most = max(widths(even_offsets(site.rows, site.size)))
    seconds = multiply_seconds(most, problem, 0, len(problem.ps), links)
    yield _step(problem, None, Leg(there, 1), 0.0, site, transport, links)
    yield _step(problem, (0, len(problem.ps)), Leg(back, 1, back=True), seconds, site, transport, links)


def _step(
    problem: Problem, factors: tuple[int, int] | None, leg: Leg | None, multiply: float, site: Site, transport: TransportModel, links: Links
) -> Step:
    if leg is None:
        return Step(factors, None, links, multiply)
    copies = transport.copies(leg.exchange.transposed)
    unit, paid = problem.dtype.itemsize, links_of(transport, links)
    loads = [load(leg, r, site, unit, links) for r in sampled_ranks(leg.exchange)]
    copy = max([copies_seconds(copies, each.block, unit, links) for each in loads])
    move = max([each.seconds(paid) for each in loads])
    sent, far = max([each.near + each.far for each in loads]), max([each.far for each in loads])
    messages, far_messages = max([each.near_messages + each.far_messages for each in loads]), max([each.far_messages for each in loads])
    return Step(factors, leg, paid, multiply, copy, move, sent, far, messages, far_messages)


class Load(NamedTuple):
    """A rank's part in an exchange: bytes and messages to ranks of its own host, and to others."""

    near: int
    far: int
    near_messages: int
    far_messages: int
    block: int  # bytes before or after, the larger

    def seconds(self, paid: Links) -> float:
        """Time of it, by the links as the exchange finds them."""
        return paid.exchange_seconds(self.near, self.far, self.near_messages, self.far_messages)


def load(leg: Leg, rank: int, site: Site, itemsize: int, links: Links) -> Load:
    """The elements that a rank, by its position in a row group, sends in an exchange."""
    host = _host(rank, site.size, site.stride, links.ranks_per_host)
    inside = sum([leg.size(rank, peer) for peer in host if peer != rank])
    near, count = _messages(leg, rank, host)
    return Load(inside * itemsize, (leg.sent(rank) - inside) * itemsize, near, count - near, max(leg.held(rank), leg.gets(rank)) * itemsize)


def sampled_ranks(exchange: Exchange) -> Sequence[int]:
    """Positions of the ranks that are looked at: one of a uniform exchange, else all of 64 and some of more."""
    if exchange.uniform:
        return range(1)
    parts = exchange.ranks
    samples = max(2, PAIRS // parts)
    return sorted({parts * i // samples for i in range(samples)} | {parts - 1})


def _host(position: int, parts: int, stride: int, ranks_per_host: int) -> range:
    """Positions in a row group that share this one's host, if groups begin where hosts do."""
    near = max(1, ranks_per_host // stride)
    low = position // near * near
    return range(low, min(parts, low + near))


def _messages(leg: Leg, sender: int, host: range) -> tuple[int, int]:
    """(Receivers on a sender's host, all receivers) other than the sender itself."""
    if leg.exchange.uniform:
        return (len(host) - 1, leg.exchange.ranks - 1) if leg.held(sender) else (0, 0)
    peers = [p for p in range(leg.exchange.ranks) if p != sender and leg.size(sender, p)]
    return sum(p in host for p in peers), len(peers)


@lru_cache(maxsize=4096)
def best_cuts(problem: Problem, rows: int, parts: int, transport: TransportModel, links: Links) -> tuple[int, ...]:
    """Stages of least modelled time, by dynamic programming over how many of the first factors are left."""
    ps, qs, itemsize = problem.inner, problem.outer, problem.dtype.itemsize
    count, paid = len(ps), links_of(transport, links)
    copies, near = transport.copies(True), min(links.ranks_per_host, parts)
    best: dict[int, tuple[float, tuple[int, ...]]] = {count: (0.0, ())}
    for left in range(count - 1, -1, -1):
        found = []
        for stop in range(left + 1, count + 1):
            before, cuts = best[stop]
            slices = math.prod(ps[:left]) * math.prod(qs[stop:])
            share = rows * -(-slices // parts)
            sent = share * math.prod(qs[left:stop]) * itemsize
            cost = multiply_seconds(share, problem, left, stop, links) + copies_seconds(copies, sent, itemsize, links)
            cost += paid.exchange_seconds(sent * (near - 1) / parts, sent * (parts - near) / parts, near - 1, parts - near)
            found.append((before + cost, (*cuts, stop - left)))
        best[left] = min(found)
    return best[0][1]


def memory_needed(problem: Problem, way: Way | None, site: Site, chunks: int) -> int:
    """Bytes: x, the result, and buffers for the chunks under way; with gradients also theirs, and saved operands.

    Args:
        problem: the product.
        way: the stages; None by rows.
        site: where.
        chunks: of rows.
    """
    rows, parts = site.rows, site.size
    inner, outer = math.prod(problem.inner), math.prod(problem.outer)
    blocks = [max(widths(chunk_offsets(n, parts))) for n in (inner, outer)]
    sizes = chunk_rows(rows, chunks, parts if way is None else 1)
    chunk = max(sizes)
    if way is None:
        share = -(-chunk // parts)
        buffer = max(max(blocks) * chunk, share * max(inner, outer))
        saved = inner * -(-rows // parts)
    else:
        operands = [max(widths(s.offsets)) for s in way.stages]
        products = [max(widths(s.offsets)) // s.p * s.q for s in way.stages]
        buffer = chunk * max(*operands, *products)
        saved = rows * sum(operands if way.first else operands[1:])
    total = rows * sum(blocks) + BUFFERS[min(len(sizes), len(BUFFERS)) - 1] * buffer
    if problem.gradients:
        total += rows * sum(blocks) + saved
    matrices = [p * q for i, (p, q) in enumerate(zip(problem.ps, problem.qs, strict=True)) if i not in problem.identities]
    factors = sum(matrices) * (2 if problem.gradients else 1)
    return (total + factors) * problem.dtype.itemsize


def cpu_seconds(steps: Sequence[Step], chunks: int, links: Links) -> float:
    """Seconds that the processor needs to launch all multiplies and exchanges. Arguments as in `seconds_needed`."""
    exchanges = [s for s in steps if s.leg is not None]
    chunks = chunks if exchanges else 1  # one column needs no chunks
    each = links.cpu_chunk + sum(s.links.cpu_exchange for s in exchanges)
    return links.cpu_call + chunks * each


def seconds_needed(steps: Sequence[Step], sizes: Sequence[int], links: Links) -> float:
    """Seconds of a product: the longer of the time of GPU and links and the processor's time to launch their work.

    GPU and links: with one chunk the sum. With more the longer of the two, and the last chunk's share of the other; or all of the GPU's
    work and what exchanges take of it, which move bytes through the same memory, and by kernels of their own: the longer.

    Args:
        steps: of all rows.
        sizes: rows of each chunk.
        links: between ranks.
    """
    multiply = sum(s.multiply_seconds + s.copy_seconds for s in steps)
    exchange = sum(s.exchange_seconds for s in steps)
    chunks, rows = len(sizes), sum(sizes)
    begun = cpu_seconds(steps, chunks, links)
    if chunks == 1 or rows == 0:
        return max(begun, multiply + exchange)
    again = sum(s.links.exchange_seconds(0, 0, s.messages - s.messages_to_hosts, s.messages_to_hosts) for s in steps)
    exchange += (chunks - 1) * again
    alone = max(sizes[0], sizes[-1]) / rows
    beside = multiply
    for s in steps:
        taken = s.links.exchange_seconds(s.bytes_sent, 0, s.messages, 0)  # messages to other hosts are slow
        beside += taken * (1 - s.links.beside * (1 - alone))
    return max(begun, beside, max(multiply, exchange) + min(multiply, exchange) * alone)


# Of both passes, relative to the forward pass: dx and the factors' gradients are multiplied, dy goes to whole rows, and dx back to columns.
BOTH_MULTIPLIES: Final = 3
BOTH_MOVES: Final = 2


def training_seconds(steps: Sequence[Step], sizes: Sequence[int], links: Links) -> float:
    """Seconds of a product and its gradients. Arguments as in `seconds_needed`."""
    both = [
        replace(
            s,
            multiply_seconds=BOTH_MULTIPLIES * s.multiply_seconds,
            copy_seconds=BOTH_MOVES * s.copy_seconds,
            exchange_seconds=BOTH_MOVES * s.exchange_seconds,
            bytes_sent=BOTH_MOVES * s.bytes_sent,
        )
        for s in steps
    ]
    return seconds_needed(both, sizes, replace(links, cpu_chunk=links.cpu_chunk + links.cpu_gradients))
