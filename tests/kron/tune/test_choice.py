"""The predicate of valid choices, the candidates of a search, and their way through JSON."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_cases import CHAIN, SINGLE, UNMERGED, carry_out, choice, entry, expected, launches_by, operands, problem, single

from fastkron_py.kron.families.fragments import ChainedConfig
from fastkron_py.kron.families.tile import ChainConfig, SingleConfig
from fastkron_py.kron.tune.candidates import neighbours, starting_points
from fastkron_py.kron.tune.choice import KERNELS, Choice, ChosenLaunch, is_valid, kernel_of, obstacle, rows_bucket
from fastkron_py.kron.tune.entry import entry_from_json, entry_to_json, problem_from_json, problem_to_json
from fastkron_py.testing import assert_close

SIZES = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=8)
PROBLEMS = st.builds(
    problem,
    factors=SIZES,
    rows=st.sampled_from([1, 16, 1024, 1 << 20]),
    columns=st.sampled_from([1, 7, 128]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)


@settings(max_examples=30)
@given(p=PROBLEMS)
def test_candidates_are_valid_and_begin_with_the_closed_form(p):
    from fastkron_py.kron.plan.plan import plan
    from fastkron_py.kron.plan.steps import PlanProblem

    choices = starting_points(p)
    assert choices
    ps, qs = zip(*p.factors, strict=True)
    assert choices[0].as_launches(p.factors) == list(plan(ps, qs, PlanProblem(p.itemsize, p.rows, p.columns)))
    near = neighbours(choices[0], p)
    assert near
    assert choices[0] not in near
    assert all(is_valid(c, p) for c in choices + near)


@settings(max_examples=60)
@given(p=PROBLEMS)
def test_json_there_and_back(p):
    assert problem_from_json(json.loads(json.dumps(problem_to_json(p)))) == p
    for c in [None, *starting_points(p)]:
        e = replace(entry(p), choice=c)
        assert entry_from_json(json.loads(json.dumps(entry_to_json(e)))) == e


def test_alike_launches_change_together():
    p = problem([(64, 64)] * 3, rows=256)
    first = starting_points(p)[0]
    assert len(first.launches) == 3
    assert all(len({launch.config for launch in c.launches}) == 1 for c in neighbours(first, p))


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
        (choice(ChosenLaunch(((1, 2), (0, 1)), "chain", CHAIN)), "no neighbours"),
        (choice(ChosenLaunch((), "single", SINGLE), single(0), single(1)), "outside"),
        (choice(ChosenLaunch(((0, 1), (1, 2)), "single", SINGLE)), "a single step"),
        (choice(ChosenLaunch(((0, 2),), "chain", CHAIN)), "a chain of 2"),
        (choice(ChosenLaunch(((0, 2),), "chain", SINGLE)), "with a SingleConfig"),
        (choice(ChosenLaunch(((0, 2),), "no such kernel", SINGLE)), "no such kernel"),
        (choice(single(0, 2, replace(SINGLE, block_s=24))), "block_s = 24"),
        (choice(single(0, 2, replace(SINGLE, block_s=-16))), "block_s = -16"),
        (choice(single(0, 2, replace(SINGLE, block_s=8))), "narrower"),
        (choice(single(0, 2, replace(SINGLE, block_p=64))), "wider than the factor"),
        (choice(single(0, 2, replace(SINGLE, block_s=4096))), "more than"),
        (choice(single(0, 2, replace(SINGLE, num_warps=3))), "num_warps = 3"),
        (choice(single(0, 2, replace(SINGLE, num_stages=0))), "num_stages = 0"),
        (choice(single(0, 2, replace(SINGLE, programs_per_sm=10**6))), "programs_per_sm"),
    ],
)
def test_invalid_choices_are_named(broken, why):
    assert why in obstacle(broken, problem())


def test_further_rules():
    wide = problem([(64, 64), (64, 64)])
    assert "beyond a width" in obstacle(choice(single(0, 2, replace(SINGLE, block_p=64))), wide)
    assert "chain does not fit" in obstacle(choice(ChosenLaunch(((0, 1), (1, 2)), "chain", CHAIN)), problem([(64, 64)] * 2, columns=4))
    assert "tile does not fit" in obstacle(choice(ChosenLaunch(((0, 1), (1, 2)), "chain", replace(CHAIN, block_s=1024))), problem())
    assert is_valid(UNMERGED, problem())


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (5, 4), (6, 8), (1000, 1024), (1448, 1024), (1449, 2048)])
def test_rows_go_to_the_nearest_power_of_two(rows, bucket):
    assert rows_bucket(rows) == bucket


def test_every_kernel_has_one_configuration():
    assert {kernel.config for kernel in KERNELS.values()} == {SingleConfig, ChainConfig, ChainedConfig}
    assert kernel_of(SINGLE) == "single"
    assert kernel_of(CHAIN) == "chain"


BLOCKS = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


def configs(kernel):
    fields = {"num_warps": st.sampled_from([1, 4, 8]), "programs_per_sm": st.integers(1, 3)}
    if kernel == "chained":
        return st.builds(ChainedConfig, block_s=BLOCKS, max_registers=st.sampled_from([0, 128]), warpgroup=st.booleans(), **fields)
    fields |= {"num_stages": st.integers(1, 4)}
    blocks = ("block_s",) if kernel == "chain" else ("block_s", "block_p", "block_q")
    return st.builds(KERNELS[kernel].config, **{name: BLOCKS for name in blocks}, **fields)


@st.composite
def anything(draw):
    """Two to four factors cut at random into steps and launches in any order, with any configuration."""
    count = draw(st.integers(2, 4))
    factors = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=count, max_size=count))
    cuts = draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))
    edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
    steps = list(itertools.pairwise(edges))
    launches = []
    while steps:
        size = draw(st.integers(1, min(3, len(steps))))
        kernel = "single" if size == 1 else "chain"
        launches.append(ChosenLaunch(tuple(steps[:size]), kernel, draw(configs(kernel))))
        steps = steps[size:]
    columns = draw(st.sampled_from([1, 3]))
    return problem(factors, rows=draw(st.sampled_from([1, 8])), columns=columns), Choice(tuple(draw(st.permutations(launches))))


@settings(max_examples=20)
@given(case=anything().filter(lambda case: is_valid(case[1], case[0])))
def test_whatever_is_valid_computes_the_product(case):
    p, c = case
    x, factors = operands(p)
    y = carry_out(launches_by(c, x, factors), x, factors)
    assert_close(y, expected(x, factors), steps=len(factors))


def valid_json():
    return json.loads(json.dumps(entry_to_json(entry())))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("problem", "rows"), True),
        (("problem", "rows"), "4"),
        (("problem", "rows"), 4.0),
        (("problem", "rows"), 0),
        (("problem", "batched"), 0),
        (("problem", "dtype"), "int8"),
        (("problem", "operation"), "divide"),
        (("problem", "precision"), "medium"),
        (("problem", "factors"), []),
        (("problem", "factors"), [[3, 5, 1], [4, 2, 1]]),
        (("problem", "factors"), [[3, 5], [4, True]]),
        (("problem", "factors"), [[3, 5], [4, 0]]),
        (("problem", "factors"), [[1, 1]] * 65),
        (("problem",), None),
        (("launches",), []),
        (("launches",), {}),
        (("launches", 0, "kernel"), "os.system"),
        (("launches", 0, "kernel"), 1),
        (("launches", 0, "steps"), [[0, "1"]]),
        (("launches", 0, "steps"), [[0, 1.0]]),
        (("launches", 0, "config"), None),
        (("launches", 0, "config", "block_s"), "16"),
        (("launches", 0, "config", "block_s"), True),
        (("launches", 0, "config", "more"), 1),
        (("default_us",), "10"),
        (("more",), 1),
    ],
)
def test_json_of_a_wrong_type_is_refused(path, value):
    data = valid_json()
    assert entry_from_json(data) == entry()
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ValueError):  # noqa: PT011
        entry_from_json(data)
