"""What torch asks of the polynomial KAN operators: derivatives of every order, fakes, compilation, vmap, autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from poly_kan_cases import BASES, PARAMETERS, parameters_of, problem
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan.layer_config import describe
from fastkron_py.testing import assert_close

# Torch's own, in forward mode and where it first compiles.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:.*TensorFloat32 tensor cores.*:UserWarning",
)

FORWARD = torch.ops.fastkron.poly_kan.default
BACKWARD = torch.ops.fastkron.poly_kan_backward.default


def sample(device: torch.device, generator: torch.Generator, degree: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, coefficients and bias that need gradients, and dy."""
    x, c, dy = problem(3, 2, 2, degree, torch.float64, device, generator)
    bias = torch.randn(2, dtype=torch.float64, device=device)
    return x.requires_grad_(), c.requires_grad_(), bias.requires_grad_(), dy


def options(basis: str, backend: str) -> tuple[Any, ...]:
    return describe(basis, parameters_of(basis)), "tanh", 0, None, backend


@pytest.mark.parametrize("basis", BASES)
def test_gradcheck(basis: str, device: torch.device, generator: torch.Generator) -> None:
    x, c, bias, _ = sample(device, generator)

    def call(x: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        return poly_kan(x, c, bias=bias, basis=basis, basis_parameters=PARAMETERS.get(basis), normalization="tanh")

    with fastkron_py.backend("torch"):  # whose operations are also what derives the gradients of both; contracts have the kernels'
        assert torch.autograd.gradcheck(call, (x, c, bias))
        assert torch.autograd.gradgradcheck(call, (x, c, bias), fast_mode=True)


def test_gradcheck_of_normalizations(device: torch.device, generator: torch.Generator) -> None:
    for normalization in ["clamp", "layer_norm", "none"]:
        x, c, _, _ = sample(device, generator)
        call = partial(poly_kan, normalization=normalization)
        assert torch.autograd.gradcheck(call, (x, c))
        assert torch.autograd.gradgradcheck(call, (x, c), fast_mode=True)


def test_registered_operator_has_derivatives(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """The operator itself, which compiled graphs hold, beside the eager call's shorter way."""
    x, c, bias, _ = sample(device, generator)

    def call(x: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = FORWARD(x, c, bias, *options("jacobi", backend_name))
        return y

    assert torch.autograd.gradcheck(call, (x, c, bias), fast_mode=True)
    if backend_name == "torch":  # whose operations are also what derives the gradients of both
        assert torch.autograd.gradgradcheck(call, (x, c, bias), fast_mode=True)


def test_third_derivative(device: torch.device) -> None:
    """Of T_3(x) = 4 x^3 - 3 x: 24."""
    x = torch.tensor([[0.3]], dtype=torch.float64, device=device, requires_grad=True)
    c = torch.zeros(4, 1, 1, dtype=torch.float64, device=device)
    c[3] = 1
    y = poly_kan(x, c, normalization="none")
    for expected in (12 * 0.09 - 3, 24 * 0.3, 24.0):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert_close(y.detach(), torch.full_like(x, expected).detach(), rms_tol=1e-12, max_tol=1e-12)


def test_opcheck(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for needs in [(True, True, True), (True, False, True), (False, True, False), (False, False, True)]:
        x, c, bias, dy = sample(device, generator)
        described = options("chebyshev", backend_name)
        torch.library.opcheck(
            FORWARD, tuple([t.detach().requires_grad_(need) for t, need in zip((x, c, bias), needs, strict=True)]) + described
        )
        torch.library.opcheck(BACKWARD, (dy, x, c, *needs, *described))


@pytest.mark.full
@pytest.mark.parametrize(("basis", "normalization"), [("legendre", "minmax"), ("rbf", "tanh")])
def test_compiles_in_one_graph(basis: str, normalization: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    torch.compiler.reset()
    x, c, bias, dy = sample(device, generator)

    def call(x: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        return poly_kan(x, c, basis=basis, bias=bias, normalization=normalization)

    compiled: Callable[..., Tensor] = torch.compile(call, fullgraph=True)
    wanted = (x, c, bias)
    y = compiled(*wanted)
    assert_close(y, call(*wanted).detach())
    for a, e in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(call(*wanted), wanted, dy), strict=True):
        assert_close(a, e, rms_tol=1e-13, max_tol=1e-13)


@pytest.mark.parametrize(("basis", "normalization"), [("bspline", "minmax"), ("jacobi", "minmax"), ("legendre", "layer_norm")])
def test_one_graph_for_all_batches(basis: str, normalization: str, generator: torch.Generator) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    # Sizes that differ: Dynamo takes two that are equal at first for one symbol.
    _, c, _ = problem(1, 3, 4, 4, torch.float64, torch.device("cpu"), generator)
    bias = torch.randn(4, dtype=torch.float64, generator=generator)
    chosen: dict[str, Any] = {"basis_parameters": PARAMETERS.get(basis), "normalization": normalization}

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def call(x: Tensor) -> Tensor:
        return poly_kan(x, c, bias=bias, basis=basis, **chosen)

    for rows in (2, 3, 5, 17):
        x = torch.randn(rows, 3, dtype=torch.float64, generator=generator)
        assert_close(call(x), poly_kan(x, c, bias=bias, basis=basis, **chosen))
    assert counter.frame_count == 1


def test_exports_with_any_batch(generator: torch.Generator) -> None:
    _, c, bias, _ = (t.detach() for t in sample(torch.device("cpu"), generator, degree=4))

    class Call(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = poly_kan(x, c, bias=bias, basis="jacobi", basis_parameters={"a": 0.5})
            return first, poly_kan(x, c, basis="bspline", normalization="minmax", bounds=(-1.0, 2.0))

    x = torch.randn(7, 2, dtype=torch.float64, generator=generator)
    exported = torch.export.export(Call(), (x,), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()
    for rows in (2, 9):
        x = torch.randn(rows, 2, dtype=torch.float64, generator=generator)
        for a, e in zip(exported(x), Call()(x), strict=True):
            assert_close(a, e)


def test_vmap_of_the_operators(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """The rules that a compiled graph uses."""
    x, c, bias, dy = (t.detach() for t in sample(device, generator))
    described = options("chebyshev", backend_name)
    xs, cs, dys = (torch.stack([t, 2 * t]) for t in (x, c, dy))
    for dims in ((0, None), (None, 0), (0, 0)):
        arguments = [a if d is None else s for a, s, d in zip((x, c), (xs, cs), dims, strict=True)]
        y = torch.vmap(lambda a, b: FORWARD(a, b, bias, *described), in_dims=dims)(*arguments)
        found = torch.vmap(lambda a, b, g: BACKWARD(g, a, b, True, True, True, *described), in_dims=(*dims, 0))(*arguments, dys)
        for i in range(2):
            a, b = (t if d is None else t[i] for t, d in zip(arguments, dims, strict=True))
            assert_close(y[i], FORWARD(a, b, bias, *described), rms_tol=1e-13, max_tol=1e-13)
            for mine, alone in zip(found, BACKWARD(dys[i], a, b, True, True, True, *described), strict=True):
                assert_close(mine[i], alone, rms_tol=1e-13, max_tol=1e-13)
