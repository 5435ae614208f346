"""What a way of multiplying costs the rank that has most to do: steps, memory, time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fastkron_py.distributed.blocks import Leg, Way, by_rows, chunk_offsets, chunk_rows, even_offsets, widths
from fastkron_py.distributed.cost import Links, copies_seconds, multiply_seconds
from fastkron_py.distributed.problem import Problem

# Pairs of ranks looked at for the largest cost: all of 64 ranks, some senders of more. Of a uniform exchange one tells all.
PAIRS: Final = 1 << 12
# What an exchange between stages copies: it unpacks long runs, and packs a multiply's product, which is turned.
STAGE_COPIES: Final = (1, 1)
# Buffers beside x and the result: an operand and what one launch leaves the next; the operand of the next chunk too, and the product of the
# one before, where there are several.
BUFFERS: Final = (2, 4, 5)
# Of direct stores: what a wave of chunks has under way at a time.
SLOTS: Final = 6


@dataclass(frozen=True)
class Step:
    """One exchange with the multiply before it, of the rank that has most to do.

    Attributes:
        factors: first factor and one past the last, which are multiplied; None where blocks are only exchanged.
        leg: the exchange that follows; None without.
        multiply_seconds: modelled.
        copy_seconds: modelled, of packing and unpacking, on the GPU that multiplies.
        exchange_seconds: modelled, of the links, all rows in one chunk.
        bytes_sent: to other ranks.
        bytes_to_hosts: of these, to ranks of other hosts.
        messages: to other ranks, of each chunk.
        messages_to_hosts: of these, to ranks of other hosts.
        calls: rounds of messages that the processor begins, of all rows; none where parts are packed or copied.
    """

    factors: tuple[int, int] | None
    leg: Leg | None
    multiply_seconds: float
    copy_seconds: float
    exchange_seconds: float
    bytes_sent: int
    bytes_to_hosts: int
    messages: int
    messages_to_hosts: int
    calls: int = 0


def stage_steps(problem: Problem, way: Way, rows: int, stride: int, links: Links) -> Iterator[Step]:
    """The steps of stages with exchanges between them.

    Args:
        problem: what is multiplied.
        way: the stages.
        rows: of x in a line.
        stride: from a rank of a line to the next.
        links: between ranks.
    """
    if way.first is not None:
        yield _step(problem, None, Leg(way.first, rows), 0.0, STAGE_COPIES, stride, links)
    for stage in way.stages:
        p, q = problem.inner[stage.start : stage.stop], problem.outer[stage.start : stage.stop]
        most = max(widths(stage.offsets)) // stage.p
        seconds = multiply_seconds(rows * most, p, q, problem.dtype.itemsize, links)
        leg = None if stage.exchange is None else Leg(stage.exchange, rows)
        yield _step(problem, (stage.start, stage.stop), leg, seconds, STAGE_COPIES, stride, links)


def row_steps(problem: Problem, rows: int, parts: int, stride: int, links: Links, *, direct: bool, messages: bool) -> Iterator[Step]:
    """The steps of a product by whole rows: an exchange to rows, the product, an exchange back.

    Args:
        problem: what is multiplied.
        rows: of x in a line.
        parts: ranks in it.
        stride: from one to the next.
        links: between ranks.
        direct: ranks reach into each other's memory.
        messages: else, runs of memory are sent as they lie; neither: parts are packed.
    """
    there, back = by_rows(rows, math.prod(problem.inner), math.prod(problem.outer), parts)
    most = max(widths(even_offsets(rows, parts)))
    seconds = multiply_seconds(most, problem.inner, problem.outer, problem.dtype.itemsize, links)
    for exchange, factors, spent, is_back in ((there, None, 0.0, False), (back, (0, len(problem.ps)), seconds, True)):
        runs = messages and exchange.in_runs and not direct
        copies = (0, 0) if direct or runs else (1, 0)  # what a rank keeps is copied beside the multiplies
        calls = most if runs else 0
        step = _step(problem, factors, Leg(exchange, 1, is_back), spent, copies, stride, links)
        yield replace(step, calls=calls, exchange_seconds=step.exchange_seconds + calls * links.round)


def _step(
    problem: Problem, factors: tuple[int, int] | None, leg: Leg | None, multiply: float, copies: tuple[int, int], stride: int, links: Links
) -> Step:
    if leg is None:
        return Step(factors, None, multiply, 0.0, 0.0, 0, 0, 0, 0)
    parts, unit = leg.exchange.ranks, problem.dtype.itemsize
    samples = max(2, PAIRS // parts)
    sampled = range(1) if leg.exchange.uniform else sorted({parts * i // samples for i in range(samples)} | {parts - 1})
    copy, move, sent, far, messages, far_messages = 0.0, 0.0, 0, 0, 0, 0
    for r in sampled:
        host = _host(r, parts, stride, links.ranks_per_host)
        inside = sum(leg.size(r, peer) for peer in host if peer != r)
        near_count, count = _messages(leg, r, host)
        bytes_out = leg.sent(r) * unit
        bytes_far = bytes_out - inside * unit
        copy = max(copy, copies_seconds(copies, max(leg.held(r), leg.gets(r)) * unit, unit, links))
        move = max(move, links.exchange_seconds(bytes_out - bytes_far, bytes_far, near_count, count - near_count))
        sent, far = max(sent, bytes_out), max(far, bytes_far)
        messages, far_messages = max(messages, count), max(far_messages, count - near_count)
    return Step(factors, leg, multiply, copy, move, sent, far, messages, far_messages)


def _host(position: int, parts: int, stride: int, ranks_per_host: int) -> range:
    """Positions of a line that share this one's host, if lines begin where hosts do."""
    near = max(1, ranks_per_host // stride)
    low = position // near * near
    return range(low, min(parts, low + near))


def _messages(leg: Leg, sender: int, host: range) -> tuple[int, int]:
    """(Receivers on a sender's host, all receivers) other than the sender itself."""
    if leg.exchange.uniform:
        return (len(host) - 1, leg.exchange.ranks - 1) if leg.held(sender) else (0, 0)
    peers = [p for p in range(leg.exchange.ranks) if p != sender and leg.size(sender, p)]
    return sum(p in host for p in peers), len(peers)


def memory_needed(problem: Problem, way: Way | None, rows: int, parts: int, chunks: int) -> int:
    """Bytes: x, the result, and buffers for the chunks under way; with gradients also theirs, and saved operands.

    Args:
        problem: what is multiplied.
        way: the stages; None by rows.
        rows: of x in a line.
        parts: ranks in it.
        chunks: of rows.
    """
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
    factors = sum(p * q for p, q in zip(problem.ps, problem.qs, strict=True)) * (2 if problem.gradients else 1)
    return (total + factors) * problem.dtype.itemsize


def cpu_seconds(steps: Sequence[Step], chunks: int, links: Links) -> float:
    """What the processor needs to begin all multiplies and exchanges. Arguments as in `seconds_needed`."""
    exchanges = sum(s.leg is not None for s in steps)
    chunks = chunks if exchanges else 1  # one column needs no chunks
    each = links.cpu_chunk + exchanges * links.cpu_exchange
    return links.cpu_call + chunks * each + sum(s.calls for s in steps) * links.cpu_message


def seconds_needed(steps: Sequence[Step], sizes: Sequence[int], links: Links) -> float:
    """What GPU and links need, or what the processor needs to begin their work: the longer.

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
    again = sum(links.exchange_seconds(0, 0, s.messages - s.messages_to_hosts, s.messages_to_hosts) for s in steps)
    exchange += (chunks - 1) * again
    alone = max(sizes[0], sizes[-1]) / rows
    beside = multiply
    for s in steps:
        share = links.beside if s.calls else links.beside_packed
        taken = links.exchange_seconds(s.bytes_sent, 0, s.messages, 0) + s.calls * links.round  # what goes to other hosts goes slowly
        beside += taken * (1 - share * (1 - alone))
    return max(begun, beside, max(multiply, exchange) + min(multiply, exchange) * alone)
