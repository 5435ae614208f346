"""The last mode of a multiply by the main loop of linear layers, which adds z as it stores the result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from canonical_cases import dense, force_products, multiply, problem, watch_kernels

from fastkron_py.kron.families import torch_products
from fastkron_py.kron.families.torch_products import multiply_algorithm, takes_gemm
from fastkron_py.kron.kernels.epilogues import AXPBY, TIMES
from fastkron_py.kron.planner import segment_of
from fastkron_py.kron.problem import Mode, Rows, contiguous_problem
from fastkron_py.runtime.gpu import HOPPER, nvidia
from fastkron_py.testing import assert_close


def _algorithm(mode: Mode) -> str:
    return "gemm" if mode.adds and takes_gemm(mode) else "matmul"


# (batches, rows, P, Q, R)
SHAPES = {
    "one factor": (1, 33, (72,), (80,), 1),
    "a factor before": (1, 33, (3, 40), (5, 88), 1),
    "two columns of tiles": (1, 5, (4, 64), (4, 264), 1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_products(shape: tuple, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, is_transposed in ((torch.bfloat16, False), (torch.float16, True)):
        force_products(monkeypatch, "matmul")
        monkeypatch.setattr(torch_products, "multiply_times", lambda mode: {_algorithm(mode): 1.0})
        names = watch_kernels(monkeypatch)
        torch.manual_seed(0)
        x, factors = problem(dtype, device, *shape)
        if is_transposed:
            factors = [f.mT.contiguous().mT for f in factors]
        wanted = dense(x, factors)
        z = torch.randn(wanted.shape, device=device).to(dtype)
        steps = 3 * len(factors) + 1  # the interpreter truncates to bfloat16, which errs twice as much as rounding
        assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.0 * z.double(), steps=steps)
        assert_close(multiply(x, factors, z, 1.0, 1.0), wanted + z.double(), steps=steps)
        assert_close(multiply(x, factors, z[:, :1].expand_as(z), 1.0, -1.0), wanted - z[:, :1].double(), steps=steps)
        assert "_gemm_kernel" in names
        with pytest.raises(AssertionError):
            assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.5 * z.double(), steps=steps)


def test_z_decides() -> None:
    """On an H200 torch's product took 35 us and its copy of z 20 for 131072 x 32 to 160."""
    mode = Mode(1, 131072, 1, 32, 160, 2, 1, HOPPER)
    assert multiply_algorithm(mode) == "matmul"
    assert multiply_algorithm(replace(mode, adds=True)) == "gemm"
    assert multiply_algorithm(replace(mode, adds=True, p=33)) != "gemm"
    assert multiply_algorithm(replace(mode, adds=True, gpu=nvidia(8, 0))) != "gemm"


def test_z_that_scales_is_not_added() -> None:
    problem = replace(contiguous_problem([(32, 160)], 131072, 1, torch.bfloat16, HOPPER), z=Rows(0, 160, 1))
    for epilogue, taken in ((AXPBY, True), (TIMES, False)):
        offers = torch_products.offers(segment_of(replace(problem, epilogue=epilogue), 0, 1, True))
        assert ("gemm" in [offer.launch.config for offer in offers]) is taken
