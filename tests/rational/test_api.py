"""`rational` against autograd of its formula in float64: versions, degrees, dtypes, layouts, what is zero, what is shared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from rational_cases import HALF_TOLERANCES, VERSIONS, WITHOUT_NOISE, Problem, absolute_of, assert_right, expected, ours, problem, step
from torch import Tensor

import fastkron_py
from fastkron_py import rational

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.sampled(ways=2)  # each version's kernels
@pytest.mark.parametrize("version", VERSIONS)
def test_versions(version: str, backend_name: str, device: torch.device) -> None:
    for shape, groups in [((2, 4, 8), 4), ((5, 7, 96), 1)]:
        for dtype in (torch.float64, torch.float32):
            p = problem(shape, groups, version=version, dtype=dtype, device=device)
            assert_right(ours(p, version), p, version)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_degrees_and_dtypes(dtype: torch.dtype, backend_name: str, device: torch.device) -> None:
    for degrees in [(5, 4), (3, 2), (7, 6), (0, 1), (2, 5), (16, 16)]:
        p = problem((3, 5, 24), 3, degrees, dtype=dtype, device=device)
        if degrees[0] == 16:  # x^16 of a normal number may be 1e10
            p = p._replace(x=p.x.clamp(-1.5, 1.5))
        assert_right(ours(p), p)


# ---- layouts ---------------------------------------------------------------------------------


def channels_first(t: Tensor) -> Tensor:
    """[N, H, W, C] whose memory is [N, C, H, W]."""
    return t.movedim(-1, 1).contiguous().movedim(1, -1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels first": channels_first,
    "channels outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "swapped rows": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels between": lambda t: t.movedim(-1, 2).contiguous().movedim(2, -1),
    "sliced rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "sliced and shifted rows": lambda t: torch.cat([t, t], -1)[..., 1 : t.shape[-1] + 1],
    "every other channel": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "sliced outside": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "expanded": lambda t: t[:1].expand(t.shape),
    "one row expanded": lambda t: t[0, 0, 0].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, backend_name: str, device: torch.device) -> None:
    for groups in [4, 1]:
        p = problem((3, 4, 5, 16), groups, device=device)
        p = p._replace(x=LAYOUTS[layout](p.x))
        assert_right(ours(p), p)
        # The gradient in a layout of its own.
        assert_right(ours(p._replace(dy=LAYOUTS[layout](p.dy))), p._replace(dy=LAYOUTS[layout](p.dy)))


def test_small_ranks_and_dimensions_of_one(backend_name: str, device: torch.device) -> None:
    for shape in [(8,), (1, 8), (1, 1, 1), (7, 1), (1, 3, 1, 8)]:
        p = problem(shape, 2 if shape[-1] == 8 else 1, device=device)
        assert_right(ours(p), p)


# ---- what is zero ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_zeros_have_the_formula_s_derivatives(version: str, backend_name: str, device: torch.device) -> None:
    """At x = 0, at denominators that are zero in part and in whole, and at numerators of zero: sign(0) = 0."""
    p = problem((4, 6, 12), 3, version=version, dtype=torch.float64, device=device)
    x, a, b = p.x.clone(), p.a.clone(), p.b.clone()
    x[0] = 0.0
    x[1, :, ::3] = -0.0
    b[0] = 0.0
    b[1, 1:3] = 0.0
    a[2] = 0.0
    p = Problem(x, a, b, p.dy)
    found = ours(p, version)
    assert_right(found, p, version)
    if absolute_of(version) != "none":
        assert not found[3][0].any()  # no derivative at all of absolute values of zero


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, under the interpreter
def test_infinities_and_nan_stand_where_the_formula_has_them(backend_name: str, device: torch.device) -> None:
    for version in VERSIONS:
        p = problem((2, 3, 8), 2, version=version, device=device)
        x = p.x.clone()
        x[0, 0, 0], x[0, 1, 5] = torch.nan, torch.inf
        y = rational(x, p.a, p.b, version=version)
        want = fastkron_py.reference.rational(x, p.a, p.b, version=version)
        assert torch.equal(y.isnan(), want.isnan())
        fastkron_py.testing.assert_close(y.nan_to_num(), want.nan_to_num(), rms_tol=3e-6, max_tol=3e-5)


# ---- coefficients ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", WITHOUT_NOISE)
def test_shared_coefficients(version: str, backend_name: str, device: torch.device) -> None:
    for groups in [(1, 4), (4, 1), (1, 1)]:
        p = problem((5, 3, 16), groups, version=version, device=device)
        assert_right(ours(p, version), p, version)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mixed_dtypes(dtype: torch.dtype, backend_name: str, device: torch.device) -> None:
    """The gradient of each argument comes in its own dtype."""
    for coefficients in [torch.float32, torch.bfloat16, torch.float16]:
        p = problem((3, 4, 8), 2, dtype=dtype, coefficients=coefficients, device=device)
        assert_right(ours(p), p)


# ---- version D -------------------------------------------------------------------------------


def test_noise_is_of_training_only(backend_name: str, device: torch.device) -> None:
    p = problem((3, 4, 8), 2, version="D", device=device)
    plain = rational(p.x, p.a, p.b, version="B")
    assert torch.equal(rational(p.x, p.a, p.b, version="D"), plain)
    assert torch.equal(rational(p.x, p.a, p.b, version="D", training=True, noise=0.0), plain)
    assert torch.equal(rational(p.x, p.a, p.b, version="B", training=True), plain)


def test_noise_scales_the_numerator(backend_name: str, device: torch.device) -> None:
    """One draw for each coefficient and call, within its bounds, and the gradient has the same draw in it."""
    x, b = torch.ones(200, 1, device=device), torch.zeros(1, 1, device=device)
    a = torch.full((1, 1), 5.0, device=device)
    draws = torch.stack([rational(x, a, b, version="D", training=True) / 5 for _ in range(60)])
    assert torch.equal(draws, draws[:, :1].expand_as(draws))
    of_calls = draws[:, 0, 0]
    assert float(of_calls.min()) >= 0.9
    assert float(of_calls.max()) <= 1.1
    assert abs(float(of_calls.mean()) - 1) < 4 * 0.2 / 12**0.5 / 60**0.5
    assert float(of_calls.std()) == pytest.approx(0.2 / 12**0.5, rel=0.5)
    torch.manual_seed(3)
    y, _, da, _ = step(lambda *t: rational(*t, version="D", training=True), x, a, b, torch.ones_like(x))
    fastkron_py.testing.assert_close(da, (200 * y[0] / 5).double().reshape(1, 1))


# ---- autocast and arrays ---------------------------------------------------------------------


def test_autocast_rounds_the_result_only(backend_name: str, device: torch.device) -> None:
    """x is read as it is, in float32 too; its gradient comes in x's dtype and the coefficients' in theirs."""
    for dtype, half in product([torch.float32, torch.bfloat16], [torch.bfloat16, torch.float16]):
        p = problem((3, 4, 8), 2, dtype=dtype, device=device)
        with torch.autocast(device.type, half):
            y = rational(p.x, p.a, p.b)
        assert y.dtype == half
        rms, most = HALF_TOLERANCES[half]
        fastkron_py.testing.assert_close(y, expected(p)[0], rms_tol=rms, max_tol=most)
        p = p._replace(dy=p.dy.to(half))

        def function(*t: Tensor, half: torch.dtype = half) -> Tensor:
            with torch.autocast(device.type, half):
                return rational(*t)

        assert_right(step(function, *p), p)
