"""Many adapters on one base layer, by an index of each row's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import Refusal, assert_all_refused, value, wrong_type
from torch import Tensor

from fastkron_py import lokr_linear
from fastkron_py.adapters import launches
from fastkron_py.adapters.batched import lokr_indexed
from fastkron_py.adapters.plan import FactorSize
from fastkron_py.testing import assert_close

SIZES = {
    "second_first": ((2, 4), (8, 16)),
    "first_first": ((8, 4), (5, 3)),
    "unaligned": ((2, 3), (5, 7)),
    "wide w1": ((3, 40), (16, 8)),
    "several blocks": ((3, 3), (300, 70)),
}
ADAPTERS = 4


def problem(
    form: str, dtype: torch.dtype, rank: int | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Any, Tensor, Tensor]:
    """x, w1, w2, base and index: one adapter has no row, and some rows have no adapter."""
    (out1, in1), (out2, in2) = SIZES[form]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    w2: Any = draw(ADAPTERS, out2, in2) if rank is None else (draw(ADAPTERS, out2, rank), draw(ADAPTERS, rank, in2))
    index = torch.tensor([[3, 0, -1, 0, 3], [1, -1, 3, 0, 1]], device=device)
    return draw(2, 5, in1 * in2), draw(ADAPTERS, out1, in1), w2, draw(2, 5, out1 * out2), index


def by_loop(x: Tensor, w1: Tensor, w2: Any, base: Tensor, index: Tensor) -> Tensor:
    whole = w2.double() if isinstance(w2, Tensor) else w2[0].double() @ w2[1].double()
    rows = []
    for row, added, i in zip(x.double().flatten(0, -2), base.double().flatten(0, -2), index.flatten().tolist(), strict=True):
        rows.append(added if i < 0 else added + 0.5 * torch.kron(w1[i].double(), whole[i]) @ row)
    return torch.stack(rows).view(base.shape)


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("rank", [None, 2, 300])
def test_values(form: str, rank: int | None, backend_name: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)[:: 1 if form == "second_first" else 2]:
        x, w1, w2, base, index = problem(form, dtype, rank, device)
        want = by_loop(x, w1, w2, base, index)
        # Sums may cancel, and a pair's rounds twice.
        options: dict[str, Any] = {"magnitude": want.abs().max().expand_as(want), "steps": 4, "rms_tol": None}
        y = lokr_linear(x, w1, w2, base=base, index=index, scale=0.5)
        assert_close(y, want, **options)
        assert torch.equal(y, lokr_linear(x, w1, w2, base=base, index=index.int(), scale=torch.tensor(0.5, device=device)))
        assert_close(lokr_linear(x, w1, w2, index=index, scale=0.5), want - base.double(), **options)
        for none in (-1, ADAPTERS):
            assert torch.equal(lokr_linear(x, w1, w2, base=base, index=torch.full_like(index, none)), base)
    wide = lokr_linear(x.bfloat16(), w1.float(), w2.float() if rank is None else [t.float() for t in w2], index=index, scale=0.5)
    assert_close(wide, want - base.double(), magnitude=options["magnitude"], steps=8, rms_tol=None)


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_factors_of_nothing(needs_gradients: bool, backend_name: str, device: torch.device) -> None:
    """No adapters, adapters of rank 0, factors without rows or columns: the result is base, and it is contiguous."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, w1, w2, base, index = problem("second_first", dtype, None, device)
        x[0], base = torch.nan, base.transpose(0, 1).contiguous().transpose(0, 1)
        empty = (w2[:, :, :0], w2[:, :0])
        for first, second, number in ((w1[:0], w2[:0], -1), (w1, empty, 2), (w1[:0], (empty[0][:0], empty[1][:0]), 0)):
            leaves = [t.detach().requires_grad_(needs_gradients) for t in (x, first, base)]
            given = torch.full_like(index, number)
            y = lokr_linear(leaves[0], leaves[1], second, base=leaves[2], index=given)
            where = slice(1 if number == 2 else 0, None)  # NaN may reach rows that have an adapter
            assert torch.equal(y[where], base[where])
            assert y.is_contiguous()
            if needs_gradients:
                dx, dw, dbase = torch.autograd.grad(y, leaves, torch.ones_like(y))
                assert dw.shape == first.shape
                assert not dx[where].count_nonzero()
                assert bool((dbase == 1).all())
        assert torch.equal(lokr_linear(x[..., :0], w1, w2[..., :0], base=base, index=index), base)
        assert lokr_linear(x, w1, w2[:, :0], index=index).shape == (2, 5, 0)


def test_many_rows_of_few_adapters(backend_name: str, device: torch.device) -> None:
    x, w1, w2, base, _ = problem("second_first", torch.float32, None, device)
    x, base, index = (
        x[0, :1].repeat(5000, 1) * torch.rand(5000, 1, device=device),
        base[0, :1].repeat(5000, 1),
        torch.randint(-1, ADAPTERS, (5000,), device=device) % 3,
    )
    assert_close(lokr_linear(x, w1, w2, base=base, index=index, scale=0.5), by_loop(x, w1, w2, base, index), steps=4)
    assert not lokr_linear(x[:0], w1, w2, index=index[:0]).numel()
    assert_close(lokr_linear(x[7], w1, w2, index=index[7]), lokr_linear(x, w1, w2, index=index)[7].double(), steps=4)


@pytest.mark.parametrize("rank", [None, 2])
def test_numbers_that_are_not_finite_stay_in_their_rows(rank: int | None, backend_name: str, device: torch.device) -> None:
    """Also in gradients: of a row without an adapter nothing but base's."""
    for dtype in (torch.float32, torch.bfloat16):
        x, w1, w2, base, index = problem("second_first", dtype, rank, device)
        dy = torch.randn_like(base)
        for t, number in ((x, float("nan")), (x, float("inf")), (dy, float("nan"))):
            t[0, 2, 3] = number  # of a row without an adapter
            tensors = [t.detach().requires_grad_() for t in (x, w1, *([w2] if rank is None else w2), base)]
            y = lokr_linear(*tensors[:2], tensors[2] if rank is None else tuple(tensors[2:4]), base=tensors[-1], index=index)
            dx, *others, dbase = torch.autograd.grad(y, tensors, dy)
            assert not dx[0, 2].count_nonzero()
            assert torch.equal(dbase.nan_to_num(), dy.nan_to_num())
            assert all([g.isfinite().all() for g in (dx, *others)])
            with torch.no_grad():
                found = lokr_linear(x, w1, w2, base=base, index=index)
            assert torch.equal(found[0, 2], base[0, 2])
            assert found.isfinite().all()
        x[0, 3] = float("nan")  # of a row with one
        found = lokr_linear(x, w1, w2, base=base, index=index)
        assert found[0, 3].isnan().all()
        assert found.isfinite().sum() == found.numel() - found.shape[-1]


@pytest.mark.parametrize("form", ["second_first", "first_first", "unaligned"])
@pytest.mark.parametrize("rank", [None, 2])
def test_gradients(form: str, rank: int | None) -> None:
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


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_one_row_and_factors_with_gaps(needs_gradients: bool, backend_name: str, device: torch.device) -> None:
    """x may have one dimension, and index none; rows of w2 need not be contiguous, which torch's grouped products ask for."""
    x, w1, w2, base, index = problem("second_first", torch.float32, device=device)
    gaps = torch.full((*w2.shape[:-1], 2 * w2.shape[-1] + 1), float("nan"), device=device)[..., 1::2]
    gaps.copy_(w2)
    want = by_loop(x, w1, w2, base, index)
    y = lokr_linear(x.requires_grad_(needs_gradients), w1, gaps, base=base, index=index, scale=0.5)
    one = lokr_linear(x[1, 3], w1, gaps, base=base[1, 3], index=index[1, 3], scale=0.5)
    assert one.shape == base.shape[2:]
    for got, expected in ((y, want), (one, want[1, 3])):
        assert_close(got.detach(), expected.detach(), magnitude=want.detach().abs().max().expand_as(expected), steps=4, rms_tol=None)


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


def test_bitwise_repeats_autocast_and_compile(backend_name: str, device: torch.device) -> None:
    x, w1, w2, base, index = problem("second_first", torch.float32, None, device)
    want = by_loop(x, w1, w2, base, index)
    first, second = (lokr_linear(x, w1, w2, base=base, index=index, scale=0.5) for _ in range(2))
    assert torch.equal(first, second)
    with torch.autocast(device.type, torch.bfloat16):
        half = lokr_linear(x, w1, w2, base=base, index=index, scale=0.5)
    assert half.dtype == torch.bfloat16
    assert_close(half, want, steps=8)

    def call(*given: Tensor) -> Tensor:
        return lokr_linear(*given[:3], base=given[3], index=given[4], scale=0.5)

    for dtype in (torch.float32, torch.bfloat16):
        x, w1, w2, base, index = problem("second_first", dtype, None, device)
        want = by_loop(x, w1, w2, base, index)
        for needs in (False, True):
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            assert_close(compiled(x, w1.requires_grad_(needs), w2, base, index).detach(), want, steps=4)
    torch.library.opcheck(lokr_indexed.registered, (x, w1.detach(), None, w2, None, base, index, 0.5, None, backend_name))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_no_product_is_smaller_than_tensor_cores_take(dtype: torch.dtype) -> None:
    """The interpreter takes any; compilers refuse sums of fewer than 16 terms."""
    for in1 in range(1, 65):
        most = launches.most_rank(dtype, in1, torch.device("cpu"))
        for rank in (None, 1, 2, most) if most else (None,):
            tile = launches._tile(dtype, in1, FactorSize(64, 64, rank), torch.device("cpu"))
            assert min(tile["BLOCK_N"], tile["BLOCK_O"], tile["BLOCK_K"]) >= 16, (in1, rank, tile)
