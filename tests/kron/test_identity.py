"""Integers among the factors, which stand for identities, against dense products in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import fastkron_py
from fastkron_py import Hadamard, kron_matmul, kron_matmul_left
from fastkron_py.kron import modes
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.testing import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Sizes = tuple[Any, ...]
LISTS: list[Sizes] = [
    (3, (2, 4)),
    ((2, 4), 3),
    (2, (2, 4), 3),
    ((2, 4), 3, (5, 2)),
    (2, 3, (2, 4), 1, (3, 3), 4, (2, 2), 1, 3),
    (1, (2, 3), 1),
    (2, 3),
    (0, (2, 3)),
]
BATCHES: list[Sizes] = [(2, (7, 1, 2, 3), 4), ((7, 1, 2, 3), 4, (3, 2)), ((2, 3), 2, (5, 2, 3)), (3, (5, 2, 3))]


def drawn(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Any]:
    return [s if isinstance(s, int) else torch.randn(s, device=device).to(dtype) for s in sizes]


def dense(factors: list[Any]) -> torch.Tensor:
    """In float64 or complex128."""
    matrices = [f for f in factors if isinstance(f, torch.Tensor)]
    wide = torch.complex128 if matrices and matrices[0].is_complex() else torch.float64
    device = matrices[0].device if matrices else None
    found = torch.ones(1, 1, dtype=wide, device=device)
    for f in factors:
        f = torch.eye(f, dtype=wide, device=device) if isinstance(f, int) else f.to(wide)
        found = torch.einsum("...ij,...kl->...ikjl", found, f).flatten(-4, -3).flatten(-2)
    return found


def product(x: torch.Tensor, factors: list[Any], left: bool, **options: Any) -> torch.Tensor:
    return kron_matmul_left(factors, x, **options) if left else kron_matmul(x, factors, **options)


@pytest.mark.parametrize("sizes", LISTS + BATCHES, ids=str)
def test_values(sizes: Sizes, backend_name: str, device: torch.device) -> None:
    for dtype, batch, left in itertools.product(DTYPES, [(), (5,)], [False, True]):
        factors = drawn(sizes, dtype, device)
        matrix = dense(factors).to(device)
        shape = (matrix.shape[-1], 3) if left else (3, matrix.shape[-2])
        x = torch.randn(*batch, *shape, device=device).to(dtype)
        wanted = matrix @ x.double() if left else x.double() @ matrix
        z = torch.randn(wanted.shape[-2:], device=device).to(dtype)
        y = product(x, factors, left)
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert_close(y, wanted, steps=4)
        scaled = product(x, factors, left, alpha=-2.0, beta=0.5, z=z)
        assert_close(scaled, -2 * wanted + 0.5 * z.double(), steps=8)
        if y.numel():
            with pytest.raises(AssertionError):
                assert_close(y * 1.1, wanted, steps=4)


def test_vectors_and_strided_operands(device: torch.device) -> None:
    for sizes, left in itertools.product([(2, (2, 4), 3), ((2, 4), 3, (5, 2)), (6,)], [False, True]):
        factors = drawn(sizes, torch.float64, device)
        matrix = dense(factors).to(device)
        matrix = matrix if left else matrix.mT
        wide = torch.randn(matrix.shape[-1], 4, device=device, dtype=torch.float64)
        assert_close(product(wide[:, 0], factors, left), matrix @ wide[:, 0])
        for x in (wide.mT.contiguous().mT, wide[:, ::2], wide[:, :1].expand(-1, 4), wide.flip(1)):
            y = product(x if left else x.mT, factors, left)
            assert_close(y if left else y.mT, matrix @ x)


def test_no_identity_is_built(device: torch.device) -> None:
    f = torch.randn(2, 2, device=device)
    x = torch.randn(2**19, device=device)
    y = kron_matmul(x, [2**9, f, 2**9])  # whose dense identities had 2**18 elements, and that of [2**18, f] 2**36
    assert_close(y.view(2**9, 2, 2**9), torch.einsum("apb,pq->aqb", x.view(2**9, 2, 2**9).double(), f.double()))
    assert_close(kron_matmul(x, [2**18, f]).view(-1, 2), x.view(-1, 2).double() @ f.double())
    y = kron_matmul(x, [2**19])
    assert y.equal(x)
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("sizes", [(2, (2, 3), 3), ((2, 3), 2, (3, 2)), (2, (5, 1, 2, 3), 2), (4,)], ids=str)
def test_gradients_of_both_orders(sizes: Sizes, left: bool) -> None:
    factors = drawn(sizes, torch.float64, torch.device("cpu"))
    matrix = dense(factors)
    x = torch.randn((matrix.shape[-1], 3) if left else (3, matrix.shape[-2]), dtype=torch.float64, requires_grad=True)
    z = torch.randn((matrix.shape[-2], 1) if left else (1, matrix.shape[-1]), dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    tensors = [f.requires_grad_() for f in factors if isinstance(f, torch.Tensor)]

    def function(x: torch.Tensor, z: torch.Tensor, alpha: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        left_over = iter(tensors)
        given = [f if isinstance(f, int) else next(left_over) for f in factors]
        return product(x, given, left, beta=0.5, z=z) + product(x, given, left, alpha=alpha)

    assert torch.autograd.gradcheck(function, (x, z, alpha, *tensors), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, z, alpha, *tensors), fast_mode=True)


def test_compiled_whole() -> None:
    """Sizes of identities may be symbols."""
    f, g = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)

    def function(x: torch.Tensor, n: int, z: torch.Tensor) -> torch.Tensor:
        return kron_matmul(x, [n, f, g], alpha=2.0, beta=0.5, z=z)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (3, 5):
        x, z = torch.randn(5, n * 2 * 4, dtype=torch.float64), torch.randn(n * 6, dtype=torch.float64)
        assert_close(compiled(x, n, z), 2 * (x @ dense([n, f, g])) + 0.5 * z)


def test_arrays_and_other_integers() -> None:
    x, f = np.random.default_rng(0).normal(size=(5, 24)), np.random.default_rng(1).normal(size=(4, 3))
    y = kron_matmul(x, [np.int64(2), f, 3])
    assert isinstance(y, np.ndarray)
    assert_close(torch.from_numpy(y), torch.from_numpy(x @ np.kron(np.kron(np.eye(2), f), np.eye(3))))
    assert np.array_equal(kron_matmul(x, [24]), x)
    assert_close(
        torch.from_numpy(kron_matmul_left([2, f, 3], x[0, :18])), torch.from_numpy(np.kron(np.kron(np.eye(2), f), np.eye(3)) @ x[0, :18])
    )
    t = torch.from_numpy(x)
    assert_close(fastkron_py.gekmm([2, torch.from_numpy(f), 3], t[:, :18].mT), dense([2, torch.from_numpy(f), 3]) @ t[:, :18].mT)


def test_calls_with_matrices_and_identities_take_turns() -> None:
    """A cached call of matrices is not taken for one with integers in their places."""
    x = torch.randn(5, 24)
    a, b = torch.randn(4, 4), torch.eye(6)
    for _ in range(3):
        assert_close(kron_matmul(x, [a, b]), x.double() @ dense([a, 6]))
        assert_close(kron_matmul(x, [a, 6]), x.double() @ dense([a, 6]))
        assert_close(kron_matmul(x, [4, b]), x.double())
        assert_close(kron_matmul(x[0], [a, 6]), x[0].double() @ dense([a, 6]))


def test_calls_with_identities_are_kept(backend_name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """By the sizes and places of the identities: the second call of each looks at none of them. With gradients and scalars."""
    for pattern, left, needs in itertools.product([(2, None, 3), (3, None, 2), (None, 6), (6, None)], [False, True], [False, True]):
        CACHE.forget()
        for i in range(2):
            f = torch.randn(4, 4, device=device).requires_grad_(needs)
            factors = [f if n is None else n for n in pattern]
            x = torch.randn((24, 5) if left else (5, 24), device=device)
            matrix = dense([t.detach() if isinstance(t, torch.Tensor) else t for t in factors])
            with fastkron_py.backend(backend_name), monkeypatch.context() as patch:
                patch.setattr(modes, "multiply", modes.multiply if i == 0 else None)
                y = product(x, factors, left, alpha=i + 2)
            wanted = (i + 2) * (matrix @ x.double() if left else x.double() @ matrix)
            assert_close(y.detach(), wanted, steps=4)
            if needs:
                y.sum().backward()
                wide = f.detach().double().requires_grad_()
                matrix = dense([wide if n is None else n for n in pattern])
                ((i + 2) * (matrix @ x.double() if left else x.double() @ matrix)).sum().backward()
                assert_close(f.grad, wide.grad, steps=64)


def test_refusals() -> None:
    for factors, error, text in [
        ([True, (8, 8)], TypeError, r"factors\[0\]: expected a matrix, or an integer n for the identity I_n; got bool"),
        ([(8, 8), -2], ValueError, r"factors\[1\]: expected .*integer n of 0 or more.*; got -2"),
        ([(8, 8), 2.0], TypeError, r"factors\[1\]: expected a torch tensor, like x; got float"),
        ([(8, 8), 2], ValueError, r"x: expected dimension -1 of size 16 = 8 \* 2.*got size 24"),
        ([25], ValueError, r"x: expected dimension -1 of size 25.*got size 24"),
        (24, TypeError, r"factors: expected a list or tuple of matrices; got int"),
        (Hadamard(24, 1), TypeError, r"factors: expected a list or tuple of matrices; got .*Hadamard$"),
    ]:
        given = [torch.ones(f) if isinstance(f, tuple) else f for f in factors] if isinstance(factors, list) else factors
        with pytest.raises(error, match=text):
            kron_matmul(torch.ones(3, 24), given)
