"""`fastkron::lokr_linear`: one node of autograd, and the composed product's numbers."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from adapter_cases import CASES, LoKrCase, leaves_of, lokr_problem
from torch import Tensor

import fastkron_py
from fastkron_py import lokr_linear, reference
from fastkron_py.adapters import composed, program
from fastkron_py.adapters.factor import Factor
from fastkron_py.adapters.plan import Plan
from fastkron_py.runtime.precision import torch_products
from fastkron_py.testing import assert_close

PAIRS = [CASES[1], CASES[3], LoKrCase((4,), (3, 2), (5, 4), rank1=2)]


def factors(w1: Any, w2: Any) -> tuple[Factor, Factor]:
    return tuple(Factor(*w) if isinstance(w, tuple) else Factor(w) for w in (w1, w2))  # type: ignore[return-value]


def planned(monkeypatch: pytest.MonkeyPatch, is_dense: bool) -> None:
    """Let every pair be multiplied out, or none."""
    monkeypatch.setattr(composed, "best_plan", lambda w1, w2, *_: Plan(is_dense or w1.rank is None, is_dense or w2.rank is None))


@pytest.fixture(params=[True, False], ids=["expanded", "pair"])
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, request.param)


def test_the_composed_products_numbers(plans: None, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Results bit by bit: the same multiplies on the same operands. A pair's gradients within a rounding: here the matrix's gradient lies
    in memory as the matrix does, there transposed, and torch may then sum in another order."""
    for case, factor_dtype in product([CASES[0], *PAIRS], [torch.bfloat16, torch.float32]):
        x, w1, w2, base = lokr_problem(case, torch.bfloat16, device, generator, factor_dtype)
        leaves = [t.requires_grad_() for t in leaves_of(x, w1, w2, base)]
        dy = torch.randn(base.shape, generator=generator).to(device, torch.bfloat16)
        got, want = lokr_linear(x, w1, w2, base=base, scale=0.5), composed.add_product(x, *factors(w1, w2), base, 0.5, None)
        assert torch.equal(got, want)
        for g, w in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True):
            assert_close(g, w.double(), steps=1)
            assert g.dtype == w.dtype
        with torch.no_grad():  # on CPUs by a kernel that rounds less often
            assert_close(lokr_linear(x, w1, w2, base=base, scale=0.5), want.double(), steps=2)


def test_some_gradients(plans: None, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for case, wanted in product(PAIRS, range(6)):
        x, w1, w2, base = lokr_problem(case, torch.float64, device, generator)
        given = leaves_of(x, w1, w2, base)
        leaf = given[wanted % len(given)].requires_grad_()
        found = [
            torch.autograd.grad(y.square().sum(), leaf)[0]
            for y in (lokr_linear(x, w1, w2, base=base, scale=2.0), composed.add_product(x, *factors(w1, w2), base, 2.0, None))
        ]
        torch.testing.assert_close(*found)


def test_autocast_rounds_no_pair_inside_of_transforms(
    plans: None, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:
    """A float32 pair is multiplied out in float32 there as well: the same numbers as of an eager call."""
    for case in PAIRS:
        x, w1, w2, base = lokr_problem(case, torch.float32, device, generator)
        with torch.autocast(device.type, torch.bfloat16):
            want = lokr_linear(x, w1, w2, base=base)
            got, _ = torch.func.jvp(partial(lokr_linear, w1=w1, w2=w2, base=base), (x,), (x,))
        assert torch.equal(got, want)


def test_autocast_rounds_no_second_derivative(plans: None, device: torch.device, generator: torch.Generator) -> None:
    """By Triton; torch's own products are rounded in backward passes under autocast."""
    x, w1, w2, base = lokr_problem(CASES[3], torch.float32, device, generator)
    leaves = [t.requires_grad_() for t in leaves_of(x, w1, w2)]

    def second(autocast: bool) -> tuple[Tensor, ...]:
        with fastkron_py.backend("triton"):
            first = torch.autograd.grad(lokr_linear(x, w1, w2, base=base).square().sum(), leaves, create_graph=True)
            total = sum([g.square().sum() for g in first])
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return torch.autograd.grad(total, leaves)

    for got, want in zip(second(True), second(False), strict=True):
        torch.testing.assert_close(got, want)


def test_a_pair_is_multiplied_out_in_the_precision_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, generator: torch.Generator
) -> None:
    """Whatever torch's setting for the process is: forward and backward, and in the composed product."""
    planned(monkeypatch, True)
    asked: list[str | None] = []

    def noted(x: Tensor, precision: str | None) -> Any:
        asked.append(precision)
        return torch_products(x, precision)

    monkeypatch.setattr(program, "torch_products", noted)
    x, w1, w2, base = lokr_problem(CASES[3], torch.float32, device, generator)
    leaves = [t.requires_grad_() for t in leaves_of(x, w1, w2)]
    with fastkron_py.backend("triton"):
        y = lokr_linear(x, w1, w2, base=base, precision="highest")
        assert asked == ["highest"] * 2
        torch.autograd.grad(y.sum(), leaves)
        assert asked == ["highest"] * 4
    monkeypatch.setattr(Factor, "expanded", None)  # which torch multiplies in its own precision
    torch.testing.assert_close(composed.add_product(x, *factors(w1, w2), base, 1.0, "highest"), y)


def gradients(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), leaves)


def test_what_is_kept_is_of_its_own_call(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Two graphs at a time, and one backward pass twice."""
    problems = [lokr_problem(CASES[6], torch.float64, device, generator) for _ in range(2)]
    leaves = [[t.requires_grad_() for t in leaves_of(*problem)] for problem in problems]
    results = [lokr_linear(x, w1, w2, base=base) for x, w1, w2, base in problems]
    for y, of_one in zip(results, leaves, strict=True):
        first = torch.autograd.grad(y.square().sum(), of_one, retain_graph=True)
        for a, b in zip(first, gradients(y, of_one), strict=True):
            assert torch.equal(a, b)
    (x, w1, w2, base), of_first = problems[0], leaves[0]
    want = gradients(composed.add_product(x, *factors(w1, w2), base, 1.0, None), of_first)
    for g, w in zip(gradients(lokr_linear(x, w1, w2, base=base), of_first), want, strict=True):
        torch.testing.assert_close(g, w)


class Adapted(torch.nn.Module):
    def forward(self, x: Tensor, w1: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lokr_linear(x, w1, (a, b))


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_number_of_rows(strict: bool, generator: torch.Generator) -> None:
    """The plan of an eager call depends on their number: that of a rank of 8 changes."""
    w1, a, b = (torch.randn(shape, generator=generator) for shape in ((4, 4), (16, 8), (8, 16)))
    x = torch.randn(5000, 64, generator=generator)
    shapes = {"x": {0: torch.export.Dim("rows")}, "w1": None, "a": None, "b": None}
    made = torch.export.export(Adapted(), (x[:7], w1, a, b), dynamic_shapes=shapes, strict=strict).module()
    for rows in (1, 2, 500, 5000):
        want = reference.lokr_linear(x[:rows].double(), w1.double(), (a.double(), b.double()))
        assert_close(made(x[:rows], w1, a, b), want, steps=4)
