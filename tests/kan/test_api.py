"""`poly_kan` and its gradients against a dense sum in float64; what goes by torch in slices; constant and normalized inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from poly_kan_cases import (
    BASES,
    PARAMETERS,
    config_of,
    forward,
    gradients_of,
    layer,
    layer_gradients,
    problem,
    table_error_bound,
)
from sampling import in_full
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan import launches, layer_config, operands, plan, program, torch_backend
from fastkron_py.kan.api import own_bounds
from fastkron_py.kan.plan import Tile
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import ADA
from fastkron_py.testing import assert_close
from fastkron_py.tiling import torch_products

# rows, in, out, degree: ones, primes, several tiles each way, a reduction that is split.
SHAPES = [(1, 1, 1, 1), (5, 1, 3, 4), (7, 13, 11, 3), (37, 70, 45, 2), (3, 130, 5, 4)]
LARGE_SHAPES = [(40, 32, 64, 3), (70, 45, 33, 2)]
# The basis is rounded to the dtype once, the result once: two steps. The float32 recurrence carries its roundings on, and
# gradients at higher degrees more of them, hence the factor.
STEPS = 2


def gradients(x: Tensor, c: Tensor, dy: Tensor, **options: Any) -> list[Tensor]:
    x, c = x.detach().requires_grad_(), c.detach().requires_grad_()
    y = poly_kan(x, c, **options)
    return [y.detach(), *torch.autograd.grad(y, (x, c), dy)]


def assert_gradients(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype, factor: float = 1.0) -> None:
    for name, a, e in zip(("y", "dx", "dC"), actual, expected, strict=True):
        rms = {torch.float32: 1e-6, torch.float64: 1e-14 * math.sqrt(STEPS)}.get(dtype, STEPS * torch.finfo(dtype).eps) * factor
        # Single elements: four times the RMS bound in an isotropic error's tail; tanh' of a rounded x adds its own.
        assert_close(a, e, rms_tol=rms, max_tol=8 * rms, name=name)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every product for a large one: degree 0 apart, operands transposed."""
    monkeypatch.setattr(plan, "MEASURED", plan.MEASURED._replace(large_products=1, large_rows=1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int], backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for dtype in [torch.float64, torch.float32]:
        x, c, dy = problem(*shape, dtype, device, generator)
        assert_gradients(gradients(x, c, dy), layer_gradients(x, c, dy, "chebyshev"), dtype, factor=2)


@pytest.mark.parametrize("basis", BASES)
def test_bases(basis: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, c, dy = problem(6, 5, 4, 5, torch.float64, device, generator)
    options = {"basis": basis, "basis_parameters": PARAMETERS.get(basis), "normalization": "tanh"}
    assert_gradients(gradients(x, c, dy, **options), layer_gradients(x, c, dy, basis), torch.float64, factor=2)


def test_half_types(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for dtype in [torch.bfloat16, torch.float16]:
        x, c, dy = problem(19, 20, 17, 6, dtype, device, generator)
        assert_gradients(gradients(x, c, dy), layer_gradients(x, c, dy, "chebyshev"), dtype)


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every reduction over several programs, degrees too, in small tiles; the shapes of the partial sums that are added up."""
    # Two blocks of inputs in three groups of degrees; of outputs two blocks and what is left; of rows one each.
    monkeypatch.setattr(plan, "forward", lambda sizes: Tile(16, 16, 16, 4, 2, 1, 2, 2, 3))
    monkeypatch.setattr(plan, "input_gradient", lambda sizes: Tile(16, 16, 16, 4, 2, 2, 2, 2))
    monkeypatch.setattr(plan, "coefficient_gradient", lambda sizes: Tile(16, 16, 16, 4, 2, 4, 2, 1))
    seen: list[tuple[int, ...]] = []

    in_splits = launches._in_splits

    def noted(splits: int, out: Tensor) -> Any:
        seen.extend([(splits, *out.shape)] if splits > 1 else [])
        return in_splits(splits, out)

    monkeypatch.setattr(launches, "_in_splits", noted)
    return seen


# Of nine degrees three a program and dx's, without the first, four pairs; of six two, and two pairs and a half.
@pytest.mark.parametrize(("dtype", "degree"), [(torch.float64, 5), *in_full([(torch.float32, 8)])], ids=str)
def test_shared_out(
    dtype: torch.dtype, degree: int, shared_out: list[tuple[int, ...]], device: torch.device, generator: torch.Generator
) -> None:
    """Also each gradient by itself: the same numbers as both of one launch."""
    x, c, dy = problem(17, 33, 35, degree, dtype, device, generator)
    with fastkron_py.backend("triton"):
        actual = gradients(x, c, dy)
        assert shared_out == [(6, 17, 35), (2, 17, 33), (2, degree + 1, 35, 33)]
        assert_gradients(actual, layer_gradients(x, c, dy, "chebyshev"), dtype, factor=2)
        for i, wanted in enumerate((x, c)):
            given = [t.detach().requires_grad_(t is wanted) for t in (x, c)]
            (alone,) = torch.autograd.grad(poly_kan(*given), given[i], dy)
            assert torch.equal(alone, actual[1 + i])
    assert len(shared_out) == 5  # the forward pass has one program, the gradients have three


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_as_large_products(dtype: torch.dtype, large: None, device: torch.device, generator: torch.Generator) -> None:
    for shape in LARGE_SHAPES:
        x, c, dy = problem(*shape, dtype, device, generator)
        with fastkron_py.backend("triton"):
            actual = gradients(x, c, dy)
        assert_gradients(actual, layer_gradients(x, c, dy, "chebyshev"), dtype, factor=2)


@pytest.mark.parametrize("basis", ["bspline", "fourier"])
def test_other_bases_as_large_products(basis: str, large: None, device: torch.device, generator: torch.Generator) -> None:
    """One whose first function is no constant, and one whose state has four tiles."""
    x, c, dy = problem(40, 32, 33, 5, torch.float64, device, generator)
    with fastkron_py.backend("triton"):
        actual = gradients(x, c, dy, basis=basis, normalization="tanh")
    assert_gradients(actual, layer_gradients(x, c, dy, basis), torch.float64, factor=2)


def test_bias_and_more_dimensions(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, c, _ = problem(6, 5, 4, 3, torch.float64, device, generator)
    x = x.reshape(2, 3, 5).requires_grad_()
    bias = torch.randn(4, dtype=torch.float64, device=device, requires_grad=True)
    y = poly_kan(x, c, bias=bias)
    assert y.shape == (2, 3, 4)
    assert_close(y, layer(x, c, "chebyshev", bias))
    (db,) = torch.autograd.grad(y.sum(), bias)
    assert_close(db, torch.full_like(bias, 6.0))
    assert_close(poly_kan(x[0, 0], c), layer(x[0, 0], c, "chebyshev"))


def test_nothing(backend_name: str, device: torch.device) -> None:
    empty = poly_kan(torch.randn(0, 3, device=device), torch.randn(4, 2, 3, device=device))
    assert empty.shape == (0, 2)
    bias = torch.randn(2, device=device)
    x, c = torch.randn(5, 0, device=device, requires_grad=True), torch.randn(4, 2, 0, device=device, requires_grad=True)
    y = poly_kan(x, c, bias=bias)
    assert torch.equal(y, bias.expand(5, 2))
    assert [g.shape for g in torch.autograd.grad(y.sum(), (x, c))] == [x.shape, c.shape]


def test_far_arguments_have_finite_gradients(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for normalization in ["tanh", "clamp", "minmax", "layer_norm"]:
        _, c, dy = problem(9, 6, 4, 8, torch.float32, device, generator)
        x = torch.linspace(-100, 100, 54, device=device).reshape(9, 6)
        for t in gradients(x, c, dy, normalization=normalization):
            assert bool(t.isfinite().all())
        if normalization == "tanh":
            assert_gradients(gradients(x, c, dy), layer_gradients(x, c, dy, "chebyshev"), torch.float32, factor=3)


def test_normalizations_are_what_they_say(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, c, _ = problem(9, 6, 4, 3, torch.float64, device, generator)
    x = 2 * x

    def plain(t: Tensor) -> Tensor:
        return poly_kan(t, c, normalization="none")

    assert_close(poly_kan(x, c, normalization="clamp"), plain(x.clamp(-1, 1)))
    assert_close(poly_kan(x, c, normalization="layer_norm"), plain(torch.tanh(torch.nn.functional.layer_norm(x, (6,)))))
    low, high = x.amin(0), x.amax(0)
    unit = (2 * (x - low) / (high - low) - 1).clamp(-1, 1)
    assert_close(poly_kan(x, c, normalization="minmax"), plain(unit), rms_tol=1e-13, max_tol=1e-13)
    assert_close(poly_kan(x, c, normalization="minmax", bounds=(-1, 3.0)), plain(((x - 1) / 2).clamp(-1, 1)))
    bounds = (low - 1, high + 1)
    unit = 2 * (x - low + 1) / (high - low + 2) - 1
    assert_close(poly_kan(x, c, normalization="minmax", bounds=bounds), plain(unit), rms_tol=1e-13, max_tol=1e-13)
    constant = torch.ones_like(x)
    assert_close(poly_kan(constant, c, normalization="minmax"), plain(torch.zeros_like(x)))


def test_slopes_at_the_ends(backend_name: str, device: torch.device) -> None:
    """Those of the inner side, whatever `torch.clamp` has there: 1 before torch 2.14, 0 from then on."""
    x = torch.tensor([[1.0, -1.0, 0.5, 2.0]], device=device, requires_grad=True)
    c = torch.tensor([0.0, 1.0], device=device)[:, None, None].expand(2, 1, 4).contiguous()
    (found,) = torch.autograd.grad(poly_kan(x, c, normalization="clamp").sum(), x)
    assert_close(found, torch.tensor([[1.0, 1.0, 1.0, 0.0]], device=device))


@pytest.mark.parametrize("as_large", [False, True])
def test_nan_stays_in_its_row(as_large: bool, backend_name: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    if as_large:
        request.getfixturevalue("large")
    c = torch.randn(4, 5, 7, device=device, requires_grad=True)
    for basis, normalization in product(("chebyshev", "bspline", "fourier", "rbf"), ("tanh", "clamp", "minmax", "layer_norm", "none")):
        x = torch.rand(6, 7, device=device) * 2 - 1
        x[2, 3] = math.nan
        y = poly_kan(x, c, basis=basis, normalization=normalization)
        assert y.isnan().all(1).tolist() == [False, False, True, False, False, False]
        assert int(y.isnan().sum()) == 5


def test_infinity_stays_in_its_row(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Min-max leaves it out of the range, and takes it for the range's end; a column of nothing else has the range [-1, 1]."""
    x, c, _ = problem(6, 3, 4, 3, torch.float64, device, generator)
    finite = x.clone()
    x[2, 1], x[4, 0] = math.inf, -math.inf
    finite[2, 1], finite[4, 0] = finite[[0, 1, 3, 4, 5], 1].max(), finite[[0, 1, 2, 3, 5], 0].min()
    assert_close(poly_kan(x, c, normalization="minmax"), poly_kan(finite, c, normalization="minmax"))
    x[:, 2], finite[:, 2] = math.inf, 1.0
    bounds = (finite.amin(0).index_fill(0, torch.tensor(2, device=device), -1), finite.amax(0))
    assert_close(poly_kan(x, c, normalization="minmax"), poly_kan(finite, c, normalization="minmax", bounds=bounds))


def test_normalizes_before_rounding(generator: torch.Generator) -> None:
    """Ranges wider than float16's half, and under autocast numbers that are close to one another."""
    for normalization, case in product(["minmax", "layer_norm"], ["wide", "1990", "offset"]):
        _, c, _ = problem(1, 3, 4, 5, torch.float32, torch.device("cpu"), generator)
        x = {
            "wide": torch.linspace(-4e4, 4e4, 30).reshape(10, 3),
            "1990": torch.linspace(1990, 2025, 24).reshape(8, 3),
            "offset": 100 + 0.01 * torch.randn(50, 3, generator=generator),
        }[case]
        if case == "wide":
            y = poly_kan(x.half(), c.half(), normalization=normalization)
            x, c = x.half(), c.half()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                y = poly_kan(x, c, normalization=normalization)
            c = c.bfloat16()
        assert_close(y, poly_kan(x.double(), c.double(), normalization=normalization), steps=3)


def test_bounds_leave_nan_and_infinities_out() -> None:
    x = torch.tensor([[1.0, math.nan], [3.0, 2.0], [-1.0, 5.0], [math.inf, -math.inf]])
    low, high = own_bounds(x)
    assert low.tolist() == [-1.0, 2.0]
    assert high.tolist() == [3.0, 5.0]


def test_table(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """The table's result differs from the recurrence's by its bound at most, for every coefficient at its largest."""
    for basis in ["chebyshev", "bspline"]:
        degree, size = 6, 129
        x, c, dy = problem(8, 5, 4, degree, torch.float64, device, generator)
        exact = gradients(x, c, dy, basis=basis, normalization="tanh")
        lines = gradients(x, c, dy, basis=basis, normalization="tanh", evaluation="lut", lut_size=size)
        bound = table_error_bound(basis, degree, size) * c.abs().sum((0, 2))
        assert bool(((lines[0] - exact[0]).abs() <= bound).all())
        assert not torch.equal(lines[0], exact[0])
        # Slopes err by h / 2 of the second derivative: 1 / 60 of a curve with a few turns.
        assert_close(lines[1], exact[1], rms_tol=0.2, max_tol=0.5)
        assert_close(lines[2], exact[2], rms_tol=0.05, max_tol=0.2)


def test_nothing_is_read_behind_a_table(
    shared_out: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, device: torch.device, generator: torch.Generator
) -> None:
    """Five derivatives go in pairs: zero times what the sixth is made of. Behind the table's rows is somebody else's memory, here NaN."""
    table = layer_config.basis_table

    def before_nan(*arguments: Any) -> Tensor:
        rows = table(*arguments)
        return torch.cat([rows, torch.full_like(rows, math.nan)])[: len(rows)]

    x, c, dy = problem(5, 6, 7, 5, torch.float64, device, generator)
    with fastkron_py.backend("triton"):
        expected = gradients(x, c, dy, evaluation="lut", lut_size=17)
        monkeypatch.setattr(layer_config, "basis_table", before_nan)
        assert all(map(torch.equal, gradients(x, c, dy, evaluation="lut", lut_size=17), expected))


# ---- slices of the torch backend ------------------------------------------------------------------


ROWS = 3  # of a slice


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of three rows, and no layer small enough for autograd's own record."""
    monkeypatch.setattr(torch_backend, "PRODUCT_ROWS", ROWS)
    monkeypatch.setattr(torch_backend, "FEW_ROWS", 1)
    monkeypatch.setattr(torch_products, "SLICE_ELEMENTS", 1)
    monkeypatch.setattr(torch_products, "GPU_SLICE_ELEMENTS", 1)
    monkeypatch.setattr(program, "_SMALL", 0)


@pytest.mark.parametrize("basis", BASES)
def test_every_row(basis: str, sliced: None, device: torch.device, generator: torch.Generator) -> None:
    options = {"basis": basis, "basis_parameters": PARAMETERS.get(basis)}
    for rows, dtype in product([1, ROWS, 10], [torch.float64, torch.float32, torch.bfloat16, torch.float16]):
        x, c, dy = problem(rows, 5, 4, 6, dtype, device, generator)
        x = torch.stack([x, x], 1)[:, 1]  # rows with gaps
        leaves = [t.requires_grad_() for t in (x, c)]
        bias = torch.randn(4, generator=generator).to(device, dtype)
        with fastkron_py.backend("torch"):
            y = poly_kan(x, c, bias=bias, **options)
            found = torch.autograd.grad(y, leaves, dy)
            with torch.no_grad():
                assert torch.equal(poly_kan(x, c, bias=bias, **options), y)
        plain, *gradients = layer_gradients(x.detach(), c.detach(), dy, basis)
        # Values are rounded before the product, and gradients of all slices are summed: two steps; recurrences carry roundings on.
        tolerance = {torch.float64: 1e-13, torch.float32: 3e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
        for name, a, e in zip(("y", "dx", "dC"), (y.detach(), *found), (plain + bias.double(), *gradients), strict=True):
            assert_close(a, e, rms_tol=tolerance, max_tol=8 * tolerance, name=f"{name} of {rows}, {dtype}")


# ---- tiles of other GPUs --------------------------------------------------------------------------


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_against_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_large: bool, generator: torch.Generator, device: torch.device
) -> None:
    """With the record of a GPU whose tensor cores read operands from registers, and none of them float64."""
    gpu = replace(ADA, multiprocessors=3, has_approximations=False)
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    if is_large:
        monkeypatch.setattr(plan, "MEASURED", plan.MEASURED._replace(large_products=1, large_rows=1))
    x, c, dy = problem(50, 36, 70, 3, dtype, device, generator)
    layer = config_of("chebyshev", 3)
    dx, dc, _ = gradients_of(dy, x, c, layer, "highest", (True, True, True))
    for got, want in zip((forward(x, c, None, layer, "highest"), dx, dc), layer_gradients(x, c, dy, "chebyshev"), strict=True):
        assert_close(got, want, steps=8)


# ---- degree 0 apart -------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def constant(c: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    build = Builder((c, bias))
    program = build.program([operands.constant(build, *build.inputs, wide)])
    return program([c] if bias is None else [c, bias])[0]


def store_column_sums(x: Tensor, out: Tensor) -> None:
    build = Builder((x, out))
    operands.store_column_sums(build, *build.inputs)
    build.program([])([x, out])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Positive numbers: sums in bfloat16 would stop growing."""
    for num_out, num_in in [(1, 1), (13, 300), (40, 512)]:
        c = torch.rand(3, num_out, num_in, dtype=torch.float64, generator=generator).to(device, dtype)
        c[1:] = torch.nan
        bias = torch.rand(num_out, dtype=torch.float64, generator=generator).to(device, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tol = 1e-15 if dtype == torch.float64 else 1e-7
        for given in (None, bias):
            found = constant(c, given, wide)
            expected = c[0].double().sum(1) + (0 if given is None else given.double())
            assert found.dtype == wide
            assert_close(found, expected, rms_tol=3 * tol, max_tol=12 * tol)


def test_prepared_together(device: torch.device, generator: torch.Generator) -> None:
    """One launch transposes C and dy, and makes low halves and sums; dy is copied if its rows are no vectors."""
    for rows, num_out, num_in, first, stride in [(70, 68, 5, 1, 68), (65, 70, 66, 1, 70), (3, 7, 2, 0, 8)]:
        c = torch.randn(first + 2, num_out, num_in, generator=generator).to(device)
        dy = torch.randn(rows, stride, generator=generator).to(device)[:, :num_out]
        build = Builder((c, dy))
        (ct, ct_low), (upright, low), (across, across_low), sums = operands.prepared(build, *build.inputs, first)
        results = [t for t in (ct, ct_low, low, across, across_low, sums) if t is not upright]
        found = build.program([*results, *([] if upright is build.inputs[1] else [upright])])([c, dy])
        assert [t.shape for t in found[3:5]] == [(1, num_out, operands.whole_vectors(rows))] * 2
        for t, by in ((found[0], c[first:].mT), (found[3], dy.mT[None]), *([(found[6][None], dy[None])] if stride % 4 else [])):
            assert torch.equal(t[:, :, : by.shape[2]], by)
        low_of = found[2][:, :num_out]
        assert torch.equal(found[4][0, :, :rows], low_of.mT)
        assert float((low_of.abs() > 2**-10 * dy.abs()).sum()) == 0
        assert_close(found[5].sum(0), dy.double().sum(0), rms_tol=1e-6, max_tol=1e-5)
        spread = torch.full((2, num_out, num_in), torch.nan, device=device)
        build = Builder((found[5], spread))
        operands.spread_sums(build, *build.inputs)
        build.program([])([found[5], spread])
        assert bool(spread[1].isnan().all())
        assert_close(spread[0], dy.double().sum(0)[:, None].expand(-1, num_in), rms_tol=1e-6, max_tol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """In one stage and in two; rows of a wider matrix, whose rest is NaN; nothing but degree 0 is written."""
    for rows, num_out, num_in in [(1, 1, 1), (512, 20, 260), (513, 70, 17), (1300, 16, 3)]:
        wide = torch.full((rows, num_out + 5), torch.nan, dtype=dtype, device=device)
        dy = wide[:, 2 : 2 + num_out]
        dy.copy_(torch.rand(rows, num_out, dtype=torch.float64, generator=generator))
        out = torch.full((2, num_out, num_in), torch.nan, dtype=dtype, device=device)
        store_column_sums(dy, out)
        assert bool(out[1].isnan().all())
        tol = {torch.float32: 3e-7, torch.bfloat16: 4e-3, torch.float64: 1e-15}[dtype]  # roundings of the result
        assert_close(out[0], dy.double().sum(0)[:, None].expand(-1, num_in), rms_tol=tol, max_tol=4 * tol)
