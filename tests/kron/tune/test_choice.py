"""Which choices are valid: those that families offer, and these compute the product."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_cases import UNMERGED, carry_out, choice, expected, launch, launches_by, operands, problem, single

from fastkron_py.kron.families import offers
from fastkron_py.kron.forward import multiply_problem
from fastkron_py.kron.planner import segment_of
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.kron.tune.table import Choice
from fastkron_py.runtime.gpu import INTERPRETER
from fastkron_py.testing import assert_close

SQUARE = [(16, 16)] * 2


def chain(steps=((0, 1), (1, 2)), family="tile", factors=SQUARE):
    return choice(launch(steps, family, factors))


def multiply_of(p):
    x, factors = operands(p)
    return multiply_problem(x, factors, x.device, "highest")


@pytest.mark.parametrize(
    ("chosen", "p"),
    [
        (choice(), problem()),
        (choice(single(0)), problem()),
        (choice(single(0), single(1), single(1)), problem()),
        (choice(single(0), single(0, 2)), problem()),
        (choice(single(0), launch(((1, 2),), factors=SQUARE)), problem()),
        (chain(steps=((1, 2), (0, 1))), problem(SQUARE)),
        (chain(factors=problem().factors), problem()),  # narrow steps, which are multiplied out
        (chain(((0, 2),), factors=[(64, 64)] * 2), problem([(64, 64)] * 2)),  # multiplied out beyond a width of 64
        (chain(factors=[(64, 64)] * 2), problem([(64, 64)] * 2, columns=4)),  # more than a tile
        (chain(family="whole_row"), problem(SQUARE)),
        (chain(family="fragments"), problem(SQUARE)),
    ],
)
def test_what_families_do_not_offer_is_not_taken(chosen, p):
    if torch.cuda.is_available() and chosen.launches and chosen.launches[0].family == "fragments":
        pytest.skip("Hopper's GPUs are offered fragments")
    assert UNMERGED.is_offered(multiply_of(problem()))
    assert chain().is_offered(multiply_of(problem(SQUARE)))
    assert not chosen.is_offered(multiply_of(p))


@st.composite
def anything(draw):
    """Two to four factors cut at random into launches that families offer, in any order."""
    sizes = st.sampled_from([1, 2, 3, 5, 9, 16, 17])
    factors = draw(st.lists(st.tuples(sizes, sizes), min_size=2, max_size=4).filter(lambda f: math.prod(p * q for p, q in f) < 1 << 20))
    p = problem(factors, rows=draw(st.sampled_from([1, 8])), columns=draw(st.sampled_from([1, 3])))
    launches, stop = [], len(factors)
    while stop:
        start = draw(st.integers(max(0, stop - 3), stop - 1))
        family = draw(st.sampled_from(["tile", "tile", "torch_products"]))
        planned = contiguous_problem(factors, p.rows, p.columns, torch.float32, INTERPRETER)
        offer = offers(segment_of(replace(planned, families=(family,)), start, stop, False))[family]
        if not isinstance(offer, str):
            launches.append(replace(draw(st.sampled_from([made.launch for made in offer])).shifted(start), config=None))
            stop = start
    chosen = Choice(tuple(draw(st.permutations(launches))))
    return p, chosen


@settings(max_examples=20)
@given(case=anything())
def test_whatever_is_valid_computes_the_product(case):
    p, c = case
    assert c.is_offered(multiply_of(p))
    x, factors = operands(p)
    y = carry_out(launches_by(c, x, factors), x, factors)
    assert_close(y, expected(x, factors), steps=len(factors))
