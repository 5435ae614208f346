"""Which choices are valid: each obstacle by its name, whatever has none computes the product, and JSON keeps it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_cases import CHAIN, SINGLE, UNMERGED, carry_out, choice, expected, launches_by, operands, problem, single

from fastkron_py.kron.families import offers
from fastkron_py.kron.families.fragments import ChainedConfig
from fastkron_py.kron.families.tile import ChainConfig, SingleConfig
from fastkron_py.kron.forward import multiply_problem
from fastkron_py.kron.planner import segment_of
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.kron.tune.choice import Choice, TunedLaunch, is_offered, obstacle
from fastkron_py.runtime.gpu import INTERPRETER
from fastkron_py.testing import assert_close


def chain(config=CHAIN, steps=((0, 1), (1, 2)), family="tile"):
    return choice(TunedLaunch(steps, family, config))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (choice(), "do not cover"),
        (choice(single(0)), "do not cover"),
        (choice(single(0), single(1), single(1)), "do not cover"),
        (choice(single(0), single(0, 2)), "do not cover"),
        (choice(single(0), single(1), single(2)), "outside"),
        (choice(single(-1), single(1)), "outside"),
        (choice(single(1, 1), single(0, 2)), "outside"),
        (choice(single(0, 10**15)), "outside"),
        (chain(steps=((1, 2), (0, 1))), "no neighbours"),
        (choice(TunedLaunch((), "tile", SINGLE), single(0), single(1)), "outside"),
        (chain(SINGLE), "a SingleConfig for 2 steps"),
        (chain(steps=((0, 2),)), "a ChainConfig for 1 steps"),
        (chain(family="fragments"), "a ChainConfig for family 'fragments'"),
        (chain(family="whole_row"), "a ChainConfig for family 'whole_row'"),
        (chain(None, family="no such family"), "no family 'no such family'"),
        (choice(single(0, 2, replace(SINGLE, block_s=24))), "powers of two"),
        (choice(single(0, 2, replace(SINGLE, block_s=-16))), "powers of two"),
        (choice(single(0, 2, replace(SINGLE, block_s=8))), "powers of two from 16"),
        (choice(single(0, 2, replace(SINGLE, block_p=64))), "wider than the factor"),
        (choice(single(0, 2, replace(SINGLE, block_s=4096))), "more than"),
        (choice(single(0, 2, replace(SINGLE, num_warps=3))), "out of range"),
        (choice(single(0, 2, replace(SINGLE, num_stages=0))), "out of range"),
        (choice(single(0, 2, replace(SINGLE, programs_per_sm=10**6))), "out of range"),
        (chain(replace(CHAIN, block_s=1024)), "tile does not fit"),
        (chain(replace(CHAIN, block_s=12)), "no power of two"),
        (chain(ChainedConfig(16, 3, 0, 0), family="fragments"), "registers"),
        (chain(ChainedConfig(16, 4, 0, 300), family="fragments"), "max_registers = 300"),
        (chain(ChainedConfig(16, 4, -1, 0), family="fragments"), "programs_per_sm = -1"),
    ],
)
def test_invalid_choices_are_named(broken, why):
    assert why in obstacle(broken, problem())


def offered(chosen, p):
    x, factors = operands(p)
    return is_offered(chosen, p.factors, multiply_problem(x, factors, x.device, "highest"))


def test_families_offer_some_launches_only():
    assert offered(UNMERGED, problem())
    assert offered(chain(), problem([(16, 16)] * 2))
    assert not offered(chain(), problem())  # narrow steps, which are multiplied out
    assert not offered(chain(None, ((0, 2),)), problem([(64, 64)] * 2))  # multiplied out beyond a width of 64
    assert not offered(chain(), problem([(64, 64)] * 2, columns=4))  # more than a tile
    assert not offered(chain(None, family="whole_row"), problem())


BLOCKS = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


def configs(steps):
    """Of Triton's kernels, valid or not."""
    fields = {"num_warps": st.sampled_from([1, 4, 8]), "programs_per_sm": st.integers(1, 3), "num_stages": st.integers(1, 4)}
    if steps > 1:
        return st.builds(ChainConfig, block_s=BLOCKS, **fields)
    return st.none() | st.builds(SingleConfig, block_s=BLOCKS, block_p=BLOCKS, block_q=BLOCKS, **fields)


@st.composite
def anything(draw):
    """Two to four factors cut at random into launches that families offer, in any order, with any configuration."""
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
            launch = TunedLaunch.of(draw(st.sampled_from([made.launch for made in offer])).shifted(start))
            launches.append(replace(launch, config=draw(configs(len(launch.steps))) if family == "tile" else None))
            stop = start
    return p, Choice(tuple(draw(st.permutations(launches))))


@settings(max_examples=20)
@given(case=anything().filter(lambda case: obstacle(case[1], case[0]) is None))
def test_whatever_is_valid_computes_the_product(case):
    p, c = case
    assert offered(c, p)
    x, factors = operands(p)
    y = carry_out(launches_by(c, x, factors), x, factors)
    assert_close(y, expected(x, factors), steps=len(factors))
