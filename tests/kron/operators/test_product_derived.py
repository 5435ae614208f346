"""`KroneckerProduct` under autograd and torch.compile: derivatives in float64, compiled results against eager ones."""

import math

import pytest
import torch
from kronecker_cases import hermitian, near, random_factors
from torch import Tensor

from fastkron_py import KroneckerProduct, kron_matmul
from fastkron_py.reference import kron_dense
from fastkron_py.testing import assert_close

# ---- gradients: random projections of each result, so that no symmetry hides a wrong sign or a missing conjugate ------


SINGULAR = {  # rows that are multiples of one another, so that LU finds an exact zero
    "one": [[[1, 2], [2, 4]], [[3, 1, 0], [0, 2, 1], [1, 0, 1]]],
    "two": [[[1, 2], [2, 4]], [[1, 1], [3, 3]]],
    "power of two": [[[1, 2, 1], [2, 4, 2], [0, 1, 1]], [[3, 1], [1, 2]]],
    "zeros": [[[0, 0], [0, 0]], [[3, 1], [1, 2]]],
    "with a scalar": [[[1, 2], [2, 4]], [[3]]],
    "zero scalars": [[[0]], [[0]]],
}


def determinant(f: Tensor) -> Tensor:
    """By minors, so that autograd derives a polynomial."""
    if len(f) == 1:
        return f[0, 0]
    rest = [torch.cat((f[1:, :j], f[1:, j + 1 :]), 1) for j in range(len(f))]
    return sum((-1) ** j * f[0, j] * determinant(rest[j]) for j in range(len(f)))


def test_gradients_of_det_at_singular_factors(dtype):
    """Beside the polynomial, and beside torch's of the dense product: first derivatives, and real second ones where torch has those."""

    def derivatives(y: Tensor, factors: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        first = torch.autograd.grad(y, factors, torch.ones_like(y), create_graph=True)
        return first, torch.autograd.grad(first, factors, [torch.ones_like(f) for f in factors])

    for name in SINGULAR:
        factors = [(torch.tensor(f, dtype=dtype) * (1 + 1j if dtype.is_complex else 1)).requires_grad_() for f in SINGULAR[name]]
        k, dense = KroneckerProduct(factors), kron_dense(factors)
        n = dense.shape[-1]
        polynomial = math.prod([determinant(f) ** (n // len(f)) for f in factors])

        assert k.det() == 0
        plain = torch.autograd.grad(k.det(), factors, torch.ones((), dtype=dtype))
        (first, second), (dense_first, dense_second) = (derivatives(d, factors) for d in (k.det(), torch.linalg.det(dense)))
        expected = derivatives(polynomial, factors)
        for got in (plain, first, dense_first):
            torch.testing.assert_close(got, expected[0], rtol=1e-9, atol=1e-9)
        for got, by_torch, want in zip(second, dense_second, expected[1], strict=True):
            if by_torch.isfinite().all() and not dtype.is_complex:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_gradient_of_det_at_many_singular_factors():
    """Some of these an LU decomposition takes without rounding even where they are turned, and which ones is up to the processor."""
    numbers = torch.cartesian_prod(*[torch.arange(-3.0, 4.0, dtype=torch.float64)] * 3)
    f = torch.stack((numbers[:, :2], numbers[:, :2] * numbers[:, 2:]), 1).requires_grad_()
    scalar = torch.tensor([[3.0]], dtype=torch.float64)
    (got,) = torch.autograd.grad(KroneckerProduct([f, scalar]).det().sum(), f)
    a, b, c, d = f.detach().flatten(1).unbind(1)
    torch.testing.assert_close(got, 9 * torch.stack((d, -c, -b, a), 1).view(-1, 2, 2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["cholesky", "eigvalsh", "eigh"])
def test_gradients_of_hermitian_functions(name, dtype):
    factors = [f.requires_grad_() for f in random_factors([(2, 2), (3, 3)], dtype, "cpu", dominant=False)]

    def function(*factors: Tensor) -> Tensor:
        k = KroneckerProduct(hermitian(factors))
        if name == "cholesky":
            return k.cholesky().to_dense()
        if name == "eigvalsh":
            return k.eigvalsh()
        values, v = k.eigh()  # a function of the matrix: the eigenvectors' phases are anyone's
        return (v @ KroneckerProduct([torch.diag(values.log()).to(dtype)]).to_dense()) @ v.mH.to_dense()

    assert torch.autograd.gradcheck(function, factors)


def test_gradients_of_rectangular_diagonals(dtype):
    factors = [f.requires_grad_() for f in random_factors([(2, 3), (2, 3, 2)], dtype, "cpu")]
    assert torch.autograd.gradcheck(lambda *fs: KroneckerProduct(fs).diagonal(), factors)
    assert torch.autograd.gradcheck(lambda *fs: KroneckerProduct(fs).trace(), factors)


def test_parameters_stay_parameters_and_get_gradients(device):
    parameters = torch.nn.ParameterList(random_factors([(3, 3), (3, 3)], torch.float32, device))
    k = KroneckerProduct(parameters)
    assert k.requires_grad
    assert k.factors[0] is parameters[0]
    (k @ torch.ones(9, device=device)).sum().backward()
    dense = [p.detach().double().requires_grad_() for p in parameters]
    (kron_dense(dense) @ torch.ones(9, dtype=torch.float64, device=device)).sum().backward()
    for p, d in zip(parameters, dense, strict=True):
        assert_close(p.grad, d.grad)
    # A later change of a parameter shows: the operator holds no copy.
    with torch.no_grad():
        parameters[0].zero_()
    assert (k @ torch.ones(9, device=device) == 0).all()
    assert not k.detach().requires_grad
    assert k.clone().factors[0].data_ptr() != parameters[0].data_ptr()


# ---- compilation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
def test_compiles_without_graph_breaks(inside):
    """Square operators and square x, so that no shape tells K @ x from x @ K: only the values do."""
    factors = [f + f.mT for f in random_factors([(2, 2), (3, 3)], torch.float64, "cpu")]
    outside = KroneckerProduct(factors)
    x = torch.randn(6, 6, dtype=torch.float64)

    def function(x, factors):
        k = KroneckerProduct(factors) if inside else outside
        products = k @ x, x @ k, torch.matmul(k, x), torch.matmul(x, k), torch.matmul(k, k.mT) @ x, k.mH @ x
        scaled = (x[0, 0] * k) @ x, (k * x[0, 0]) @ x, (k / x[0, 0]) @ x, (-k * 2) @ x
        return *products, *scaled, k.solve(x), torch.linalg.solve(k, x), k.logdet() + x, k.eigh().eigenvectors @ x, k.to_dense() @ x

    class Whole(torch.nn.Module):
        def forward(self, x, factors):
            return function(x, factors)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    exported = [torch.export.export(Whole(), (x, factors), strict=strict).module() for strict in (True, False)] if inside else []
    for made in (compiled, *exported):
        for got, want in zip(made(x, factors), function(x, factors), strict=True):
            near(got, want)


def test_the_verbs_take_a_parameter_list():
    factors = torch.nn.ParameterList([torch.randn(2, 3), torch.randn(3, 2)])
    x = torch.randn(4, 6)
    assert_close(kron_matmul(x, factors).detach(), x.double() @ kron_dense([f.detach().double() for f in factors]))
