"""Pseudo-inverses of singular sums and products against the dense matrix's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kronecker_cases import dense_sum, near
from torch import Tensor

from fastkron_py import KroneckerProduct, KroneckerSum
from fastkron_py.reference import kron_dense

RCOND = 1e-9


def laplacian(weights: Tensor) -> Tensor:
    """Of a weighted path: Hermitian, with one null vector, whatever the weights are."""
    n = weights.shape[-1] + 1
    d = torch.eye(n, dtype=weights.dtype)[1:] - torch.eye(n, dtype=weights.dtype)[:-1]
    phases = torch.polar(torch.ones(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)) if weights.is_complex() else 1.0
    own = d.mT @ ((weights.abs() + 0.5)[..., None] * d).to(d.dtype)
    return own if not weights.is_complex() else phases[:, None] * own * phases.conj()


def generator(weights: Tensor) -> Tensor:
    """Of a Markov chain: not symmetric, with one right null vector, of ones, and another left one."""
    n = weights.shape[-1]
    rates = (weights.abs() ** 2 + 0.1) * (1 - torch.eye(n))
    return (torch.diag_embed(rates.sum(-1)) - rates).to(weights.dtype)


def mass(weights: Tensor) -> Tensor:
    return torch.diag_embed((weights.abs() + 1).to(weights.dtype))


CASES = {
    "Neumann": ([(3,), (2,)], lambda a, b: ([laplacian(a), laplacian(b)], None)),
    "a batch": ([(2, 3), (2,)], lambda a, b: ([laplacian(a), laplacian(b)], None)),
    "mass matrices": ([(3,), (2,), (4,), (3,)], lambda a, b, m, n: ([laplacian(a), laplacian(b)], [mass(m), mass(n)])),
    "Markov chains": ([(4, 4), (3, 3)], lambda a, b: ([generator(a), generator(b)], None)),
    "regular": ([(3,), (2,)], lambda a, b: ([laplacian(a) + torch.eye(4), laplacian(b)], None)),
    "several null vectors": ([(3,), (2,)], lambda a, b: ([laplacian(a), torch.kron(laplacian(b), torch.eye(2, dtype=b.dtype))], None)),
}


@pytest.mark.parametrize("name", CASES)
def test_sums(name: str, dtype: torch.dtype) -> None:
    shapes, make = CASES[name]
    tensors = [torch.randn(s, dtype=dtype) for s in shapes]
    factors, masses = make(*tensors)
    s, dense = KroneckerSum(factors, masses=masses), dense_sum(factors, masses)
    inverse = torch.linalg.pinv(dense, rtol=RCOND)
    b = torch.randn(dense.shape[-1], 2, dtype=dtype)
    near(s.solve(b, rcond=RCOND), inverse @ b)
    near(s.solve(b[:, 0], rcond=RCOND), (inverse @ b)[..., 0])
    with pytest.raises(AssertionError):
        near(s.solve(b, rcond=RCOND) + 1e-6, inverse @ b)

    def solve(b: Tensor, *tensors: Tensor) -> Tensor:
        factors, masses = make(*tensors)
        return KroneckerSum(factors, masses=masses).solve(b, rcond=RCOND)

    given = (b.requires_grad_(), *[t.requires_grad_() for t in tensors])
    assert torch.autograd.gradcheck(solve, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(solve, given, fast_mode=True)
    if not dtype.is_complex:
        tangents = tuple(torch.randn_like(t) for t in given)
        detached = tuple(t.detach() for t in given)
        near(torch.func.jvp(solve, detached, tangents)[1], _difference(solve, detached, tangents))


def _difference(function, at, along) -> Tensor:
    """By reverse mode twice, which `gradgradcheck` has checked."""
    y = function(*[t.requires_grad_() for t in at])
    v = torch.zeros_like(y, requires_grad=True)
    gradients = torch.autograd.grad(y, at, v, create_graph=True)
    total = sum((g * t).sum() for g, t in zip(gradients, along, strict=True))
    return torch.autograd.grad(total, v)[0]


def test_batches_of_differing_null_spaces() -> None:
    a = torch.stack([laplacian(torch.ones(3).double()), laplacian(torch.ones(3).double()) + torch.eye(4)])
    other = laplacian(torch.ones(2).double())
    for masses in (None, [mass(torch.rand(4).double()), mass(torch.rand(3).double())]):
        s, dense = KroneckerSum([a, other], masses=masses), dense_sum([a, other], masses)
        b = torch.randn(12, 2, dtype=torch.float64)
        near(s.solve(b, rcond=RCOND), torch.linalg.pinv(dense, rtol=RCOND) @ b)


def test_real_null_vectors_of_complex_pairs() -> None:
    """Eigenvalues i and -i of the factors add up to 0: null vectors are real, eigenvectors are not."""
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    change = torch.eye(2).double() + torch.rand(2, 2).double() / 4
    f, g = change @ turn @ torch.linalg.inv(change), 2 * turn
    f, g = torch.block_diag(f, g), turn + 0
    s, dense = KroneckerSum([f, g]), dense_sum([f, g])
    b = torch.randn(8, 2, dtype=torch.float64)
    near(s.solve(b, rcond=RCOND), torch.linalg.pinv(dense, rtol=RCOND) @ b)


def test_poisson_with_neumann_conditions() -> None:
    """On 24^3 points: the residual of what has a solution, and a mean of 0."""
    n = 24
    line = n**2 * laplacian(torch.ones(n - 1).double())
    s = KroneckerSum([line] * 3)
    b = torch.randn(n**3, dtype=torch.float64)
    x = s.solve(b, rcond=1e-12)
    assert (s @ x - (b - b.mean())).norm() < 1e-10 * b.norm()
    assert abs(float(x.mean())) < 1e-14
    with pytest.raises(torch.linalg.LinAlgError, match="factors: expected an invertible matrix for solve without rcond=; got eigenvalues"):
        s.solve(b)
    assert s.float().solve(b.float(), rcond=1e-6).isfinite().all()


PRODUCTS = {
    "tall": [(5, 3), (4, 2)],
    "wide": [(2, 3), (3, 3)],
    "mixed": [(2, 3), (2, 3, 2)],
    "one": [(1, 1)],
    "empty": [(0, 3), (2, 2)],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, dtype: torch.dtype) -> None:
    factors = [torch.randn(s, dtype=dtype) for s in PRODUCTS[name]]
    for k in (KroneckerProduct(factors), KroneckerProduct([factors[0], 2, *factors[1:]])):
        dense = k.to_dense()
        near(k.pinv().to_dense(), torch.linalg.pinv(dense))
        near(torch.linalg.pinv(k).to_dense(), torch.linalg.pinv(dense))
        b = torch.randn(dense.shape[-2], 3, dtype=dtype)
        near(k.lstsq(b), torch.linalg.pinv(dense) @ b)
        u, values, vh = k.svd()
        near(u.to_dense() @ (values[..., None] * vh.to_dense()), dense)
        near(u.mH.to_dense() @ u.to_dense(), torch.eye(u.shape[-1], dtype=dtype).expand(*u.shape[:-2], -1, -1))
        near(values.sort(descending=True).values, torch.linalg.svdvals(dense)[..., : values.shape[-1]])
    if name != "empty":
        given = [f.requires_grad_() for f in factors]
        assert torch.autograd.gradcheck(lambda *fs: KroneckerProduct(fs).pinv().to_dense(), given, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda *fs: KroneckerProduct(fs).pinv().to_dense(), given, fast_mode=True)


def test_singular_products() -> None:
    f, g = laplacian(torch.rand(3).double()), torch.rand(2, 2).double()
    k, b = KroneckerProduct([f, g]), torch.randn(8, 2, dtype=torch.float64)
    near(k.solve(b, rcond=1e-9), torch.linalg.pinv(kron_dense([f, g]), rtol=1e-9) @ b)
    arrays = KroneckerProduct([f.numpy(), g.numpy()])
    near(torch.from_numpy(arrays.solve(b.numpy(), rcond=1e-9)), k.solve(b, rcond=1e-9))
    assert isinstance(arrays.svd().S, np.ndarray)
    of_arrays = KroneckerSum([f.numpy(), f.numpy()]).solve(np.ones(16), rcond=1e-9)
    assert isinstance(of_arrays, np.ndarray)
    assert np.abs(of_arrays).max() < 1e-12


REFUSED = {
    "no number": (lambda s, k: s.solve(torch.ones(16).double(), rcond="0"), TypeError, "rcond: expected a number or None; got str"),
    "true": (lambda s, k: k.pinv(rcond=True), TypeError, "rcond: expected a number or None; got bool"),
    "negative": (lambda s, k: k.lstsq(torch.ones(16).double(), rcond=-1), ValueError, "rcond: expected a number of at least 0"),
    "too large": (lambda s, k: s.solve(torch.ones(16).double(), rcond=1.0), ValueError, "rcond: .* less than 1; got 1.0"),
    "a rectangle": (
        lambda s, k: KroneckerProduct([torch.ones(2, 3)]).solve(torch.ones(2), rcond=0.1),
        ValueError,
        r"factors\[0\]: expected a square matrix for solve",
    ),
    "half": (lambda s, k: k.to(torch.float16).svd(), TypeError, "factors: expected a dtype among"),
    "another size": (lambda s, k: s.solve(torch.ones(15).double(), rcond=0.1), ValueError, "b: expected dimension -1 of size 16"),
    "Jordan blocks": (
        lambda s, k: KroneckerSum([torch.diag(torch.ones(3), 1), torch.eye(2)]).solve(torch.ones(8), rcond=0.1),
        torch.linalg.LinAlgError,
        "factors: expected eigenvectors that are not nearly dependent for solve with rcond=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, error, text = REFUSED[name]
    f = laplacian(torch.ones(3).double())
    with pytest.raises(error, match=text):
        call(KroneckerSum([f, f]), KroneckerProduct([f, f]))
