"""Norms of a weight plus a Kronecker product against those of the sum."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from fastkron_py.adapters.adapter import adapted_norms
from fastkron_py.testing import assert_close

SIZES = [((3, 2), (4, 5)), ((1, 1), (6, 7)), ((2, 5), (3, 1))]


def draw(sizes: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    (o1, i1), (o2, i2) = sizes
    w1, w2 = torch.randn(o1, i1, dtype=dtype), torch.randn(o2, i2, dtype=dtype)
    return torch.randn(o1 * o2, i1 * i2, dtype=dtype), w1, w2


@pytest.mark.parametrize("form", ["rows", "masked_rows", "columns"])
def test_values_and_gradients(form: str) -> None:
    for sizes, weight_dtype in product(SIZES, [torch.bfloat16, torch.float32, torch.float64]):
        weight, w1, w2 = draw(sizes, torch.float64)
        weight = weight.to(weight_dtype)
        mask = (torch.rand(weight.shape[0], dtype=torch.float64) > 0.3) * 1.5 if form == "masked_rows" else None
        by_row = form != "columns"
        scale = torch.ones(()) if mask is None else mask[:, None]
        assert_close(
            adapted_norms(weight, w1, w2, by_row=by_row, row_mask=mask),
            (weight.double() + scale * torch.kron(w1, w2)).norm(dim=int(by_row)),
            steps=4,
        )
        inputs = [w1.requires_grad_(), w2.requires_grad_()]

        norms = partial(adapted_norms, weight, by_row=by_row, row_mask=mask)
        assert torch.autograd.gradcheck(norms, inputs)
        assert torch.autograd.gradgradcheck(norms, inputs, fast_mode=True)


def test_a_row_of_zeros() -> None:
    """As torch has it: norm 0 and gradient 0, where a square root would give NaN."""
    for by_row in [True, False]:
        w1, w2 = torch.zeros(2, 2, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
        norms = adapted_norms(torch.zeros(6, 4), w1, w2, by_row=by_row)
        assert not norms.count_nonzero()
        assert all(not g.count_nonzero() for g in torch.autograd.grad(norms.sum(), (w1, w2)))
