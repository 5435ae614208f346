"""The Walsh-Hadamard transform, and the matrices of orders other than powers of two."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from planning import planned

import fastkron_py
from fastkron_py import hadamard
from fastkron_py.kron import hadamard as module
from fastkron_py.kron.hadamard import operator
from fastkron_py.kron.hadamard_orders import factor_sizes, hadamard_matrix, padded_matrix, split
from fastkron_py.runtime.call_cache import CallCache
from fastkron_py.testing import assert_close

X = torch.randn(3, 16)

# Those that language models' rows need, and one of each construction.
ORDERS = (4, 12, 20, 28, 36, 44, 52, 60, 76, 92, 108, 116, 140, 148, 156, 172)


def matrix(n: int) -> torch.Tensor:
    """H_m (x) H_(2^k) in float64, from its factors."""
    found = torch.ones(1, 1, dtype=torch.float64)
    for size in factor_sizes(n):  # in any order: other dtypes have the same product
        power = size & (size - 1) == 0
        h = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)] if power else hadamard_matrix(size)
        found = torch.kron(found, torch.tensor(np.array(h), dtype=torch.float64))
    return found


def test_rows_are_orthogonal() -> None:
    for m in ORDERS:
        h = hadamard_matrix(m)
        assert h is not None
        assert np.array_equal(np.abs(h), np.ones((m, m)))
        assert np.array_equal(h @ h.T, m * np.eye(m))


def test_orders_without_a_matrix() -> None:
    assert hadamard_matrix(188) is None
    assert hadamard_matrix(14) is None
    assert hadamard_matrix(1028) is None  # of a known construction, but too large


@pytest.mark.full
def test_the_transposed_matrix_is_the_inverse(device: torch.device) -> None:
    """Exactly, of integers: for each order below 700 that has a matrix, and for rows of models."""
    wide = [(2, n) for n in (4544, 10944, 18304, 29568)]
    tried = 0
    for rows, n in [*[(3, n) for n in range(1, 700)], *wide]:
        try:
            split(n)
        except ValueError:
            continue
        tried += 1
        torch.manual_seed(n)
        x = torch.randint(-9, 10, (rows, n), device=device).double()
        signs = torch.randint(0, 2, (n,), device=device).double() * 2 - 1
        y = hadamard(x, signs=signs)
        assert torch.equal(hadamard(y, transpose=True, signs=signs), n * x), n
        if n == 12:  # a control: this matrix is not symmetric
            assert not torch.equal(hadamard(hadamard(x)), n * x)
    assert tried > 140


@pytest.mark.parametrize("n", [16, 40])
def test_transposed_and_with_signs(n: int, device: torch.device) -> None:
    torch.manual_seed(0)
    h, signs = matrix(n).to(device), torch.randint(0, 2, (n,), device=device).double() * 2 - 1
    x = torch.randn(3, n, dtype=torch.float64, device=device, requires_grad=True)
    wanted = {False: (x * signs) @ h * 0.5, True: x @ h.mT * signs * 0.5}
    for transpose, product in wanted.items():

        def transformed(x: torch.Tensor, signs: torch.Tensor, transpose: bool = transpose) -> torch.Tensor:
            return hadamard(x, scale=0.5, transpose=transpose, signs=signs)

        assert_close(transformed(x, signs), product)
        assert torch.autograd.gradcheck(transformed, (x, signs.clone().requires_grad_()))
        assert_close(torch.func.vmap(transformed, in_dims=(0, None))(x, signs), product)
        assert_close(torch.func.vmap(transformed, in_dims=(None, 0))(x[0], signs.expand(2, n)), product[:1].expand(2, n))
        compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x, signs), product)
        rounded = transformed(x.detach().bfloat16(), signs.bfloat16())
        assert_close(
            rounded,
            torch.as_tensor({False: (x.bfloat16().double() * signs) @ h, True: x.bfloat16().double() @ h.mT * signs}[transpose]) * 0.5,
            steps=6,
        )
        with torch.no_grad():
            own = x.clone()
            assert hadamard(own, scale=0.5, transpose=transpose, signs=signs, out=own) is own
            assert_close(own, product)
            of_signs = signs.repeat(3, 1)  # the memory that they are in
            assert_close(hadamard(x, scale=0.5, transpose=transpose, signs=of_signs[0], out=of_signs), product)
        if device.type == "cpu":
            found = hadamard(x.detach().numpy(), scale=0.5, transpose=transpose, signs=signs.numpy())
            assert_close(torch.from_numpy(found), product)
    with torch.autocast(device.type, torch.bfloat16):
        assert hadamard(x.detach().float(), transpose=True, signs=signs.float()).dtype == torch.bfloat16


def test_powers_of_two_are_scipys(device: torch.device) -> None:
    for n in [1, 2, 8, 64, 256]:
        from scipy.linalg import hadamard as sylvester

        h = hadamard(torch.eye(n, dtype=torch.float64, device=device))
        assert np.array_equal(h.cpu().numpy(), sylvester(n))


@pytest.mark.parametrize("shape", [(32,), (5, 24), (2, 3, 112), (0, 16), (2, 0, 12)], ids=str)
def test_products(shape: tuple[int, ...], device: torch.device) -> None:
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]:
        torch.manual_seed(0)
        n = shape[-1]
        x = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32, device=device).to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        y = hadamard(x, scale=n**-0.5)
        assert y.shape == x.shape
        assert y.dtype == dtype
        expected = x.to(wide) @ matrix(n).to(device, wide) * n**-0.5
        if x.numel():
            assert_close(y, expected, steps=2 * len(factor_sizes(n)))  # the interpreter truncates to bfloat16
            with pytest.raises(AssertionError):  # a control: two entries of each row exchanged
                assert_close(y, (x.flip(-1)).to(wide) @ matrix(n).to(device, wide) * n**-0.5, steps=2 * len(factor_sizes(n)))


def test_float16_has_room_between_launches(device: torch.device) -> None:
    """Sums of 4096 numbers of 100 exceed float16's range, unless the factors are made smaller first."""
    x = torch.full((2, 4096), 100.0, dtype=torch.float16, device=device)
    y = hadamard(x, scale=1 / 64)
    assert y[0, 0] == 6400
    assert not y[:, 1:].any()


def test_gradients(device: torch.device) -> None:
    x = torch.randn(3, 24, dtype=torch.float64, device=device, requires_grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)

    def transformed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return hadamard(x, scale=scale)

    assert torch.autograd.gradcheck(transformed, (x, scale))
    assert torch.autograd.gradgradcheck(transformed, (x, scale))
    (dx,) = torch.autograd.grad(hadamard(x).sum(), x)
    assert_close(dx, torch.ones_like(x) @ matrix(24).to(device).T)


def test_factors_that_were_made_in_inference_mode_are_saved_for_gradients(device: torch.device) -> None:
    with torch.inference_mode():
        hadamard(torch.randn(2, 40, device=device))
    y = torch.randn(2, 40, device=device, requires_grad=True)
    hadamard(y).sum().backward()


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: hadamard(torch.ones(3, 7)), ValueError, r"x.shape\[-1\]: expected m \* 2\^k .*; got 7"),
    (lambda: hadamard(torch.ones(3, 7)), ValueError, r"for other sizes, hadamard of blocks .*, or an orthogonal matrix in kron_matmul"),
    (lambda: hadamard(X, transpose=1), TypeError, "transpose: expected a bool; got int"),
    (lambda: hadamard(X, signs=torch.ones(15)), ValueError, r"signs: expected shape \(16,\), one for each column of x; got shape \(15,\)"),
    (lambda: hadamard(X, signs=torch.ones(16).double()), TypeError, "signs: expected x's dtype"),
    (lambda: hadamard(X, signs=[1.0] * 16), TypeError, "signs: expected a torch tensor"),
    (
        lambda: hadamard(X, transpose=True, signs=torch.ones(16, requires_grad=True), out=torch.empty(3, 16)),
        ValueError,
        r"out: expected torch\.no_grad",
    ),
    (lambda: hadamard(torch.ones(3, 0)), ValueError, r"x.shape\[-1\]: expected a positive length; got 0"),
    (lambda: hadamard(torch.ones(3, 8).long()), TypeError, "x: expected a dtype among float16, .*; got torch.int64"),
    (lambda: hadamard(torch.ones(2, 8).to_sparse()), TypeError, r"x: expected a dense \(strided\) tensor; got torch.sparse_coo"),
    (lambda: hadamard(torch.tensor(1.0)), ValueError, "x: expected at least one dimension"),
    (lambda: hadamard([1.0, 2.0]), TypeError, "x: expected a torch tensor"),
    (lambda: hadamard(torch.ones(2, 8), scale=math.inf), ValueError, "scale: expected a finite number"),
    (lambda: hadamard(np.ones((2, 8)), scale=torch.tensor(1.0)), TypeError, "scale: expected a number, since x is"),
    (lambda: hadamard(X, out=torch.empty(16, 3)), ValueError, r"out: expected the result's shape \(3, 16\); got shape \(16, 3\)"),
    (lambda: hadamard(X, out=torch.empty(3, 16).double()), TypeError, "out: expected x's dtype"),
    (lambda: hadamard(X.clone().requires_grad_(), out=torch.empty(3, 16)), ValueError, r"out: expected torch\.no_grad"),
    (lambda: hadamard(np.ones((2, 8)), out=np.ones((2, 8))), TypeError, "out: expected None, since x is"),
]


def test_refusals() -> None:
    for call, error, message in REFUSED:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.full)], ids=str)
def test_compiled_for_lengths_that_change(dynamic: bool | None, device: torch.device) -> None:
    """Also of a scale with a gradient; a graph is one of its length."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, scale: hadamard(x, scale=scale), dynamic=dynamic, fullgraph=True, backend="aot_eager")
    for rows, n in ((3, 16), (4, 16), (3, 24)):
        x = torch.randn(rows, n, dtype=torch.float64, device=device)
        wanted = x @ matrix(n).to(device)
        torch.testing.assert_close(compiled(x, 1.0), wanted, rtol=0, atol=1e-12)
        scale = torch.tensor(2.0, dtype=torch.float64, device=device, requires_grad=True)
        compiled(x, scale).sum().backward()
        torch.testing.assert_close(scale.grad, wanted.sum(), rtol=0, atol=1e-10)


def test_out(device: torch.device) -> None:
    """The result is written to a tensor, of any strides, which may be x or overlap it."""
    for n in [16, 24]:
        x = torch.randn(3, n, device=device)
        wanted = x.double() @ matrix(n).to(device) * 0.5
        wide = torch.full((3, 2 * n), torch.nan, device=device)
        memory = torch.full((4, n), torch.nan, device=device)
        memory[:3] = x
        own = x.clone()
        for source, out in ((x, torch.full_like(x, torch.nan)), (x, wide[:, ::2]), (own, own), (memory[:3], memory[1:])):
            assert hadamard(source, scale=0.5, out=out) is out
            assert_close(out, wanted)
        factor = torch.randn(3, n, device=device, requires_grad=True)
        for source in (x, torch.randn(3, n, device=device)):  # by way of memory of its own, and straight
            product = (factor * x).sum()
            hadamard(source, out=x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


def test_what_the_kernel_writes_is_counted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd, as torch's own writes are: a launch into a tensor's memory tells torch nothing. This one writes nothing."""
    monkeypatch.setattr(module, "has_additions", lambda *given: True)
    monkeypatch.setattr(CallCache, "program", lambda _cache, _key, build: Mock(has_places=False))
    x = torch.randn(3, 16, device=device)
    product = (torch.randn(3, 16, device=device, requires_grad=True) * x).sum()
    hadamard(x, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_rows_of_language_models_take_one_launch_in_half_types() -> None:
    for n in [2048, 4096, 8192, 16384, 32768, 11008, 13824, 14336, 24576, 28672]:
        sizes = factor_sizes(n)
        assert math.prod(sizes) == n
        (launch,) = planned(sizes, rows=16384, dtype=torch.bfloat16)
        assert launch.family == "slice_pair"


def test_the_product_of_the_factors_is_the_length() -> None:
    """Factors of two are at most 8 x 8, so that plans can multiply neighbours out as they like."""
    for order, k in itertools.product([1, *ORDERS], (0, 1, 2, 5, 16)):
        sizes = factor_sizes(order << k)
        assert math.prod(sizes) == order << k
        assert [size for size in sizes if size > 8 and size & (size - 1) == 0] == []


# ---- the operator of additions, by torch: on a GPU it is a kernel (tests/gpu/test_hadamard_on_gpu.py) ----------------------


def added(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The transform by additions."""
    m, bits = split(x.shape[-1])
    (padded,) = padded_matrix(m)
    found: torch.Tensor = operator(x, None if padded is None else padded.to(x.device), scale, m, bits, "torch")
    return found


@pytest.mark.parametrize("shape", [(1,), (32,), (5, 24), (2, 3, 112), (0, 16), (2, 0, 12)], ids=str)
def test_additions(shape: tuple[int, ...], device: torch.device) -> None:
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.float16]:
        torch.manual_seed(0)
        n = shape[-1]
        x = torch.randn(shape, device=device).to(dtype)
        y = added(x, n**-0.5)
        assert y.shape == x.shape
        assert y.dtype == dtype
        if x.numel():
            expected = x.double() @ matrix(n).to(device) * n**-0.5
            assert_close(y, expected, steps=2)
            if n > 1:
                with pytest.raises(AssertionError):  # a control: rows the other way round
                    assert_close(y, x.flip(-1).double() @ matrix(n).to(device) * n**-0.5, steps=2)


@pytest.mark.parametrize("n", [8, 24])
def test_derivatives_of_additions(n: int, device: torch.device) -> None:
    x = torch.randn(3, n, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: added(x, 0.7), (x,))
    assert torch.autograd.gradgradcheck(lambda x: added(x, 0.7), (x,))
    value = x.detach()
    assert_close(torch.func.vmap(lambda x: added(x, 0.7), in_dims=1)(value.view(3, 1, n)), added(value, 0.7)[None])
    assert torch.equal(torch.func.jvp(lambda x: added(x, 0.7), (value,), (value,))[1], added(value, 0.7))
    m, bits = split(n)
    (padded,) = padded_matrix(m)
    torch.library.opcheck(operator.registered, (x, padded if padded is None else padded.to(device), 0.7, m, bits, "torch"))


def test_a_kept_call_takes_another_scale(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one shape run one program, whichever scale it was built for."""
    monkeypatch.setattr(module, "has_additions", lambda *given: True)
    x = torch.randn(3, 16, device=device)
    with fastkron_py.backend("torch"):
        for scale in (1.0, 0.5, 0.0, 1, 2):
            assert_close(hadamard(x, scale=scale), x.double() @ matrix(16).to(device) * scale)


def test_cpus_multiply_by_factors(device: torch.device) -> None:
    if device.type == "cpu":
        assert not module.has_additions(1, 4, torch.float32, device, "auto")
