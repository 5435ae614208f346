"""A multiply whose intermediate is saved for the backward pass: numbers and gradients as without it.

In float64 and float32 both ways err by rounding only; in half types the intermediate is rounded once more.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fastkron_py
from fastkron_py import kron_matmul, kron_matmul_left, reference
from fastkron_py.kron import gradients
from fastkron_py.kron.plan import gradients as plan
from fastkron_py.kron.plan.gradients import Cut, find_cut
from fastkron_py.kron.problem import Problem, contiguous_problem
from fastkron_py.runtime.builder import describe
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.testing import assert_close

# (P, Q) of the factors: the last ones narrow x, the first ones, those in the middle, and each of two cuts; all of them are wide.
SHAPES = {
    "last": [(3, 5), (40, 2)],
    "first": [(40, 2), (3, 5)],
    "first of three": [(36, 2), (2, 3), (3, 4)],
    "last two of three": [(3, 4), (90, 1), (66, 2)],
    "twice": [(20, 1), (3, 9), (24, 1)],
    "wide": [(129, 131), (130, 140)],
}


@pytest.fixture(autouse=True)
def cuts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cuts that are made, of tensors of any size."""
    made: list[Cut] = []

    def noted(problem: Problem) -> Cut | None:
        with monkeypatch.context() as patch:
            both = plan.both_passes
            patch.setattr(plan, "both_passes", lambda asked: both(asked) * (10 if asked is problem else 1))
            cut = find_cut(problem)
        made.extend([] if cut is None else [cut])
        return cut

    monkeypatch.setattr(gradients, "find_cut", noted)
    CACHE.forget()
    with fastkron_py.backend("triton"):
        yield made
    CACHE.forget()


def problem(shapes: list[tuple[int, int]], left: bool, dtype: torch.dtype, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """(x, the factors, z) with gradients, and the verb."""
    torch.manual_seed(0)
    k, n = (int(torch.tensor([s[i] for s in shapes]).prod()) for i in (0, 1))
    sizes = [(2, k, 3), *[(q, p) for p, q in shapes], (n, 1)] if left else [(2, 2, k), *shapes, (2, n)]
    tensors = [torch.randn(s, dtype=torch.float64).to(device, dtype).requires_grad_() for s in sizes]
    return tensors, kron_matmul_left if left else kron_matmul


def test_the_setting_of_precision_changes_before_the_backward_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The intermediate is that of one cut, whatever products cost then; of square factors all cuts have intermediates of one size."""
    monkeypatch.setattr(gradients, "find_cut", lambda asked: Cut.of(asked, 2 if asked.precision == "highest" else 1, False))
    (x, *factors, _), verb = problem([(6, 6), (5, 5), (4, 4)], False, torch.float32, device)
    y = verb(x, factors)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        got = torch.autograd.grad(y, [x, *factors], torch.ones_like(y))
    finally:
        torch.set_float32_matmul_precision(before)
    wide = [t.detach().double().requires_grad_() for t in (x, *factors)]
    wanted = reference.kron_matmul(wide[0], wide[1:])
    for g, w in zip(got, torch.autograd.grad(wanted, wide, torch.ones_like(wanted)), strict=True):
        assert_close(g, w, rms_tol=5e-3, max_tol=5e-2)  # those of TF32


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_numbers(dtype: torch.dtype, shapes: list[tuple[int, int]], left: bool, device: torch.device, cuts: list[Cut]) -> None:
    (x, *factors, z), verb = problem(shapes, left, dtype, device)
    x64, *f64, z64 = (t.detach().double().requires_grad_() for t in (x, *factors, z))
    for given, options in (((), {}), ((z,), {"alpha": 0.5, "beta": 2.0})):
        y = verb(*((x, factors) if verb is kron_matmul else (factors, x)), z=given[0] if given else None, **options)
        wanted = reference.kron_matmul(x64, f64, z=z64 if given else None, left=left, **options)
        assert_close(y, wanted, steps=4 * len(shapes))
        dy = torch.randn_like(wanted).to(dtype)
        got = torch.autograd.grad(y, [x, *factors, *given], dy)
        want = torch.autograd.grad(wanted, [x64, *f64, *([z64] if given else [])], dy.double())
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, steps=6 * len(shapes))
    assert cuts


@pytest.mark.parametrize("left", [False, pytest.param(True, marks=pytest.mark.full)], ids=["right", "left"])
def test_second_derivatives(left: bool, device: torch.device, cuts: list[Cut]) -> None:
    tensors, verb = problem([(70, 1), (2, 3)], left, torch.float64, device)

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor) -> Any:
        return verb(*((x, [a, b]) if verb is kron_matmul else ([a, b], x)), z=z, beta=0.7)

    small = [t.detach()[:1].requires_grad_() if t.ndim == 3 else t for t in tensors]
    assert torch.autograd.gradcheck(function, small, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, small, fast_mode=True)
    assert cuts


def test_without_gradients_nothing_is_cut(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    (x, *factors, _), _ = problem(SHAPES["last"], False, torch.float32, device)
    whole = kron_matmul(x.detach(), [f.detach() for f in factors])
    with torch.no_grad():
        assert torch.equal(kron_matmul(x, factors), whole)
    monkeypatch.setattr(gradients, "find_cut", lambda _: None)
    CACHE.forget()
    assert torch.equal(kron_matmul(x, factors), whole)


def test_backward_passes_in_a_row_and_of_parts(device: torch.device, cuts: list[Cut]) -> None:
    """What was saved is not overwritten; gradients of x alone and of one factor alone."""
    (x, *factors, _), _ = problem(SHAPES["twice"], False, torch.float64, device)
    y = kron_matmul(x, factors)
    dy = torch.randn_like(y)
    whole = torch.autograd.grad(y, [x, *factors], dy, retain_graph=True)
    again = torch.autograd.grad(y, [x, *factors], dy, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    for i, t in enumerate([x, *factors]):
        tensors = [u.detach().requires_grad_(u is t) for u in (x, *factors)]
        (got,) = torch.autograd.grad(kron_matmul(tensors[0], tensors[1:]), tensors[i], dy)
        assert_close(got, whole[i], steps=4)
    assert cuts


def whole(*shapes: tuple[int, int], rows: int = 64, dtype: torch.dtype = torch.float32) -> Problem:
    return contiguous_problem(shapes, rows, 1, dtype, HOPPER)


def where(asked: Problem) -> tuple[int, bool] | None:
    """(before which factor, whether the last ones are multiplied first) of a cut."""
    cut = find_cut(asked)
    return None if cut is None else cut[:2]


def test_wide_factors_save_an_intermediate_of_the_size_of_x() -> None:
    for dtype in [torch.bfloat16, torch.float32, torch.float64]:
        assert find_cut(whole((300, 300), (300, 300), dtype=dtype)) is not None
        assert find_cut(whole((300, 300), dtype=dtype)) is None


def test_others_save_small_ones_alone() -> None:
    assert find_cut(whole((64, 64), (64, 64), rows=1024)) is None
    assert find_cut(whole((300, 300), (64, 64), rows=1024)) is None
    assert where(whole((64, 64), (64, 4), rows=1024)) == (1, True)


def test_the_larger_of_x_and_the_result_bounds_what_is_saved() -> None:
    """Of 205 x 226 to 262 x 1649 that after the second factor first would be 7 times x, beside 9 of the result."""
    assert where(whole((205, 262), (226, 1649), rows=1, dtype=torch.float64)) == (1, False)


def test_a_backward_pass_reads_what_was_saved(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with another intermediate gradients are others."""
    (x, *factors, _), _ = problem(SHAPES["last"], False, torch.float64, device)
    right = torch.autograd.grad(kron_matmul(x, factors).sum(), factors)
    add = gradients.add_multiply_saving

    def spoiled(build: Any, *arguments: Any) -> Any:
        y, between = add(build, *arguments)
        return y, build.call(torch.zeros_like, (between,), describe(between.shape, between.dtype))

    monkeypatch.setattr(gradients, "add_multiply_saving", spoiled)
    CACHE.forget()
    wrong = torch.autograd.grad(kron_matmul(x, factors).sum(), factors)
    assert not torch.allclose(wrong[0], right[0])


def test_where_x_would_be_copied(device: torch.device, cuts: list[Cut]) -> None:
    """Nothing is cut: strided tensors, and factors with batches."""
    (x, *factors, _), _ = problem(SHAPES["last"], False, torch.bfloat16, device)
    kron_matmul(x.detach()[0].mT.contiguous().mT.requires_grad_(), factors)
    kron_matmul(x, [f.expand(2, -1, -1) for f in factors])
    assert not cuts


def test_a_result_without_elements(device: torch.device, cuts: list[Cut]) -> None:
    for shapes, left in itertools.product([[(40, 2), (3, 0)], [(4, 0), (8, 64), (2, 16)]], [False, True]):
        (x, *factors, _), verb = problem(shapes, left, torch.float32, device)
        y = verb(factors, x) if left else verb(x, factors)
        assert y.numel() == 0
        assert all((t == 0).all() for t in torch.autograd.grad(y.sum(), [x, *factors]))
        assert not cuts


# ---- the plan ------------------------------------------------------------------------------------------------------------------


def test_cuts() -> None:
    for shapes, rows, cut in [
        (((4, 12), (512, 2)), 1 << 14, (1, True)),
        (((512, 2), (4, 12)), 1 << 14, (1, False)),
        (((512, 512), (4, 4)), 1 << 14, None),  # nothing narrows x
        (((512, 200), (4, 4)), 1 << 14, None),  # by less than 4
        (((8, 1), (8, 8)), 1 << 17, None),  # one launch has both gradients
        (((512, 2),), 1 << 14, None),
    ]:
        assert where(whole(*shapes, rows=rows)) == cut
