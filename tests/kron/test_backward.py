"""The launches of the backward pass in canonical form, on data poisoned beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from canonical_cases import CASES, DTYPES, backward, backward_program, dense, expected_gradients, problem, rounding_steps

from fastkron_py.kron import gradients
from fastkron_py.kron.gradient_problem import Group
from fastkron_py.testing import assert_close


@pytest.mark.parametrize("case", [c for n, c in CASES.items() if n != "many rows"], ids=[n for n in CASES if n != "many rows"])
def test_backward(device, case):
    for dtype in DTYPES:
        x, factors = problem(dtype, device, *case)
        dy = torch.randn_like(dense(x, factors)).to(dtype)
        dx, dfs = backward(dy, x, factors, 0.5)
        steps = rounding_steps(dtype, 2 * len(factors))
        for got, want in zip((dx, *dfs), expected_gradients(dy, x, factors, 0.5), strict=True):
            assert_close(got, want, steps=steps)


def test_backward_gives_what_is_needed(device):
    for needs in [(True, 0, 0, 0), (False, 1, 0, 0), (False, 0, 0, 1), (True, 0, 1, 0), (False, 1, 0, 1)]:
        x, factors = problem(torch.float64, device, 1, 3, (4, 5, 3), (3, 4, 5), 1)
        dy = torch.randn(1, 3, 60, 1, dtype=torch.float64, device=device)
        full_dx, full = backward(dy, x, factors)
        dx, dfs = backward(dy, x, factors, needs=[bool(n) for n in needs])
        for got, want, need in zip((dx, *dfs), (full_dx, *full), needs, strict=True):
            assert (got is not None) == need
            if got is not None:
                assert_close(got, want, steps=3)


GROUPED = {
    "chain, more after it": (1, 1, (3, 4, 4, 4, 4, 4), (3, 4, 4, 4, 4, 4), 1),
    "three groups": (1, 2, (16, 16, 16), (16, 16, 16), 1),
    "chain with columns": (1, 2, (12, 5, 6), (6, 7, 8), 16),
    "merged, batched": (3, 4, (2, 3, 2, 5), (3, 2, 2, 4), 1),
    "wide between narrow": (1, 2, (3, 70, 2), (2, 66, 3), 1),
    "rows alone": (4, 1, (5,), (9,), 1),
}


@pytest.mark.parametrize("case", GROUPED.values(), ids=GROUPED.keys())
def test_groups(device, case):
    for dtype in [torch.float64, torch.float32, torch.complex64, torch.complex128]:
        x, factors = problem(dtype, device, *case)
        dy = torch.randn_like(dense(x, factors)).to(dtype)
        before = x.clone(), dy.clone()
        dx, dfs = backward(dy, x, factors, -0.3)
        for got, want in zip((dx, *dfs), expected_gradients(dy, x, factors, -0.3), strict=True):
            assert_close(got, want, steps=2 * len(factors))
        assert torch.equal(x, before[0])  # the next gradient takes the place of inputs that were made, not of these
        assert torch.equal(dy, before[1])


@pytest.mark.parametrize("shape", [((3, 2),), ((3, 2), (2, 5)), ((70, 2),)], ids=["step", "chain", "wide"])
def test_every_slice_is_summed_once(device, shape):
    """Integers: sums are exact, so a slice that is left out or taken twice shows, also in the last tile."""
    ps, qs = zip(*shape, strict=True)
    for rows in (1, 15, 16, 17, 400, 1031):
        x = torch.randint(-4, 5, (1, rows, math.prod(ps), 1), device=device).double()
        dy = torch.randint(-4, 5, (1, rows, math.prod(qs), 1), device=device).double()
        factors = [torch.randint(-4, 5, (1, p, q), device=device).double() for p, q in shape]
        dx, dfs = backward(dy, x, factors)
        for got, want in zip((dx, *dfs), expected_gradients(dy, x, factors), strict=True):
            assert torch.equal(got, want)


def test_rows_with_a_stride(device):
    """x and dy are read where they are, and dx is contiguous all the same."""
    wide = torch.randn(14, 40, dtype=torch.float64, device=device)
    x, dy = wide[::2, :30][None, :, :, None], wide[1::2, 4:40][None, :, :, None]
    factors = [torch.randn(1, p, q, dtype=torch.float64, device=device) for p, q in ((5, 4), (6, 9))]
    dx, dfs = backward(dy, x, factors)
    assert dx.is_contiguous()
    for got, want in zip((dx, *dfs), expected_gradients(dy, x, factors), strict=True):
        assert_close(got, want, steps=4)


def most_alive(program):
    """The largest number of intermediates ``[B, L, n, R]`` that are alive at a time, with dx, which is one of them in the end."""
    alive, most = set(), 0
    for step in program._steps:
        alive |= {make.number for make in step.makes if len(make.shape) == 4}  # sums and factor gradients have fewer dimensions
        most = max(most, len(alive))
        alive -= set(step.drops)
    return most


def multiplied(program):
    """Of each launch of a multiply: its factors, as (first, one past the last)."""
    found = []
    for step in program._steps:
        if "multiply_fwd" in step.run.configs[-1].kernel.__name__:
            ((_, factors),) = step.tuples
            found.append((min(factors) - 2, max(factors) - 1))  # inputs are dy, x, and the factors
    return found


def fused(program):
    """Of each launch for a group of factors: whether it sums the gradients of A and of B, and makes the next gradient."""
    configs = [step.run.configs[-1] for step in program._steps]
    of_groups = [c.arguments for c in configs if "multiply_bwd" in c.kernel.__name__]
    return [(a.get("NEED_A", False), a.get("NEED_B", True), a["NEED_X"]) for a in of_groups]  # a narrow factor is B


@pytest.fixture
def one_factor_a_group(monkeypatch):
    monkeypatch.setattr(gradients, "gradient_plan", lambda problem: tuple(Group(i, i, i + 1) for i in range(len(problem.shapes))))


@pytest.mark.usefixtures("one_factor_a_group")
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_few_intermediates_are_alive(device, count):
    """Two of x's size beside x and the gradients, however many groups there are; dx is one of them in the end."""
    ps = (2, 3, 2, 3, 2, 2)[:count]
    x, factors = problem(torch.float64, device, 1, 3, ps, ps, 1)
    dy = torch.randn_like(x)
    program = backward_program(dy, x, factors, shared=0)  # buffers have memory of their own
    assert most_alive(program) == 2
    assert len(fused(program)) == count
    # Three groups store all; more compute the inputs of the later ones again, from x.
    assert len(multiplied(program)) == count - 1
    dx, dfs = backward(dy, x, factors)
    for got, want in zip((dx, *dfs), expected_gradients(dy, x, factors), strict=True):
        assert_close(got, want, steps=2 * count)


@pytest.mark.usefixtures("one_factor_a_group")
def test_what_nobody_needs_is_not_launched(device):
    ps = (2, 3, 4)
    x, factors = problem(torch.float64, device, 1, 3, ps, ps, 1)
    dy = torch.randn_like(x)
    # need_x, need_factors: runs of factors multiplied; of each fused launch (A's sum, B's sum, the next gradient)
    cases = {
        (True, False, False, False): ([(0, 3)], []),
        (False, True, False, False): ([(1, 3)], [(False, True, False)]),
        (False, False, False, True): ([(0, 2)], [(False, True, False)]),
        (True, False, False, True): ([(0, 2)], [(False, True, True)]),
        (True, True, False, False): ([(1, 3), (1, 3)], [(False, True, True)]),
        (False, True, False, True): ([(1, 3), (1, 2)], [(False, True, True), (False, True, False)]),
    }
    for needs, expected in cases.items():
        program = backward_program(dy, x, factors, needs=needs)
        assert (multiplied(program), fused(program)) == expected


def test_of_multiplied_out_factors_some(device):
    ps, qs = (2, 3, 2), (3, 2, 2)
    x, factors = problem(torch.float64, device, 2, 3, ps, qs, 1)
    dy = torch.randn(2, 3, 12, 1, dtype=torch.float64, device=device)
    want = expected_gradients(dy, x, factors)
    _, dfs = backward(dy, x, factors, needs=[False, True, False, True])
    assert dfs[1] is None
    assert_close(dfs[0], want[1], steps=6)
    assert_close(dfs[2], want[3], steps=6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("split", [0, 1], ids=["multiplied out", "chain"])
def test_an_infinity_stays_out_of_the_padding(device, monkeypatch, split, which):
    """Three rows in tiles of two or four, odd widths: what is not there is not multiplied by the infinity of a factor."""
    monkeypatch.setattr(gradients, "gradient_plan", lambda _: (Group(0, split, 2),))
    x, dy = (torch.rand(1, 3, 35, 1, dtype=torch.float64, device=device) + 0.5 for _ in range(2))
    factors = [torch.rand(1, p, p, dtype=torch.float64, device=device) for p in (5, 7)]
    factors[which][0, 0, 0] = math.inf
    dx, dfs = backward(dy, x, factors)
    want = expected_gradients(dy, x, [f.clamp(max=2.0) for f in factors])
    assert_close(dfs[which], want[1 + which], steps=4)  # needs the other factor only
    assert bool((dfs[1 - which] == math.inf).all())
    # Everything is positive, so dx is infinite where the factor's first row counts, and else what it would be without.
    shape = (3, 5, 7)
    dx, want_dx = dx.view(shape).movedim(1 + which, 0), want[0].view(shape).movedim(1 + which, 0)
    assert bool((dx[0] == math.inf).all())
    assert_close(dx[1:], want_dx[1:], steps=4)


def test_many_programs_repeat_bit_for_bit(device):
    for rows, ps, qs in ((50, (4,) * 4, (4,) * 4), (50, (2, 3, 4), (2, 3, 4)), (50, (70, 2), (70, 2)), (300, (8, 9), (9, 8))):
        x, factors = problem(torch.float32, device, 1, rows, ps, qs, 1)
        dy = torch.randn(1, rows, math.prod(qs), 1, device=device)
        first, again = (backward(dy, x, factors, 0.7) for _ in range(2))
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_negative_control(device):
    """The comparison notices one slice too few."""
    x, factors = problem(torch.float64, device, 1, 40, (6, 6), (6, 6), 1)
    dy = torch.randn_like(x)
    want = expected_gradients(dy, x, factors)
    _, dfs = backward(dy[:, :-1], x[:, :-1], factors, needs=[False, True, True])
    with pytest.raises(AssertionError):
        assert_close(dfs[0], want[1], steps=4)
