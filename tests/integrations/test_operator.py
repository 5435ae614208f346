"""linear_operator's own test case, inherited for `KroneckerLinearOperator` in all its forms, on the CPU and on a GPU."""

from __future__ import annotations

import unittest
from functools import reduce
from typing import Any

import pytest
import torch
from integrations_reference import dense, kron
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    IdentityLinearOperator,
    ToeplitzLinearOperator,
    TriangularLinearOperator,
)
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from torch import Tensor

from fastkron_py.integrations.gpytorch import KroneckerLinearOperator
from fastkron_py.integrations.gpytorch.operators import KroneckerTriangularLinearOperator, ScaledKroneckerLinearOperator

# Of torch, GPyTorch and linear_operator about each other; what this package warns of is tested in test_activation.py.
pytestmark = pytest.mark.filterwarnings("ignore")

A = [[4.0, 0.0, 2.0], [0.0, 3.0, -1.0], [2.0, -1.0, 3.0]]
B = [[2.0, 1.0], [1.0, 2.0]]
C = [[4.0, 0.5, 1.0, 0.0], [0.5, 4.0, -1.0, 0.0], [1.0, -1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 4.0]]


def leaf(values: Any) -> Tensor:
    return torch.tensor(values).requires_grad_()


class Device:
    """Puts everything that a test makes on one device."""

    device = "cpu"

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        torch.set_default_device(self.device)

    def tearDown(self) -> None:
        torch.set_default_device(None)
        super().tearDown()  # type: ignore[misc]


class Square(Device, LinearOperatorTestCase):
    """What all square cases share."""

    seed = 0
    should_call_lanczos = True
    should_call_lanczos_diagonalization = False

    def evaluate_linear_op(self, linear_op: Any) -> Tensor:
        return reduce(kron, [dense(op) for op in linear_op.linear_ops])


class TestSquare(Square, unittest.TestCase):
    def create_linear_op(self) -> Any:
        return KroneckerLinearOperator(leaf(A), DenseLinearOperator(leaf(B)), leaf(C))


@pytest.mark.full
class TestBatch(Square, unittest.TestCase):
    def create_linear_op(self) -> Any:
        return KroneckerLinearOperator(*[leaf(f).detach().repeat(3, 1, 1).requires_grad_() for f in (A, B, C)])


@pytest.mark.full
class TestStructured(Square, unittest.TestCase):
    """A Toeplitz factor between an identity, which is a batch, and a constant diagonal, which is a number.

    Batched: the reference's eigh has no gradient where eigenvalues repeat, and the cases that need it leave batches out.
    """

    def create_linear_op(self) -> Any:
        constant = ConstantDiagLinearOperator(leaf([[1.5], [0.5]]), 2)
        toeplitz = ToeplitzLinearOperator(leaf([[3.0, 1.0, 0.5], [2.0, -0.5, 0.1]]))
        return KroneckerLinearOperator(IdentityLinearOperator(2, torch.Size([2]), device=torch.device(self.device)), toeplitz, constant)


@pytest.mark.full
class TestScaled(Square, unittest.TestCase):
    should_call_lanczos_diagonalization = True

    def create_linear_op(self) -> Any:
        return ScaledKroneckerLinearOperator(KroneckerLinearOperator(leaf(A), leaf(B)), leaf(2.5))

    def evaluate_linear_op(self, linear_op: Any) -> Tensor:
        return super().evaluate_linear_op(linear_op.base_linear_op) * linear_op._constant


@pytest.mark.full
class TestPlusDiagonal(Square, unittest.TestCase):
    """``K (x) K + sigma^2 I``."""

    should_call_lanczos = False
    should_call_lanczos_diagonalization = True
    should_call_cg = False
    skip_slq_tests = True

    def create_linear_op(self) -> Any:
        return KroneckerLinearOperator(leaf(A), leaf(B)) + ConstantDiagLinearOperator(leaf([0.7]), 6)

    def evaluate_linear_op(self, linear_op: Any) -> Tensor:
        return super().evaluate_linear_op(linear_op.linear_op) + dense(linear_op.diag_tensor)


class Rectangular(Device, RectangularLinearOperatorTestCase):
    """What rectangular cases share."""

    seed = 0
    batch: tuple[int, ...] = ()

    def create_linear_op(self) -> Any:
        return KroneckerLinearOperator(*[torch.randn(*self.batch, *s).requires_grad_() for s in ((2, 3), (5, 2), (6, 4))])

    def evaluate_linear_op(self, linear_op: Any) -> Tensor:
        return reduce(kron, [dense(op) for op in linear_op.linear_ops])


class TestRectangular(Rectangular, unittest.TestCase):
    pass


@pytest.mark.full
class TestTriangular(Rectangular, unittest.TestCase):
    """What a Cholesky decomposition gives; square, but no covariance."""

    def create_linear_op(self) -> Any:
        factors = [TriangularLinearOperator(torch.tril(torch.randn(n, n)).requires_grad_()) for n in (3, 4)]
        return KroneckerTriangularLinearOperator(*factors)


# The same on a GPU, where products of every mix of factors are tested in test_products.py: a batch, and what is solved by eigenvectors.
for _case in (TestBatch, TestPlusDiagonal):
    _name = f"{_case.__name__}OnGPU"
    _case_on_gpu = type(_name, (_case,), {"device": "cuda", "__module__": __name__})
    globals()[_name] = pytest.mark.gpu(_case_on_gpu)
del _case, _case_on_gpu, _name
