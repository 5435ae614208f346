"""Large layers whose calls are cached, in plain Triton and as on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from poly_kan_cases import problem
from poly_kan_on_numpy import pipelined
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan import plan
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import INTERPRETER
from fastkron_py.testing import assert_close
from fastkron_py.tiling.gemm_config import GemmTile

# tests/gpu has the same, compiled.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
CPU = torch.device("cpu")


@pytest.fixture(params=["plain", "hopper"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every product is large; on a Hopper GPU, of as few multiprocessors as its kernels can be run for on NumPy."""
    if request.param == "hopper":
        pipelined(monkeypatch)
        tile = GemmTile(32, 256, 32, 4, 2, group=2)
        monkeypatch.setattr(plan, "MEASURED", plan.MEASURED._replace(gemm_tiles={"2": tile, "4": tile}, least_filled=0.0))
        gpu = replace(INTERPRETER, multiprocessors=3, has_wgmma=True)
        monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(plan, "MEASURED", plan.MEASURED._replace(large_products=1, large_rows=1))
    with fastkron_py.backend("triton"):
        yield request.param


def gradients(x: Tensor, c: Tensor, dy: Tensor, bias: Tensor | None, precision: str | None, **options: Any) -> list[Tensor]:
    given = [t.detach().requires_grad_() for t in (x, c, bias) if t is not None]
    y = poly_kan(given[0], given[1], bias=given[2] if bias is not None else None, precision=precision, **options)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


BOTH = ["poly_kan", "poly_kan_backward"]


def test_calls_that_differ(dialect: str, built: list[str], generator: torch.Generator) -> None:
    """Other strides; an address that a copy cannot start from; a table; a dy that is expanded. Each has programs of its own."""
    x, c, dy = problem(40, 40, 24, 3, torch.bfloat16, CPU, generator)
    expected = gradients(x, c, dy, None, None)
    assert built == BOTH
    built.clear()

    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (x, c, dy)]
    assert all(t.data_ptr() % 16 == 2 for t in shifted)
    for i in range(3):
        given = [shifted[n] if n == i else t for n, t in enumerate((x, c, dy))]
        for _ in range(2):
            assert_close(gradients(*given, None, None)[1], expected[1], rms_tol=1e-2, max_tol=8e-2)  # plain Triton may split otherwise
    # Of x both; of C that pass whose kernel copies it as it is: for Hopper y's, in plain Triton dx's; of dy its own.
    assert built == [*BOTH, "poly_kan" if dialect == "hopper" else "poly_kan_backward", "poly_kan_backward"]

    built.clear()
    if dialect == "plain":  # NumPy takes only what is contiguous
        for _ in range(2):
            assert equal(gradients(torch.cat([x, x], 1)[:, :40], c, dy, None, None), expected)
        assert built == BOTH

    built.clear()
    for _ in range(2):
        gradients(x, c, dy, None, None, evaluation="lut", lut_size=64)
    assert built == BOTH

    built.clear()
    for _ in range(2):
        gradients(x, c, torch.ones((), dtype=x.dtype).expand(40, 24), None, None)
    assert built == ["poly_kan_backward"]
