"""Degree 0 apart: sums of coefficients as a bias, and sums of dy's columns as its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastkron_py.kan import operands
from fastkron_py.runtime.builder import Builder
from fastkron_py.testing import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def constant(c: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    build = Builder((c, bias))
    program = build.program([operands.constant(build, *build.inputs, wide)])
    return program([c] if bias is None else [c, bias])[0]


def store_column_sums(x: Tensor, out: Tensor) -> None:
    build = Builder((x, out))
    operands.store_column_sums(build, *build.inputs)
    build.program([])([x, out])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Positive numbers: sums in bfloat16 would stop growing."""
    for num_out, num_in in [(1, 1), (13, 300), (40, 512)]:
        c = torch.rand(3, num_out, num_in, dtype=torch.float64, generator=generator).to(device, dtype)
        c[1:] = torch.nan
        bias = torch.rand(num_out, dtype=torch.float64, generator=generator).to(device, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tol = 1e-15 if dtype == torch.float64 else 1e-7
        for given in (None, bias):
            found = constant(c, given, wide)
            expected = c[0].double().sum(1) + (0 if given is None else given.double())
            assert found.dtype == wide
            assert_close(found, expected, rms_tol=3 * tol, max_tol=12 * tol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """In one stage and in two; rows of a wider matrix, whose rest is NaN; nothing but degree 0 is written."""
    for rows, num_out, num_in in [(1, 1, 1), (512, 20, 260), (513, 70, 17), (1300, 16, 3)]:
        wide = torch.full((rows, num_out + 5), torch.nan, dtype=dtype, device=device)
        dy = wide[:, 2 : 2 + num_out]
        dy.copy_(torch.rand(rows, num_out, dtype=torch.float64, generator=generator))
        out = torch.full((2, num_out, num_in), torch.nan, dtype=dtype, device=device)
        store_column_sums(dy, out)
        assert bool(out[1].isnan().all())
        tol = {torch.float32: 3e-7, torch.bfloat16: 4e-3, torch.float64: 1e-15}[dtype]  # roundings of the result
        assert_close(out[0], dy.double().sum(0)[:, None].expand(-1, num_in), rms_tol=tol, max_tol=4 * tol)
