"""LoKr layers: sizes, results, merging, dropout, states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import Refusal, assert_refused
from torch import Tensor, nn

from fastkron_py.nn import LoKrConv2d, LoKrLinear
from fastkron_py.testing import assert_close

Layer = LoKrLinear | LoKrConv2d
LAYERS: dict[str, Callable[..., Layer]] = {
    "linear": lambda **kw: LoKrLinear(24, 30, 2, **kw),
    "linear_whole": lambda **kw: LoKrLinear(24, 30, 8, factor=4, **kw),
    "linear_both": lambda **kw: LoKrLinear(64, 64, 2, decompose_both=True, **kw),
    "linear_prime": lambda **kw: LoKrLinear(13, 7, 2, bias=False, **kw),
    "conv_1x1": lambda **kw: LoKrConv2d(24, 30, 1, 2, **kw),
    "conv": lambda **kw: LoKrConv2d(24, 30, 3, 2, padding=1, **kw),
    "conv_tucker": lambda **kw: LoKrConv2d(24, 30, (3, 2), 2, use_tucker=True, stride=2, **kw),
    "conv_whole": lambda **kw: LoKrConv2d(24, 30, 3, 8, factor=4, **kw),
}
ALL = pytest.mark.parametrize("name", LAYERS)


def made(name: str, **options: Any) -> Layer:
    """A layer whose adapter is not 0."""
    layer = LAYERS[name](**options)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


def operand(layer: Layer, dtype: torch.dtype = torch.float64) -> Tensor:
    size = (5, 6) if isinstance(layer, LoKrConv2d) else ()
    inputs = layer.base_layer.weight.shape[1]  # type: ignore[union-attr, index]
    return torch.randn(3, inputs, *size).to(dtype) if size else torch.randn(2, 3, inputs).to(dtype)


def weight_of(layer: Layer) -> Tensor:
    """The adapter's weight, by definition."""
    w1, w2 = layer.first_factor().expanded().left.double(), layer.second_factor().expanded().double()
    pairs = torch.einsum("ac,bd...->abcd...", w1, w2)
    return layer.scale * pairs.reshape(layer.base_layer.weight.shape)  # type: ignore[union-attr, arg-type]


def whole(layer: Layer) -> nn.Module:
    """The base layer with the adapter in its weight, in float64."""
    base: Any = copy.deepcopy(layer.base_layer).double()
    base.weight.data += weight_of(layer)
    return base  # type: ignore[no-any-return]


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values(name: str, dtype: torch.dtype) -> None:
    layer = made(name, dtype=dtype, alpha=3.0)
    x = operand(layer, dtype)
    factors = [p for n, p in layer.named_parameters() if n.startswith("lokr")]
    assert {p.dtype for p in factors} == {torch.float32 if dtype == torch.bfloat16 else dtype}
    # The base layer's result, the factors and the two products round.
    assert_close(layer(x), whole(layer)(x.double()).detach(), steps=8 if dtype == torch.bfloat16 else 4)


@ALL
def test_a_new_adapter_is_zero_and_learns(name: str) -> None:
    layer = LAYERS[name](dtype=torch.float64)
    x = operand(layer)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer(x).square().sum().backward()
    trained = {n for n, p in layer.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in layer.named_parameters() if n.startswith("lokr")}
    last: Any = layer.lokr_w2 if layer.lokr_w2 is not None else layer.lokr_w2_b
    assert last.grad.count_nonzero()


@ALL
def test_merging(name: str) -> None:
    layer = made(name, dtype=torch.float64)
    x, before = operand(layer), layer.base_layer.weight.detach().clone()  # type: ignore[union-attr, operator]
    want = layer(x)
    layer.merge()
    layer.merge()
    assert layer.is_merged
    assert_close(layer.base_layer.weight, before + weight_of(layer), steps=4)
    assert_close(layer(x), want.detach(), steps=4)
    layer.unmerge()
    layer.unmerge()
    assert_close(layer.base_layer.weight, before, steps=4)
    assert_close(layer(x), want.detach(), steps=4)


def test_merging_a_half_weight_rounds_once() -> None:
    layer = made("linear", dtype=torch.bfloat16)
    want = layer.base_layer.weight.double() + weight_of(layer)  # type: ignore[union-attr, operator]
    layer.merge()
    assert_close(layer.base_layer.weight, want.detach())


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_dropout(name: str) -> None:
    """Rates of 0 and 1 are certain; a rate between drops rows, and only while training."""
    layer = made(name, dtype=torch.float64)
    x = operand(layer)
    base, both = layer.base_layer(x), layer(x)
    for rate in ("dropout", "rank_dropout", "module_dropout"):
        sure = made(name, dtype=torch.float64, **{rate: 1.0})
        sure.load_state_dict(layer.state_dict())
        torch.testing.assert_close(sure(x), base)
        torch.testing.assert_close(sure.eval()(x), both)
    some = made(name, dtype=torch.float64, rank_dropout=0.5, rank_dropout_scale=True)
    some.load_state_dict(layer.state_dict())
    ratio = ((some(x) - base) / (both - base)).movedim(1 if name == "conv" else -1, 0).flatten(1)
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-6, atol=1e-6)
    kept = ratio[:, 0] > 0.5
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(ratio[kept, 0], torch.full_like(ratio[kept, 0], len(kept) / int(kept.sum())), rtol=1e-6, atol=1e-6)


@ALL
@pytest.mark.parametrize("style", ["lycoris", "peft"])
def test_adapter_states(name: str, style: str) -> None:
    layer, other = made(name, alpha=3.0, dtype=torch.float64), made(name, alpha=3.0, dtype=torch.float64)
    other.base_layer.load_state_dict(layer.base_layer.state_dict())
    state = layer.adapter_state_dict(style)
    assert ("alpha" in state) == (style == "lycoris")
    other.load_adapter_state_dict({f"{k}.default" if style == "peft" and k != "alpha" else k: v for k, v in state.items()})
    x = operand(layer)
    torch.testing.assert_close(other(x), layer(x))


@ALL
def test_states_and_copies(name: str) -> None:
    layer, other = made(name, alpha=3.0, dtype=torch.float64), made(name, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    x = operand(layer)
    assert torch.equal(other(x), layer(x))
    assert other.scale == layer.scale == 3.0 / layer.options.rank
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_from_layers() -> None:
    linear, conv = nn.Linear(24, 30).eval(), nn.Conv2d(24, 30, 3)
    layers: list[Layer] = [LoKrLinear.from_linear(linear, 2, alpha=4), LoKrConv2d.from_conv(conv, 2, use_tucker=True)]
    for layer, base in zip(layers, (linear, conv), strict=True):
        assert layer.base_layer is base
        assert layer.training == base.training
        assert not any(p.requires_grad for p in base.parameters())


@pytest.mark.parametrize("device", ["meta"])
def test_on_the_meta_device(device: str) -> None:
    layer = LoKrLinear(24, 30, 2, device=device)
    assert layer(torch.ones(3, 24, device=device)).shape == (3, 30)


REFUSED: dict[str, Refusal] = {
    "in_features": (lambda: LoKrLinear(0, 3, 1), ValueError, "in_features: expected a positive integer; got 0"),
    "rank": (lambda: LoKrLinear(3, 3, 0), ValueError, "rank: expected a positive integer; got 0"),
    "factor": (lambda: LoKrLinear(3, 3, 1, 0), ValueError, "factor: expected -1 or at least 1; got 0"),
    "decompose_both": (lambda: LoKrLinear(3, 3, 1, -1, 1), TypeError, "decompose_both: expected True or False; got int"),
    "alpha": (lambda: LoKrLinear(3, 3, 1, alpha=float("nan")), ValueError, "alpha: expected a finite number; got nan"),
    "alpha_tensor": (lambda: LoKrLinear(3, 3, 1, alpha=torch.ones(())), TypeError, "alpha: expected a number or None; got torch.Tensor"),
    "dropout": (lambda: LoKrLinear(3, 3, 1, dropout=2.0), ValueError, "dropout: expected a probability; got 2.0"),
    "layer": (
        lambda: LoKrLinear.from_linear(nn.Conv2d(3, 3, 1), 1),
        TypeError,
        "layer: expected an nn.Linear; got torch.nn.modules.conv.Conv2d",
    ),
    "conv_layer": (
        lambda: LoKrConv2d.from_conv(nn.Linear(3, 3), 1),
        TypeError,
        "layer: expected an nn.Conv2d; got torch.nn.modules.linear.Linear",
    ),
    "groups": (
        lambda: LoKrConv2d.from_conv(nn.Conv2d(4, 4, 1, groups=2), 1),
        ValueError,
        "layer: expected a convolution of one group; got groups=2",
    ),
    "padding_mode": (
        lambda: LoKrConv2d.from_conv(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), 1),
        ValueError,
        "layer: expected padding_mode 'zeros'; got 'circular'",
    ),
    "style": (
        lambda: LoKrLinear(3, 3, 1).adapter_state_dict("kohya"),
        ValueError,
        "style: expected one of lycoris, peft; got 'kohya'",
    ),
    "state": (
        lambda: LoKrLinear(24, 30, 2).load_adapter_state_dict({"lokr_w1": torch.ones(5, 4)}),
        ValueError,
        "state: expected lokr_w1, lokr_w2_a, lokr_w2_b; got lokr_w1",
    ),
    "state_of_two": (
        lambda: LoKrLinear(4, 4, 2).load_adapter_state_dict({"lokr_w1.a": torch.ones(2, 2), "lokr_w1.b": torch.ones(2, 2)}),
        ValueError,
        "state: expected one adapter; got lokr_w1 twice",
    ),
    "state_shape": (
        lambda: LoKrLinear(4, 4, 2).load_adapter_state_dict({"lokr_w1": torch.ones(2, 3), "lokr_w2": torch.ones(2, 2)}),
        ValueError,
        "state['lokr_w1']: expected shape (2, 2); got shape (2, 3)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert_refused(*REFUSED[name])


def test_without_gradients_the_base_layers_result_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made("linear"), torch.randn(4, 24)
    expected, seen, forward = layer(x).detach(), [], nn.Linear.forward

    def watched(self: nn.Linear, x: Tensor) -> Tensor:
        seen.append(forward(self, x))
        return seen[-1]

    monkeypatch.setattr(nn.Linear, "forward", watched)
    with torch.no_grad():
        y = layer(x)
        assert_close(y, expected.double(), steps=2)
        assert y is seen[-1]
        layer.base_layer.register_forward_hook(lambda *_: None)  # which may keep it
        assert layer(x) is not seen[-1]
        assert_close(seen[-1], forward(layer.base_layer, x).double(), steps=1)  # type: ignore[arg-type]
    assert layer(x) is not seen[-1]  # autograd may want it
