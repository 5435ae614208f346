"""Products with small factors in registers: the kernel's addresses, masks and sums, on NumPy; tests/gpu has it on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_on_numpy import launch

from fastkron_py.kron.families import butterfly
from fastkron_py.kron.kernels.epilogues import AXPBY, PLAIN, SCALE, TIMES, StoreEpilogue
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.reference import kron_matmul
from fastkron_py.runtime.program import bits as pattern
from fastkron_py.testing import assert_close

SINGLE, DOUBLE = torch.float32, torch.float64
SHAPES = [(2, 2), (8, 8), (2, 4, 8), (8, 2, 4), (4, 4, 4, 4), (8, 8, 8), (2,) * 9, (4, 8, 2, 8, 8), (8, 8, 8, 8), (8, 8, 8, 8, 2), (4,) * 6]


def multiplied(x: torch.Tensor, factors: list[torch.Tensor], z: torch.Tensor, epilogue: StoreEpilogue) -> torch.Tensor:
    """``[B, L, P]`` by the kernel; alpha is 0.5 and beta 2."""
    batches, rows, _ = x.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    common: dict[str, Any] = {
        "x_strides": (*x.stride()[:2], 0, 1, 0),
        "y_strides": (*y.stride()[:2], 0, 1, 0),
        "z_strides": (*z.stride()[:2], 0, z.stride(2), 0),
        "factor_strides": tuple([f.stride() for f in factors]),
        "num_slices": rows,
        "before": 1,
        "after": 1,
        "SHAPES": tuple([tuple(f.shape[1:]) for f in factors]),
        "HEAD": False,
        "TAIL": False,
        "EPILOGUE": epilogue.function(x.dtype),
    }
    steps = [Step(i, i + 1, f.shape[1], f.shape[2]) for i, f in enumerate(factors)]
    sizes = {"shape": (batches, rows, 1, 1), "num_slices": rows, "itemsize": x.element_size()}
    problem = SimpleNamespace(launch=Launch(tuple(steps)), common=common, factor_strides=common["factor_strides"], **sizes)
    ((kernel, grid, arguments),) = butterfly.launch_configs(problem)  # type: ignore[arg-type]
    given = arguments | {"alpha": pattern(0.5), "beta": pattern(2.0)}
    launch(kernel, grid[0], [x, tuple(factors), z, y], given)
    return y


def problem(shapes: tuple[int, ...], dtype: torch.dtype, batches: int = 1, rows: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(batches, rows, torch.Size(shapes).numel(), dtype=dtype)
    return x, [torch.randn(batches, p, p, dtype=dtype) / p**0.5 for p in shapes]


def expected(x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """In float64."""
    return kron_matmul(x.double(), [f.double() for f in factors])


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_products(shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, factors = problem(shapes, dtype)
    y = multiplied(x, factors, x, PLAIN)
    assert_close(y, expected(x, factors), steps=2 * len(shapes))
    with pytest.raises(AssertionError):  # a control: a factor transposed
        assert_close(y, expected(x, [*factors[:-1], factors[-1].mT]), steps=2 * len(shapes))


def test_batches_views_and_epilogues() -> None:
    x, factors = problem((4, 8, 4), SINGLE, batches=2, rows=35)
    wide = torch.randn(2, 35, 256)
    wide[..., 5:133] = x
    z = torch.randn(2, 35, 128)
    factors[1] = factors[1].mT
    wanted = expected(x, factors)
    assert_close(multiplied(wide[..., 5:133], factors, z, AXPBY), 0.5 * wanted + 2 * z.double(), steps=8)
    assert_close(multiplied(x, factors, z, SCALE), 0.5 * wanted, steps=8)
    row = z[:, :1].expand_as(z)
    assert_close(multiplied(x, factors, row, TIMES), wanted * row.double(), steps=8)
