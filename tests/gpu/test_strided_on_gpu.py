"""Matrices whose rows lie apart, copied by one call to CUDA's driver."""

from __future__ import annotations

import pytest
import torch

from fastkron_py.distributed.transport import copies
from fastkron_py.distributed.transport.copies import copy_matrix, copy_runs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(("rows", "columns", "gaps"), [(7, 1000, (3, 0)), (1, 5, (0, 2)), (300, 64, (64, 1))])
def test_it_copies_a_matrix_and_nothing_beside_it(dtype: torch.dtype, rows: int, columns: int, gaps: tuple[int, int]) -> None:
    of, to = (torch.randn(rows + 2, columns + gap, device="cuda").to(dtype) for gap in gaps)
    expected = to.clone()
    expected[1:-1, :columns] = of[2:, :columns]
    assert copy_matrix(to[1:-1, :columns], of[2:, :columns])
    assert torch.equal(to, expected)


def test_on_a_side_stream_behind_what_makes_it() -> None:
    of, to = torch.zeros(64, 1 << 16, device="cuda"), torch.full((64, 1 << 15), torch.nan, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(50):
            of.add_(1.0)
        assert copy_matrix(to, of[:, 1 << 15 :])
        of.fill_(-1.0)
    stream.synchronize()
    assert torch.equal(to, torch.full_like(to, 50.0))


def test_what_it_leaves_to_torch() -> None:
    """Lazy conjugates, rows one on top of the other, and rows that are too far apart."""
    x = torch.randn(4, 8, device="cuda", dtype=torch.complex64)
    y = torch.empty_like(x)
    assert not copy_matrix(y, x.conj())
    assert not copy_matrix(y, x[:1].expand(4, 8))
    far = torch.empty((1 << 31) + 64, dtype=torch.uint8, device="cuda").as_strided((2, 8), (1 << 31, 1))
    assert not copy_matrix(torch.empty(2, 8, dtype=torch.uint8, device="cuda"), far)


@pytest.mark.parametrize("turned", [False, True])
def test_runs(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few matrices of long runs, whichever of the two dimensions has fewer."""
    calls = []
    monkeypatch.setattr(copies, "copy_matrix", lambda to, of: calls.append(to.shape) or copy_matrix(to, of))
    of = torch.randn(3, 40, 1 << 17, device="cuda")[:, :, : 1 << 16]
    to = torch.full((3, 40, 1 << 16), torch.nan, device="cuda")
    copy_runs(*(t.transpose(0, 1) if turned else t for t in (to, of)))
    assert torch.equal(to, of)
    assert calls == [(40, 1 << 16)] * 3
