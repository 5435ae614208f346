"""The Kronecker verbs inside torch.compile: one graph, no breaks, no needless recompilation."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shapes_list import assert_near, assert_same, expected, power, problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fastkron_py import gemkm, kron_matmul, kron_matmul_left, reference

# A compiled graph asks for the backend when it runs, so both backends compile the same graph.
pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores.*:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graphs, guards or counters of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], how: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=how, fullgraph=True, **options)


def test_every_public_form(device: torch.device, generator: torch.Generator) -> None:
    """Vectors, scalar tensors, FastKron's forms: all in one graph."""
    x, factors = problem(power(3, 4, 4, 2), torch.float32, device, generator)

    def everything(x: Tensor, factors: list[Tensor], alpha: Tensor) -> tuple[Tensor, ...]:
        y = kron_matmul(x, factors, alpha=alpha, precision="highest")
        return (
            y,
            gemkm(x, factors, 2.0, 0.5, y),
            kron_matmul(x[0], factors),
            kron_matmul_left(factors, x.mT),
            kron_matmul_left(factors, x[1], beta=alpha, z=y[0]),
        )

    alpha = torch.tensor(0.25, device=device)
    got = compiled(everything)(x, factors, alpha)
    for g, w in zip(got, everything(x, factors, alpha), strict=True):
        assert_same(g, w)


def test_tensors_without_memory() -> None:
    """Of the meta device, which models are made on before they are filled; torch 2.11 cannot trace whether it has autocast."""
    x, factors = torch.ones(3, 8, device="meta"), [torch.ones(2, 3, device="meta"), torch.ones(4, 4, device="meta")]
    y = compiled(kron_matmul)(x, factors)
    assert y.is_meta
    assert y.shape == (3, 12)


def test_dynamic_shapes_with_gradients(device: torch.device, generator: torch.Generator) -> None:
    """dynamic=True: everything symbolic, in backward too."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, f: kron_matmul(x, [f, f]).square().sum(), backend=counter, fullgraph=True, dynamic=True)
    compiled_so_far = []
    for rows, p in ((5, 3), (7, 4), (9, 6)):
        x, (f, _) = problem(power(rows, p, p, 2), torch.float64, device, generator)
        leaves = [x.requires_grad_(), f.requires_grad_()]
        got = torch.autograd.grad(function(x, f), leaves)
        want = torch.autograd.grad(reference.kron_matmul(x, [f, f]).square().sum(), leaves)
        for g, w in zip(got, want, strict=True):
            assert_near(g, w, scale=5)
        compiled_so_far.append(counter.frame_count)
    assert len(set(compiled_so_far)) == 1  # Dynamo may restart within the first compilation, but compiles no more


def test_changed_scalars_do_not_recompile_for_ever(device: torch.device, generator: torch.Generator) -> None:
    """alpha as a Python float becomes symbolic (or is a tensor): two graphs serve every value."""
    counter = CompileCounterWithBackend("aot_eager")
    x, factors = problem(power(3, 4, 4, 2), torch.float32, device, generator)
    function = torch.compile(lambda x, fs, alpha: kron_matmul(x, fs, alpha=alpha), backend=counter, fullgraph=True)
    for alpha in (0.5, 0.75, -2.0, 3.5):
        tensor = torch.tensor(alpha, device=device)
        assert_near(function(x, factors, tensor), expected(x, factors, alpha=alpha))
    assert counter.frame_count == 1


@pytest.mark.full  # a C++ compiler takes a quarter of a minute; what it is given is an operator, as the tests above see
@pytest.mark.skipif(
    not (torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler on a CPU"
)
@pytest.mark.skipif(
    torch.cuda.is_available() and not (shutil.which("gcc") or shutil.which("cc")), reason="inductor's launchers need a C compiler"
)
def test_inductor(device: torch.device, generator: torch.Generator) -> None:
    """The default backend: code around the operator is generated, the operator is called, gradients are right."""
    x, factors = problem(power(5, 4, 4, 2), torch.float32, device, generator)
    leaves = [x.requires_grad_(), *(f.requires_grad_() for f in factors)]

    def loss(multiply: Callable[..., Tensor], x: Tensor, factors: list[Tensor]) -> Tensor:
        return multiply(x.sin() * 2, factors).cos().sum()

    got = compiled(lambda x, fs: loss(kron_matmul, x, fs), "inductor")(x, factors)
    want = loss(reference.kron_matmul, x.double(), [f.double() for f in factors])
    assert math.isclose(float(got.detach()), float(want.detach()), rel_tol=1e-5)
    grads = torch.autograd.grad(want, leaves)
    for g, w in zip(torch.autograd.grad(got, leaves), grads, strict=True):
        assert_near(g, w.double(), scale=5)
