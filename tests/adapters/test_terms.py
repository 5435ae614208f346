"""Sums of Kronecker products in one adapter: values, gradients, and what fits no sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastkron_py import lokr_linear
from fastkron_py.testing import assert_close

FORMS = {"second_first": ((2, 5), (4, 6)), "first_first": ((6, 4), (5, 2))}
Pair = Tensor | tuple[Tensor, Tensor]


def problem(form: str, terms: int, dtype: torch.dtype = torch.float64, low_rank: bool = False) -> tuple[Tensor, Pair, Pair, Tensor]:
    """x, w1, w2 and base."""
    (out1, in1), (out2, in2) = FORMS[form]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    w2: Pair = (draw(terms, out2, 2), draw(terms, 2, in2)) if low_rank else draw(terms, out2, in2)
    return draw(3, 7, in1 * in2), draw(terms, out1, in1), w2, draw(3, 7, out1 * out2)


def by_definition(x: Tensor, w1: Pair, w2: Pair, base: Tensor, scale: float = 0.5) -> Tensor:
    first, second = (w.double() if isinstance(w, Tensor) else w[0].double() @ w[1].double() for w in (w1, w2))
    weight = sum([torch.kron(a, b) for a, b in zip(first, second, strict=True)])
    return base.double() + scale * x.double() @ weight.mT  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("low_rank", [False, True])
def test_values(form: str, terms: int, low_rank: bool) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, w1, w2, base = problem(form, terms, dtype, low_rank)
        want = by_definition(x, w1, w2, base)
        assert_close(lokr_linear(x, w1, w2, base=base, scale=0.5), want, steps=4)
        assert_close(lokr_linear(x[0, 0], w1, w2, base=base[0, 0], scale=0.5), want[0, 0], steps=4)
        out = base.clone()
        assert lokr_linear(x, w1, w2, base=out, out=out, scale=0.5) is out
        assert_close(out, want, steps=4)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str) -> None:
    x, w1, w2, base = problem(form, 2, low_rank=True)
    tensors = [t.requires_grad_() for t in (x[0], w1, *w2, base[0])]  # type: ignore[union-attr]

    def call(x: Tensor, w1: Tensor, a: Tensor, b: Tensor, base: Tensor) -> Any:
        return lokr_linear(x, w1, (a, b), base=base, scale=0.5)

    torch.autograd.gradcheck(call, tensors)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*tensors).detach(), by_definition(*tensors[:2], tensors[2:4], tensors[4]).detach(), steps=4)  # type: ignore[arg-type]


def test_under_autocast() -> None:
    x, w1, w2, base = problem("second_first", 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = lokr_linear(x, w1, w2, base=base, scale=0.5)
    assert y.dtype == torch.bfloat16
    assert_close(y, by_definition(x, w1, w2, base), steps=8)
