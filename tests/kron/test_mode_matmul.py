"""Matrices that contract dimensions of a tensor, against einsum in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import fastkron_py
from fastkron_py import mode_matmul
from fastkron_py.testing import assert_close

SHAPE = (3, 4, 5, 6)
COLUMNS = {0: 2, 1: 7, 2: 5, 3: 8}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
DIMS = [(0,), (1,), (3,), (-1,), (0, 1), (1, 2), (2, -1), (0, 2), (1, 3), (0, 1, 3), (0, 1, 2, 3), (3, 0)]


def einsum(x: torch.Tensor, factors: dict[int, torch.Tensor]) -> torch.Tensor:
    """In float64 or complex128, one dimension after the other."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    y = x.to(wide)
    for dim, f in factors.items():
        y = torch.tensordot(y, f.to(wide), ([dim], [0])).movedim(-1, dim)
    return y


def drawn(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    torch.manual_seed(0)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    x = torch.randn(SHAPE, dtype=wide).to(device, dtype)
    return x, {dim: torch.randn(SHAPE[dim], COLUMNS[dim % 4], dtype=wide).to(device, dtype) for dim in dims}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, device: torch.device) -> None:
    for dims in DIMS:
        x, factors = drawn(dims, dtype, device)
        y = mode_matmul(x, factors)
        assert y.dtype == dtype
        assert_close(y, einsum(x, factors), steps=4 * len(dims))
        with pytest.raises(AssertionError):
            assert_close(y * 1.5, einsum(x, factors), steps=4 * len(dims))


def test_permuted_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Size] = []
    reshape = torch.Tensor.reshape

    def counted(t: torch.Tensor, *shape: Any) -> torch.Tensor:
        found = reshape(t, *shape)
        copies.extend([t.shape] if t.numel() and found.data_ptr() != t.data_ptr() else [])
        return found

    for dims, order in itertools.product([(0,), (1, 2), (0, 3)], [(3, 2, 1, 0), (1, 0, 3, 2), (2, 0, 1, 3)]):
        x, factors = drawn(dims, torch.float64, torch.device("cpu"))
        permuted = x.permute(order).contiguous().permute([order.index(d) for d in range(4)])
        assert permuted.stride() != x.stride()
        wanted = einsum(x, factors)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "reshape", counted)
            y = mode_matmul(permuted, factors)
        assert_close(y, wanted, steps=8)
        assert x.shape not in copies
        assert y.permute(order).is_contiguous()


def test_other_strides(device: torch.device) -> None:
    for view in ["sliced", "expanded", "negative step"]:
        x, factors = drawn((1, 2), torch.float64, device)
        views = {"sliced": torch.cat([x, x], 1)[:, ::2], "expanded": x[:1].expand_as(x), "negative step": x.flip(2)}
        assert_close(mode_matmul(views[view], factors), einsum(views[view], factors), steps=8)


def test_shapes_at_the_edge(device: torch.device) -> None:
    x = torch.randn(4, device=device, dtype=torch.float64)
    assert_close(mode_matmul(x, {0: torch.eye(4, 3, device=device).double()}), x[:3], steps=2)
    assert mode_matmul(x, {}).equal(x)
    empty = torch.zeros(0, 4, 5, device=device)
    assert mode_matmul(empty, {1: torch.ones(4, 6, device=device)}).shape == (0, 6, 5)
    assert mode_matmul(torch.zeros(3, 0, device=device), {1: torch.ones(0, 2, device=device)}).equal(torch.zeros(3, 2, device=device))
    assert mode_matmul(x.expand(2, 3, 4), {np.int64(2): torch.ones(4, 1, device=device).double()}).shape == (2, 3, 1)


def test_all_dimensions_are_one_product() -> None:
    x, factors = drawn((0, 1, 2, 3), torch.float64, torch.device("cpu"))
    y = fastkron_py.kron_matmul(x.reshape(1, -1), [factors[i] for i in range(4)])
    assert torch.equal(mode_matmul(x, factors).reshape(1, -1), y)


X = torch.zeros(2, 3, 4)
REFUSED = {
    "no mapping": ([torch.ones(3, 3)], TypeError, "factors: expected a mapping of dimensions to matrices; got list"),
    "no integer": ({"1": torch.ones(3, 3)}, TypeError, "factors: expected integers as dimensions"),
    "out of range": ({3: torch.ones(3, 3)}, ValueError, "factors: expected dimensions from -3 to 2, as x has; got 3"),
    "twice": ({1: torch.ones(3, 3), -2: torch.ones(3, 3)}, ValueError, "factors: expected each dimension once"),
    "rows": ({1: torch.ones(4, 3)}, ValueError, r"factors\[1\]: expected a matrix with 3 rows \(`x.shape\[1\]`\); got shape \(4, 3\)"),
    "a vector": ({1: torch.ones(3)}, ValueError, r"factors\[1\]: expected a matrix with 3 rows"),
    "dtype": ({1: torch.ones(3, 3).double()}, TypeError, r"factors\[1\]: expected x's dtype torch.float32"),
    "no tensor": ({1: np.ones((3, 3))}, TypeError, r"factors\[1\]"),
}


def test_refusals() -> None:
    for factors, error, message in REFUSED.values():
        with pytest.raises(error, match=message):
            mode_matmul(X, factors)


# ---- matrices over several dimensions --------------------------------------------------------------------------------------------


def over_several(x: torch.Tensor, dims: tuple[int, ...], u: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """In float64 or complex128."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    given = [x.shape[d] for d in dims]
    y = torch.tensordot(x.to(wide), u.to(wide).reshape(*given, *sizes), (list(dims), list(range(len(dims)))))
    return y.movedim(list(range(-len(dims), 0)), [d % x.ndim for d in dims])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_over_several_dimensions(dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    for dims in [(0, 2), (2, 0), (1, 2), (3, 1), (0, 1, 3), (-1, 0), (2,)]:
        x = torch.randn(SHAPE, dtype=wide).to(device, dtype)
        rows = int(np.prod([SHAPE[d] for d in dims]))
        u = (torch.randn(rows, rows, dtype=wide) / rows**0.5).to(device, dtype)
        assert_close(mode_matmul(x, {dims: u}), over_several(x, dims, u, tuple(SHAPE[d] for d in dims)), steps=4)
        sizes = tuple(range(2, 2 + len(dims)))
        v = torch.randn(rows, int(np.prod(sizes)), dtype=wide).to(device, dtype)
        for given in (x, x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)):
            found, wanted = mode_matmul(given, {dims: v}, sizes={dims: sizes}), over_several(x, dims, v, sizes)
            assert_close(found, wanted, steps=4)
            with pytest.raises(AssertionError):
                assert_close(found * 1.5, wanted, steps=4)
    x = torch.randn(SHAPE, dtype=wide).to(device, dtype)
    u, f = torch.randn(15, 15, dtype=wide).to(device, dtype), torch.randn(6, 2, dtype=wide).to(device, dtype)
    assert_close(mode_matmul(x, {(0, 2): u, 3: f}), einsum(over_several(x, (0, 2), u, (3, 5)), {3: f}), steps=8)


def test_gates_on_random_pairs() -> None:
    """A circuit of 4 qubits against tensordot, with gradients."""
    torch.manual_seed(0)
    n = 4
    gates = [torch.linalg.qr(torch.randn(4, 4, dtype=torch.complex128)).Q for _ in range(5)]
    pairs = [tuple(torch.randperm(n)[:2].tolist()) for _ in gates]

    def circuit(state: torch.Tensor, *gates: torch.Tensor) -> torch.Tensor:
        for pair, gate in zip(pairs, gates, strict=True):
            state = mode_matmul(state, {pair: gate.mT})
        return state

    state = torch.randn([2] * n, dtype=torch.complex128)
    expected = state
    for pair, gate in zip(pairs, gates, strict=True):
        expected = over_several(expected, pair, gate.mT, (2, 2))
    assert_close(circuit(state, *gates), expected, rms_tol=1e-13, max_tol=1e-13)
    given = [t.requires_grad_() for t in (state, *gates)]
    assert torch.autograd.gradcheck(circuit, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(circuit, given, fast_mode=True)
    of_arrays = mode_matmul(state.detach().numpy(), {(0, 2): gates[0].detach().mT.numpy()})
    assert isinstance(of_arrays, np.ndarray)


OF_SEVERAL = {
    "rows": ({(0, 2): torch.ones(6, 6)}, None, ValueError, r"factors\[\(0, 2\)\]: expected a matrix with 8 rows, the product of"),
    "columns": ({(0, 2): torch.ones(8, 6)}, None, ValueError, r"sizes: expected 2 sizes, whose product is the 6 columns .*; got \[2, 4\]"),
    "sizes": ({(0, 2): torch.ones(8, 6)}, {(0, 2): (2, 2)}, ValueError, r"sizes: expected 2 sizes"),
    "no such tuple": ({0: torch.ones(2, 2)}, {(0, 2): (2, 2)}, ValueError, "sizes: expected tuples of dimensions that factors has"),
    "twice": ({(0, 2): torch.ones(8, 8), 2: torch.ones(4, 4)}, None, ValueError, "factors: expected each dimension once"),
    "nothing": ({(): torch.ones(1, 1)}, None, ValueError, "factors: expected each dimension once"),
    "a text": ({("a",): torch.ones(2, 2)}, None, TypeError, "factors: expected integers as dimensions"),
}


def test_refusals_of_several() -> None:
    for factors, sizes, error, message in OF_SEVERAL.values():
        with pytest.raises(error, match=message):
            mode_matmul(X, factors, sizes=sizes)


# ---- batches of matrices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_of_matrices(dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    double = torch.complex128 if dtype.is_complex else torch.float64

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=wide).to(device, dtype)

    x, a, b, shared = drawn(*SHAPE), drawn(3, 5, 2), drawn(3, 4, 6, 3), drawn(4, 7)
    of = {t: t.to(double) for t in (x, a, b, shared)}
    for given in (x, x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)):
        for factors, equation in (
            ({2: a}, "abcd,acC->abCd"),
            ({-1: b, 2: a}, "abcd,abdD,acC->abCD"),
            ({1: shared, 2: a}, "abcd,bB,acC->aBCd"),
            ({-1: b[:1]}, "abcd,zbdD->abcD"),
        ):
            expected = torch.einsum(equation, of[x], *[f.to(double) for f in factors.values()])
            assert_close(mode_matmul(given, factors), expected, steps=8)
            with pytest.raises(AssertionError):
                assert_close(mode_matmul(given.flip(0), factors), expected, steps=8)
    over_two = drawn(3, 24, 6)
    expected = torch.einsum("abcd,abdBD->aBcD", of[x], over_two.to(double).reshape(3, 4, 6, 2, 3))
    assert_close(mode_matmul(x, {(1, 3): over_two}, sizes={(1, 3): (2, 3)}), expected, steps=8)


OF_BATCHES = {
    "another batch": (
        {1: torch.ones(3, 3, 3)},
        r"factors\[1\]: expected batch dimensions as x begins with, \(2,\), .* got shape \(3, 3, 3\)",
    ),
    "a dimension of its own": (
        {0: torch.ones(2, 2, 2)},
        r"factors\[0\]: expected batch dimensions as x begins with, \(\), and none that have",
    ),
    "one of another": ({0: torch.ones(2, 2), 1: torch.ones(2, 3, 3)}, r"factors: expected dimensions from 1 on, behind those of batches"),
    "beside a tuple": ({(0, 2): torch.ones(2, 8, 8)}, r"factors\[\(0, 2\)\]: expected batch dimensions as x begins with"),
}


def test_refusals_of_batches() -> None:
    for factors, message in OF_BATCHES.values():
        with pytest.raises(ValueError, match=message):
            mode_matmul(X, factors)
