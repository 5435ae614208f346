"""layer_norm_rational: the rational function of layer normalisation, on both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rational_cases import WITHOUT_NOISE
from torch import Tensor
from torch.nn.functional import layer_norm

from fastkron_py import reference
from fastkron_py.rational.api import layer_norm_rational
from fastkron_py.rational.denominators.registry import find_denominator
from fastkron_py.runtime.backend import backend
from fastkron_py.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run: compiled, or interpreted


def arguments(
    dtype: torch.dtype = torch.float64, version: str = "B", shape: tuple[int, ...] = (2, 5, 24), shared: bool = True
) -> list[Tensor]:
    """(x, weight, bias, numerator, denominator) of 3 groups; denominators of version N keep away from its poles."""
    c = shape[-1]
    denominator = find_denominator(version)
    b = torch.randn(3, denominator.count(4)) * (0.01 if denominator.has_poles else 0.5)
    made = [2 * torch.randn(shape) + 1, torch.randn(c), torch.randn(c), torch.randn(1 if shared else 3, 6), b]
    return [t.to(DEVICE, dtype).requires_grad_() for t in made]


def expected(given: list[Tensor], cotangent: Tensor, version: str) -> list[Tensor]:
    """Result and gradients by the formula in float64."""
    wide = [t.detach().double().requires_grad_() for t in given]
    x, weight, bias, a, b = wide
    y = reference.rational(layer_norm(x, x.shape[-1:], weight, bias, 1e-5), a, b, version=version)
    return [y.detach(), *torch.autograd.grad(y, wide, cotangent.double())]


def found(given: list[Tensor], version: str = "B") -> tuple[list[Tensor], Tensor]:
    y = layer_norm_rational(*given, version=version)
    cotangent = torch.randn(y.shape, dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad(y, given, cotangent)], cotangent


@pytest.mark.sampled(ways=2)  # each version's kernels
@pytest.mark.parametrize("version", WITHOUT_NOISE)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_equals_the_formula(name: str, version: str) -> None:
    for shared in [True, False]:
        given = arguments(version=version, shared=shared)
        with backend(name):
            ours, cotangent = found(given, version)
        for t, want in zip(ours, expected(given, cotangent, version), strict=True):
            # A denominator with poles divides by numbers that come close to zero.
            torch.testing.assert_close(t, want, rtol=1e-9, atol=1e-11 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_in_every_dtype(name: str) -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        given = arguments(dtype)
        with backend(name):
            ours, cotangent = found(given)
        for t, want in zip(ours, expected(given, cotangent, "B"), strict=True):
            assert t.dtype == dtype
            # One rounding of the result; float32 sums of terms of both signs.
            tolerance = 4e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            assert float((t.double() - want).norm() / want.norm()) < tolerance


def test_any_rank_odd_widths_and_empty_inputs() -> None:
    for shape in [(24,), (1, 24), (70, 3), (3, 33), (0, 24), (2, 0, 3, 24)]:
        given = arguments(shape=shape)
        with backend("triton"):
            ours, cotangent = found(given)
        if torch.Size(shape).numel():
            for t, want in zip(ours, expected(given, cotangent, "B"), strict=True):
                assert_close(t, want)
        else:
            assert all(not t.any() for t in ours)
            assert [t.shape for t in ours] == [torch.Size(shape), *[t.shape for t in given]]


def test_rows_without_variance() -> None:
    """eps alone counts there, and in float64 it is float64's."""
    given = arguments()
    with torch.no_grad():
        given[0].copy_(given[0][..., :1] + 1e-3 * given[0])
    with backend("triton"):
        ours, cotangent = found(given)
    for t, want in zip(ours, expected(given, cotangent, "B"), strict=True):
        torch.testing.assert_close(t, want, rtol=1e-10, atol=1e-12 * float(want.abs().max()))


def test_strided_input_and_wide_rows_that_are_composed() -> None:
    with backend("triton"):
        given = arguments()
        given[0] = torch.randn(2, 24, 5, dtype=torch.float64, device=DEVICE).mT.requires_grad_()
        ours, cotangent = found(given)
        for t, want in zip(ours, expected(given, cotangent, "B"), strict=True):
            assert_close(t, want)
        wide = arguments(shape=(2, 2049))
        ours, cotangent = found(wide)
        for t, want in zip(ours, expected(wide, cotangent, "B"), strict=True):
            # Sums of four thousand terms of both signs.
            torch.testing.assert_close(t, want, rtol=1e-11, atol=1e-13 * float(want.abs().max()))


def test_keeps_x_and_two_numbers_a_row() -> None:
    given = arguments(torch.float32, shape=(64, 24))
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer_norm_rational(*given)
    assert sum(kept.values()) == sum(t.untyped_storage().nbytes() for t in given) + 2 * 64 * 4


REFUSED: list[tuple[int, Any, type[Exception], str]] = [
    (0, None, TypeError, "x: expected a torch tensor; got None"),
    (1, None, TypeError, "weight: expected a torch tensor; got None"),
    (2, torch.zeros(23, device=DEVICE), ValueError, r"bias: expected shape \[24\]; got shape \(23,\)"),
    (1, torch.zeros(24, dtype=torch.int64, device=DEVICE), TypeError, "weight: expected a floating dtype; got torch.int64"),
    (3, torch.zeros(5, 6, dtype=torch.float64, device=DEVICE), ValueError, "denominator: expected as many groups"),
]


def test_bad_input() -> None:
    for index, value, error, message in REFUSED:
        given: list[Any] = arguments()
        given[index] = value
        with pytest.raises(error, match=message):
            layer_norm_rational(*given)
    given = arguments()
    assert torch.equal(layer_norm_rational(*given, eps=np.float32(0.5)), layer_norm_rational(*given, eps=0.5))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="eps: expected a number; got str"):
        layer_norm_rational(*arguments(), eps="small")  # type: ignore[arg-type]
