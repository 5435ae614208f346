"""Sums of many terms of half types on a GPU: none is left out."""

from __future__ import annotations

import math
import random

import pytest
import torch
from canonical_cases import force_gradients, force_products

import fastkron_py
from fastkron_py import functional
from fastkron_py.tiling.torch_products import by_parts

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
HALF = (torch.float16, torch.bfloat16)
# (P, Q, terms) of products by torch that lacked terms on an H200
WRONG = [(384, 384, 93_636), (88, 608, 97_347), (8, 664, 13_832), (976, 72, 32_772), (272, 408, 67_592), (24, 176, 180_264)]
LAST = 70


def sizes(seed: int, count: int, most_terms: int) -> list[tuple[int, int, int]]:
    """(P, Q, terms): widths of whole vectors, as cuBLAS splits their sums."""
    generator, found = random.Random(seed), []
    while len(found) < count:
        p, q = (8 * int(math.exp(generator.uniform(0, math.log(130)))) for _ in range(2))
        terms = int(math.exp(generator.uniform(math.log(2000), math.log(most_terms))))
        if terms * (p + q) < 1 << 26:
            found.append((p, q, terms))
    return found


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_term_is_added(dtype: torch.dtype) -> None:
    """Of ones, each sum is the number of its terms."""
    for p, q, terms in sizes(0, 1000, 400_000):
        a, b = torch.ones(terms, p, device=DEVICE, dtype=dtype), torch.ones(terms, q, device=DEVICE, dtype=dtype)
        for left, right in ((a.mT, b), (a.view(p, terms), b), (a.mT, b.view(q, terms).mT)):
            found = by_parts(left, right)
            found = torch.mm(left, right, out_dtype=torch.float32) if found is None else found
            assert found.min() == found.max() == terms, (p, q, terms)


def test_torch_leaves_terms_out() -> None:
    """The control: if this fails, sums need not be cut any more."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    wrong = 0
    for p, q, terms in sizes(0, 1000, 400_000):
        a, b = torch.ones(terms, p, device=DEVICE, dtype=torch.float16), torch.ones(terms, q, device=DEVICE, dtype=torch.float16)
        wrong += bool(torch.mm(a.mT, b, out_dtype=torch.float32).min() != terms)
    assert wrong


def last_terms(terms: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, but for the last LAST: of ones."""
    x = torch.zeros(terms, width, device=DEVICE, dtype=dtype)
    x[-LAST:] = 1
    return x


@pytest.mark.parametrize("algorithm", ["matmul", "copying"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_of_factors(dtype: torch.dtype, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_products(monkeypatch, algorithm)
    force_gradients(monkeypatch, algorithm)
    for p, q, terms in WRONG + sizes(1, 40, 60_000):
        x, dy = last_terms(terms, p, dtype), torch.ones(terms, q, device=DEVICE, dtype=dtype)
        factor = torch.ones(p, q, device=DEVICE, dtype=dtype, requires_grad=True)
        (found,) = torch.autograd.grad(fastkron_py.kron_matmul(x, [factor]), factor, dy)
        assert found.min() == found.max() == LAST, (p, q, terms)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_products_of_wide_factors(dtype: torch.dtype) -> None:
    for p, q, rows in ((75_528, 24, 3), (86_416, 440, 8), (33_304, 40, 2), (20_488, 8, 280)):
        x, factor = torch.ones(rows, p, device=DEVICE, dtype=dtype), torch.full((p, q), 2.0**-10, device=DEVICE, dtype=dtype)
        wanted = torch.full((rows, q), p * 2.0**-10, device=DEVICE, dtype=dtype)
        assert torch.equal(fastkron_py.kron_matmul(x, [factor]), wanted)
        assert torch.equal(fastkron_py.kron_matmul_left([factor.mT], x.mT), wanted.mT)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weight_gradients_of_layers(dtype: torch.dtype) -> None:
    for p, q, terms in WRONG:
        x, dy = last_terms(terms, p, dtype), torch.ones(terms, q, device=DEVICE, dtype=dtype)
        weight = torch.ones(q, p, device=DEVICE, dtype=dtype, requires_grad=True)
        a, b = torch.tensor([[0.0, 1.0]], device=DEVICE), torch.zeros(1, 1, device=DEVICE)  # the identity
        (found,) = torch.autograd.grad(functional.rational_linear(x, a, b, weight), weight, dy)
        assert found.min() == found.max() == LAST, (p, q, terms)
