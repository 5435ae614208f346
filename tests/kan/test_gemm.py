"""The gradient of a polynomial KAN layer's inputs by the linear layers' main loop, interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from poly_kan_cases import BASES, config_of, input_gradient, layer_gradients, problem
from sampling import in_full
from torch import Tensor

from fastkron_py.kan import launches, plan
from fastkron_py.kan.launches import Problem
from fastkron_py.kan.layer_config import LayerConfig
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import INTERPRETER
from fastkron_py.testing import assert_close
from fastkron_py.tiling.gemm_config import GemmTile

# Where there is a GPU, tests/gpu runs the compiled kernel on it.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def by_gemm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every product is large, on a device with Hopper's copies and few multiprocessors; the choices of what was launched."""
    chosen: list[Any] = []
    add = launches._add_input_gradient_by_gemm

    def noted(call: Any, choice: Any) -> Tensor:
        chosen.append(choice)
        return add(call, choice)

    monkeypatch.setattr(launches, "_add_input_gradient_by_gemm", noted)
    tile = GemmTile(32, 256, 32, 4, 2, group=2)
    figures = {"large_products": 1, "large_rows": 1, "least_filled": 0.0, "gemm_tiles": {"2": tile, "4": tile}}
    monkeypatch.setattr(plan, "MEASURED", plan.MEASURED._replace(**figures))
    gpu = replace(INTERPRETER, multiprocessors=3, has_wgmma=True)
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(launches, "has_pipelined", lambda device, dtype: False)
    return chosen


def exact(x: Tensor, c: Tensor, dy: Tensor, layer: LayerConfig) -> Tensor:
    """dx in float64, by the host's derivatives."""
    x = x.double()
    slopes = torch.stack(list(layer.derivatives(layer.normalizer.host(x))))
    return layer.normalizer.host_derivative(x) * torch.einsum("dmj,doj,mo->mj", slopes, c.double(), dy.double())


DTYPES = {
    "TF32": (torch.float32, "high", 2e-3),  # one operand of each product is cut off, not rounded
    "bfloat16": (torch.bfloat16, "highest", 1e-2),
    "float16": (torch.float16, "highest", 1.5e-3),
}


CASES = [("TF32", 12), ("bfloat16", 5), ("float16", 8)]
MORE = [("TF32", 3), ("TF32", 8), ("TF32", 17), ("bfloat16", 3), ("bfloat16", 8), ("bfloat16", 17), ("float16", 3), ("float16", 17)]


@pytest.mark.parametrize(("name", "degree"), [*CASES, *in_full(MORE)])
def test_against_float64(name: str, degree: int, by_gemm: list[Any], generator: torch.Generator) -> None:
    """Rows, inputs and outputs that fill no tile, several tiles a program, counts of degrees that are no power of two."""
    dtype, precision, bound = DTYPES[name]
    x, c, dy = problem(70, 88, 40, degree, dtype, torch.device("cpu"), generator)
    dx = input_gradient(dy, x, c, config_of("chebyshev", degree), precision)
    assert len(by_gemm) == 1
    assert_close(dx, layer_gradients(x, c, dy, "chebyshev")[1], rms_tol=bound, max_tol=8 * bound)
    assert torch.equal(dx, input_gradient(dy, x, c, config_of("chebyshev", degree), precision))


@pytest.mark.parametrize("basis", BASES)
def test_every_basis(basis: str, by_gemm: list[Any], generator: torch.Generator) -> None:
    x, c, dy = problem(33, 40, 16, 6, torch.float32, torch.device("cpu"), generator)
    dx = input_gradient(dy, x, c, config_of(basis, 6), "high")
    assert len(by_gemm) == 1
    assert_close(dx, layer_gradients(x, c, dy, basis)[1], rms_tol=2e-3, max_tol=1.6e-2)


@pytest.mark.parametrize(("normalization", "table_size"), [("tanh", 256), ("clamp", 0), ("none", 0)])
def test_tables_and_normalisations(normalization: str, table_size: int, by_gemm: list[Any], generator: torch.Generator) -> None:
    x, c, dy = problem(33, 40, 16, 4, torch.float32, torch.device("cpu"), generator)
    layer = config_of("legendre", 4, normalization, table_size)
    dx = input_gradient(dy, x, c, layer, "high")
    assert len(by_gemm) == 1
    assert_close(dx, exact(x, c, dy, layer), rms_tol=2e-3, max_tol=1.6e-2)


def test_nan_and_infinity_stay_in_their_places(by_gemm: list[Any], generator: torch.Generator) -> None:
    """A NaN of x is its own element's, one of dy its row's, one of a coefficient its input's."""
    x, c, dy = problem(40, 40, 24, 5, torch.float32, torch.device("cpu"), generator)
    x[3, 7], dy[5, 2], c[2, 9, 11], x[8, 8] = float("nan"), float("nan"), float("nan"), float("inf")
    dx = input_gradient(dy, x, c, config_of("chebyshev", 5), "high")
    wrong = torch.zeros(40, 40, dtype=torch.bool)
    wrong[3, 7] = wrong[5] = wrong[:, 11] = True
    assert torch.equal(dx.isnan(), wrong)
    assert float(dx[8, 8]) == 0.0
    assert len(by_gemm) == 1


def test_what_other_kernels_keep(by_gemm: list[Any], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes, float64, rows that the copy engine does not take, few degrees, many, and devices other than Hopper's."""

    def is_taken(width: int = 40, degree: int = 4, dtype: torch.dtype = torch.float32, precision: str = "high") -> bool:
        x, c, dy = problem(8, width, 8, degree, dtype, torch.device("cpu"), generator)
        sizes = (*x.shape, c.shape[1], x.stride(0), dy.stride(0))
        return launches.gemm_choice(Problem(*sizes, config_of("chebyshev", degree), precision, dtype, x.device)) is not None

    assert is_taken()
    assert not is_taken(precision="highest")
    assert not is_taken(dtype=torch.float64)
    assert not is_taken(width=41)
    assert not is_taken(width=44, dtype=torch.bfloat16)
    assert not is_taken(degree=2)
    assert not is_taken(degree=33)
    monkeypatch.setattr(devices, "gpu_of", lambda device: INTERPRETER)
    assert not is_taken()
