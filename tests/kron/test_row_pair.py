"""Two steps on one slice at a time, in half types."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from canonical_cases import dense, multiply, problem, watch_kernels

from fastkron_py import families
from fastkron_py.kron.families import slice_pair, whole_row
from fastkron_py.kron.families.slice_pair import matrices_of, shared_memory, slice_pair_config, tiling, turns_of
from fastkron_py.kron.kernels.epilogues import AXPBY, PLAIN, TO_FLOAT8, TO_INTEGERS, StoreEpilogue
from fastkron_py.kron.plan.steps import Step
from fastkron_py.kron.planner import plan
from fastkron_py.kron.problem import Problem
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.testing import assert_close

# (batches, rows, P, Q, R)
SHAPES = {
    "whole tiles": (1, 3, (64, 32), (64, 32), 1),
    "padded": (1, 3, (40, 37), (33, 40), 1),
    "batches": (3, 2, (50, 32), (50, 32), 1),
    "multiplied out": (1, 5, (8, 5, 8, 4), (8, 6, 4, 9), 1),
    "a factor before": (1, 2, (3, 64, 32), (2, 64, 32), 1),
    "a wide first step": (1, 3, (172, 64), (172, 64), 1),
    "a wide first step, padded": (2, 2, (140, 70), (132, 66), 1),
    "two in the middle": (1, 3, (64, 2, 64), (64, 2, 64), 1),
    "two in the middle, padded": (2, 2, (40, 2, 35), (33, 2, 36), 1),
    "four in the middle": (1, 3, (64, 4, 64), (64, 4, 64), 1),
    "three in the middle, padded": (1, 2, (40, 3, 35), (36, 3, 34), 1),
    "two in the middle, a factor before": (1, 2, (3, 8, 5, 2, 64), (2, 8, 6, 2, 64), 1),
    "eight in the middle, in two turns": (1, 2, (64, 8, 64), (64, 8, 64), 1),
    "six in the middle, in two turns, padded": (1, 2, (64, 6, 35), (40, 6, 64), 1),
    "parts on the right": (1, 3, (64, 86), (64, 86), 1),
    "parts on the right, transposed": (2, 3, (86, 64), (80, 40), 1),
    "a first step of 32, transposed": (1, 3, (32, 40), (32, 48), 1),
    "two wide steps, transposed": (1, 2, (150, 100), (130, 128), 1),
    "a narrow first step": (1, 5, (16, 64), (16, 64), 1),
    "a narrow first step, padded": (2, 3, (12, 100), (10, 70), 1),
    "a narrow second step": (1, 3, (64, 16), (64, 16), 1),
    "a narrow second step, padded": (1, 3, (100, 9), (120, 12), 1),
    "two narrow steps, a factor before": (1, 2, (3, 20, 30), (2, 24, 17), 1),
}
DTYPES = [torch.bfloat16, torch.float16]
SIDES = [(40, 36), (70, 36), (140, 70), (40, 2, 35), (20, 40), (40, 12)]


LARGE = ("eight in the middle, in two turns",)  # takes the interpreter half a minute; six in the middle take two turns too


@pytest.fixture(autouse=True)
def paired(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are launched; half types take this kernel on any device, however few rows there are."""
    monkeypatch.setattr(slice_pair, "slice_pair_start", lambda *_: 0.0)
    monkeypatch.setattr(Problem, "half", property(lambda self: str(self.dtype).removeprefix("torch.")))
    monkeypatch.setattr(whole_row, "may_take", lambda problem: False)
    plan.cache_clear()
    with families(slice_pair.name, "tile", "narrow"):
        yield watch_kernels(monkeypatch)
    plan.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [pytest.param(s, id=n, marks=pytest.mark.full if n in LARGE else ()) for n, s in SHAPES.items()])
def test_products(shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device, paired: list[str]) -> None:
    torch.manual_seed(0)
    x, factors = problem(dtype, device, *shape)
    wanted = dense(x, factors)
    z = torch.randn(wanted.shape, device=device).to(dtype)
    steps = 3 * len(factors)  # the interpreter truncates to bfloat16, which errs twice as much as rounding
    assert_close(multiply(x, factors), wanted, steps=steps)
    assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.0 * z.double(), steps=steps + 1)
    assert "_row_pair_fwd_kernel" in paired


def test_nothing_between_two_steps_overflows(device: torch.device) -> None:
    """Intermediates of 2^20 in float16, whose largest number is 65504, and of 2^-20 beside them, in another row."""
    x, factors = problem(torch.float16, device, 1, 4, (40, 36), (40, 36), 1)
    large, small = 2.0**10, 2.0**-10
    x = x * torch.tensor([large, large, small, small], device=device).view(1, 4, 1, 1).half()
    factors = [factors[0] * 2.0**-12, factors[1] * large]
    y = multiply(x, factors)
    assert y.isfinite().all()
    for rows in (slice(0, 2), slice(2, 4)):
        assert_close(y[:, rows], dense(x[:, rows], factors), steps=8)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ps", SIDES, ids=str)
def test_infinities_stay_in_their_slices(ps: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, factors = problem(dtype, device, 1, 3, ps, ps, 1)
    x[0, 1, 7] = float("inf")
    y = multiply(x, factors)
    assert not y[0, 1].isfinite().any()
    assert_close(y[:, ::2], dense(x[:, ::2], factors), steps=6)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ps", SIDES, ids=str)
def test_an_infinity_of_a_factor_stays_in_its_place(ps: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Also where the tile is padded: 0 times an infinity is NaN."""
    x, factors = problem(dtype, device, 1, 2, ps, ps, 1)
    for n, (factor, size) in enumerate(zip(factors, ps, strict=True)):
        finite = factor.clone()
        row, column = min(3, size - 1), min(5, size - 1)
        factor[0, row, column] = float("inf")
        y = multiply(x, factors).view(2, *ps).movedim(1 + n, -1)
        others = torch.arange(size, device=device) != column
        left = [f[..., others] if i == n else f for i, f in enumerate(factors)]
        assert not y[..., column].isfinite().any()
        assert_close(y[..., others], dense(x, left).view(2, *[f.shape[2] for f in left]).movedim(1 + n, -1), steps=6)
        factor.copy_(finite)


PAIRS = [
    (33, 32),
    (32, 64),
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (86, 128),
    (172, 64),
    (172, 60),
    (172, 128),
    (64, 192),
    (256, 128),
    (256, 36),
]
NARROW = [(16, 16), (16, 100), (31, 128), (128, 16), (20, 40), (8, 8)]
TRIPLES = [(64, 4, 64), (64, 8, 64), (128, 4, 128), (64, 2, 128), (128, 4, 64), (112, 2, 64), (128, 2, 128), (100, 2, 100)]


def test_shared_memory_suffices() -> None:
    """By the model, which `tests/compile` holds against the compiler."""
    for shape, epilogue in itertools.product([*PAIRS, *NARROW, *TRIPLES], [PLAIN, AXPBY, TO_FLOAT8, TO_INTEGERS]):
        assert_fits(tuple([Step(i, i + 1, p, p) for i, p in enumerate(shape)]), epilogue)


def assert_fits(steps: tuple[Step, ...], epilogue: StoreEpilogue) -> None:
    """Shared memory has the programs of a multiprocessor, and a thread's registers its sums."""
    config, tiles = slice_pair_config(steps, epilogue.needs_z, epilogue.rounds_to, HOPPER), tiling(steps)
    adds = epilogue.needs_z and len(steps) == 2
    assert shared_memory(tiles, config.stages, adds) * config.programs_per_sm <= HOPPER.shared_memory
    assert matrices_of(steps) // turns_of(steps) * tiles.sums // (32 * config.num_warps) <= 128
