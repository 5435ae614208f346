"""A transport in one file: registered, plans can name it, and products and gradients go over it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from pages import example
from products import block, grid_for, make, multiply, single
from rank_pool import RankPool

from fastkron_py.distributed import Problem, plan
from fastkron_py.distributed.plan import TRANSPORTS, Transport


class Mail(Transport):
    """Nothing is sent by it."""

    name = "mail"
    label = "by mail"
    slots = 3


PROBLEM = Problem(128, (64,) * 4, (64,) * 4)


def test_it_can_be_asked_for() -> None:
    before = plan(PROBLEM, (1, 8))
    with mock.patch.dict(TRANSPORTS, {"mail": Mail()}):
        found = plan(PROBLEM, (1, 8), transport="mail")
        assert (found.transport, before.transport) == ("mail", "peer memory")
        assert ", by mail" in str(found)
        assert plan(PROBLEM, (1, 8)) == before
        # What it needs beside x, the result and their buffers.
        packed = plan(PROBLEM, (1, 8), transport="packed")
        assert found.peak_memory == packed.peak_memory + 3 * 4 * found.most_elements
        assert plan(PROBLEM, (8, 1), transport="mail").transport == "packed"  # nothing is exchanged
    with pytest.raises(ValueError, match="transport: expected None or one of packed, peer memory; got 'mail'"):
        plan(PROBLEM, (1, 8), transport="mail")


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
