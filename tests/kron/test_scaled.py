"""A product times or over a tensor that broadcasts to it: `fastkron::kron_scaled`, and the launches that scale."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from canonical_cases import CASES, DTYPES, dense, force_products, in_double, multiply, problem, rounding_steps, watch_kernels
from torch import Tensor

import fastkron_py
from fastkron_py.kron.operator import kron_scaled, multiply_scaled
from fastkron_py.reference import kron_dense
from fastkron_py.testing import assert_close


def _scaled(y: Tensor, z: Tensor, divides: bool) -> Tensor:
    return y / z if divides else y * z


def _divisor(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of both signs, far from 0."""
    z = torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    return (z + z / z.abs()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_launches(case: str, dtype: torch.dtype, device: torch.device) -> None:
    """Every kernel and every place of a mode, with z along the modes, along the rows and columns, or along both."""
    for along in ["n", "columns", "everything"]:
        torch.manual_seed(0)
        x, factors = problem(dtype, device, *CASES[case])
        wanted = dense(x, factors)
        _, rows, n, columns = wanted.shape
        z = _divisor(*{"n": (n, 1), "columns": (rows, 1, columns), "everything": wanted.shape}[along], dtype=dtype).to(device)
        magnitude = dense(x.abs(), [f.abs() for f in factors])
        for divides in (False, True):
            y = multiply(x, factors, z.expand(wanted.shape), epilogue="over" if divides else "times")
            own, size = _scaled(wanted, in_double(z), divides), _scaled(magnitude, in_double(z).abs(), divides)
            assert_close(y, own, magnitude=size.abs(), steps=rounding_steps(dtype, len(factors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_operator(dtype: torch.dtype, backend_name: str, device: torch.device) -> None:
    """Batches of x and of factors that z varies over or not, real z beside complex x, and z with no view in canonical form."""
    for divides, left in itertools.product([False, True], [False, True]):
        factors = [torch.randn(3, 1, 4, 5, dtype=dtype, device=device), torch.randn(6, 3, dtype=dtype, device=device)]
        x = torch.randn(2, *((15, 7) if left else (7, 24)), dtype=dtype, device=device)
        k = kron_dense([in_double(f) for f in factors])
        wanted = k @ in_double(x) if left else in_double(x) @ k
        m, n = wanted.shape[-2:]
        shapes: list[tuple[int, ...]] = [(), (n,), (m, 1), (2, 1, 1), (3, 1, m, 1), (3, 2, m, n), (2, m, n)]
        for shape in shapes:
            for z in (_divisor(*shape, dtype=dtype).to(device), _divisor(*shape, dtype=torch.float32).to(device)):
                y = kron_scaled(x, factors, z, divides, None, backend_name, left)
                assert y.shape == wanted.shape
                assert_close(y, _scaled(wanted, in_double(z), divides), steps=4)


def test_scaling_takes_no_pass_of_its_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches are those of the product, in another order."""
    factors, x = [torch.randn(p, p, device=device) for p in (8, 9, 10)], torch.randn(720, 3, device=device)
    d = torch.arange(720.0, device=device)
    taken = watch_kernels(monkeypatch)
    with fastkron_py.backend("triton"):
        fastkron_py.kron_matmul_left(factors, x)
        plain = list(taken)
        taken.clear()
        y = multiply_scaled(factors, x, d)
    assert sorted(taken) == sorted(plain)
    assert_close(y, d[:, None].double() * (kron_dense([f.double() for f in factors]) @ x.double()), steps=4)


@pytest.mark.parametrize("algorithm", ["matmul", "copying"])
def test_products_by_torch_are_scaled_in_place(algorithm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force_products(monkeypatch, algorithm)
    x, factors = problem(torch.float32, device, 1, 3, (66, 65), (66, 65), 2)  # wide: one launch each
    z = _divisor(66 * 65, 1).float().to(device)
    for divides in (False, True):
        y = multiply(x, factors, z.expand(1, 3, 66 * 65, 2), epilogue="over" if divides else "times")
        assert_close(y, _scaled(dense(x, factors), z.double(), divides), steps=4)


@pytest.mark.parametrize("divides", [False, True], ids=["times", "over"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients(dtype: torch.dtype, divides: bool, device: torch.device) -> None:
    x = torch.randn(2, 6, 2, dtype=dtype, device=device, requires_grad=True)
    factors = [torch.randn(*shape, dtype=dtype, device=device, requires_grad=True) for shape in ((2, 2), (2, 3, 3))]

    def function(x: Tensor, z: Tensor, *fs: Tensor) -> Tensor:
        with fastkron_py.backend("torch"):
            return multiply_scaled(fs, x, z, divides=divides)

    for z in (_divisor(6, dtype=dtype), _divisor(2, 6, dtype=torch.float64)):
        given = (x, z.to(device).requires_grad_(), *factors)
        assert torch.autograd.gradcheck(function, given, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


def test_transforms_and_graphs() -> None:
    x, z = torch.randn(4, 6, 2, dtype=torch.float64), _divisor(4, 6)
    factors = [torch.randn(4, 2, 2, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)]
    k = kron_dense(factors)
    for divides in (False, True):

        def function(x: Tensor, z: Tensor, f: Tensor, divides: bool = divides) -> Tensor:
            return multiply_scaled([f, factors[1]], x, z, divides=divides)

        for dims in ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, 0, None)):
            given = [t if d == 0 else t[0] for t, d in zip((x, z, factors[0]), dims, strict=True)]
            own = [t if d == 0 else t[0].expand_as(t) for t, d in zip((x, z, k), dims, strict=True)]
            wanted = _scaled(own[2] @ own[0], own[1][..., None], divides)
            assert_close(torch.func.vmap(function, dims)(*given), wanted)
        wanted = _scaled(k[0] @ x[0], z[0, :, None], divides)
        torch.compiler.reset()
        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x[0], z[0], factors[0][0]), wanted)


def test_a_wrong_scale_would_show(device: torch.device) -> None:
    """The control: one element of z that is off by one part in a thousand."""
    x, factors = problem(torch.float32, device, *CASES["left form"])
    wanted = dense(x, factors)
    z = _divisor(wanted.shape[2], 1).float().to(device)
    off = z.double()
    off[5] *= 1.001
    y = multiply(x, factors, z.expand(wanted.shape), epilogue="times")
    with pytest.raises(AssertionError, match="is not close"):
        assert_close(y, wanted * off, magnitude=(wanted * off).abs(), steps=4)
