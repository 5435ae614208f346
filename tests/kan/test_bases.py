"""Every basis against scipy, on the host and by a kernel; tables; documentation; bases that users register."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from pages import table
from poly_kan_cases import BASES, by_scipy, config_of, parameters_of, table_error_bound
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan.bases.registry import find_basis, unregister_basis
from fastkron_py.kan.bases.table import basis_table, table_values
from fastkron_py.kan.normalizers import NORMALIZERS
from fastkron_py.nn import KAN, Basis, PolyKANConv2d, PolyKANLinear, register_basis, smooth_init_

TERMS = 25
# Largest error over degrees 0 to 24, relative to each function's largest value: a float32 recurrence carries every rounding on. Measured
# on these points: 1e-6 to 1.2e-5 (Jacobi); the same recurrences in float64 stay below 1e-14.
FLOAT32_ERROR = 4e-5


@triton.jit
def _basis_kernel(
    t_ptr,
    y_ptr,  # [TERMS, size]
    size,
    START: tl.constexpr,
    STEP: tl.constexpr,
    VALUE: tl.constexpr,
    TERMS: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    state = START(tl.load(t_ptr + i, mask=i < size, other=0.0), TERMS, PARAMS)
    for n in range(0, TERMS):
        d = tl.program_id(0) * 0 + n
        tl.store(y_ptr + d * size + i, VALUE(state, d, t_ptr, TERMS, PARAMS), mask=i < size)
        state = STEP(state, d, TERMS, PARAMS)


@triton.jit
def _map_kernel(x_ptr, y_ptr, size, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, FUNCTION(tl.load(x_ptr + i, mask=i < size, other=0.0)), mask=i < size)


def points() -> Tensor:
    """Inside (-1, 1), and near its ends."""
    inside = torch.rand(97, dtype=torch.float64) * 2 - 1
    return torch.cat([inside * 0.999, torch.tensor([0.0, 0.9999, -0.9999], dtype=torch.float64)])


def expected(basis: str, t: Tensor) -> tuple[Tensor, Tensor]:
    pairs = [by_scipy(basis, n, TERMS, t.numpy()) for n in range(TERMS)]
    return torch.from_numpy(np.stack([v for v, _ in pairs])), torch.from_numpy(np.stack([d for _, d in pairs]))


def worst(actual: Tensor, reference: Tensor) -> float:
    """Largest error of any function, relative to its largest value, or to 1 where that is smaller."""
    scale = reference.abs().amax(1, keepdim=True).clamp(min=1)
    return float(((actual.double().cpu() - reference).abs() / scale).max())


@pytest.mark.parametrize("basis", BASES)
def test_host_agrees_with_scipy(basis: str) -> None:
    t = points()
    values, derivatives = expected(basis, t)
    found = find_basis(basis)
    assert worst(torch.stack(list(found.values(t, TERMS, parameters_of(basis)))), values) < 1e-10
    assert worst(torch.stack(list(found.derivatives(t, TERMS, parameters_of(basis)))), derivatives) < 1e-10


@pytest.mark.parametrize("basis", BASES)
def test_kernel_agrees_with_scipy(basis: str, device: torch.device) -> None:
    for dtype in [torch.float64, torch.float32]:
        t = points().to(dtype)
        found, bound = find_basis(basis), 1e-10 if dtype == torch.float64 else FLOAT32_ERROR
        prologues = (found.value_prologue, found.derivative_prologue)
        for prologue, reference in zip(prologues, expected(basis, t.double()), strict=True):
            assert prologue is not None
            y = torch.empty(TERMS, len(t), dtype=dtype, device=device)
            constants = config_of(basis, TERMS - 1).constants
            _basis_kernel[(1,)](t.to(device), y, len(t), *prologue, TERMS, constants, 128, enable_fp_fusion=True)
            assert worst(y, reference) < bound


def test_jacobi_where_a_denominator_vanishes(device: torch.device) -> None:
    """a + b = 0 and -1 make 0 / 0 of the general recurrence's first step."""
    for a, b in [(0.0, 0.0), (-0.5, -0.5), (2.0, -0.7), (-0.9, -0.1)]:
        from scipy.special import eval_jacobi

        t = points()
        prologue = find_basis("jacobi").value_prologue
        assert prologue is not None
        y = torch.empty(TERMS, len(t), dtype=torch.float64, device=device)
        _basis_kernel[(1,)](t.to(device), y, len(t), *prologue, TERMS, (a, b), 128, enable_fp_fusion=True)
        reference = torch.from_numpy(np.stack([eval_jacobi(n, a, b, t.numpy()) for n in range(TERMS)]))
        assert worst(y, reference) < 1e-10
        assert worst(torch.stack(list(find_basis("jacobi").values(t, TERMS, (a, b)))), reference) < 1e-10


def test_splines_of_lower_order(device: torch.device) -> None:
    for order in [1, 2]:
        from poly_kan_cases import _spline

        t = points()
        found = find_basis("bspline")
        for prologue, derivative in ((found.value_prologue, False), (found.derivative_prologue, True)):
            splines = [_spline(n, TERMS, order) for n in range(TERMS)]
            reference = np.stack([np.nan_to_num((s.derivative() if derivative else s)(t.numpy())) for s in splines])
            y = torch.empty(TERMS, len(t), dtype=torch.float64, device=device)
            assert prologue is not None
            _basis_kernel[(1,)](t.to(device), y, len(t), *prologue, TERMS, (float(order),), 128, enable_fp_fusion=True)
            assert worst(y, torch.from_numpy(reference)) < 1e-10
        total = sum(found.values(t, TERMS, (float(order),)))
        torch.testing.assert_close(total, torch.ones_like(t))


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizers(name: str, device: torch.device) -> None:
    x = torch.cat([torch.randn(50, dtype=torch.float64) * 3, torch.tensor([0.0, 100.0, -100.0, 700.0, math.nan], dtype=torch.float64)])
    argument = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(NORMALIZERS[name].host(argument).sum(), argument)
    for function, reference in ((NORMALIZERS[name].value, NORMALIZERS[name].host(x)), (NORMALIZERS[name].derivative, slope)):
        y = torch.empty_like(x, device=device)
        _map_kernel[(1,)](x.to(device), y, len(x), function, 64, enable_fp_fusion=True)
        torch.testing.assert_close(y.cpu()[:-1], reference[:-1], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(NORMALIZERS[name].host_derivative(x)[:-1], slope[:-1], rtol=1e-13, atol=1e-15)
    assert bool(NORMALIZERS[name].host(x)[-1].isnan())


@pytest.mark.parametrize("basis", BASES)
def test_table_stays_within_its_bound(basis: str) -> None:
    for size in [33, 257]:
        terms = 9
        found, p = find_basis(basis), parameters_of(basis)
        t = torch.linspace(-1, 1, 5001, dtype=torch.float64)
        table = basis_table(found, terms, p, size, torch.float64, torch.device("cpu"))
        error = torch.stack(list(table_values(t, table))) - torch.stack(list(found.values(t, terms, p)))
        bound = table_error_bound(basis, terms - 1, size, p)
        assert float(error.abs().max()) <= bound * (1 + 1e-6)
        assert float(error.abs().max()) > bound / 20  # a bound that says something


# ---- documentation -------------------------------------------------------------------------------


def test_rows_of_the_page() -> None:
    """Each has the basis's formula, its parameters and their defaults, and what its layers do to x."""
    for name, formula, parameters, normalization in table("guides/kan.md", "Bases"):
        found = find_basis(name.strip("`"))
        assert (formula, normalization) == (found.formula, f"`{found.normalization}`")
        assert re.findall(r"`(\w+)`", parameters) == list(found.parameters)
        assert all(f"{default:g}" in parameters for default in found.parameters.values())


# ---- one of a user's own --------------------------------------------------------------------------


@triton.jit
def _start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t, tl.zeros_like(t) + 1, tl.zeros_like(t)  # t, t^d, t^(d - 1)


@triton.jit
def _step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state[0], state[1] * state[0], state[1]


@triton.jit
def _value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state[1]


@triton.jit
def _slope(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return d.to(state[0].dtype) * state[2]


def _values(t: Tensor, terms: int, parameters: tuple[float, ...]) -> Iterator[Tensor]:
    return (t**d for d in range(terms))


def _slopes(t: Tensor, terms: int, parameters: tuple[float, ...]) -> Iterator[Tensor]:
    return (d * t ** max(0, d - 1) for d in range(terms))


POWERS = Basis("powers", _values, _slopes, (_start, _step, _value), (_start, _step, _slope), has_constant=True, formula="t^d")


@pytest.fixture
def powers() -> Iterator[str]:
    yield register_basis(POWERS).name
    unregister_basis("powers")


def problem(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, coefficients and bias, and dy."""
    sizes = (7, 3), (5, 4, 3), (4,), (7, 4)
    return [torch.randn(size, dtype=torch.float64).to(device, dtype) for size in sizes]


def by_formula(x: Tensor, c: Tensor, bias: Tensor) -> Tensor:
    """Written out, by powers; differentiable."""
    return bias + sum(torch.tanh(x) ** d @ c[d].mT for d in range(len(c)))


def step(function: Any, *given: Tensor) -> list[Tensor]:
    """The result and its gradients."""
    *given, dy = given
    leaves = [t.detach().requires_grad_() for t in given]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def errors(basis: str, given: list[Tensor]) -> list[float]:
    """Relative, of the result and of the gradients of x, coefficients and bias."""
    found = step(lambda x, c, bias: poly_kan(x, c, basis=basis, bias=bias, precision="highest"), *given)
    expected = step(by_formula, *(t.double() for t in given))
    return [float((a.double() - e).norm() / e.norm()) for a, e in zip(found, expected, strict=True)]


# Some dozen roundings of each term, in sums of 15 terms; bfloat16 rounds tanh x, powers and the result.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def test_without_device_functions(device: torch.device) -> None:
    """The basis runs in torch, whichever backend is asked for."""
    plain = register_basis(Basis("plain powers", _values, _slopes))
    try:
        with fastkron_py.backend("triton"):
            assert max(errors(plain.name, problem(torch.float32, device))) < TOLERANCES[torch.float32]
    finally:
        unregister_basis("plain powers")


def test_layers(powers: str, backend_name: str, device: torch.device) -> None:
    """The layers take it by name; its normalisation is theirs, and `smooth_init_` scales coefficients to its frequencies."""
    x = torch.randn(9, 3, device=device)
    layer = PolyKANLinear(3, 4, 4, powers, device=device)
    assert layer.normalization == "tanh"
    expected = by_formula(x.double(), layer.coefficients.double(), torch.zeros(4, device=device))
    assert float(((layer(x).double() - expected).norm() / expected.norm()).detach()) < TOLERANCES[torch.float32]
    assert bool(KAN([3, 5, 2], 4, powers).to(device)(x).isfinite().all())
    assert PolyKANConv2d(2, 3, 3, 4, powers).to(device)(torch.randn(1, 2, 5, 5, device=device)).shape == (1, 3, 3, 3)
    wide = smooth_init_(PolyKANLinear(64, 64, 4, powers, device=device))
    deviations = wide.coefficients.detach().double().std((1, 2))
    torch.testing.assert_close(deviations / deviations[1], torch.tensor([1, 1, 1 / 4, 1 / 9, 1 / 16]).to(deviations), rtol=0.1, atol=0.0)


def test_a_name_has_no_colon() -> None:
    with pytest.raises(ValueError, match="basis: expected a name without colons; got 'a:b'"):
        register_basis(replace(POWERS, name="a:b"))
