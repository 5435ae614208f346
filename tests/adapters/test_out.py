"""`lokr_linear` that writes its result to a tensor, of its own or the base layer's result."""

from __future__ import annotations

import pytest
import torch
from adapter_cases import CASES, LoKrCase, case_id, lokr_problem
from torch import Tensor

import fastkron_py
from fastkron_py import lokr_linear, reference
from fastkron_py.adapters import operator
from fastkron_py.testing import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.complex128]


def poisoned(t: Tensor) -> Tensor:
    """Contiguous memory like a tensor's, full of NaN."""
    return torch.full_like(t, float("nan"), memory_format=torch.contiguous_format)


def wanted(x: Tensor, w1, w2, base: Tensor | None, scale: float) -> Tensor:
    wide = [tuple(t.to(torch.promote_types(t.dtype, torch.float64)) for t in (w if isinstance(w, tuple) else (w,))) for w in (w1, w2)]
    k1, k2 = (w[0] if len(w) == 1 else w[0] @ w[1] for w in wide)
    y = scale * (x.to(k1.dtype) @ torch.kron(k1, k2).mT)
    return y if base is None else base + y


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_out_has_the_result(case: LoKrCase, backend_name, device, generator, monkeypatch) -> None:
    written: list[bool] = []
    monkeypatch.setattr(operator, "write", lambda *given, write=operator.write: (written.append(True), write(*given)))
    for dtype in DTYPES:
        x, w1, w2, base = lokr_problem(case, dtype, device, generator)
        expected = wanted(x, w1, w2, base, 0.5)
        steps = 12 if dtype == torch.bfloat16 else 8
        written.clear()
        with torch.no_grad():
            out = poisoned(base)
            assert lokr_linear(x, w1, w2, base=base, out=out, scale=0.5) is out
            assert_close(out, expected, steps=steps)
            out = poisoned(base)
            lokr_linear(x, w1, w2, out=out)
            assert_close(out, wanted(x, w1, w2, None, 1.0), steps=steps)
            for _ in range(2):  # checked, and found again
                in_place = base.contiguous().clone()
                assert lokr_linear(x, w1, w2, base=in_place, out=in_place, scale=0.5) is in_place
                assert_close(in_place, expected, steps=steps)
        assert len(written) == (4 if x.ndim == 1 else 3)  # a vector is checked each time


def test_memory_that_a_program_may_not_write_to(backend_name, device, generator) -> None:
    """Gaps, x itself, or half of base: the result is copied there."""
    w1, w2 = torch.randn(2, 2, generator=generator), torch.randn(3, 3, generator=generator)
    x, base = (torch.randn(5, 6, generator=generator) for _ in range(2))
    w1, w2, x, base = (t.to(device) for t in (w1, w2, x, base))
    expected = wanted(x, w1, w2, base, 1.0)
    gaps = torch.full((5, 12), 7.0, device=device)
    lokr_linear(x, w1, w2, base=base, out=gaps[:, ::2])
    assert_close(gaps[:, ::2], expected, steps=8)
    assert torch.equal(gaps[:, 1::2], torch.full((5, 6), 7.0, device=device))
    memory = torch.cat([base.flatten(), base.flatten()[:6]])
    memory[6:36] = base.flatten()
    lokr_linear(x, w1, w2, base=memory[6:].view(5, 6), out=memory[:30].view(5, 6))
    assert_close(memory[:30].view(5, 6), expected, steps=8)
    own = x.clone()
    lokr_linear(own, w1, w2, base=base, out=own)
    assert_close(own, expected, steps=8)
    apart = base.clone()
    lokr_linear(x, w1, w2, base=apart, out=apart)  # kept
    own = x.clone()
    lokr_linear(own, w1, w2, base=own, out=own)  # alike, but for where it is
    assert_close(own, wanted(x, w1, w2, x, 1.0), steps=8)


def test_an_x_that_is_base_is_not_written_while_it_is_read(backend_name, device, monkeypatch) -> None:
    monkeypatch.setattr(operator, "write", lambda *given: pytest.fail("x was written"))
    w1, w2, own = torch.randn(2, 2, device=device), torch.randn(3, 3, device=device), torch.randn(5, 6, device=device)
    expected = wanted(own, w1, w2, own.clone(), 1.0)
    lokr_linear(own, w1, w2, base=own, out=own)
    assert_close(own, expected, steps=8)


def test_autograd_sees_the_write(backend_name, device) -> None:
    """A backward pass that has saved base raises, checked and found again, as after a write by torch."""
    w1, w2, x = torch.randn(2, 2, device=device), torch.randn(3, 3, device=device), torch.randn(5, 6, device=device)
    for _ in range(2):
        base, factor = torch.randn(5, 6, device=device), torch.randn(5, 6, device=device, requires_grad=True)
        product = (factor * base).sum()
        with torch.no_grad():
            lokr_linear(x, w1, w2, base=base, out=base)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    with torch.inference_mode():
        lokr_linear(x, w1, w2, base=torch.zeros(5, 6, device=device), out=torch.zeros(5, 6, device=device))


def test_one_vector_and_no_rows(backend_name, device) -> None:
    w1, w2 = torch.ones(2, 2, device=device), torch.ones(3, 2, device=device)
    out = torch.empty(6, device=device)
    assert lokr_linear(torch.ones(4, device=device), w1, w2, out=out) is out
    assert out.tolist() == [4.0] * 6
    none = torch.empty(0, 6, device=device)
    assert lokr_linear(torch.ones(0, 4, device=device), w1, w2, base=none, out=none) is none


def test_refusals() -> None:
    x, w1, w2, base = torch.ones(5, 6), torch.ones(2, 2), torch.ones(3, 3), torch.ones(5, 6)
    for out, error, message in (
        (base.double(), TypeError, "out: expected x's dtype"),
        (base[:-1], ValueError, "out: expected the result's shape"),
        (base.numpy(), TypeError, "out: expected a torch tensor"),
    ):
        with pytest.raises(error, match=message):
            lokr_linear(x, w1, w2, base=base, out=out)


def test_no_gradient_is_lost() -> None:
    x, w1, w2, base = torch.ones(5, 6), torch.ones(2, 2, requires_grad=True), torch.ones(3, 3), torch.ones(5, 6)
    with pytest.raises(ValueError, match=r"out: expected torch\.no_grad"):
        lokr_linear(x, w1, w2, out=base)
    with torch.no_grad():
        lokr_linear(x, w1, w2, out=base)
    assert_close(base, reference.lokr_linear(x, w1, w2).detach().double(), steps=4)
    with pytest.raises(TypeError, match="out: expected None, since x is not a torch tensor"):
        fastkron_py.lokr_linear(x.numpy(), w1.detach().numpy(), w2.numpy(), out=base)


def _base_is_x(make) -> tuple[Tensor, ...]:
    x = make(5, 6)
    return x, make(2, 2), make(3, 3), x


def _chunks(make) -> tuple[Tensor, ...]:
    x, base = make(10, 6).chunk(2)
    return x, make(2, 2), make(3, 3), base


def _factor_of_base(make) -> tuple[Tensor, ...]:
    memory = make(34)
    return make(5, 6), memory[30:].view(2, 2), make(3, 3), memory[:30].view(5, 6)


@pytest.mark.parametrize("shared", [_base_is_x, _chunks, _factor_of_base])
def test_a_call_that_could_not_write_in_place_leaves_later_ones_alone(shared, backend_name, device, generator) -> None:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for operands in (shared, lambda make: (make(5, 6), make(2, 2), make(3, 3), make(5, 6)), shared):
        x, w1, w2, base = operands(make)
        expected = wanted(x, w1, w2, base.clone(), 1.0)
        assert lokr_linear(x, w1, w2, base=base, out=base) is base
        assert_close(base, expected, steps=8)
