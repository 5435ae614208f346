"""Large layers that are computed again by what was recorded of them, in plain Triton and as on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from poly_kan_cases import layer_gradients, problem
from poly_kan_on_numpy import stage
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan import cached as recorded_poly_kan
from fastkron_py.kan import config as tuning
from fastkron_py.kan import launches as triton_poly_kan
from fastkron_py.runtime import device as devices
from fastkron_py.runtime import torch_internals as guards
from fastkron_py.testing import assert_close
from fastkron_py.tiling import gemm_problem as gemm_kind
from fastkron_py.tiling.gemm_config import GemmTile

pytestmark = [
    pytest.mark.skipif(guards.GUARDS is None, reason="this torch lacks the guards that records are recognised by"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same, compiled"),
]
CPU = torch.device("cpu")
KINDS = {
    "three passes": (torch.float32, "highest", 1e-6),
    "TF32": (torch.float32, "high", 2e-3),  # one operand of each product is cut off, not rounded
    "bfloat16": (torch.bfloat16, None, 1e-2),
}


@pytest.fixture(params=["plain", "hopper"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every product is large; on a Hopper GPU, of as few multiprocessors as its kernels can be run for on NumPy."""
    if request.param == "hopper":
        stage(monkeypatch)
        tile = GemmTile(32, 256, 32, 4, 2, group=2)
        monkeypatch.setattr(tuning, "_INPUT_GEMM", {2: tile, 4: tile})
        monkeypatch.setattr(tuning, "_LEAST_FILLED", 0.0)
        monkeypatch.setattr(gemm_kind, "multiprocessor_count", lambda device: 3)
        monkeypatch.setattr(devices, "has_chained", lambda device, dtype: dtype != torch.float64)
    for module in (tuning, recorded_poly_kan):
        monkeypatch.setattr(module, "LARGE_PRODUCTS", 1)
    monkeypatch.setattr(tuning, "LARGE_ROWS", 1)
    forget()
    with fastkron_py.backend("triton"):
        yield request.param
    forget()


def forget() -> None:
    recorded_poly_kan.forget()
    triton_poly_kan.forget_launches()


def gradients(x: Tensor, c: Tensor, dy: Tensor, bias: Tensor | None, precision: str | None, **options: Any) -> list[Tensor]:
    given = [t.detach().requires_grad_() for t in (x, c, bias) if t is not None]
    y = poly_kan(given[0], given[1], bias=given[2] if bias is not None else None, precision=precision, **options)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


def unrecorded(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> list[Tensor]:
    with monkeypatch.context() as context:
        context.setattr(guards, "GUARDS", None)
        return gradients(*arguments, **options)


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_again(kind: str, dialect: str, launched: list[str], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias, and 101 rows, of which no float32 matrix that is turned has whole vectors."""
    dtype, precision, bound = KINDS[kind]
    x, c, dy = problem(101, 72, 40, 4, dtype, CPU, generator)
    bias = torch.randn(40, generator=generator).to(dtype)
    expected = unrecorded(monkeypatch, x, c, dy, bias, precision)
    assert launched == ["launched", "launched_gradients"]
    launched.clear()
    assert equal(gradients(x, c, dy, bias, precision), expected)
    assert launched == ["launched", "launched_gradients"]  # recorded
    launched.clear()
    assert equal(gradients(x, c, dy, bias, precision), expected)
    assert launched == []
    for t in (x, dy):  # records do not look at numbers
        t.copy_(torch.randn(t.shape, generator=generator))
    exact = layer_gradients(x, c, dy, "chebyshev")
    exact[0] = exact[0] + bias.double()
    exact.append(dy.double().sum(0))
    for name, a, e in zip(("y", "dx", "dC", "db"), gradients(x, c, dy, bias, precision), exact, strict=True):
        assert_close(a, e, rms_tol=bound, max_tol=8 * bound, name=name)
    assert launched == []


def test_what_differs_goes_the_long_way(dialect: str, launched: list[str], generator: torch.Generator) -> None:
    """Other strides; an address that a copy cannot start from; a table, which no launch made; a dy that is expanded."""
    x, c, dy = problem(40, 40, 24, 3, torch.bfloat16, CPU, generator)
    expected = gradients(x, c, dy, None, None)
    launched.clear()
    assert equal(gradients(x, c, dy, None, None), expected)
    assert launched == []

    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (x, c, dy)]
    assert all(t.data_ptr() % 16 == 2 for t in shifted)
    for i in range(3):
        given = [shifted[n] if n == i else t for n, t in enumerate((x, c, dy))]
        assert_close(gradients(*given, None, None)[1], expected[1], rms_tol=1e-2, max_tol=8e-2)  # plain Triton may split otherwise
    if dialect == "hopper":
        assert launched == ["launched", "launched_gradients"] * 2 + ["launched_gradients"]

    else:  # NumPy takes only what is contiguous
        launched.clear()
        assert equal(gradients(torch.cat([x, x], 1)[:, :40], c, dy, None, None), expected)
        assert launched == ["launched", "launched_gradients"]

    launched.clear()
    for _ in range(3):
        gradients(x, c, dy, None, None, evaluation="lut", lut_size=64)
    assert launched.count("launched") >= 3

    launched.clear()
    for _ in range(2):
        gradients(x, c, torch.ones((), dtype=x.dtype).expand(40, 24), None, None)
    assert launched.count("launched_gradients") == 2


def test_no_memory_is_kept_for_long(dialect: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a small piece, what a replay needs on the way is had when it is needed, and given back."""
    monkeypatch.setattr(recorded_poly_kan, "_SHARED", 1 << 12)
    x, c, dy = problem(64, 72, 40, 4, torch.float32, CPU, generator)
    gradients(x, c, dy, None, "highest")
    (slot,) = recorded_poly_kan.RECORDS._slots.values()
    (layer,) = slot.records
    ((_, _, backward),) = layer._passes
    for replay in (layer.replay, backward):
        assert all(b.nbytes <= 1 << 12 for b in replay._pooled)
        dropped = sum(len(move.drops) for move in replay._moves)
        assert dropped == sum(len(move.makes) for move in replay._moves) - len(replay._results)
    assert sum(len(move.drops) for move in backward._moves) >= 2


def test_the_check_can_fail(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, dialect: str) -> None:
    """A replay whose results are another layer's."""
    x, c, dy = problem(40, 40, 24, 3, torch.float32, CPU, generator)
    expected = gradients(x, c, dy, None, "high")
    call = type(next(iter(recorded_poly_kan.RECORDS._slots.values())).records[0].replay).__call__
    monkeypatch.setattr("fastkron_py.runtime.program.Replay.__call__", lambda self, given, alpha: call(self, [t + 1 for t in given], alpha))
    assert not any(torch.equal(a, b) for a, b in zip(gradients(x, c, dy, None, "high"), expected, strict=True))
