"""The operator's products and gradients against float64 references: which factor takes part how, and where identities stand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from integrations_reference import dense, kron
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    IdentityLinearOperator,
    KroneckerProductAddedDiagLinearOperator,
    KroneckerProductLinearOperator,
    RootLinearOperator,
    ToeplitzLinearOperator,
    TriangularLinearOperator,
)
from torch import Tensor

from fastkron_py.integrations.gpytorch import KroneckerLinearOperator, products
from fastkron_py.integrations.gpytorch.operators import KroneckerTriangularLinearOperator
from fastkron_py.kron.cpu import compiled
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore")  # linear_operator's own

GRADIENT = {torch.float32: 2e-5, torch.float64: 1e-13}


def full(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, dtype=torch.float64)


def identity(n: int, batch: Sequence[int] = ()) -> Callable[[], Any]:
    return lambda: IdentityLinearOperator(n, batch_shape=torch.Size(batch), dtype=torch.float64)


def constant(n: int) -> Callable[[], Any]:
    return lambda: ConstantDiagLinearOperator(torch.rand(1, dtype=torch.float64) + 0.5, n)


def diagonal(n: int) -> Callable[[], Any]:
    return lambda: DiagLinearOperator(torch.randn(n, dtype=torch.float64))


def toeplitz(n: int, *batch: int) -> Callable[[], Any]:
    return lambda: ToeplitzLinearOperator(torch.randn(*batch, n, dtype=torch.float64))


def triangular(n: int) -> Callable[[], Any]:
    return lambda: TriangularLinearOperator(torch.tril(torch.randn(n, n, dtype=torch.float64)))


def low_rank(n: int) -> Callable[[], Any]:
    return lambda: RootLinearOperator(torch.randn(n, 2, dtype=torch.float64))


def nested() -> Any:
    return KroneckerProductLinearOperator(full(2, 3)(), full(3, 2)())


MIXES: dict[str, list[Callable[[], Any]]] = {
    "dense": [full(3, 4), full(5, 2)],
    "one factor": [full(4, 3)],
    "identity first": [identity(3), full(2, 4), full(3, 2)],
    "identity last": [full(2, 4), full(3, 2), identity(3)],
    "identity inside": [full(2, 4), identity(3), full(3, 2)],
    "identity around": [identity(2), full(3, 4), identity(3)],
    "identities alone": [identity(2), identity(3)],
    "constants alone": [constant(2), identity(3)],
    "constant": [full(2, 3), constant(3)],
    "narrow diagonal": [full(2, 3), diagonal(4)],
    "wide diagonal": [full(2, 3), diagonal(products.DIAGONAL_LIMIT + 1)],
    "diagonals alone": [diagonal(3), diagonal(4)],
    "constant on a diagonal": [diagonal(3), constant(4)],
    "Toeplitz": [toeplitz(3), toeplitz(4), toeplitz(3)],
    "triangular": [triangular(3), full(2, 3)],
    "low rank": [low_rank(4), full(2, 3)],
    "wide low rank": [full(2, 3), low_rank(products.OTHER_LIMIT + 1), full(3, 2)],
    "nested": [full(2, 3), nested],
    "batch": [full(3, 2, 4), full(1, 3, 2)],
    "batch and none": [full(3, 2, 4), full(3, 2)],
    "batch, identity first": [identity(3, (2,)), full(2, 3, 4), full(2, 2, 3)],
    "batch, identity inside": [full(2, 3, 4), identity(3), full(2, 2, 3)],
    "two batches": [full(2, 1, 3, 2), full(3, 2, 3)],
    "batch of Toeplitz": [toeplitz(3, 2), toeplitz(3, 2)],
}


def make(name: str, dtype: torch.dtype, place: torch.device) -> tuple[KroneckerLinearOperator, Tensor]:
    """The operator of a mix, and the same as a dense float64 matrix that its tensors' gradients reach."""
    operator = KroneckerLinearOperator(*[factor() for factor in MIXES[name]]).to(dtype=dtype, device=place)
    for tensor in operator.representation():
        tensor.requires_grad_(tensor.is_floating_point())
    return operator, reduce(kron, [dense(op).double() for op in operator.linear_ops])


@pytest.mark.parametrize("dtype", GRADIENT)
def test_products(dtype: torch.dtype, place: torch.device) -> None:
    for name in MIXES:
        with torch.no_grad(), told(name):
            check_products(*make(name, dtype, place), dtype, place)


@contextlib.contextmanager
def told(name: str) -> Iterator[None]:
    """Adds the mix to an error."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"of the mix {name!r}")
        raise


def check_products(operator: KroneckerLinearOperator, reference: Tensor, dtype: torch.dtype, place: torch.device) -> None:
    for batch in ((), (4, *reference.shape[:-2]), reference.shape[:-2]):
        x = torch.randn(*batch, reference.shape[-1], 3, dtype=dtype, device=place)
        y = operator._matmul(x)
        assert y.is_contiguous()
        assert y.data_ptr() != x.data_ptr()
        assert_close(y, reference @ x.double())
        x = torch.randn(*batch, reference.shape[-2], 3, dtype=dtype, device=place)
        assert_close(operator._t_matmul(x), reference.mT @ x.double())
    vector = torch.randn(reference.shape[-1], dtype=dtype, device=place)
    assert_close(operator._matmul(vector), reference @ vector.double())
    columns = torch.randn(3, reference.shape[-1], dtype=dtype, device=place).mT
    assert_close(operator._matmul(columns), reference @ columns.double())


@pytest.mark.parametrize("dtype", GRADIENT)
@pytest.mark.parametrize("way", ["as it is", "loop", "torch"])
def test_bilinear_derivative(way: str, dtype: torch.dtype, place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few columns take a loop over the factors on a CPU without the kernel; more, and all on a GPU, the fused backward pass."""
    if way != "as it is":
        monkeypatch.setattr(compiled, "kernel", lambda itemsize: None)
    if way == "torch":
        monkeypatch.setattr(products, "FEW_COLUMNS", 0)
    for name in MIXES:
        with told(name):
            check_derivative(*make(name, dtype, place), dtype, place)


def check_derivative(operator: KroneckerLinearOperator, reference: Tensor, dtype: torch.dtype, place: torch.device) -> None:
    tensors = operator.representation()
    batch = reference.shape[:-2]
    for extra in ((), (2,)):
        left = torch.randn(*extra, *batch, reference.shape[-2], 3, dtype=dtype, device=place)
        right = torch.randn(*extra, *batch, reference.shape[-1], 3, dtype=dtype, device=place)
        found = operator._bilinear_derivative(left, right)
        assert len(found) == len(tensors)
        loss = (left.double() * (reference @ right.double())).sum()
        if not loss.requires_grad:
            assert found == (None,) * len(tensors)
            continue
        expected = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
        for ours, theirs in zip(found, expected, strict=True):
            if theirs is not None:
                assert ours is not None
                assert ours.shape == theirs.shape
                # A sum of a few dozen products errs by a little more than one product.
                assert_close(ours, theirs.double(), rms_tol=GRADIENT[dtype], max_tol=4 * GRADIENT[dtype])


def test_parts_are_made_once_and_again_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("fastkron_py.integrations.gpytorch.products.toeplitz", lambda c, f=products.toeplitz: made.append(1) or f(c))
    column = torch.randn(4, dtype=torch.float64)
    operator = KroneckerLinearOperator(ToeplitzLinearOperator(column), torch.eye(2, dtype=torch.float64))
    x = torch.randn(8, 2, dtype=torch.float64)
    operator._matmul(x), operator._t_matmul(x)
    assert len(made) == 1
    column.mul_(2)
    assert_close(operator._matmul(x), reduce(kron, [dense(op) for op in operator.linear_ops]) @ x)
    assert len(made) == 2


def test_what_was_made_without_gradients_is_not_used_with_them() -> None:
    column = torch.randn(4, requires_grad=True)
    operator = KroneckerLinearOperator(ToeplitzLinearOperator(column), RootLinearOperator(torch.randn(3, 1, requires_grad=True)))
    x = torch.randn(12, 2)
    with torch.no_grad():
        operator._matmul(x)
    assert operator._matmul(x).requires_grad
    operator.matmul(x).sum().backward()
    assert column.grad is not None


def positive(n: int) -> Tensor:
    a = torch.randn(n, n, dtype=torch.float64)
    return a @ a.mT + torch.eye(n, dtype=torch.float64)


def test_what_is_derived_is_ours_too() -> None:
    operator = KroneckerLinearOperator(positive(3), positive(4))
    assert type(operator.mT) is KroneckerLinearOperator
    assert type(operator.to(torch.float32)) is KroneckerLinearOperator
    assert type(operator.cholesky().inverse()) is KroneckerTriangularLinearOperator
    assert type(operator._symeig(eigenvectors=True)[1]) is KroneckerLinearOperator
    assert type(operator.svd()[0]) is KroneckerLinearOperator
    assert type(operator.cholesky()) is KroneckerTriangularLinearOperator
    assert type(operator.representation_tree()(*operator.representation())) is KroneckerLinearOperator
    with torch.no_grad():
        from linear_operator.settings import max_cholesky_size

        with max_cholesky_size(1):
            assert type(operator.root_decomposition().root) is KroneckerLinearOperator


def test_plus_a_constant_diagonal() -> None:
    operator = KroneckerLinearOperator(positive(3), positive(4))
    shifted = operator.add_diagonal(torch.tensor(0.3, dtype=torch.float64))
    assert type(shifted) is KroneckerProductAddedDiagLinearOperator
    reference = reduce(kron, [dense(op) for op in operator.linear_ops]) + 0.3 * torch.eye(12, dtype=torch.float64)
    b = torch.randn(12, 2, dtype=torch.float64)
    quad, logdet = shifted.inv_quad_logdet(b, logdet=True)
    assert_close(quad, (b * torch.linalg.solve(reference, b)).sum(), rms_tol=1e-12, max_tol=1e-12)
    assert_close(logdet, torch.logdet(reference), rms_tol=1e-12, max_tol=1e-12)


# ---- refusals ------------------------------------------------------------------------------------


def test_refuses_factors_unlike_the_right_hand_side() -> None:
    single, double, x = torch.randn(2, 2), torch.randn(3, 3, dtype=torch.float64), torch.randn(6, 1)
    for factors, side, error, message in (
        ((single, double), x, TypeError, r"linear_ops\[1\]: expected torch.float32, as the right-hand side has; got torch.float64"),
        ((single, double.float()), x.double(), TypeError, r"linear_ops\[0\]: expected torch.float64"),
        (
            (single, double.float().to("meta")),
            x,
            ValueError,
            r"linear_ops\[1\]: expected a factor on cpu, where the right-hand side is; got meta",
        ),
    ):
        with pytest.raises(error, match=message):
            KroneckerLinearOperator(*factors)._matmul(side)


def test_refuses_factors_that_are_not_square() -> None:
    """Though the product is."""
    calls: list[tuple[Callable[[Any], Any], str]] = [
        (lambda k: k.inverse(), "inverse"),
        (lambda k: k._solve(torch.ones(6, 1)), "solve"),
        (lambda k: k._logdet(), "logdet"),
        (lambda k: k._symeig(), "an eigendecomposition"),
        (lambda k: k.cholesky(), "a Cholesky decomposition"),
        (lambda k: k.root_decomposition(), "a root decomposition"),
        (lambda k: k.root_inv_decomposition(), "a root decomposition"),
    ]
    for call, what in calls:
        operator = KroneckerLinearOperator(torch.randn(2, 2), torch.randn(1, 3), torch.randn(3, 1))
        with pytest.raises(ValueError, match=rf"linear_ops\[1\]: expected a square factor for {what}; got 1 x 3"):
            call(operator)
