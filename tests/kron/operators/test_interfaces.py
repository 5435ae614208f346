"""Lazy operators as SciPy's, their elements, and a product's factors one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch
from kronecker_cases import definite, near

from fastkron_py import KroneckerProduct, KroneckerSum


def operators(arrays: bool) -> dict[str, Any]:
    f, g, h = (m.numpy() if arrays else m for m in (definite(5), definite(6), definite(5)))
    k = KroneckerProduct(f, g)
    return {
        "product": k,
        "sum": KroneckerSum([f, g]),
        "plus a number": k.add_diagonal(0.5),
        "points": k.masked(rows=range(3, 20), columns=range(3, 20)),
        "sum of operators": k + KroneckerProduct([h, g]),
        "root": k.sqrt(),
    }


@pytest.mark.parametrize("arrays", [False, True], ids=["torch", "numpy"])
def test_scipy_solves_with_every_operator(arrays: bool) -> None:
    for name, k in operators(arrays).items():
        a, dense = k.aslinearoperator(), np.asarray(k.to_dense())
        n = dense.shape[0]
        b = np.random.default_rng(0).standard_normal(n)
        assert a.dtype == np.float64, name
        for solve in (sla.cg, sla.gmres):
            x, info = solve(a, b, rtol=1e-12, maxiter=1000)
            assert info == 0, name
            near(torch.from_numpy(dense @ x), torch.from_numpy(b))
        near(
            torch.from_numpy(np.sort(sla.eigsh(a, k=3, return_eigenvectors=False, tol=1e-13))),
            torch.linalg.eigvalsh(torch.from_numpy(dense))[-3:],
        )
        near(
            torch.from_numpy(np.sort(sla.svds(a, k=2, return_singular_vectors=False, tol=1e-13))),
            torch.linalg.svdvals(torch.from_numpy(dense))[:2].flip(0),
        )
        columns = np.random.default_rng(1).standard_normal((n, 3))
        near(torch.from_numpy(a @ columns), torch.from_numpy(dense @ columns))
        near(torch.from_numpy(a.H @ (1j * columns)), torch.from_numpy(dense.T @ (1j * columns)))


def test_rectangles_complex_ones_and_parameters() -> None:
    f = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    k = KroneckerProduct(f, f)
    a = k.aslinearoperator()
    dense = k.to_dense().detach().numpy()
    assert (a.shape, a.dtype) == ((9, 16), np.complex128)
    x, y = np.ones(16), np.arange(9.0)
    near(torch.from_numpy(a @ x), torch.from_numpy(dense @ x))
    near(torch.from_numpy(a.rmatvec(y)), torch.from_numpy(dense.conj().T @ y))
    least = sla.lsqr(a, y.astype(complex), atol=1e-14, btol=1e-14)[0]
    near(torch.from_numpy(dense @ least), torch.from_numpy(y.astype(complex)))
    with pytest.raises(ValueError, match=r"aslinearoperator: expected an operator without batch dimensions; got shape \(2, 3, 3\)"):
        KroneckerProduct([torch.ones(2, 3, 3)]).aslinearoperator()


@pytest.mark.parametrize("arrays", [False, True], ids=["torch", "numpy"])
def test_elements(arrays: bool) -> None:
    mask = np.arange(17) % 2 == 0
    for name, k in operators(arrays).items():
        if name == "root":
            with pytest.raises(TypeError, match=r"key: expected a product, a sum or points of one; got .*KroneckerFunction"):
                k[0, 0]
            continue
        dense = np.asarray(k.to_dense())
        keys = [
            (3, -1),
            2,
            (slice(None), 4),
            slice(2, 9, 3),
            ([1, 1, 0], [2, 2, 5]),
            [5, 5, 0],
            (slice(1, 3), [[0, 1], [1, 1]]),
            (np.array([[1], [2]]), np.array([0, 3, 3])),
            (slice(None), slice(None, None, 2)),
            (slice(0, 0), 1),
        ]
        keys += [mask] if name == "points" else []
        for key in keys:
            found = k[key]
            assert isinstance(found, torch.Tensor) != arrays, key
            near(torch.as_tensor(np.asarray(found)), torch.from_numpy(np.asarray(dense[key])))
        near(torch.as_tensor(np.asarray(k[[4, 4, 1]][:, [0, 0]])), torch.from_numpy(dense[[4, 4, 1]][:, [0, 0]]))


def _whole_and_lazy(g: torch.Tensor) -> tuple[Any, Any]:
    return (lambda f: KroneckerProduct([f, g])), (lambda f: KroneckerProduct([f, g]).to_dense())


def test_elements_of_batches_have_gradients() -> None:
    f, g = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    k = KroneckerProduct([f, g])
    near(k[..., 5, :], k.to_dense()[..., 5, :])
    # Indices that are made inside a transform, which wraps them.
    got, want = (torch.func.grad(lambda f, a=a: a(f)[..., torch.tensor([5, 0]), :].sum())(f.detach()) for a in _whole_and_lazy(g.detach()))
    near(got, want)
    assert torch.autograd.gradcheck(lambda f, g: KroneckerProduct([f, g]).add_diagonal(g[0, 0])[..., [1, 1], [1, 2]], (f, g))
    with pytest.raises(TypeError, match="not iterable"):
        iter(k)


REFUSED = {
    "three": (lambda k: k[0, 0, 0], IndexError, "key: expected a row and a column"),
    "a float": (lambda k: k[0.5], TypeError, "key: expected integers, slices, arrays of integers or masks of size 6; got float$"),
    "a text": (lambda k: k["a"], TypeError, "key: expected integers, slices, arrays of integers or masks of size 6; got str$"),
    "out of range": (lambda k: k[6], IndexError, "key: expected indices from -6 to 5; got 6$"),
    "one of several out of range": (lambda k: k[[5, -7, 9]], IndexError, "key: expected indices from -6 to 5; got -7$"),
    "another mask": (lambda k: k[torch.ones(5, dtype=torch.bool)], TypeError, "key: expected .* masks of size 6; got bool"),
    "too many": (lambda k: KroneckerProduct([torch.eye(100)] * 3)[:], ValueError, "max_elements: expected at least"),
    "a second argument that is no matrix": (
        lambda k: KroneckerProduct(torch.eye(2), torch.ones(2)),
        ValueError,
        r"factors\[1\]: expected a matrix",
    ),
    "masses by position": (
        lambda k: KroneckerSum([torch.eye(2)], [torch.eye(2)]),
        TypeError,
        r"factors\[0\]: expected a torch tensor",
    ),
    "a lone matrix": (
        lambda k: KroneckerProduct(torch.eye(2)),
        TypeError,
        "factors: expected a list or tuple of matrices; got torch.Tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call(KroneckerProduct([torch.eye(2), 3]))


def test_factors_one_by_one() -> None:
    f, g = torch.randn(2, 3), torch.randn(4, 5)
    assert KroneckerProduct(f, 2, g).factors == (f, 2, g)
    assert torch.equal(KroneckerProduct(f, g).to_dense(), torch.kron(f, g))
    f, g, mass = (torch.randn(n, n, dtype=torch.float64) for n in (2, 3, 2))
    wanted = torch.kron(f, torch.eye(3)) + torch.kron(mass, g)
    assert torch.equal(KroneckerSum(f, g, masses=[mass, 3]).to_dense(), wanted)


def test_pylops_wraps_every_operator() -> None:
    pylops = pytest.importorskip("pylops")
    for name, k in operators(arrays=False).items():
        a, dense = pylops.aslinearoperator(k.aslinearoperator()), k.to_dense().numpy()
        n = dense.shape[0]
        b = np.random.default_rng(0).standard_normal(n)
        assert pylops.utils.dottest(a, n, n), name
        two = pylops.VStack([a, 0.1 * pylops.Identity(n)])  # its operators compose
        x = pylops.optimization.basic.lsqr(two, np.concatenate([b, 0 * b]), niter=2000, atol=1e-14, btol=1e-14)[0]
        near(torch.from_numpy(x), torch.from_numpy(np.linalg.solve(dense.T @ dense + 0.01 * np.eye(n), dense.T @ b)))


def test_linear_operator_wraps_every_operator() -> None:
    """With gradients, as a matrix of which it knows the products."""
    module = pytest.importorskip("linear_operator")

    class Wrapped(module.operators.LinearOperator):  # type: ignore[misc, name-defined]
        def __init__(self, *tensors: torch.Tensor, operator: Any) -> None:
            super().__init__(*tensors, operator=operator)
            self.of, self.operator = operator._with(tensors), operator

        def _matmul(self, rhs: torch.Tensor) -> torch.Tensor:
            return self.of @ rhs  # type: ignore[no-any-return]

        def _size(self) -> torch.Size:
            return torch.Size(self.of.shape)

        def _transpose_nonbatch(self) -> Any:
            return Wrapped(*self.of.mT._arrays, operator=self.operator.mT)

    for name, k in operators(arrays=False).items():
        if name == "sum of operators":
            continue  # whose arrays have parts
        tensors = [t.clone().requires_grad_() for t in k._arrays]
        b = torch.ones(k.shape[-1], 1, dtype=torch.float64)
        x = Wrapped(*tensors, operator=k).solve(b)
        gradients = torch.autograd.grad(x.sum(), tensors)
        expected = torch.linalg.solve(k._with(tensors).to_dense(), b)
        near(x, expected)
        for found, wanted in zip(gradients, torch.autograd.grad(expected.sum(), tensors), strict=True):
            near(found, wanted)
