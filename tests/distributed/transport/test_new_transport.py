"""A transport in one file: registered, it is chosen by the planner for its costs, and products and gradients go over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pages import example
from products import block, grid_for, make, multiply, single
from rank_pool import RankPool
from torch import Tensor

from fastkron_py.distributed import Links, Plan, Problem, api, kron_matmul, plan
from fastkron_py.distributed.plan.cost import TRANSPORTS
from fastkron_py.distributed.transport.all_to_all import pack, unpack
from fastkron_py.distributed.transport.transfer import Transfer, Transport


class Mail(Transport):
    """A letter to each peer, in order; for transfers up to a number of elements. Modelled to cost next to nothing."""

    name = "mail"
    label = "by mail"
    slots = 3
    most = 10**9

    def __init__(self) -> None:
        self.letters = self.refused = 0

    def links(self, links: Links, size: int) -> Links:
        return replace(links, latency=0.0, message=0.0, bandwidth=1e15, pair_bandwidth=1e15, beside=1.0, cpu_exchange=0.0)

    def send(self, transfer: Transfer, local: Tensor) -> Letters | None:
        if transfer.rows * transfer.exchange.rows * transfer.exchange.columns > self.most:  # the same on every rank
            self.refused += 1
            return None
        going, coming = (transfer.sizes(outgoing) for outgoing in (True, False))
        arrived, group, works = local.new_empty(transfer.rows * sum(coming)), transfer.row_group.group, []
        parts = pack(transfer, local).split([transfer.rows * n for n in going])
        slots = arrived.split([transfer.rows * n for n in coming])
        me = transfer.row_group.position
        slots[me].copy_(parts[me])
        with transfer.stage(local):
            works += [group.send([parts[peer]], peer, 0) for peer in transfer.row_group.others if going[peer]]
            works += [group.recv([slots[peer]], peer, 0) for peer in transfer.row_group.others if coming[peer]]
        self.letters += len(works)
        return Letters(works, parts, arrived)


class Letters(NamedTuple):
    works: list[dist.Work]
    parts: tuple[Tensor, ...]
    arrived: Tensor

    def receive(self, transfer: Transfer, out: Tensor | None) -> Tensor:
        for work in self.works:
            transfer.wait(work, self.arrived)
        out = self.arrived.new_full((transfer.size,), torch.nan) if out is None else out
        unpack(transfer, self.arrived, out)
        return out


class SlowMail(Mail):
    """A second for each exchange."""

    def links(self, links: Links, size: int) -> Links:
        return replace(links, latency=1.0)


@contextmanager
def registered(mail: Mail | None = None) -> Iterator[Mail]:
    api._planned.cache_clear()
    mail = mail or Mail()
    with mock.patch.dict(TRANSPORTS, {mail.name: mail}):
        yield mail
    api._planned.cache_clear()


PROBLEM = Problem(128, (64,) * 4, (64,) * 4)


def test_the_planner_chooses_it_by_what_it_costs() -> None:
    before = plan(PROBLEM, (1, 8))
    with registered():
        found = plan(PROBLEM, (1, 8))
        assert (found.transport, before.transport) == ("mail", "peer memory")
        assert found.seconds < before.seconds
        assert ", by mail" in str(found)
        assert not found.direct
        assert not found.messages
        assert plan(PROBLEM, (1, 8), transport="peer memory") == before
        assert plan(PROBLEM, (1, 8), direct=True).direct
        # What it needs beside x, the result and their buffers.
        options = {"stages": found.stages, "chunks": found.chunks}
        packed = plan(PROBLEM, (1, 8), transport="packed", **options)  # type: ignore[arg-type]
        assert found.peak_memory == packed.peak_memory + 3 * 4 * found.most_elements
        assert plan(PROBLEM, (1, 8), memory=found.peak_memory - 1, **options).transport == "packed"  # type: ignore[arg-type]
    with registered(SlowMail()):
        assert plan(PROBLEM, (1, 8)) == before


def test_it_can_be_asked_for() -> None:
    with registered(SlowMail()):
        found: Plan = plan(PROBLEM, (1, 8), transport="mail")
        assert found.transport == "mail"
        assert found.seconds > 2.0
    with pytest.raises(ValueError, match="transport: expected None or one of packed, messages, peer memory; got 'mail'"):
        plan(PROBLEM, (1, 8), transport="mail")
    with pytest.raises(ValueError, match="transport: expected one at most; got messages, peer memory"):
        plan(PROBLEM, (1, 8), direct=True, transport="messages")
    with pytest.raises(ValueError, match=r'transport: expected another with stages \(2, 2\), or stages="rows"; got messages'):
        plan(PROBLEM, (1, 8), stages=(2, 2), transport="messages")
    with pytest.raises(ValueError, match="transport: expected another with direct=False; got peer memory"):
        plan(PROBLEM, (1, 8), direct=False, transport="peer memory")


def over_mail(m, sizes, stages, left, some):
    """A product and its gradients on two ranks over the mail, over the mail as far as it goes, and packed: letters, and refusals."""
    if (grid := grid_for((2, 1) if left else (1, 2))) is None:
        return None
    x, factors, _ = make(m, sizes, left=left)
    ps, qs = zip(*sizes, strict=True)
    whole = [t.clone().requires_grad_() for t in (x, *factors)]
    expected = single(whole[0], whole[1:], left)
    expected.square().sum().backward()
    counts = []
    for most in (10**9, some, None):
        mine = [t.clone().requires_grad_() for t in (block(x, grid), *[f.to(grid.device) for f in factors])]
        with registered() as mail:
            mail.most = most or 0
            how = plan(Problem(m, ps, qs, torch.float64, left), grid.shape, stages=stages, transport="mail" if most else "packed")
            y = multiply(mine[0], mine[1:], left, grid=grid, plan=how)
            assert torch.equal(y, block(expected, grid))
            y.square().sum().backward()
        assert torch.equal(mine[0].grad, block(whole[0].grad, grid))
        assert all(torch.equal(a.grad.cpu(), b.grad) for a, b in zip(mine[1:], whole[1:], strict=True))
        counts.append((mail.letters, mail.refused))
    return counts


@pytest.mark.parametrize(("stages", "left", "some"), [("rows", False, 300), ("rows", True, 300), ((1, 2), False, 230), ((1, 2), True, 400)])
def test_products_and_gradients_go_over_it(ranks: RankPool, stages: object, left: bool, some: int) -> None:
    """Some is between the elements of the two exchanges: the larger one is packed then."""
    sizes = ((3, 5), (4, 2), (5, 3))
    for counts in filter(None, ranks.run(over_mail, 7, sizes, stages, left, some)):
        (letters, refused), (fewer, more), none = counts
        assert refused == 0
        assert 0 < fewer < letters
        assert more > 0
        assert none == (0, 0)


def unasked(m, size):
    """A plan that nobody gave: letters of a product with mail registered, and without."""
    if (grid := grid_for((1, 2))) is None:
        return None
    sizes = ((size, size),) * 3
    x, factors, _ = make(m, sizes)
    with registered() as mail:
        y = kron_matmul(block(x, grid), [f.to(grid.device) for f in factors], grid=grid)
    letters = mail.letters
    again = kron_matmul(block(x, grid), [f.to(grid.device) for f in factors], grid=grid)
    assert torch.equal(y, block(single(x, factors), grid))
    assert torch.equal(y, again)
    return letters, mail.letters - letters


def test_a_product_that_is_given_no_plan_takes_it(ranks: RankPool) -> None:
    assert all(letters > 0 and more == 0 for letters, more in filter(None, ranks.run(unasked, 9, 6)))


def by_the_page(code, sizes, stages, left):
    """A product and the gradient of x over the transport that docs/extending.md registers."""
    if (grid := grid_for((2, 1) if left else (1, 2))) is None:
        return None
    x, factors, _ = make(7, sizes, left=left)
    whole = x.clone().requires_grad_()
    expected = single(whole, factors, left)
    expected.square().sum().backward()
    mine, factors = block(x, grid).clone().requires_grad_(), [f.to(grid.device) for f in factors]
    with mock.patch.dict(TRANSPORTS):
        exec(compile(code, "docs/extending.md", "exec"), {"__name__": "example"})
        ps, qs = zip(*sizes, strict=True)
        how = plan(Problem(7, ps, qs, torch.float64, left), grid.shape, stages=stages, transport="mail")
        sent = mock.Mock(side_effect=TRANSPORTS["mail"].send)
        with mock.patch.object(type(TRANSPORTS["mail"]), "send", sent):
            y = multiply(mine, factors, left, grid=grid, plan=how)
            y.square().sum().backward()
    assert torch.equal(y, block(expected, grid))
    assert torch.equal(mine.grad, block(whole.grad, grid))
    return sent.call_count


@pytest.mark.parametrize(("stages", "left"), [("rows", False), ((1, 2), True)])
def test_the_example_of_the_page(ranks: RankPool, stages: object, left: bool) -> None:
    code = example("extending.md", "A transport")
    for count in ranks.run(by_the_page, code, ((3, 5), (4, 2), (5, 3)), stages, left):
        assert count is None or count > 0
