"""`lokr_linear` against the float64 definition: values, gradients, what is never built, and which pairs are multiplied out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from adapter_cases import CASES, LoKrCase, case_id, leaves_of, lokr_problem, mapped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastkron_py import lokr_linear, reference
from fastkron_py.adapters.plan import CPU_COSTS, GPU_COSTS, FactorSize, Plan, best_plan, split_size
from fastkron_py.testing import assert_close

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
        # Torch's products on GPUs round twice what lies between them to the half dtype.
        rounds_between = backend_name == "torch" and device.type == "cuda"
        assert relative(got, w) < (8 * bound if rounds_between else bound)
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


def test_scales(device: torch.device, generator: torch.Generator) -> None:
    for scale in [0.5, np.float32(0.5), torch.tensor(0.5), 2]:
        x, w1, w2, base = lokr_problem(CASES[1], torch.float32, device, generator)
        got = lokr_linear(x, w1, w2, base=base, scale=scale)
        assert_close(got, expected(x, w1, w2, base, float(scale)), magnitude=magnitude(x, w1, w2, base))


# ---- plans ----------------------------------------------------------------------------------------


def densities(w1: FactorSize, w2: FactorSize, tokens: int, **changed: float) -> list[bool]:
    """Whether w2 is multiplied out, on a CPU and on a GPU."""
    return [best_plan(w1, w2, tokens, costs._replace(**changed)).w2_is_dense for costs in (CPU_COSTS, GPU_COSTS)]


def test_matrices_are_matrices() -> None:
    for costs in (CPU_COSTS, GPU_COSTS):
        assert best_plan(FactorSize(8, 8), FactorSize(512, 512), 4096, costs) == Plan(True, True)


def test_which_pairs_stay_pairs() -> None:
    # Of rank 32 in 512 x 512: an eighth of the work, and a sixteenth of the operand between.
    for tokens in (1, 64, 4096):
        assert densities(FactorSize(8, 8), FactorSize(512, 512, 32), tokens) == [False, False]
    # A large matrix is not built for few tokens.
    for tokens in (1, 64):
        assert densities(FactorSize(2, 2), FactorSize(4096, 4096, 32), tokens) == [False, False]
    # Few tokens take one call on a GPU: the second product would take longer than the work that it saves; on a CPU work is dearer.
    assert densities(FactorSize(8, 8), FactorSize(512, 512, 32), 512) == [False, True]
    # A high rank is multiplied out for many tokens. Of one the work is too little; on a GPU a second call takes longer than all of it.
    assert densities(FactorSize(8, 8), FactorSize(128, 512, 500), 4096) == [True, True]
    assert densities(FactorSize(8, 8), FactorSize(128, 512, 100), 1) == [False, True]


def test_a_first_factor_of_low_rank() -> None:
    """Of rank 2 in 8 x 8 it leaves w2 a quarter of the work; of rank 8 it would only read x once more."""
    w1, w2 = FactorSize(8, 8, 2), FactorSize(512, 512)
    for costs in (CPU_COSTS, GPU_COSTS):
        assert best_plan(w1, w2, 4096, costs) == Plan(False, True)
        assert best_plan(w1._replace(rank=8), w2, 4096, costs) == Plan(True, True)


def test_sizes() -> None:
    for size, factor, expected in [
        (128, -1, (8, 16)),
        (127, -1, (1, 127)),
        (360, -1, (18, 20)),
        (360, 16, (15, 24)),
        (250, 8, (5, 50)),
        (1024, 16, (16, 64)),
        (4, 4, (1, 4)),
        (6, 100, (2, 3)),
        (1, -1, (1, 1)),
    ]:
        assert split_size(size, factor) == expected
