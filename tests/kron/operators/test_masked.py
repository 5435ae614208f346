"""Some rows and columns of a Kronecker product, against the same of a dense matrix in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kronecker_cases import definite, near

from fastkron_py import KroneckerProduct
from fastkron_py.testing import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def rectangular(dtype: torch.dtype, device: torch.device) -> tuple[KroneckerProduct, torch.Tensor]:
    """A product ``[24, 24]`` and the matrix."""
    wide = torch.complex64 if dtype.is_complex else torch.float32
    f, g = (torch.randn(size, dtype=wide).to(device, dtype) for size in [(3, 4), (4, 3)])
    k = KroneckerProduct([f, 2, g])
    return k, k.to(torch.complex128 if dtype.is_complex else torch.float64).to_dense()


@pytest.mark.parametrize("which", ["rows", "columns", "both"])
def test_products(which: str, device: torch.device) -> None:
    for dtype in DTYPES:
        k, dense = rectangular(dtype, device)
        rows = torch.rand(24, device=device) < 0.5 if which != "columns" else None
        columns = torch.tensor([5, 0, 23, 7], device=device, dtype=torch.int32) if which != "rows" else None
        a = k.masked(rows=rows, columns=columns)
        wanted = dense if rows is None else dense[rows]
        wanted = wanted if columns is None else wanted[:, columns.long()]
        assert a.shape == wanted.shape
        x, y = torch.randn(a.shape[1], 3, device=device).to(dtype), torch.randn(5, 2, a.shape[0], device=device).to(dtype)
        assert_close(a @ x, wanted @ x.to(wanted.dtype), steps=3)
        assert_close(a @ x[:, 0], wanted @ x[:, 0].to(wanted.dtype), steps=3)
        assert_close(y @ a, y.to(wanted.dtype) @ wanted, steps=3)
        assert_close(y[0, 0] @ a, y[0, 0].to(wanted.dtype) @ wanted, steps=3)
        assert_close(a.mT @ y.mT, wanted.mT @ y.mT.to(wanted.dtype), steps=3)
        assert_close(a.mH @ y.mT, wanted.mH @ y.mT.to(wanted.dtype), steps=3)
        assert_close(a.to_dense(), wanted, steps=3)
        assert_close(a.diagonal(), wanted.diagonal(), steps=3)
        with pytest.raises(AssertionError):
            assert_close(a @ x, k.masked(rows=rows, columns=columns).to_dense().flip(1).to(wanted.dtype) @ x.to(wanted.dtype), steps=3)


def test_a_batch_of_factors(backend_name: str, device: torch.device) -> None:
    f, g = torch.randn(2, 1, 3, 4, device=device), torch.randn(5, 4, 3, device=device)
    rows = torch.tensor([7, 0, 11, 3], device=device)
    a = KroneckerProduct([f, g]).masked(rows=rows, columns=rows)
    wanted = KroneckerProduct([f.double(), g.double()]).to_dense()[..., rows, :][..., rows]
    x = torch.randn(2, 1, 4, 3, device=device)
    assert_close(a @ x, wanted @ x.double(), steps=3)
    assert_close(x[0, 0].mT @ a, x[0, 0].mT.double() @ wanted, steps=3)


def symmetric(device: torch.device | str = "cpu") -> tuple[KroneckerProduct, torch.Tensor, torch.Tensor]:
    """A product ``[18, 18]``, a mask and the matrix of its points."""
    k = KroneckerProduct([definite(3).to(device), 2, definite(3).to(device)])
    mask = torch.arange(18, device=device) % 3 != 1
    return k, mask, k.to_dense()[mask][:, mask]


@pytest.mark.parametrize("added", ["nothing", "number", "0-dimensional", "vector", "batch"])
def test_solves(added: str, device: torch.device) -> None:
    for preconditioner in [True, False, lambda r: r / 2]:
        k, mask, dense = symmetric(device)
        a = k.masked(rows=mask, columns=mask)
        vector = torch.rand(12, device=device, dtype=torch.float64) + 0.1
        diagonals = {"number": 0.5, "0-dimensional": vector[0], "vector": vector, "batch": torch.stack([vector, 3 * vector])}
        if added != "nothing":
            a = a.add_diagonal(diagonals[added])
            diagonal = torch.as_tensor(diagonals[added], dtype=torch.float64, device=device)
            dense = dense + torch.diag_embed(diagonal.expand(*diagonal.shape[:-1], 12))
        b = torch.randn(12, 2, device=device, dtype=torch.float64)
        seen: list[int] = []
        x = a.solve(b, tolerance=1e-12, preconditioner=preconditioner, progress=lambda i, _, seen=seen: seen.append(i))
        assert_close(
            x, torch.linalg.solve(dense, b.expand(*dense.shape[:-2], 12, 2)), steps=10**4
        )  # the tolerance, times the condition number
        assert a.convergence is not None
        assert a.convergence.converged
        assert seen == list(range(1, a.convergence.iterations + 1))
        assert_close(a @ b, dense @ b, steps=3)
        assert_close(b.mT @ a, b.mT @ dense, steps=3)
        assert_close(a.mT @ b, dense @ b, steps=3)
        assert_close(a.to_dense(), dense, steps=3)
        assert_close(a.diagonal(), dense.diagonal(dim1=-2, dim2=-1), steps=3)
        with pytest.raises(AssertionError):
            assert_close(x, 1.0001 * torch.linalg.solve(dense, b.expand(*dense.shape[:-2], 12, 2)), steps=10**4)


def test_order_of_indices() -> None:
    k, _, _ = symmetric()
    index = torch.tensor([7, 0, 17, 3])
    a = k.masked(rows=index, columns=index.clone())
    dense = k.to_dense()[index][:, index]
    b = torch.randn(4, dtype=torch.float64)
    assert_close(a.solve(b), torch.linalg.solve(dense, b), steps=10**6)  # 1e-10, as of the tolerance
    assert_close(a.add_diagonal(torch.arange(4.0).double()).to_dense(), dense + torch.diag(torch.arange(4.0)))


def test_a_diagonal_stays_the_parameter_that_it_is() -> None:
    """It is spread over the grid at each use: every pass has a graph of its own, copies work, and later changes show."""
    k, _, _ = symmetric()
    index, s = torch.tensor([7, 0, 17, 3]), torch.rand(4, dtype=torch.float64).add(1).requires_grad_()
    a, b = k.masked(rows=index, columns=index).add_diagonal(s), torch.randn(4, dtype=torch.float64)
    dense = k.to_dense()[index][:, index]
    for _ in range(2):
        for use, wanted in [
            (lambda m: m @ b, lambda d: d @ b),
            (lambda m: m.inv_quad_logdet(b)[0], lambda d: b @ torch.linalg.solve(d, b)),
        ]:
            for operator in (a, a.mT, copy.deepcopy(a)):
                near(use(operator), wanted(dense + s.diag()))
            (got,), (want,) = (torch.autograd.grad(f.sum(), s) for f in (use(a), wanted(dense + s.diag())))
            near(got, want)
        with torch.no_grad():
            s.mul_(2)


def test_transforms() -> None:
    f, g = definite(3), definite(2)
    index = torch.tensor([4, 0, 3])
    xs, fs = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 3, 3, dtype=torch.float64)

    def product(f: torch.Tensor, x: torch.Tensor) -> Any:
        return KroneckerProduct([f, g]).masked(rows=index, columns=index) @ x

    wanted = torch.stack([torch.kron(m, g)[index][:, index] @ x for m, x in zip(fs, xs, strict=True)])
    assert_close(torch.vmap(product)(fs, xs), wanted)
    assert_close(torch.func.jacfwd(product)(f, xs[0]), torch.func.jacrev(product)(f, xs[0]))
    a = KroneckerProduct([f, g]).masked(rows=index, columns=index)
    compiled = torch.compile(lambda x: a @ x, fullgraph=True, backend="aot_eager")
    assert_close(compiled(xs[0]), torch.kron(f, g)[index][:, index] @ xs[0])
    solved = torch.vmap(lambda x: a.solve(x, tolerance=1e-12))(xs)
    assert_close(solved, torch.linalg.solve(torch.kron(f, g)[index][:, index], xs.mT).mT, steps=10**4)


NOT_THESE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ValueError, r"rows, columns: expected a mask or indices for one of them"),
    ({"rows": torch.zeros(4, dtype=torch.bool)}, ValueError, r"rows: expected at least one point; got none"),
    ({"rows": torch.ones(9, dtype=torch.bool)}, ValueError, r"rows: expected a mask of size 4, the product's; got size 9"),
    ({"columns": [9]}, ValueError, r"columns: expected indices from 0 to 8; got 9"),
    ({"columns": [-1]}, ValueError, r"columns: expected indices from 0 to 8; got -1"),
    ({"columns": [1, 1, 2]}, ValueError, r"columns: expected each index once; got 1 indices"),
    ({"columns": []}, ValueError, r"columns: expected at least one point"),
    ({"columns": torch.ones(2)}, TypeError, r"columns: expected bools or signed integers; got torch.float32"),
    ({"rows": torch.ones(4, dtype=torch.uint8)}, TypeError, r"rows: expected bools or signed integers; got torch.uint8"),
    ({"rows": torch.ones(2, 2, dtype=torch.int64)}, ValueError, r"rows: expected .*of one dimension; got shape \(2, 2\)"),
    ({"rows": torch.ones(4, dtype=torch.bool, device="meta")}, ValueError, r"rows: expected the factors' device cpu; got meta"),
    ({"rows": "abc"}, TypeError, r"rows: expected .*got str"),
]


def _masked() -> Any:
    return KroneckerProduct([definite(3), definite(2)]).masked(rows=[0, 1, 4], columns=[0, 1, 4])


NOT_SO: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: KroneckerProduct([definite(3)]).masked(rows=[0], columns=[1]).solve(torch.ones(1)),
        ValueError,
        r"rows, columns: expected the same",
    ),
    (lambda: KroneckerProduct([definite(3)]).masked(rows=[0]).add_diagonal(1.0), ValueError, r"rows, columns: expected the same points"),
    (
        lambda: KroneckerProduct([torch.ones(2, 3)]).masked(rows=[0], columns=[0]).add_diagonal(1.0),
        ValueError,
        r"factors: expected a square",
    ),
    (lambda: _masked().add_diagonal(1.0).add_diagonal(1.0), TypeError, r"s: expected the only diagonal.*; got a second one"),
    (lambda: _masked().add_diagonal(torch.ones(2).double()), ValueError, r"s: expected a vector \[3\].*got shape \(2,\)"),
    (lambda: _masked().add_diagonal(torch.ones(3)), TypeError, r"s: expected factors\[0\]'s dtype torch.float64; got torch.float32"),
    (lambda: _masked().add_diagonal([1.0, 2.0, 3.0]), TypeError, r"s: expected a number or an array; got list"),
    (lambda: _masked() @ torch.ones(6).double(), ValueError, r"x: expected dimension -1 of size 3, the number of points that are kept"),
    (lambda: _masked() @ _masked(), TypeError, r"x: expected an array"),
    (lambda: _masked().solve(torch.ones(4).double()), ValueError, r"b: expected dimension -1 of size 3, the number of points"),
    (lambda: _masked().add_diagonal(-9.0).solve(torch.ones(3).double()), ValueError, r"factors, s: expected a positive definite"),
    (
        lambda: KroneckerProduct([torch.randn(3, 3)]).masked(rows=[0, 1], columns=[0, 1]).solve(torch.ones(2)),
        ValueError,
        r"factors\[0\]: expected a symmetric matrix",
    ),
]


def test_refusals() -> None:
    for masks, error, text in NOT_THESE:
        with pytest.raises(error, match=text):
            KroneckerProduct([torch.ones(2, 3)] * 2).masked(**masks)
    for call, error, text in NOT_SO:
        with pytest.raises(error, match=text):
            call()


def test_masks_of_any_array(device):
    """Strides below 0, another byte order, Python's objects, memory that is read only: as the same mask of torch's."""
    k = KroneckerProduct([torch.rand(3, 3, device=device), torch.rand(4, 4, device=device)])
    kept = np.random.default_rng(0).random(12) < 0.5
    kept[0] = True
    index, locked = np.flatnonzero(kept), kept.copy()
    locked.flags.writeable = False
    expected = k.to_dense()[torch.from_numpy(index)]
    for mask in (kept[::-1].copy()[::-1], kept.astype(object), locked, index.astype(">i8"), index[::-1].copy()[::-1], index.astype(object)):
        assert torch.equal(k.masked(rows=mask).to_dense(), expected)
    a, b = KroneckerProduct([torch.eye(3) + 1, torch.eye(4)]).add_diagonal(1.0), torch.rand(12)
    for mask in (kept[::-1].copy()[::-1], kept.astype(object), locked):
        assert torch.equal(a.solve(b, mask=mask), a.solve(b, mask=torch.from_numpy(kept.copy())))
    with pytest.raises(TypeError, match="rows: expected a bool mask or indices"):
        k.masked(rows=np.array([None, 1], dtype=object))


# ---- likelihoods of grids with missing values ------------------------------------------------------------------------------------


def test_masked_solves_of_some_points() -> None:
    """A mask of the points that are kept leaves out more of them."""
    lines, kept, s = process("vector")
    a = KroneckerProduct(lines).masked(rows=kept, columns=kept).add_diagonal(s)
    for batch in ((), (2,)):
        mask = torch.rand(*batch, a.shape[-1]) < 0.6
        x = a.solve(torch.where(mask.unsqueeze(-1), 1.0, torch.nan).double(), mask=mask, tolerance=1e-12)
        assert (x[~mask] == 0).all()
        near((a @ x)[mask], torch.ones_like(x)[mask])


def process(noise: str, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Factors of a Gaussian process' covariance [960, 960], a mask with 30% missing, and noise of each point that is kept, or one."""
    torch.manual_seed(0)
    lines = [torch.linspace(0, 1, n, dtype=torch.float64) for n in (32, 30)]
    factors = [torch.exp(-8 * (x - x[:, None]) ** 2) for x in lines]
    kept = torch.rand(960) < 0.7
    s = torch.full((1,), 0.02) if noise == "number" else 0.02 + 0.05 * torch.rand(int(kept.sum()))
    if dtype.is_complex:
        phases = [torch.polar(torch.ones(n, dtype=torch.float64), torch.rand(n, dtype=torch.float64)) for n in (32, 30)]
        factors = [p[:, None] * f * p.conj() for p, f in zip(phases, factors, strict=True)]
    return [f.to(dtype) for f in factors], kept, s.to(dtype)


@pytest.mark.parametrize("noise", ["number", "vector"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32], ids=str)
def test_estimated_likelihoods(noise: str, dtype: torch.dtype) -> None:
    """The estimate within four of its errors of the exact value, with the exact derivatives but for chance; the same with the same seed."""
    factors, kept, s = process(noise, dtype)
    b = torch.randn(int(kept.sum()), dtype=torch.float64).to(dtype)

    def terms(probes: int | None, *tensors: torch.Tensor) -> tuple[Any, Any]:
        a = KroneckerProduct(tensors[:2]).masked(rows=kept, columns=kept).add_diagonal(tensors[2])
        found = a.inv_quad_logdet(b, probes=probes, generator=torch.Generator().manual_seed(0) if probes else None, tolerance=1e-3)
        return a, found

    given = [t.requires_grad_() for t in (*factors, s)]
    (_, exact), (a, found) = terms(None, *given), terms(64, *given)
    assert found.logdet.dtype == dtype.to_real()
    assert abs(float((found.logdet - exact.logdet).detach())) < 4 * float(a.standard_error) + 1e-5 * abs(float(exact.logdet.detach()))
    assert float(a.standard_error) < (1 if noise == "number" else 20)
    assert float(found.inv_quad.detach()) == pytest.approx(float(exact.inv_quad.detach()), rel=1e-3)
    assert torch.equal(terms(64, *given)[1].logdet, found.logdet)
    if dtype == torch.float32:
        return
    scale = float((given[0].detach().conj() * torch.autograd.grad(exact.logdet, given[0], retain_graph=True)[0]).sum().real.abs())
    for t, mine, theirs in zip(given, torch.autograd.grad(found.logdet, given), torch.autograd.grad(exact.logdet, given), strict=True):
        along = ((mine - theirs) * t.detach().conj()).sum().real  # as of a variance: single elements have more of the error
        assert abs(float(along)) < (0.01 if noise == "number" else 0.1) * scale
    found = terms(64, *given)[1]
    (first,) = torch.autograd.grad(found.logdet, given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="logdet: derivatives of the first order are there"):
        torch.autograd.grad(first.real.sum(), given[0])


def test_estimates_of_batches_identities_and_arrays() -> None:
    f, g = torch.stack([definite(8), definite(8)]), definite(5)
    index = torch.randperm(120)[:90]
    s = torch.tensor([[0.5], [1.5]], dtype=torch.float64)
    a = KroneckerProduct([f, 3, g]).masked(rows=index, columns=index).add_diagonal(s)
    exact = torch.logdet(a.to_dense())
    found = a.logdet(probes=256, generator=torch.Generator().manual_seed(0))
    assert found.shape == a.standard_error.shape == (2,)
    assert ((found - exact).abs() < 4 * a.standard_error).all()
    assert (a.standard_error < 0.01 * exact).all()
    arrays = KroneckerProduct([f.numpy(), 3, g.numpy()]).masked(rows=index.numpy(), columns=index.numpy()).add_diagonal(s.numpy())
    of_arrays = arrays.logdet(probes=256, generator=torch.Generator().manual_seed(0))
    assert isinstance(of_arrays, np.ndarray)
    assert isinstance(arrays.standard_error, np.ndarray)
    assert np.array_equal(of_arrays, found.numpy())
    everything = KroneckerProduct([f[0], g]).masked(rows=range(40), columns=range(40)).add_diagonal(0.5)
    assert_close(everything.logdet(probes=2), torch.logdet(everything.to_dense()), rms_tol=1e-12, max_tol=1e-12)
    assert float(everything.standard_error) == 0
    one = KroneckerProduct([torch.tensor([[2.0]])]).masked(rows=[0], columns=[0]).add_diagonal(1.0)
    assert one.logdet() == one.logdet(probes=1) == pytest.approx(np.log(3))


def test_samples_have_the_covariance() -> None:
    """100,000 samples: an element of their covariance errs by about 1/300 of the largest, and 5 times that is allowed."""
    for added in (0.0, 0.3, torch.rand(4, dtype=torch.float64)):
        index = torch.tensor([4, 0, 3, 5])
        a = KroneckerProduct([definite(3), definite(2)]).masked(rows=index, columns=index).add_diagonal(added)
        x = a.sample((1000, 100), generator=torch.Generator().manual_seed(0)).flatten(0, 1)
        assert x.shape == (100_000, 4)
        assert (x.mT @ x / len(x) - a.to_dense()).abs().max() < 5 / 300 * a.to_dense().abs().max()
    assert isinstance(KroneckerProduct([np.eye(3)]).masked(rows=[0, 2], columns=[0, 2]).sample((2,)), np.ndarray)


LIKELIHOODS_NOT_OF: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: _masked().inv_quad_logdet(torch.ones(4).double()), ValueError, "b: expected dimension -1 of size 3"),
    (lambda: _masked().add_diagonal(-9.0).inv_quad_logdet(torch.ones(3).double()), ValueError, "factors, s: expected a positive definite"),
    (
        lambda: _masked().add_diagonal(-9.0).logdet(probes=3),
        ValueError,
        "factors, s: expected a positive definite .*; got an eigenvalue of",
    ),
    (lambda: _masked().logdet(probes=0), ValueError, "probes: expected 1 or more; got 0"),
    (lambda: _masked().logdet(probes=1.5), TypeError, "probes: expected an integer or None; got float"),
    (lambda: _masked().to(torch.float16).logdet(), TypeError, "factors: expected a dtype among"),
    (
        lambda: KroneckerProduct([torch.eye(3)]).masked(rows=[0], columns=[1]).logdet(),
        ValueError,
        "rows, columns: expected the same points",
    ),
    (lambda: KroneckerProduct([torch.eye(3)]).masked(rows=[0]).trace(), ValueError, "rows, columns: expected as many of each"),
    (
        lambda: KroneckerProduct([torch.eye(100)] * 2).masked(rows=range(9000), columns=range(9000)).logdet(),
        ValueError,
        r"probes: expected a number of probe vectors.*got None for shape \(9000, 9000\)",
    ),
    (
        lambda: KroneckerProduct([torch.randn(3, 3)]).masked(rows=[0, 1], columns=[0, 1]).logdet(probes=2),
        ValueError,
        r"factors\[0\]: expected a symmetric matrix for logdet with probes",
    ),
]


def test_likelihoods_that_are_refused() -> None:
    for call, error, text in LIKELIHOODS_NOT_OF:
        with pytest.raises(error, match=text):
            call()
