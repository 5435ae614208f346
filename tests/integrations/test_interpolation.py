"""Interpolated operators around ours: sparse matrices made once, diagonals by products, and SKIP's dense grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpytorch import kernels
from integrations_reference import dense
from linear_operator.operators import InterpolatedLinearOperator
from torch import Tensor

from fastkron_py.integrations.gpytorch import KroneckerLinearOperator, interpolation, use_fastkron
from fastkron_py.integrations.gpytorch.interpolation import GridDenseLinearOperator, Weights
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore")  # linear_operator's own

N, M, GRID = 7, 5, 12


def weights(n: int, k: int, batch: tuple[int, ...], place: torch.device) -> tuple[Tensor, Tensor]:
    """Grid points in no order, one of them twice in each row, and weights, some of them zero."""
    indices = torch.randint(GRID, (*batch, n, k), device=place)
    indices[..., 1] = indices[..., 0]
    values = torch.randn(*batch, n, k, device=place)
    values[..., 0, 2] = 0
    return indices, values


def matrix(indices: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(*indices.shape[:-1], GRID, dtype=torch.float64, device=values.device).scatter_add(-1, indices, values.double())


def interpolated(batch: tuple[int, ...], place: torch.device) -> tuple[InterpolatedLinearOperator, Tensor, Tensor, Tensor]:
    """An operator with weights of its own on each side, and the float64 matrices that it is the product of."""
    factors = [torch.randn(*batch, 3, 3, device=place, requires_grad=True), torch.randn(*batch, 4, 4, device=place, requires_grad=True)]
    base = KroneckerLinearOperator(*factors)
    left, right = weights(N, 4, batch, place), weights(M, 3, batch, place)
    return InterpolatedLinearOperator(base, *left, *right), matrix(*left), dense(base).double(), matrix(*right)


@pytest.fixture
def stock_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to linear_operator's sparse products."""

    def fail(*_: Any) -> None:
        raise AssertionError("linear_operator's sparse product")

    monkeypatch.setattr("linear_operator.utils.sparse.bdsmm", fail)


@pytest.mark.parametrize("compressed", [False, True] if torch.backends.mkl.is_available() else [False])
def test_products_and_gradients(compressed: bool, place: torch.device, stock_fails: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpolation, "COMPRESSED", (place.type,) if compressed else ())
    for batch in ((), (2,), (1, 3)):
        check_products_and_gradients(batch, place)


def check_products_and_gradients(batch: tuple[int, ...], place: torch.device) -> None:
    with use_fastkron():
        operator, left, base, right = interpolated(batch, place)
        whole = left @ base @ right.mT
        x, y = torch.randn(*batch, M, 3, device=place), torch.randn(*batch, N, 3, device=place)
        with torch.no_grad():
            assert_close(operator._matmul(x), whole.detach() @ x.double(), rms_tol=1e-6, max_tol=1e-5)
            assert_close(operator._t_matmul(y), whole.detach().mT @ y.double(), rms_tol=1e-6, max_tol=1e-5)
            found = operator._bilinear_derivative(y, x)
    tensors = operator.base_linear_op.representation()
    expected = torch.autograd.grad((y.double() * (whole @ x.double())).sum(), tensors)
    assert found[len(tensors) :] == (None,) * 4
    for gradient, reference in zip(found, expected, strict=False):
        assert_close(gradient, reference.double(), rms_tol=2e-6, max_tol=1e-5)


def test_one_matrix_serves_both_sides_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    of = Weights.of
    monkeypatch.setattr(Weights, "of", lambda *a: made.append(1) or of(*a))
    indices, values = weights(N, 4, (), torch.device("cpu"))
    x = torch.randn(N, 2)
    with use_fastkron(), torch.no_grad():
        operator = InterpolatedLinearOperator(
            KroneckerLinearOperator(torch.randn(3, 3), torch.randn(4, 4)), indices, values, indices, values
        )
        first = operator._matmul(x)
        assert torch.equal(operator._matmul(x), first)
        assert len(made) == 1
        values.mul_(2)  # written to: made again
        assert_close(operator._matmul(x), 4 * first.double(), rms_tol=1e-6, max_tol=1e-5)
        assert len(made) == 2


def test_diagonals(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By products with 1, 2 and all columns at a time, with gradients of factors and weights."""
    monkeypatch.setattr(KroneckerLinearOperator, "_get_indices", lambda *_: pytest.fail("looked up"))
    for elements in (1, 30, 1 << 20):
        monkeypatch.setattr(interpolation, "COLUMN_ELEMENTS", elements)
        factors = [torch.randn(n, n, device=place, requires_grad=True) for n in (3, 4)]
        (li, lv), (ri, rv) = weights(N, 4, (), place), weights(N, 3, (), place)
        leaves = [*factors, lv.requires_grad_(), rv.requires_grad_()]
        with use_fastkron():
            found = InterpolatedLinearOperator(KroneckerLinearOperator(*factors), li, lv, ri, rv)._diagonal()
        reference = (matrix(li, lv) @ torch.kron(*[f.double() for f in factors]) @ matrix(ri, rv).mT).diagonal()
        assert_close(found, reference.detach(), rms_tol=1e-6, max_tol=1e-5)
        pairs = zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(reference.sum(), leaves), strict=True)
        for gradient, expected in pairs:
            assert_close(gradient, expected.double(), rms_tol=2e-6, max_tol=1e-5)


def test_skip_takes_dense_grids(stock_fails: None) -> None:
    one = kernels.GridInterpolationKernel(kernels.ScaleKernel(kernels.RBFKernel()), 16, 1, ((-0.2, 1.2),))
    x = torch.rand(9, 3)
    with use_fastkron():
        operator = one(x, last_dim_is_batch=True).evaluate_kernel()
        assert type(operator.base_linear_op) is GridDenseLinearOperator
        assert operator.base_linear_op.tensor.stride(0) == 0  # one grid for all inputs, not three copies
        with torch.no_grad():
            y = operator._matmul(torch.ones(3, 9, 1))
    assert_close(
        y,
        one(x, last_dim_is_batch=True).evaluate_kernel().to_dense().detach().double() @ torch.ones(3, 9, 1).double(),
        rms_tol=1e-6,
        max_tol=1e-5,
    )
