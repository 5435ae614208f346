"""Derivatives of the Kronecker verbs: against finite differences and against float64 autograd of the definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from shapes_list import (
    BATCHES,
    REAL,
    Case,
    assert_near,
    assert_same,
    backend_pairs,
    call,
    ids,
    on_backends,
    power,
    problem,
    wide,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastkron_py
from fastkron_py import kron_matmul, reference
from fastkron_py.runtime.backend import is_interpreting

SIDES = pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
# Finite differences ask for thousands of calls of a few elements each.
TINY = [
    power(2, 2, 2, 1),
    power(2, 2, 2, 3),
    Case(2, ((2, 3), (3, 1))),
    Case(1, ((1, 2), (3, 2))),
]
TINY_BATCHES = [
    Case(2, ((2, 1), (1, 2)), (2,), ()),
    Case(2, ((2, 1), (1, 2)), (), (2,)),
    Case(1, ((2, 1), (1, 2)), (2, 1), (3,)),
    Case(1, ((2, 1), (1, 2)), (1, 2, 1), (2, 1, 1)),
]
# Tolerances hold for one pass of arithmetic; a gradient takes two to four.
GRADIENT_SCALE = 3.0


def double(case: Case, device: torch.device, generator: torch.Generator, left: bool) -> tuple[Tensor, list[Tensor]]:
    x, factors = problem(case, torch.float64, device, generator, left=left)
    return x.requires_grad_(), [f.requires_grad_() for f in factors]


def check_first_and_second(function: Any, inputs: list[Tensor], second: bool = True) -> None:
    # fast_mode compares along random directions: what interpreted kernels have time for.
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    if second:
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


# ---- finite differences --------------------------------------------------------------------------


@backend_pairs("case", [*TINY, *TINY_BATCHES], [TINY[0], TINY[2], TINY_BATCHES[1]])
@SIDES
def test_gradcheck(case: Case, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """All of x, factors, z, alpha and beta at once, z broadcast along rows and batches."""
    x, factors = double(case, device, generator, left)
    y = call(left)(x, factors)
    z = torch.randn(y.shape[-2], 1, dtype=torch.float64, device=device, requires_grad=True)
    alpha, beta = (torch.tensor(v, dtype=torch.float64, device=device, requires_grad=True) for v in (0.7, -1.3))

    def function(x: Tensor, z: Tensor, alpha: Tensor, beta: Tensor, *factors: Tensor) -> Tensor:
        return call(left)(x, factors, alpha=alpha, beta=beta, z=z)

    # Second order takes an interpreter long: there the pairs and the Hessian-vector products below cover more factors.
    interpreted = backend_name == "triton" and is_interpreting()
    check_first_and_second(function, [x, z, alpha, beta, *factors], second=not interpreted or case == TINY[0])


COMPLEX = [power(2, 2, 2, 2), Case(2, ((2, 3), (3, 1)))]


def complex_problem(case: Case, left: bool, device: torch.device, generator: torch.Generator) -> tuple[Any, list[Tensor]]:
    """A function with complex alpha and beta, and its inputs x, z and the factors."""
    x, factors = problem(case, torch.complex128, device, generator, left=left)
    z = torch.randn(1, dtype=torch.complex128, device=device)

    def function(x: Tensor, z: Tensor, *factors: Tensor) -> Tensor:
        return call(left)(x, factors, alpha=0.7 - 0.2j, beta=1j, z=z)

    return function, [t.requires_grad_() for t in (x, z, *factors)]


@backend_pairs("case", [*COMPLEX, TINY_BATCHES[1]], COMPLEX)
@SIDES
def test_gradcheck_complex(case: Case, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    function, inputs = complex_problem(case, left, device, generator)
    x, _, *factors = inputs
    second = backend_name == "torch"
    check_first_and_second(function, inputs, second=second)
    check_first_and_second(lambda x, *fs: call(left)(x, fs, alpha=2.0), [x, *factors], second=second)


@pytest.mark.full
@pytest.mark.parametrize("case", COMPLEX, ids=ids)
@SIDES
def test_second_derivatives_of_complex_kernels(case: Case, left: bool, device: torch.device, generator: torch.Generator) -> None:
    """Apart, since interpreted kernels take half a minute each."""
    function, inputs = complex_problem(case, left, device, generator)
    with fastkron_py.backend("triton"):
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


SUBSETS = [subset for n in range(1, 5) for subset in itertools.combinations(["x", "f0", "f1", "z"], n)]


@backend_pairs("wanted", SUBSETS, [s for s in SUBSETS if len(s) < 3])
@SIDES
def test_every_subset(wanted: tuple[str, ...], left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Each subset of x, the factors and z: gradients of these, first and second, and of no others."""
    x, factors = problem(Case(3, ((2, 3), (3, 2))), torch.float64, device, generator, left=left)
    arguments = {"x": x, "f0": factors[0], "f1": factors[1], "z": torch.randn(1, dtype=torch.float64, device=device)}
    inputs = [arguments[name].requires_grad_() for name in wanted]

    def function(*inputs: Tensor) -> Tensor:
        a = {**arguments, **dict(zip(wanted, inputs, strict=True))}
        return call(left)(a["x"], [a["f0"], a["f1"]], alpha=0.5, beta=2.0, z=a["z"])

    check_first_and_second(function, inputs, second=wanted != ("z",) and (backend_name == "torch" or len(wanted) == 2))
    function(*inputs).sum().backward()
    for name, t in arguments.items():
        assert (t.grad is not None) == (name in wanted)


# ---- float64 autograd of the definition ----------------------------------------------------------

GRADIENT_CASES = [
    power(17, 1, 1, 2),
    power(13, 3, 3, 1),
    power(3, 2, 2, 8),
    power(3, 8, 8, 3),
    power(17, 16, 16, 2),
    power(3, 50, 50, 2),
    power(2, 128, 128, 1),
    Case(16, ((2, 3), (5, 2), (6, 4))),
    Case(5, ((1, 3), (11, 1), (1, 2), (4, 5))),
    power(17, 5, 1, 2),
    power(3, 1, 4, 3),
    Case(20, ((2, 2), (64, 64))),
    Case(2, ((1, 1),) * 4 + ((2, 2),) * 4 + ((1, 1),) * 4),
    Case(2, ((1, 1),) * 28 + ((2, 2),) * 8 + ((1, 1),) * 28),
    Case(1, BATCHES[0].factors, (2, 2, 1), (2, 1, 2)),
    *BATCHES,
]
# The last of the batches has 36 pairs of factors, and the longest list 64: smaller twins stand beside them.
INTERPRETED = [case for case in GRADIENT_CASES if case.elements <= 20_000 and len(case.factors) <= 12 and case != BATCHES[-1]]


def gradients_and_reference(x: Tensor, factors: list[Tensor], left: bool, **options: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The result, its gradients along some dy, and those of the definition in float64.

    dy is the result with elements scaled at random, so that ``<dF_i, F_i> > 0``: for a random dy the sum that makes
    the gradient of a 1 x 1 factor may cancel, and its relative error would be as large as it pleases.
    """
    y = call(left)(x, factors, **options)
    dy = y.detach() * torch.rand(y.shape, device=y.device).to(y.dtype).add(0.5)
    z = options.get("z")
    inputs = [x, *factors] + ([] if z is None else [z])
    grads = torch.autograd.grad(y, inputs, dy)
    xw, *fw = (t.requires_grad_() for t in wide([x, *factors]))
    if z is not None:
        options = {**options, "z": wide(z).requires_grad_()}
    yw = reference.kron_matmul(xw, fw, left=left, **options)
    wanted = torch.autograd.grad(yw, [xw, *fw] + ([] if z is None else [options["z"]]), wide(dy))
    return y, list(grads), list(wanted)


@backend_pairs("case", GRADIENT_CASES, INTERPRETED)
@SIDES
def test_against_reference(case: Case, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for dtype in REAL:
        x, factors = problem(case, dtype, device, generator, left=left)
        inputs = [x.requires_grad_(), *(f.requires_grad_() for f in factors)]
        _, grads, wanted = gradients_and_reference(x, factors, left, alpha=0.5)
        for t, got, want in zip(inputs, grads, wanted, strict=True):
            assert got.dtype == dtype
            assert got.device == t.device
            assert got.is_contiguous() or backend_name == "torch"  # of small products, which autograd records, they may be transposed
            want = torch.where(want.abs() > torch.finfo(got.dtype).max, want * torch.inf, want)  # as float16 has it
            assert_near(got, want, scale=GRADIENT_SCALE)


@on_backends([power(3, 8, 8, 2), power(5, 2, 2, 7), Case(3, ((7, 5), (11, 13), (3, 2))), *BATCHES])
@SIDES
def test_complex_against_reference(case: Case, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for dtype in [torch.complex64, torch.complex128]:
        x, factors = problem(case, dtype, device, generator, left=left)
        x.requires_grad_()
        [f.requires_grad_() for f in factors]
        _, grads, wanted = gradients_and_reference(x, factors, left, alpha=0.5 + 1j)
        for got, want in zip(grads, wanted, strict=True):
            assert_near(got, want, scale=GRADIENT_SCALE)


def test_gradient_of_z(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for z_shape, dtype in itertools.product([(1,), (24,), (5, 1), (2, 1, 1), (1, 5, 24), (3, 2, 5, 24)], [torch.float32, torch.float16]):
        x, factors = problem(Case(5, ((2, 3), (5, 2), (6, 4)), (3, 1), (2,)), dtype, device, generator)
        z = torch.randn(z_shape, device=device).to(dtype)
        for t in (x, *factors, z):
            t.requires_grad_()
        _, grads, wanted = gradients_and_reference(x, factors, False, alpha=-0.5, beta=2.0, z=z)
        for got, want in zip(grads, wanted, strict=True):
            assert_near(got, want, scale=GRADIENT_SCALE)


@on_backends([power(13, 3, 3, 1), power(3, 4, 4, 3), Case(16, ((2, 3), (5, 2), (6, 4))), BATCHES[3], BATCHES[4]])
@SIDES
def test_hessian_vector_product(case: Case, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Double backward of a function that is not quadratic: H v for all of x, factors and z together."""
    x, factors = problem(case, torch.float64, device, generator, left=left)
    z = torch.randn(1, dtype=torch.float64, device=device)
    inputs = [x, *factors, z]
    vectors = [torch.randn_like(t) for t in inputs]

    def products(multiply: Any) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = multiply(leaves[0], leaves[1:-1], alpha=0.7, beta=1.5, z=leaves[-1])
        grads = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(grads, leaves, vectors)

    def definition(x: Tensor, factors: list[Tensor], **options: Any) -> Tensor:
        return reference.kron_matmul(x, factors, left=left, **options)

    for got, want in zip(products(call(left)), products(definition), strict=True):
        assert_near(got, want, scale=4 * GRADIENT_SCALE)


# ---- bookkeeping ---------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes the arguments of this library's operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "fastkron":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]


def test_only_what_is_needed(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Unneeded gradients are not computed: the backward operator is asked for the others only, or not called."""
    for wanted in [(), ("x",), ("f1",), ("z",), ("x", "z"), ("f0", "f1")]:
        x, factors = problem(power(3, 4, 4, 2), torch.float32, device, generator)
        arguments = {"x": x, "f0": factors[0], "f1": factors[1], "z": torch.ones(1, device=device)}
        for name in wanted:
            arguments[name].requires_grad_()
        with Recorder() as recorder:
            y = kron_matmul(x, factors, beta=1.0, z=arguments["z"])
            assert y.requires_grad == bool(wanted)
            if wanted:
                y.sum().backward()
        assert len(recorder.named("kron_matmul")) == 1
        backward = [(args[4], list(args[5])) for args in recorder.named("kron_matmul_backward")]
        if set(wanted) & {"x", "f0", "f1"}:
            assert backward == [("x" in wanted, ["f0" in wanted, "f1" in wanted])]
        else:
            assert backward == []
        assert [name for name, t in arguments.items() if t.grad is not None] == [n for n in arguments if n in wanted]


@SIDES
def test_expanded_and_strided_inputs(left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Gradients arrive at the tensor under a view: summed over expanded dimensions, zero between strides."""
    x, factors = problem(Case(3, ((2, 3), (4, 2))), torch.float64, device, generator, left=left)
    base = torch.randn(2, *x.shape[:-1], 2 * x.shape[-1], dtype=torch.float64, device=device)
    inputs = [t.requires_grad_() for t in (base, *factors)]

    def function(multiply: Any, base: Tensor, f0: Tensor, f1: Tensor) -> Tensor:
        spread = base.mT.contiguous().mT[..., ::2].unsqueeze(1).expand(2, 4, *x.shape)
        return multiply(spread, [f0.mT.contiguous().mT, f1.expand(4, *f1.shape)])

    def definition(x: Tensor, factors: list[Tensor]) -> Tensor:
        return reference.kron_matmul(x, factors, left=left)

    dy = torch.randn_like(function(definition, *inputs))
    got = torch.autograd.grad(function(call(left), *inputs), inputs, dy)
    want = torch.autograd.grad(function(definition, *inputs), inputs, dy)
    for g, w, t in zip(got, want, inputs, strict=True):
        assert g.shape == t.shape
        assert_near(g, w, scale=GRADIENT_SCALE)
    # A gradient that is itself expanded: y.sum() hands down strides of 0.
    got = torch.autograd.grad(function(call(left), *inputs).sum(), inputs)
    want = torch.autograd.grad(function(definition, *inputs).sum(), inputs)
    for g, w in zip(got, want, strict=True):
        assert_near(g, w, scale=GRADIENT_SCALE)


def test_shared_factor(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """One tensor in several places, even as x and factor at once: its gradients add up."""
    _, (f, *_) = problem(power(1, 4, 4, 3), torch.float64, device, generator)
    x = torch.randn(3, 64, dtype=torch.float64, device=device)
    f.requires_grad_()
    fw = wide(f).requires_grad_()
    (got,) = torch.autograd.grad(kron_matmul(x, [f, f, f]).sin().sum(), f)
    (want,) = torch.autograd.grad(reference.kron_matmul(wide(x), [fw, fw, fw]).sin().sum(), fw)
    assert_near(got, want, scale=GRADIENT_SCALE)
    (got,) = torch.autograd.grad(kron_matmul(f, [f]).sum(), f)
    (want,) = torch.autograd.grad((fw @ fw).sum(), fw)
    assert_near(got, want, scale=GRADIENT_SCALE)
    torch.autograd.gradgradcheck(lambda f: kron_matmul(f, [f]), [f], fast_mode=True)


@SIDES
def test_vector_and_empty(left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, factors = double(power(1, 3, 3, 2), device, generator, left)
    vector = x.detach().reshape(-1).requires_grad_()
    z = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    check_first_and_second(lambda v, z, *fs: call(left)(v, fs, beta=2.0, z=z), [vector, z, *factors], second=backend_name == "torch")
    for case in (Case(0, ((3, 2), (2, 4))), Case(3, ((3, 0), (2, 4))), Case(3, ((0, 2), (2, 4))), Case(2, ((3, 2), (2, 4)), (0,), ())):
        x, factors = double(case, device, generator, left)
        y = call(left)(x, factors)
        for t, g in zip([x, *factors], torch.autograd.grad(y.sum(), [x, *factors]), strict=True):
            assert_same(g, torch.zeros_like(t))


def test_negative_control(device: torch.device, generator: torch.Generator) -> None:
    """gradcheck and the comparison with the reference both fail for a gradient with a lost term."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, f: Tensor) -> Tensor:
            ctx.save_for_backward(x, f)
            return kron_matmul(x, [f, f])

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            _, f = ctx.saved_tensors
            return kron_matmul(dy, [f.mT, f.mT]), torch.zeros_like(f)

    x, (f, _) = double(power(2, 2, 2, 2), device, generator, False)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(Wrong.apply, [x, f], fast_mode=True)
    (good,) = torch.autograd.grad(kron_matmul(x, [f, f]).sum(), f)
    (bad,) = torch.autograd.grad(Wrong.apply(x, f).sum(), f)
    with pytest.raises(AssertionError):
        assert_near(bad, good, scale=GRADIENT_SCALE)
