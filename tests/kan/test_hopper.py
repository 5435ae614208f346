"""The polynomial KAN kernels for Hopper GPUs, on NumPy: addresses, masks, buffers, waits; and what flushing does for long sums."""

from __future__ import annotations

from typing import Any

import gluon_on_numpy
import gluon_partitions
import pytest
import torch
from poly_kan_cases import coefficient_gradient, config_of, forward, gradients_of, input_gradient, layer_gradients, problem
from poly_kan_on_numpy import pipelined
from torch import Tensor

from fastkron_py.kan import plan
from fastkron_py.kan.layer_config import LayerConfig
from fastkron_py.testing import assert_close

# The kernels around them are interpreted; where there is a GPU, tests/gpu runs all of them on it.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """See `pipelined`."""
    return pipelined(monkeypatch)


def results(x: Tensor, c: Tensor, dy: Tensor, layer: LayerConfig, precision: str, bias: Tensor | None = None) -> list[Tensor]:
    return [
        forward(x, c, bias, layer, precision),
        input_gradient(dy, x, c, layer, precision),
        coefficient_gradient(dy, x, c, layer, precision),
    ]


PRODUCTS = {
    "three passes": (torch.float32, "highest", 1e-6),
    "TF32": (torch.float32, "high", 2e-3),  # one operand of each product is cut off, not rounded
    "bfloat16": (torch.bfloat16, "highest", 1e-2),
    "float16": (torch.float16, "highest", 1.5e-3),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("shape", [(200, 72, 264, 8), (300, 40, 40, 3)], ids=str)
def test_against_float64(product: str, shape: tuple[int, int, int, int], launched: list[str], generator: torch.Generator) -> None:
    """Sizes that fill no tile, several tiles a program, tiles that are shared by programs."""
    dtype, precision, bound = PRODUCTS[product]
    x, c, dy = problem(*shape, dtype, torch.device("cpu"), generator)
    actual = results(x, c, dy, config_of("chebyshev", shape[3]), precision)
    assert {name.split("_")[-2] for name in launched} == {"fwd", "dcoef"} | ({"dx"} if product == "three passes" else set())
    for name, a, e in zip(("y", "dx", "dC"), actual, layer_gradients(x, c, dy, "chebyshev"), strict=True):
        assert_close(a, e, rms_tol=bound, max_tol=8 * bound, name=name)


@pytest.mark.parametrize("basis", ["bspline", "fourier", "legendre", "rbf"])
def test_other_bases(basis: str, launched: list[str], generator: torch.Generator) -> None:
    """Of which two have no constant; 12 degrees stand side by side in groups."""
    x, c, dy = problem(130, 16, 24, 11, torch.float32, torch.device("cpu"), generator)
    bias = torch.randn(24, generator=generator)
    actual = results(x, c, dy, config_of(basis, 11), "highest", bias)
    expected = layer_gradients(x, c, dy, basis)
    expected[0] = expected[0] + bias
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, rms_tol=3e-6, max_tol=3e-5)  # roundings of the recurrences
    assert len(launched) == 3


@pytest.mark.parametrize("product", ["TF32", "bfloat16"])
@pytest.mark.parametrize("basis", ["legendre", "fourier"])
def test_rows_of_any_number_and_stride(product: str, basis: str, launched: list[str], generator: torch.Generator) -> None:
    """203 rows, whose transposed copy of dy in TF32 makes no run of 16 bytes; dy a part of a wider matrix; two groups of eight degrees."""
    dtype, precision, bound = PRODUCTS[product]
    x, c, dy = problem(203, 72, 136, 11, dtype, torch.device("cpu"), generator)
    wide = torch.full((203, 160), torch.nan, dtype=dtype)
    wide[:, 16:152] = dy
    actual = coefficient_gradient(wide[:, 16:152], x, c, config_of(basis, 11), precision)
    assert_close(actual, layer_gradients(x, c, dy, basis)[2], rms_tol=bound, max_tol=8 * bound)
    assert launched == ["_poly_kan_pipelined_dcoef_kernel"]


@pytest.mark.parametrize("parts", [1, 4, 7])
def test_work_is_dealt_out_in_any_number_of_parts(
    parts: int, launched: list[str], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six tiles, four blocks each: several tiles a part, parts that begin and end inside of tiles, several parts a program."""
    choose = plan.pipelined_coefficient_gradient
    monkeypatch.setattr(
        plan, "pipelined_coefficient_gradient", lambda sizes: choose(sizes)._replace(work_items=parts, programs=min(parts, 3))
    )
    x, c, dy = problem(250, 72, 136, 8, torch.bfloat16, torch.device("cpu"), generator)
    actual = coefficient_gradient(dy, x, c, config_of("chebyshev", 8), "highest")
    assert_close(actual, layer_gradients(x, c, dy, "chebyshev")[2], rms_tol=1e-2, max_tol=8e-2)


def too_little(wait: Any) -> Any:
    """A wait that ends while one more than it should leave is under way."""
    return lambda self, left, **deps: wait(self, left + 1, **deps)


# What is done wrongly, how, and which of y, dx and dC show it.
FAULTS = {
    "products": ("warpgroup_mma_wait", too_little, "y dx dC"),
    "stores": ("fence_async_shared", lambda fence: lambda self: None, "y dC"),
    "barriers": ("wait", lambda wait: lambda self, barrier, parity: self.pause(), "y dx dC"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_for_too_little_is_seen(
    fault: str, launched: list[str], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: what is not waited for is not there."""
    name, change, wrong = FAULTS[fault]
    monkeypatch.setattr(gluon_on_numpy.Machine, name, change(getattr(gluon_on_numpy.Machine, name)))
    x, c, dy = problem(200, 72, 40, 4, torch.float32, torch.device("cpu"), generator)
    found = results(x, c, dy, config_of("chebyshev", 4), "highest")
    for result, t in zip(("y", "dx", "dC"), found, strict=True):
        assert bool(t.isnan().any()) == (result in wrong.split()), result


def test_waiting_for_ever_is_seen(launched: list[str], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of partitions that nobody tells of empty buffers: an error, not a hang."""
    monkeypatch.setattr(gluon_on_numpy.Machine, "arrive", lambda self, barrier, **given: None)
    x, c, dy = problem(520, 288, 136, 4, torch.float32, torch.device("cpu"), generator)
    with pytest.raises(gluon_partitions.Deadlock, match="3 of 3"):
        forward(x, c, None, config_of("chebyshev", 4), "highest")
    with pytest.raises(gluon_partitions.Deadlock, match="3 of 3"):
        input_gradient(dy, x, c, config_of("chebyshev", 4), "highest")
    with pytest.raises(gluon_partitions.Deadlock, match="3 of 3"):
        coefficient_gradient(dy, x, c, config_of("chebyshev", 4), "highest")


def test_long_sums_are_flushed(launched: list[str], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 terms of one sign: 1e-6 with flushes, and, without, short by what tensor cores cut off."""
    x, c, _ = problem(8, 768, 8, 8, torch.float32, torch.device("cpu"), generator)
    c = c.abs()
    x = x.abs() + 3
    exact = layer_gradients(x, c, torch.ones(8, 8), "chebyshev")[0]

    def error() -> float:
        y = forward(x, c, None, config_of("chebyshev", 8), "highest")
        return float(torch.linalg.norm(y - exact) / torch.linalg.norm(exact))

    assert error() < 1e-6
    monkeypatch.setattr(plan, "MEASURED", plan.MEASURED._replace(flush_terms=1 << 20))
    assert error() > 5e-6


@pytest.mark.parametrize("shape", [(203, 41, 137, 5), (130, 129, 67, 3), (131, 7, 258, 1)], ids=str)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_widths_that_no_descriptor_takes(
    precision: str, shape: tuple[int, int, int, int], launched: list[str], generator: torch.Generator
) -> None:
    """Float32 operands are prepared with whole vectors of columns; degrees stand side by side by ones, twos and fours."""
    x, c, dy = problem(*shape, torch.float32, torch.device("cpu"), generator)
    actual = results(x, c, dy, config_of("chebyshev", shape[3]), precision)
    bound = 1e-6 if precision == "highest" else 2e-3
    for name, a, e in zip(("y", "dx", "dC"), actual, layer_gradients(x, c, dy, "chebyshev"), strict=True):
        assert_close(a, e, rms_tol=bound, max_tol=8 * bound, name=name)
    assert len(launched) == (3 if precision == "highest" else 2)


@pytest.mark.parametrize("basis", ["chebyshev", "rbf"])
def test_operands_of_both_gradients(basis: str, launched: list[str], generator: torch.Generator) -> None:
    """With a constant, whose gradient is sums of dy's columns, and without one."""
    x, c, dy = problem(150, 37, 70, 3, torch.float32, torch.device("cpu"), generator)
    wide = torch.full((150, 90), torch.nan)
    wide[:, 8:78] = dy
    found = gradients_of(wide[:, 8:78], x, c, config_of(basis, 3), "highest", (True, True, True))
    for a, e in zip(found, [*layer_gradients(x, c, dy, basis)[1:], dy.double().sum(0)], strict=True):
        assert_close(a, e, rms_tol=3e-6, max_tol=3e-5)
    assert len(launched) == 2


@pytest.mark.parametrize("degrees", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 3, 5])
def test_degrees_side_by_side(
    degrees: int, parts: int, launched: list[str], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many, and however many parts share the steps: parts end inside of tiles and of groups of degrees."""
    for name in ("pipelined_input_gradient", "pipelined_coefficient_gradient"):
        choose = getattr(plan, name)
        change = {"degrees": degrees, "block_n": 128 // degrees, "work_items": parts, "programs": min(parts, 3)}
        monkeypatch.setattr(plan, name, lambda sizes, choose=choose, change=change: choose(sizes)._replace(**change))
    x, c, dy = problem(140, 132, 136, 5, torch.float32, torch.device("cpu"), generator)
    expected = layer_gradients(x, c, dy, "chebyshev")
    config = config_of("chebyshev", 5)
    assert_close(coefficient_gradient(dy, x, c, config, "highest"), expected[2], rms_tol=1e-6, max_tol=8e-6)
    if degrees > 1:
        assert_close(input_gradient(dy, x, c, config, "highest"), expected[1], rms_tol=1e-6, max_tol=8e-6)
