"""`lokr_conv` against a convolution with the whole kernel, in every form of the second factor."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastkron_py.adapters.conv import Kernel, Window, lokr_conv
from fastkron_py.adapters.factor import Factor
from fastkron_py.testing import assert_close

CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}
FORMS = ["whole", "left", "tucker", "tucker_of_high_rank"]
OUT1, IN1, OUT2, IN2 = 3, 2, 5, 4


def kernel(form: str, window: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Kernel:
    rank = 7 if form == "tucker_of_high_rank" else 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    if form == "whole":
        return Kernel(draw(OUT2, IN2, *window))
    if form == "left":
        return Kernel(draw(rank, IN2, *window), draw(OUT2, rank))
    return Kernel(draw(rank, rank, *window), draw(OUT2, rank), draw(rank, IN2))


def whole(w1: Tensor, w2: Kernel) -> Tensor:
    """The kernel of the whole convolution, by definition."""
    core = w2.core.double()
    if w2.right is not None:
        core = torch.einsum("rs...,si->ri...", core, w2.right.double())
    if w2.left is not None:
        core = torch.einsum("or,ri...->oi...", w2.left.double(), core)
    pairs = torch.einsum("ac,bd...->abcd...", w1.double(), core)
    return pairs.reshape(OUT1 * OUT2, IN1 * IN2, *core.shape[2:])


WINDOWS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "strided": (2, {"padding": 1}),
    "same": (1, {"padding": "same"}),
    "dilated": (1, {"dilation": 2, "padding": 2}),
}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_values(dims: int, form: str, generator: torch.Generator) -> None:
    for window, dtype, size in product(WINDOWS, [torch.float64, torch.float32, torch.bfloat16], [1, 3]):
        stride, more = WINDOWS[window]
        padding, dilation = more.get("padding", 0), more.get("dilation", 1)
        moves = Window((stride,) * dims, padding if padding == "same" else (padding,) * dims, (dilation,) * dims)
        w1, w2 = torch.randn(OUT1, IN1, generator=generator).to(dtype), kernel(form, (size,) * dims, dtype, generator)
        x = torch.randn(2, IN1 * IN2, *(6,) * dims, generator=generator).to(dtype)
        want = 0.5 * CONVOLUTIONS[dims](x.double(), whole(w1, w2), None, *moves)
        base = torch.randn(want.shape, generator=generator).to(dtype)
        scale = 4.0 if dtype == torch.bfloat16 else 1.0  # a convolution of torch's rounds its sums to the half type
        steps = int(4 * scale)
        case = f"{window}, {size}, {dtype}"
        assert_close(lokr_conv(x, Factor(w1), w2, moves, base=base, scale=0.5), base.double() + want, steps=steps, name=case)
        assert_close(lokr_conv(x[0], Factor(w1), w2, moves, scale=0.5), want[0], steps=steps)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_both_orders(size: int, form: str, generator: torch.Generator) -> None:
    w2 = kernel(form, (size, size), torch.float64, generator)
    given = [torch.randn(1, IN1 * IN2, 3, 3), torch.randn(OUT1, IN1), *[t for t in w2 if t is not None], torch.tensor(0.5)]
    inputs = [t.double().requires_grad_() for t in given]

    def function(x: Tensor, w1: Tensor, *rest: Tensor) -> Tensor:
        return lokr_conv(x, Factor(w1), Kernel(*rest[:-1]), Window((1, 1), (0, 0), (1, 1)), scale=rest[-1])

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.ones(1, 9, 6, 6)}, r"^x: expected 3 or 4 dimensions and 8 = 2 \* 4 channels; got shape \(1, 9, 6, 6\)$"),
    ({"base": torch.ones(1, 15, 6, 6)}, r"^base: expected the result's shape \(1, 15, 4, 4\); got shape \(1, 15, 6, 6\)$"),
    ({"w2": Kernel(torch.ones(5, 4))}, r"^w2: expected a kernel .* got shape \(5, 4\)$"),
    ({"w2": Kernel(torch.ones(2, 4, 3, 3), torch.ones(5, 3))}, r"^w2's left matrix: expected .* rank 2; got shape \(5, 3\)$"),
]


def test_refused() -> None:
    for change, message in REFUSED:
        given: dict[str, Any] = {"x": torch.ones(1, 8, 6, 6), "w2": Kernel(torch.ones(5, 4, 3, 3)), "base": None} | change
        with pytest.raises(ValueError, match=message):
            lokr_conv(given["x"], Factor(torch.ones(3, 2)), given["w2"], Window((1, 1), (0, 0), (1, 1)), base=given["base"])
