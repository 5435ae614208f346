"""Matrices whose rows lie apart, copied by one call to CUDA's driver."""

from __future__ import annotations

import pytest
import torch

from fastkron_py.distributed.transport import copies
from fastkron_py.distributed.transport.copies import Copy

pytestmark = pytest.mark.gpu


def flat(t: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def copied(to: torch.Tensor, of: torch.Tensor, monkeypatch: pytest.MonkeyPatch, stream: torch.cuda.Stream | None = None) -> bool:
    """Copy ``[rows, columns]``; whether by copy engines."""
    kernels = []
    monkeypatch.setattr(copies, "copy", lambda to, of: kernels.append(to.copy_(of)))
    Copy(to, of).run(flat(to), flat(of), stream)
    return not kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(("rows", "columns", "gaps"), [(7, 1000, (3, 0)), (1, 5, (0, 2)), (300, 64, (64, 1))])
def test_it_copies_a_matrix_and_nothing_beside_it(
    dtype: torch.dtype, rows: int, columns: int, gaps: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "RUN_BYTES", 1)
    of, to = (torch.randn(rows + 2, columns + gap, device="cuda").to(dtype) for gap in gaps)
    expected = to.clone()
    expected[1:-1, :columns] = of[2:, :columns]
    assert copied(to[1:-1, :columns], of[2:, :columns], monkeypatch)
    assert torch.equal(to, expected)


def test_what_it_leaves_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy conjugates, rows one on top of the other, rows that are too far apart, and short runs."""
    x = torch.randn(4, 8, device="cuda", dtype=torch.complex64)
    y = torch.full_like(x, torch.nan)
    assert not copied(y[:, 1:], x[:, 1:], monkeypatch)
    assert torch.equal(y[:, 1:], x[:, 1:])
    monkeypatch.setattr(copies, "RUN_BYTES", 1)
    conjugate = x.view(-1).conj()
    kernels = []
    monkeypatch.setattr(copies, "copy", lambda to, of: kernels.append(to.copy_(of)))
    Copy(y, x).run(y.view(-1), conjugate)
    assert len(kernels) == 1
    assert torch.equal(y, x.conj())
    assert not copied(y, x[:1].expand(4, 8), monkeypatch)
    assert torch.equal(y, x[:1].expand(4, 8))
    far = torch.zeros((1 << 31) + 64, dtype=torch.uint8, device="cuda").as_strided((2, 8), (1 << 31, 1))
    assert not copied(torch.empty(2, 8, dtype=torch.uint8, device="cuda"), far, monkeypatch)


def test_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in a library's call, without a limit set lower."""
    of = torch.randn(40, 1 << 17, device="cuda")[:, : 1 << 16]
    to = torch.full((40, 1 << 16), torch.nan, device="cuda")
    assert copied(to, of, monkeypatch)
    assert torch.equal(to, of)
