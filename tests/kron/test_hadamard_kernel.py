"""The Hadamard transform by additions: the kernel's addresses, masks and sums, on NumPy; tests/gpu has it on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from gluon_on_numpy import launch

import fastkron_py
from fastkron_py.kron.hadamard import hadamard_launch
from fastkron_py.kron.hadamard_orders import padded_matrix
from fastkron_py.runtime.program import bits as pattern
from fastkron_py.testing import assert_close

SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16


def transformed(x: torch.Tensor, m: int, bits: int, scale: float, transposed: bool = False) -> torch.Tensor:
    """By the kernel; its operands' memory is NaN where the launch does not write."""
    (matrix,) = padded_matrix(m)
    if matrix is not None and transposed:
        matrix = matrix.mT
    ((kernel, grid, arguments),) = hadamard_launch(x, matrix, m, bits).configs
    y = torch.empty(x.shape, dtype=x.dtype)
    names = [name for name in kernel.arg_names[3:] if name != "scale"]
    given = {"scale": pattern(scale), **{name: arguments[name] for name in names}}
    launch(kernel, grid[0], [x, x.clone() if matrix is None else matrix, y], given)
    return y


def expected(x: torch.Tensor, scale: float) -> torch.Tensor:
    """By factors, in float64."""
    return fastkron_py.hadamard(x.double(), scale=scale)


@pytest.mark.parametrize("bits", [0, 1, 3, 6, 10, 11, 13, 14])
def test_powers_of_two(bits: int) -> None:
    for dtype, rows in itertools.product([SINGLE, DOUBLE, HALF], [1, 5]):
        torch.manual_seed(0)
        x = torch.randn(rows, 1 << bits).to(dtype)
        y = transformed(x, 1, bits, 0.7)
        assert_close(y, expected(x, 0.7), steps=2)
        if bits:
            with pytest.raises(AssertionError):  # a control
                assert_close(y, expected(x.flip(-1), 0.7), steps=2)


@pytest.mark.parametrize("m", [12, 20, 28])
def test_other_lengths(m: int) -> None:
    for bits in [2, 5, 8]:
        torch.manual_seed(0)
        x = torch.randn(5, m << bits)
        assert_close(transformed(x, m, bits, 0.7), expected(x, 0.7), steps=3)
        back = torch.zeros(x.shape, dtype=DOUBLE, requires_grad=True)
        (gradient,) = torch.autograd.grad(fastkron_py.hadamard(back, scale=0.7), back, x.double())
        assert_close(transformed(x, m, bits, 0.7, transposed=True), gradient, steps=3)


def test_rows_with_gaps() -> None:
    for m, bits in ((1, 6), (1, 11), (12, 5)):
        n = m << bits
        wide = torch.randn(6, n + 3)
        assert_close(transformed(wide[:, 3:], m, bits, 1.0), expected(wide[:, 3:], 1.0), steps=3)
