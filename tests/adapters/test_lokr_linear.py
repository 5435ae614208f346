"""`lokr_linear` against the float64 definition: values, gradients, transforms, compilers, and what is never built."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from adapter_cases import CASES, LoKrCase, case_id, leaves_of, lokr_problem, mapped
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fastkron_py import lokr_linear, reference
from fastkron_py.nn import LoKrLinear
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
ALL = pytest.mark.parametrize("case", CASES, ids=case_id)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
# A pair that is multiplied out, or two products, round at most twice more than the two factors' product.
STEPS = 4


def expected(x: Tensor, w1: Any, w2: Any, base: Tensor | None, scale: Any) -> Tensor:
    wide = torch.complex128 if x.is_complex() else torch.float64
    w1, w2 = (mapped(lambda t: t.to(wide), w) for w in (w1, w2))
    return reference.lokr_linear(x.to(wide), w1, w2, base=None if base is None else base.to(wide), scale=scale)


def magnitude(x: Tensor, w1: Any, w2: Any, base: Tensor) -> Tensor:
    """The sum of the absolute values that add up to each element."""
    w1, w2 = (mapped(lambda t: t.abs(), w) for w in (w1, w2))
    return expected(x.abs(), w1, w2, base.abs(), 1.0).abs()


@ALL
def test_values(case: LoKrCase, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for dtype in DTYPES:
        x, w1, w2, base = lokr_problem(case, dtype, device, generator)
        got = lokr_linear(x, w1, w2, base=base, scale=0.5)
        assert got.is_contiguous()
        options: dict[str, Any] = {"magnitude": magnitude(x, w1, w2, base), "steps": STEPS, "rms_tol": None}
        assert_close(got, expected(x, w1, w2, base, 0.5), **options)
        assert_close(lokr_linear(x, w1, w2), expected(x, w1, w2, None, 1.0), **options)


@ALL
def test_gradients_of_both_orders(case: LoKrCase, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    small = case._replace(rows=case.rows if len(case.rows) != 1 else (2,))
    x, w1, w2, base = lokr_problem(small, torch.float64, device, generator)
    scale = torch.tensor(0.7, dtype=torch.float64, device=device)
    inputs = [t.requires_grad_() for t in leaves_of(x, w1, w2, base, scale)]

    def function(*given: Tensor) -> Tensor:
        x, *rest, base, scale = given
        first = rest.pop(0) if case.rank1 is None else (rest.pop(0), rest.pop(0))
        second = rest[0] if case.rank2 is None else tuple(rest)
        return lokr_linear(x, first, second, base=base, scale=scale)

    # fast_mode compares along random directions: what interpreted kernels have time for. Gradients that are None, which take as
    # long again and never get to a kernel, meet them in one case.
    options = {"fast_mode": True, "check_undefined_grad": backend_name == "torch" or case == CASES[0]}
    assert torch.autograd.gradcheck(function, inputs, **options)
    assert torch.autograd.gradgradcheck(function, inputs, **options)


@ALL
def test_float32_factors_beside_a_half_x(case: LoKrCase, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """As trainers keep them: results in x's dtype, gradients of the factors in float32."""
    for dtype in [torch.float16, torch.bfloat16]:
        x, w1, w2, base = lokr_problem(case, dtype, device, generator, factor_dtype=torch.float32)
        leaves = [t.requires_grad_() for t in leaves_of(x, w1, w2, base)]
        got = lokr_linear(x, w1, w2, base=base, scale=0.5)
        # One more rounding: of the factors.
        assert_close(got, expected(x, w1, w2, base, 0.5).detach(), magnitude=magnitude(x, w1, w2, base).detach(), steps=STEPS + 1)
        dy = torch.randn(got.shape, device=device).to(dtype)
        doubles = [t.detach().double().requires_grad_() for t in leaves]
        first = doubles[1] if case.rank1 is None else (doubles[1], doubles[2])
        second = doubles[-2] if case.rank2 is None else (doubles[-3], doubles[-2])
        want = reference.lokr_linear(doubles[0], first, second, base=doubles[-1], scale=0.5)
        for g, w, leaf in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, doubles, dy.double()), leaves, strict=True):
            assert g.dtype == leaf.dtype
            # Sums may cancel, so the error is measured against the largest element, and one element may cancel as a whole; each of the
            # products before rounds once.
            assert_close(g.to(dtype), w, steps=3 * STEPS, rms_tol=math.inf if w.numel() == 1 else None)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_float32_factors_are_not_rounded(
    dtype: torch.dtype, autocast: bool, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:
    """Sums in float32 are returned as they are: in a half dtype they would differ from float64 by a third of its eps or so."""
    x, w1, w2, base = lokr_problem(LoKrCase((64,), (4, 4), (16, 16)), dtype, device, generator)
    dy = torch.randn(base.shape, generator=generator).to(device, dtype)
    bound = torch.finfo(dtype).eps / 16

    def gradients(factor_dtype: torch.dtype) -> list[Tensor]:  # of factors that the half dtype holds
        first, second = (w.to(factor_dtype).requires_grad_() for w in (w1, w2))
        with torch.autocast(device.type, dtype, enabled=autocast):
            return list(torch.autograd.grad(lokr_linear(x, first, second, base=base, scale=0.5), [first, second], dy))

    leaves = [w.double().requires_grad_() for w in (w1, w2)]
    want = torch.autograd.grad(reference.lokr_linear(x.double(), *leaves, scale=0.5), leaves, dy.double())
    for got, control, w in zip(gradients(torch.float32), gradients(dtype), want, strict=True):
        assert got.dtype == torch.float32
        assert relative(got, w) < bound
        assert relative(control, w) > bound


def test_second_order_of_float32_factors_beside_a_half_x(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, w1, w2, base = lokr_problem(LoKrCase((6,), (2, 3), (4, 5)), torch.float16, device, generator, factor_dtype=torch.float32)

    def second(dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(t.dtype if dtype is None else dtype).requires_grad_() for t in (x, w1, w2)]
        linear = lokr_linear if dtype is None else reference.lokr_linear
        y = linear(*leaves, base=base if dtype is None else base.to(dtype))
        first = torch.autograd.grad(y.square().sum() / 8, leaves, create_graph=True)
        found = torch.autograd.grad(sum(g.square().sum() for g in first) / 8, leaves)
        assert all(g.dtype == leaf.dtype for g, leaf in zip(found, leaves, strict=True))
        return list(found)

    for got, want in zip(second(None), second(torch.float64), strict=True):
        # Several roundings to float16 follow one another, and none of them is amplified.
        assert relative(got, want) < 8 * torch.finfo(torch.float16).eps


def test_the_operators_take_float32_factors_beside_a_half_x(device: torch.device, generator: torch.Generator) -> None:
    for left in [False, True]:
        x, w1, w2, _ = lokr_problem(LoKrCase((6,), (2, 3), (4, 5)), torch.bfloat16, device, generator, factor_dtype=torch.float32)
        x = (x.mT if left else x).requires_grad_()
        factors = [w.requires_grad_() if left else w.mT.detach().requires_grad_() for w in (w1, w2)]
        torch.library.opcheck(torch.ops.fastkron.kron_matmul, (x, factors, None, 0.5, 0.0, None, "", left))


def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    for case in [CASES[0], CASES[3]]:
        x, w1, w2, base = lokr_problem(case, torch.float32, device, generator)
        leaves = [t.requires_grad_() for t in leaves_of(x, w1, w2, base)]
        with torch.autocast(device.type, torch.bfloat16):
            got = lokr_linear(x, w1, w2, base=base, scale=0.5)
        assert got.dtype == torch.bfloat16
        assert_close(got, expected(x, w1, w2, base, 0.5).detach(), magnitude=magnitude(x, w1, w2, base).detach(), steps=STEPS + 2)
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(got.sum(), leaves))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", [CASES[3], CASES[4]], ids=case_id)
def test_compiles_to_one_graph(case: LoKrCase, dynamic: bool, device: torch.device, generator: torch.Generator) -> None:
    torch._dynamo.reset()
    x, w1, w2, base = lokr_problem(case, torch.float64, device, generator)
    leaves = [t.requires_grad_() for t in leaves_of(x, w1, w2, base)]

    def loss(x: Tensor, w1: Any, w2: Any, base: Tensor) -> Tensor:
        return lokr_linear(x.sin(), w1, w2, base=base, scale=0.5).square().sum()

    got = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x, w1, w2, base)
    want = loss(x, w1, w2, base)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(g, w)


def test_vmap_over_adapters_and_over_x(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for case in CASES[:4]:
        problems = [lokr_problem(case, torch.float64, device, generator) for _ in range(3)]
        stacked: list[Any] = []
        for parts in zip(*problems, strict=True):
            stacked.append(tuple(map(torch.stack, zip(*parts, strict=True))) if isinstance(parts[0], tuple) else torch.stack(parts))

        def call(x: Tensor, w1: Any, w2: Any, base: Tensor) -> Tensor:
            return lokr_linear(x, w1, w2, base=base, scale=2.0)

        _, w1, w2, _ = problems[0]
        torch.testing.assert_close(vmap(call)(*stacked), torch.stack([call(*p) for p in problems]))
        got = vmap(call, in_dims=(0, None, None, 0))(stacked[0], w1, w2, stacked[3])
        torch.testing.assert_close(got, torch.stack([call(p[0], w1, w2, p[3]) for p in problems]))


def test_gradients_of_each_sample(device: torch.device) -> None:
    """torch.func through a layer: as differential privacy and meta-learning call it."""
    layer = LoKrLinear(12, 10, rank=1, factor=2, device=device, dtype=torch.float64)
    torch.nn.init.normal_(layer.lokr_w2_b)
    parameters = {n: p for n, p in layer.named_parameters() if n.startswith("lokr")}
    x = torch.randn(3, 12, dtype=torch.float64, device=device)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x,)).square().sum()

    got = vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        want = torch.func.grad(loss)(parameters, x[i])
        for name, g in got.items():
            torch.testing.assert_close(g[i], want[name])


class _Largest(TorchDispatchMode):
    """The most elements that a tensor had which an operation made; views count for nothing."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else [found]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return found


def test_no_tensor_of_the_weights_size(generator: torch.Generator) -> None:
    for rank in [None, 4]:
        case = LoKrCase((3,), (8, 8), (16, 16), rank2=rank)
        leaves = [t.requires_grad_() for t in leaves_of(*lokr_problem(case, torch.float32, torch.device("cpu"), generator))]
        x, w1, *w2, base = leaves
        with _Largest() as seen:
            y = lokr_linear(x, w1, w2[0] if rank is None else tuple(w2), base=base)
            torch.autograd.grad(y.sum(), leaves)
        assert 128 * 3 <= seen.elements < 128 * 128 / 4
        with _Largest() as seen:  # the control
            reference.lokr_linear(x, w1, w2[0] if rank is None else tuple(w2), base=base)
        assert seen.elements >= 128 * 128


def test_strides(device: torch.device, generator: torch.Generator) -> None:
    """Columns, and every other element."""
    for case in CASES:
        x, w1, w2, base = lokr_problem(case, torch.float64, device, generator)
        want = lokr_linear(x, w1, w2, base=base)
        for change in (lambda t: t.mT.contiguous().mT, lambda t: t.repeat_interleave(2, -1)[..., ::2]):
            changed = [t if t.ndim < 2 else change(t) for t in (x, base)]
            torch.testing.assert_close(lokr_linear(changed[0], mapped(change, w1), mapped(change, w2), base=changed[1]), want)


def test_no_tokens(device: torch.device, generator: torch.Generator) -> None:
    for case in [LoKrCase((0,), (2, 3), (4, 5)), LoKrCase((2, 0), (2, 3), (4, 5), rank2=1)]:
        x, w1, w2, base = lokr_problem(case, torch.float32, device, generator)
        leaves = [t.requires_grad_() for t in leaves_of(x, w1, w2, base)]
        y = lokr_linear(x, w1, w2, base=base)
        assert y.shape == base.shape
        assert all(not g.count_nonzero() for g in torch.autograd.grad(y.sum(), leaves))


def test_scales(device: torch.device, generator: torch.Generator) -> None:
    for scale in [0.5, np.float32(0.5), torch.tensor(0.5), 2]:
        x, w1, w2, base = lokr_problem(CASES[1], torch.float32, device, generator)
        got = lokr_linear(x, w1, w2, base=base, scale=scale)
        assert_close(got, expected(x, w1, w2, base, float(scale)), magnitude=magnitude(x, w1, w2, base))
