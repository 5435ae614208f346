"""Long sums of half types: how they are cut, and the products by parts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastkron_py.testing import assert_close
from fastkron_py.tiling import torch_products
from fastkron_py.tiling.torch_products import LONG, LONG_ALONG, LONG_WHOLE, Cut, cut, cut_of, cut_product, write_parts


def test_parts_are_the_sum() -> None:
    lengths = (LONG + 1, 2561, 4034, 93636, 93632, 94144, 264301, 1 << 20)
    sizes = ((8, 8), (384, 384), (1, 368), (976, 72), (1280, 736))
    for (m, n), terms, unit in itertools.product(sizes, lengths, (1, 8)):
        found = cut(m, n, terms, unit)
        assert found is not None, (m, n, terms, unit)
        assert found.parts * found.terms + found.rest == terms, found
        assert found.parts > 1, found
        assert found.terms % unit == 0, found
        assert found.rest < found.terms, found
        assert found.all_parts == found.parts + bool(found.rest), found
    assert cut(384, 384, 93636) == Cut(17, 5508, 0)
    assert cut(384, 384, 93637) == Cut(17, 5508, 1)  # no length divides the sum: a part is left over
    assert cut(384, 384, 93636, 8) == Cut(19, 4928, 4)


def test_products_that_are_not_cut() -> None:
    """A result of many tiles, a short sum, a wide dtype, a batch; and sums that torch computes right: along memory, or of whole steps."""
    assert cut(2048, 2048, 8192) is None
    a, b = torch.empty(LONG + 1, 8, dtype=torch.bfloat16), torch.empty(LONG + 1, 16, dtype=torch.bfloat16)
    assert cut_of(a.mT, b) is not None
    assert cut_of(a[1:].mT, b[1:]) is None
    assert cut_of(a.float().mT, b.float()) is None
    assert cut_of(a.mT[None], b[None]) is None
    for terms in (LONG_ALONG - 1, LONG_WHOLE):
        for length, is_cut in ((terms, False), (2 * terms - 1, True)):
            a, b = torch.empty(8, length, dtype=torch.bfloat16), torch.empty(length, 8, dtype=torch.bfloat16)
            assert (cut_of(a, b) is not None) == is_cut


def operands(terms: int, dtype: torch.dtype, is_along_sum: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    a, b = (torch.randn(terms, size).to(dtype) for size in (24, 40))
    return (a.mT.contiguous(), b.mT.contiguous().mT) if is_along_sum else (a.mT, b)


def by_parts(a: Tensor, b: Tensor) -> Tensor:
    found = cut_of(a, b)
    assert found is not None
    parts = torch.full((found.all_parts, a.shape[0], b.shape[1]), torch.nan)
    write_parts(a, b, parts, found)
    return parts.sum(0)


def test_parts_add_up_to_the_product() -> None:
    for dtype, is_along_sum, terms in itertools.product((torch.float16, torch.bfloat16), (False, True), (5121, 5123)):
        a, b = operands(terms, dtype, is_along_sum)
        assert_close(by_parts(a, b), a.double() @ b.double(), steps=4)
        with pytest.raises(AssertionError):  # the control: without the last terms
            assert_close(by_parts(a[:, :-3], b[:-3]), a.double() @ b.double(), steps=4)


def test_other_devices_take_torch_s_product(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(5123, torch.bfloat16, False)
    monkeypatch.setattr(torch_products, "write_parts", None)
    assert torch.equal(cut_product(a, b), a @ b)
