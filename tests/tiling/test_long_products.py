"""Long sums of half types: how they are cut, and the products by parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastkron_py.testing import assert_close
from fastkron_py.tiling import long_products
from fastkron_py.tiling.long_products import LONG, LONG_ALONG, LONG_WHOLE, Cut, cut, cut_of, cut_product, write_parts


@pytest.mark.parametrize("terms", [LONG + 1, 2561, 4034, 93636, 93632, 94144, 264301, 1 << 20])
@pytest.mark.parametrize("sizes", [(8, 8), (384, 384), (1, 368), (976, 72), (1280, 736)], ids=str)
@pytest.mark.parametrize("unit", [1, 8])
def test_parts_are_the_sum(unit: int, sizes: tuple[int, int], terms: int) -> None:
    found = cut(*sizes, terms, unit)
    assert found is not None
    assert found.parts * found.terms + found.rest == terms
    assert found.parts > 1
    assert found.terms % unit == 0
    assert found.rest < found.terms
    assert found.all_parts == found.parts + bool(found.rest)


def test_a_part_is_left_over_where_no_length_divides_the_sum() -> None:
    assert cut(384, 384, 93636) == Cut(17, 5508, 0)
    assert cut(384, 384, 93637) == Cut(17, 5508, 1)
    assert cut(384, 384, 93636, 8) == Cut(19, 4928, 4)


def test_results_of_many_tiles_are_not_cut() -> None:
    assert cut(2048, 2048, 8192) is None


def test_products_that_are_not_cut() -> None:
    a, b = torch.empty(LONG + 1, 8, dtype=torch.bfloat16), torch.empty(LONG + 1, 16, dtype=torch.bfloat16)
    assert cut_of(a.mT, b) is not None
    assert cut_of(a[1:].mT, b[1:]) is None
    assert cut_of(a.float().mT, b.float()) is None
    assert cut_of(a.mT[None], b[None]) is None


@pytest.mark.parametrize("terms", [LONG_ALONG - 1, LONG_WHOLE])
def test_sums_that_torch_computes_right_are_not_cut(terms: int) -> None:
    """Shorter ones along an operand's memory, and whole steps."""
    a, b = torch.empty(8, terms, dtype=torch.bfloat16), torch.empty(terms, 8, dtype=torch.bfloat16)
    assert cut_of(a, b) is None
    assert cut_of(torch.empty(8, 2 * terms - 1, dtype=torch.bfloat16), torch.empty(2 * terms - 1, 8, dtype=torch.bfloat16)) is not None


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


@pytest.mark.parametrize("terms", [5121, 5123])
@pytest.mark.parametrize("is_along_sum", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parts_add_up_to_the_product(dtype: torch.dtype, is_along_sum: bool, terms: int) -> None:
    a, b = operands(terms, dtype, is_along_sum)
    assert_close(by_parts(a, b), a.double() @ b.double(), steps=4)


def test_a_sum_without_its_last_terms_is_found_wrong() -> None:
    a, b = operands(5123, torch.bfloat16, False)
    with pytest.raises(AssertionError):
        assert_close(by_parts(a[:, :-3], b[:-3]), a.double() @ b.double(), steps=4)


def test_other_devices_take_torch_s_product(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(5123, torch.bfloat16, False)
    monkeypatch.setattr(long_products, "write_parts", None)
    assert torch.equal(cut_product(a, b), a @ b)
