"""Row-wise Kronecker products against their rows, built in float64; what else they support is in tests/contracts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastkron_py import khatri_rao_matmul
from fastkron_py.testing import assert_close

Shape = tuple[int, ...]


def built(matrices: list[torch.Tensor]) -> torch.Tensor:
    """``[*batch, n, P_1 ... P_N]`` in float64 or complex128."""
    found = matrices[0].to(torch.complex128 if matrices[0].is_complex() else torch.float64)
    for x in matrices[1:]:
        found = torch.einsum("...np,...nq->...npq", found, x.to(found.dtype)).flatten(-2)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_values(dtype: torch.dtype, transpose: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    shapes: list[tuple[list[Shape], Shape | None]] = [
        ([(7, 3), (7, 4)], (2,)),
        ([(7, 3), (7, 4), (7, 2)], None),
        ([(7, 5)], (3,)),
        ([(2, 7, 3), (7, 4)], (2,)),
        ([(2, 1, 7, 3), (3, 7, 2)], (1,)),
        ([(1, 1), (1, 1)], (1,)),
        ([(0, 3), (0, 2)], (2,)),
    ]
    for given, columns in shapes:
        matrices = [torch.randn(s, dtype=wide).to(device, dtype) for s in given]
        inner = given[0][-2] if transpose else math.prod(s[-1] for s in given)
        c = torch.randn(inner, *(columns or ()), dtype=wide).to(device, dtype)
        x = built(matrices)
        expected = (x.mT if transpose else x) @ c.to(x.dtype)
        found = khatri_rao_matmul(matrices, c, transpose=transpose)
        assert found.dtype == dtype
        assert_close(found, expected, steps=4 * len(given))
        if expected.any():
            with pytest.raises(AssertionError):
                assert_close(found * 1.5, expected, steps=4 * len(given))


def test_least_squares_by_both_products() -> None:
    """A tensor-product polynomial of scattered points, by NumPy arrays and normal equations."""
    random = np.random.default_rng(0)
    at = random.uniform(-1, 1, (60, 2))
    matrices = [np.vander(at[:, 0], 4), np.vander(at[:, 1], 3)]
    c = random.standard_normal(12)
    y = khatri_rao_matmul(matrices, c)
    assert isinstance(y, np.ndarray)
    normal = khatri_rao_matmul(matrices, khatri_rao_matmul(matrices, np.eye(12)), transpose=True)
    np.testing.assert_allclose(np.linalg.solve(normal, khatri_rao_matmul(matrices, y, transpose=True)), c, rtol=1e-9)


X = torch.ones(5, 3)
REFUSED = {
    "no sequence": (X, torch.ones(3), TypeError, "matrices: expected a sequence of matrices; got torch.Tensor"),
    "none": ([], torch.ones(3), ValueError, "matrices: expected at least one matrix; got none"),
    "a vector": ([torch.ones(5)], torch.ones(5), ValueError, r"matrices\[0\]: expected a matrix; got shape \(5,\)"),
    "rows": (
        [X, torch.ones(4, 2)],
        torch.ones(6),
        ValueError,
        r"matrices\[1\]: expected a matrix with 5 rows, as matrices\[0\]; got .*\(4, 2\)",
    ),
    "coefficients": ([X, X], torch.ones(8, 2), ValueError, r"coefficients: expected \[9\] or \[\*batch, 9, Q\], .* got shape \(8, 2\)"),
    "dtype": ([X, X.double()], torch.ones(9), TypeError, r"matrices\[1\]: expected matrices\[0\]'s dtype torch.float32"),
    "batches": ([torch.ones(2, 5, 3), torch.ones(3, 5, 3)], torch.ones(9), ValueError, "matrices, coefficients: expected batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    matrices, c, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        khatri_rao_matmul(matrices, c)  # type: ignore[arg-type]


def test_transposed_coefficients_have_the_rows() -> None:
    with pytest.raises(ValueError, match=r"coefficients: expected \[5\] or \[\*batch, 5, Q\], the number of rows; got shape \(9,\)"):
        khatri_rao_matmul([X, X], torch.ones(9), transpose=True)
