"""rational_linear: linear of rational, with less kept for the backward pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from rational_cases import VERSIONS
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py import rational
from fastkron_py.rational.api import rational_linear
from fastkron_py.rational.denominators.registry import find_denominator
from fastkron_py.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run: compiled, or interpreted


def arguments(dtype: torch.dtype = torch.float64, version: str = "B", c: int = 12, shared: bool = True) -> list[Tensor]:
    """(x, numerator, denominator, weight, bias), of 3 groups."""
    made = [torch.randn(2, 5, c), torch.randn(1 if shared else 3, 6), torch.randn(3, find_denominator(version).count(4)) * 0.5]
    made += [torch.randn(7, c), torch.randn(7)]
    return [t.to(DEVICE, dtype).requires_grad_() for t in made]


def composed(x: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return linear(rational(x, a, b, **options), weight, bias)


def both(given: list[Tensor], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients of the composition and of the function."""
    found = []
    for function in (composed, rational_linear):
        z = function(*given, **options)
        cotangent = torch.linspace(-1, 1, z.numel()).to(z).reshape(z.shape)
        found.append([z.detach(), *torch.autograd.grad(z, given, cotangent)])
    return found[0], found[1]


def test_equals_the_composition() -> None:
    for version, shared in product(VERSIONS, [True, False]):
        for expected, found in zip(*both(arguments(version=version, shared=shared), version=version), strict=True):
            assert_close(found, expected)


def test_any_rank_and_empty_inputs() -> None:
    for shape in [(12,), (4, 12), (0, 12), (2, 0, 3, 12)]:
        given = [torch.randn(shape, dtype=torch.float64, device=DEVICE, requires_grad=True), *arguments()[1:]]
        for expected, found in zip(*both(given), strict=True):
            assert found.shape == expected.shape
            assert_close(found, expected)


def test_keeps_the_argument_and_not_the_values() -> None:
    given = arguments(torch.float32)
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        rational_linear(*given)
    assert set(kept) == {t.untyped_storage().data_ptr() for t in given[:4]}
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        composed(*given)
    assert len(set(kept)) == 5  # the control: it keeps the values too


@pytest.mark.parametrize("backward_under_autocast", [False, True])
def test_autocast_rounds_the_values_and_the_weight_only(backward_under_autocast: bool) -> None:
    """The same bits as of the composition, and gradients of each argument's dtype."""
    given = arguments(torch.float32)
    found = []
    for function in (composed, rational_linear):
        with torch.autocast(DEVICE, torch.bfloat16):
            z = function(*given)
        assert z.dtype == torch.bfloat16
        with torch.autocast(DEVICE, torch.bfloat16, enabled=backward_under_autocast):
            found.append([z.detach(), *torch.autograd.grad(z.square().sum(), given)])
    for expected, ours in zip(*found, strict=True):
        assert ours.dtype == expected.dtype
        # Sums over rows may be taken in another order: two units in the last place of bfloat16 at most.
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


REFUSED: list[tuple[int, Any, type[Exception], str]] = [
    (0, None, TypeError, "x: expected a torch tensor; got None"),
    (3, [1.0], TypeError, "weight: expected a torch tensor; got list"),
    (4, 1.0, TypeError, "bias: expected a torch tensor or None; got float"),
    (3, torch.zeros(7, 11, dtype=torch.float64, device=DEVICE), ValueError, r"weight: expected shape \[O, 12\]; got shape \(7, 11\)"),
    (4, torch.zeros(6, dtype=torch.float64, device=DEVICE), ValueError, r"bias: expected shape \[7\]; got shape \(6,\)"),
    (3, torch.zeros(7, 12, device=DEVICE), TypeError, "weight: expected dtype torch.float64, as that of x; got torch.float32"),
    (1, torch.zeros(5, 6, dtype=torch.float64, device=DEVICE), ValueError, "denominator: expected as many groups"),
]


def test_bad_input() -> None:
    for index, value, error, message in REFUSED:
        given: list[Any] = arguments()
        given[index] = value
        with pytest.raises(error, match=message):
            rational_linear(*given)
