"""A transport in one file: registered, it is chosen by the planner for its costs, and products and gradients go over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from pages import example
from products import block, grid_for, make, multiply, single
from rank_pool import RankPool

from fastkron_py.distributed import Links, Plan, Problem, api, plan
from fastkron_py.distributed.cost import TRANSPORTS
from fastkron_py.distributed.transport.transfer import Transport


class Mail(Transport):
    """Modelled to cost next to nothing; nothing is sent by it."""

    name = "mail"
    label = "by mail"
    slots = 3

    def links(self, links: Links) -> Links:
        return replace(links, latency=0.0, message=0.0, bandwidth=1e15, pair_bandwidth=1e15, beside=1.0, cpu_exchange=0.0)


class SlowMail(Mail):
    """A second for each exchange."""

    def links(self, links: Links) -> Links:
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
    with pytest.raises(ValueError, match="transport: expected None or one of packed, peer memory; got 'mail'"):
        plan(PROBLEM, (1, 8), transport="mail")
    with pytest.raises(ValueError, match="transport: expected another with direct=False; got peer memory"):
        plan(PROBLEM, (1, 8), direct=False, transport="peer memory")


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
