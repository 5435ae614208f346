"""The rational operators: what torch.library asks of them, derivatives of every order, transforms."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from rational_cases import WITHOUT_NOISE, problem, step
from torch import Tensor

import fastkron_py
from fastkron_py import rational, reference

# torch's own, at the first use of forward mode and of the compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores.*:UserWarning")

FORWARD = torch.ops.fastkron.rational.default
BACKWARD = torch.ops.fastkron.rational_backward.default
F64 = torch.float64


def leaves(
    shape: tuple[int, ...],
    groups: int | tuple[int, int],
    device: torch.device,
    degrees: tuple[int, int] = (5, 4),
    version: str = "B",
    dtype: torch.dtype = F64,
) -> tuple[Tensor, Tensor, Tensor]:
    x, a, b, _ = problem(shape, groups, degrees, version, dtype, device)
    return x.requires_grad_(), a.requires_grad_(), b.requires_grad_()


# ---- torch.library -----------------------------------------------------------------------------


def test_opcheck_of_layouts(backend_name: str, device: torch.device) -> None:
    """Strides of the fakes are those of the results whatever the strides of the arguments. All that opcheck looks at, of the first."""
    of_fakes = {"test_utils": ("test_schema", "test_faketensor")}
    for layout, tests in [("permuted", {}), ("expanded", of_fakes), ("sliced", of_fakes), ("another dtype", of_fakes)]:
        x, a, b, dy = problem((4, 3, 8), 2, device=device)
        dtype = torch.bfloat16 if layout == "another dtype" else torch.float32
        change: dict[str, Callable[[Tensor], Tensor]] = {
            "permuted": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            "expanded": lambda t: t[:1].expand(t.shape),
            "sliced": lambda t: torch.cat([t, t], -1)[..., :8],
            "another dtype": lambda t: t,
        }
        x = change[layout](x)
        torch.library.opcheck(FORWARD, (x, a, b, "B", dtype, backend_name), **tests)
        torch.library.opcheck(BACKWARD, (change[layout](dy).to(dtype), x, a, b, True, True, True, "B", dtype, backend_name), **tests)


# ---- derivatives -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", WITHOUT_NOISE)
def test_gradcheck(version: str, backend_name: str, device: torch.device) -> None:
    """Interpreted kernels are compared along random directions, in which no wrong element of a Jacobian can hide, but by chance."""
    for groups in [(2, 2), (1, 2)]:

        def function(*t: Tensor) -> Tensor:
            return rational(*t, version=version)

        options = {"fast_mode": backend_name == "triton", "atol": 1e-8, "rtol": 1e-5}  # of differences in float64
        torch.autograd.gradcheck(function, leaves((3, 4), groups, device, (3, 2), version), **options)
        torch.autograd.gradgradcheck(function, leaves((3, 4), groups, device, (3, 2), version), **options)


def test_second_derivatives_of_a_constant_function(backend_name: str, device: torch.device) -> None:
    """Version C of degrees 0 and 0 does not depend on x, whose gradient has no graph: torch raised an error."""
    options = {"fast_mode": backend_name == "triton", "atol": 1e-8, "rtol": 1e-5}
    torch.autograd.gradgradcheck(lambda *t: rational(*t, version="C"), leaves((3, 4), 2, device, (0, 0), "C"), **options)


@pytest.mark.parametrize("version", ["A", "B"])
def test_second_derivatives_where_arguments_are_zero(version: str, backend_name: str, device: torch.device) -> None:
    """As autograd of the formula gives them. Differences could not tell."""
    x, a, b = leaves((3, 4), 2, device, (3, 2), version)
    with torch.no_grad():
        x[0], b[0] = 0.0, 0.0

    def second(function: Callable[..., Tensor]) -> list[Tensor]:
        y = function(x, a, b, version=version)
        first = torch.autograd.grad(y.sin().sum(), (x, a, b), create_graph=True)
        total = torch.stack([(g * torch.linspace(1, 2, g.numel(), dtype=F64, device=device).view(g.shape)).sum() for g in first]).sum()
        return list(torch.autograd.grad(total, (x, a, b)))

    for found, want in zip(second(rational), second(reference.rational), strict=True):
        fastkron_py.testing.assert_close(found, want, rms_tol=1e-13, max_tol=1e-12)


# ---- vmap --------------------------------------------------------------------------------------


DIMS = [(0, None, None), (1, None, None), (0, 0, None), (None, 0, 0), (2, 1, 0), (None, None, 2)]


def test_vmap(backend_name: str, device: torch.device) -> None:
    """Results, and gradients for each sample, are those of a loop."""

    def gradients(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = rational(x, a, b)
        return y, *torch.func.grad(lambda *t: rational(*t).sin().sum(), (0, 1, 2))(x, a, b)

    for dims, groups in zip(DIMS, cycle([(2, 2), (1, 2)]), strict=False):
        single = [t.detach() for t in leaves((3, 8), groups, device)]
        batched = [t if d is None else torch.stack([t + 0.1 * i for i in range(5)], d) for t, d in zip(single, dims, strict=True)]
        samples = [[t if d is None else t.select(d, i) for t, d in zip(batched, dims, strict=True)] for i in range(5)]
        found = torch.vmap(gradients, in_dims=dims)(*batched)
        want = [step(reference.rational, *s, reference.rational(*s).cos()) for s in samples]
        for i, f in enumerate(found):
            fastkron_py.testing.assert_close(f, torch.stack([w[i] for w in want]), rms_tol=1e-12, max_tol=1e-11)
