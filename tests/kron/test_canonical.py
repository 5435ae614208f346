"""Batch dimensions in which factors do not differ are rows, not further groups of factors."""

from __future__ import annotations

import itertools

import canonical_cases
import pytest
import torch

from fastkron_py import kron_matmul_left
from fastkron_py.kron.canonical import canonical
from fastkron_py.testing import assert_close

BATCHES = [((3, 1), (3, 5), (3, 5)), ((3, 1), (5,), (3, 5)), ((2, 1, 3, 1), (4, 1, 5), (2, 4, 3, 5)), ((1,), (4,), (4,))]


def test_rows_and_groups() -> None:
    for (factor_batch, x_batch, batch), left in itertools.product(BATCHES, [False, True]):
        factors = [torch.randn(*factor_batch, 2, 2), torch.randn(4, 4)]
        problem = canonical(torch.randn(*x_batch, 8, 8), factors, left)
        groups = torch.Size(batch[:-1] if len(factor_batch) > 1 else ()).numel()
        assert problem.batch == batch
        assert [f.shape[0] for f in problem.factors] == [groups] * 2
        assert problem.x.shape == (groups, torch.Size(batch).numel() // groups * (1 if left else 8), 8, 8 if left else 1)


def test_left_products_with_rows_and_groups(backend_name: str, device: torch.device) -> None:
    for (factor_batch, x_batch, batch), size in itertools.product(BATCHES[:3], [(2, 3), (20, 33)]):
        f = torch.randn(*factor_batch, *size, device=device, requires_grad=True)
        x = torch.randn(*x_batch, size[1], 7, device=device, requires_grad=True)
        dy = torch.randn(*batch, size[0], 7, device=device)
        y = kron_matmul_left([f], x)
        wanted = f.double() @ x.double()
        assert_close(y, wanted, steps=1)
        for gradient, reference in zip(torch.autograd.grad(y, (f, x), dy), torch.autograd.grad(wanted, (f, x), dy.double()), strict=True):
            assert_close(gradient, reference.double())
        with pytest.raises(AssertionError):
            assert_close(y, wanted * 1.01, steps=1)


def test_the_reference_of_large_products_is_that_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x, factors = canonical_cases.problem(torch.complex128, "cpu", 3, 2, (5, 3, 2), (4, 2, 7), 4)
    whole = canonical_cases.dense(x, factors)
    monkeypatch.setattr(canonical_cases, "LARGEST", 0)
    assert_close(canonical_cases.dense(x, factors), whole, steps=3)
