"""Many adapters on one base layer, by an index of each row's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import Refusal, assert_all_refused, value, wrong_type
from torch import Tensor

from fastkron_py import lokr_linear
from fastkron_py.testing import assert_close

SIZES = {"second_first": ((2, 4), (8, 16)), "first_first": ((8, 4), (5, 3)), "unaligned": ((2, 3), (5, 7))}
ADAPTERS = 4


def problem(form: str, dtype: torch.dtype, rank: int | None = None) -> tuple[Tensor, Tensor, Any, Tensor, Tensor]:
    """x, w1, w2, base and index: one adapter has no row, and some rows have no adapter."""
    (out1, in1), (out2, in2) = SIZES[form]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    w2: Any = draw(ADAPTERS, out2, in2) if rank is None else (draw(ADAPTERS, out2, rank), draw(ADAPTERS, rank, in2))
    index = torch.tensor([[3, 0, -1, 0, 3], [1, -1, 3, 0, 1]])
    return draw(2, 5, in1 * in2), draw(ADAPTERS, out1, in1), w2, draw(2, 5, out1 * out2), index


def by_loop(x: Tensor, w1: Tensor, w2: Any, base: Tensor, index: Tensor) -> Tensor:
    whole = w2.double() if isinstance(w2, Tensor) else w2[0].double() @ w2[1].double()
    rows = []
    for row, added, i in zip(x.double().flatten(0, 1), base.double().flatten(0, 1), index.flatten().tolist(), strict=True):
        rows.append(added if i < 0 else added + 0.5 * torch.kron(w1[i].double(), whole[i]) @ row)
    return torch.stack(rows).view(base.shape)


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("rank", [None, 2])
def test_values_and_gradients(form: str, rank: int | None) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, w1, w2, base, index = problem(form, dtype, rank)
        tensors = [t.requires_grad_() for t in (x, w1, *([w2] if rank is None else w2), base)]
        y = lokr_linear(x, w1, w2, base=base, index=index, scale=0.5)
        dy = torch.randn(y.shape, dtype=torch.float64).to(dtype)
        found = torch.autograd.grad(y, tensors, dy)
        doubles = [t.detach().double().requires_grad_() for t in tensors]
        want = by_loop(*doubles[:2], doubles[2] if rank is None else doubles[2:4], doubles[-1], index)  # type: ignore[arg-type]
        assert_close(y.detach(), want.detach(), steps=4)
        for got, expected in zip(found, torch.autograd.grad(want, doubles, dy.double()), strict=True):
            assert_close(got, expected, steps=8)
        assert not found[1][2].count_nonzero()  # of the adapter without rows
        alone = lokr_linear(x.detach(), w1.detach(), w2, index=torch.full_like(index, -1))
        assert not alone.count_nonzero()
        assert_close(lokr_linear(x, w1, w2, index=index, scale=0.5).detach(), (want - doubles[-1]).detach(), steps=8)


def test_gradients_of_many_rows_are_summed_in_float32() -> None:
    index = torch.arange(2048) % (ADAPTERS + 1) - 1
    _, w1, w2, *_ = problem("second_first", torch.bfloat16)
    x, dy = (torch.randn(len(index), n, dtype=torch.float64).bfloat16() for n in (64, 16))
    w1.requires_grad_()
    (dw1,) = torch.autograd.grad(lokr_linear(x, w1, w2, index=index), w1, dy)
    hidden = (x.double().view(-1, 4, 16) @ w2.double().mT[index]).bfloat16().double()
    each = (dy.double().view(-1, 2, 8) @ hidden.mT).bfloat16().double() * (index >= 0)[:, None, None]
    want = torch.zeros_like(w1, dtype=torch.float64).index_add(0, index.clamp(0), each)
    assert (dw1.double() - want).norm() < 4e-3 * want.norm()


def test_bitwise_repeats_autocast_and_compile() -> None:
    x, w1, w2, base, index = problem("second_first", torch.float32)
    want = by_loop(x, w1, w2, base, index)
    first, second = (lokr_linear(x, w1, w2, base=base, index=index, scale=0.5) for _ in range(2))
    assert torch.equal(first, second)
    with torch.autocast("cpu", torch.bfloat16):
        half = lokr_linear(x, w1, w2, base=base, index=index, scale=0.5)
    assert half.dtype == torch.bfloat16
    assert_close(half, want, steps=8)
    for dtype in (torch.float32, torch.bfloat16):
        x, w1, w2, base, index = problem("second_first", dtype)

        def call(*given: Tensor) -> Tensor:
            return lokr_linear(*given[:3], base=given[3], index=given[4], scale=0.5)

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert_close(compiled(x, w1, w2, base, index), by_loop(x, w1, w2, base, index), steps=4)


X, W1, W2, BASE, INDEX = problem("second_first", torch.float32)
REFUSED: dict[str, Refusal] = {
    "list": wrong_type(
        lambda: lokr_linear(X, W1, W2, index=[0]),  # type: ignore[type-var]
        "index: expected a tensor of torch.int32 or torch.int64; got list",
    ),
    "floats": wrong_type(
        lambda: lokr_linear(X, W1, W2, index=INDEX.float()), "index: expected a tensor of torch.int32 or torch.int64; got torch.float32"
    ),
    "shape": value(
        lambda: lokr_linear(X, W1, W2, index=INDEX[0]), "index: expected shape (2, 5), as x has rows, on cpu; got shape (5,) on cpu"
    ),
    "one_adapter": value(
        lambda: lokr_linear(X, W1[0], W2[0], index=INDEX),
        "w1 and w2: expected factors [adapters, out, in], since index is given; got shape (2, 4)",
    ),
    "out": wrong_type(lambda: lokr_linear(X, W1, W2, index=INDEX, out=BASE), "out: expected None, since index is given; got torch.Tensor"),
    "numpy": wrong_type(
        lambda: lokr_linear(X.numpy(), W1.numpy(), W2.numpy(), index=INDEX.numpy()),
        "index: expected None, since x is not a torch tensor; got numpy.ndarray",
    ),
}


def test_refused() -> None:
    assert_all_refused(REFUSED)
