"""LoKr layers: sizes, results, merging, dropout, states."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusals import Refusal, assert_all_refused, value, wrong_type
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
    w1, w2 = layer.adapter().w1.expanded().left.double(), layer.adapter().w2.expanded().double()
    pairs = torch.einsum("ac,bd...->abcd...", w1, w2)
    return layer.scale * pairs.reshape(layer.base_layer.weight.shape)  # type: ignore[union-attr, arg-type]


def whole(layer: Layer) -> nn.Module:
    """The base layer with the adapter in its weight, in float64."""
    base: Any = copy.deepcopy(layer.base_layer).double()
    base.weight.data += weight_of(layer)
    return base  # type: ignore[no-any-return]


@ALL
def test_values(name: str) -> None:
    for dtype in [torch.float64, torch.float32, torch.bfloat16]:
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


def _step(layer: Layer) -> None:
    for p in layer.parameters():
        if p.requires_grad:
            p.data.add_(torch.randn_like(p))


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "optimiser step": _step,
    "alpha": lambda layer: layer.alpha.fill_(70),
    "half": lambda layer: layer.half(),
    "double": lambda layer: layer.double(),
    "copy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "state": lambda layer: layer.load_state_dict(layer.state_dict()) and None,
}


@pytest.mark.parametrize("name", ["linear", "linear_both", "conv_tucker"])
def test_unmerging_takes_out_what_was_merged(name: str) -> None:
    for change in CHANGES:
        layer = made(name, alpha=1e5)  # which float16 does not hold
        layer.lokr_w2_b.data.mul_(1e-4)  # type: ignore[union-attr]
        before = layer.base_layer.weight.detach().double().clone()  # type: ignore[union-attr, operator]
        layer.merge()
        merged = layer.base_layer.weight.detach().double().clone()  # type: ignore[union-attr, operator]
        changed = CHANGES[change](layer)
        layer = changed if isinstance(changed, nn.Module) else layer
        assert layer.is_merged
        assert layer.alpha == (70 if change == "alpha" else 1e5)
        layer.unmerge()
        assert not layer.is_merged
        weight: Any = layer.base_layer.weight
        eps = torch.finfo(torch.float16 if change == "half" else torch.float32).eps
        # Two sums are rounded, each of the size of the merged weight at most.
        torch.testing.assert_close(weight.detach().double(), before, rtol=0, atol=4 * eps * float(merged.abs().max()))
        assert (merged - before).abs().max() > 10 * eps * float(merged.abs().max())


@ALL
def test_merged_states(name: str) -> None:
    """One loads into a merged layer, which then unmerges as the first; one of the other kind, or a part of one, is rejected."""
    layer, other = made(name, dtype=torch.float64), made(name, dtype=torch.float64)
    x, plain = operand(layer), {k: t.clone() for k, t in layer.state_dict().items()}
    want = layer(x).detach()
    layer.merge()
    state = layer.state_dict()
    kept = other.base_layer.weight.detach().clone()  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"_extra_state'\]: expected a state of a LoKr\w+ with is_merged=False; got is_merged=True$"):
        other.load_state_dict(state)
    assert torch.equal(other.base_layer.weight, kept)  # type: ignore[arg-type]
    other.merge()
    for given in (plain, {k: t for k, t in plain.items() if k != "_extra_state"}, {"base_layer.weight": plain["base_layer.weight"]}):
        with pytest.raises(ValueError, match=r"with is_merged=True; got is_merged=False$"):
            other.load_state_dict(given, strict=False)
    nn.ModuleDict({"other": other, "more": nn.Linear(1, 1)}).load_state_dict({"more.bias": torch.ones(1)}, strict=False)
    other.load_state_dict(state)
    assert_close(other(x), want, steps=4)
    other.unmerge()
    assert_close(other.base_layer.weight, plain["base_layer.weight"], steps=4)
    assert_close(other(x), want, steps=4)
    other.load_state_dict({k: t for k, t in plain.items() if k != "_extra_state"})  # of an earlier version
    assert_close(other(x), want)


def test_integers_of_numpy() -> None:
    for layer in (LoKrLinear(12, 10, np.int64(2), np.int64(2)), LoKrConv2d(4, 6, 3, np.int64(2))):  # type: ignore[arg-type]
        copy.deepcopy(layer).load_state_dict(layer.state_dict())
        assert layer.configuration() == {"rank": 2, "is_merged": False}


def test_a_state_of_another_rank_is_rejected() -> None:
    """Two whole factors have the same shapes for every rank, and alpha is divided by it."""
    layer = LoKrLinear(24, 30, 16, factor=4)
    with pytest.raises(ValueError, match=r"with rank=16; got rank=8$"):
        layer.load_state_dict(made("linear_whole").state_dict())


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_alpha_is_followed_and_never_rounded(name: str) -> None:
    layer, x = made(name, alpha=1e5, dtype=torch.float64), None
    x = operand(layer)
    other = copy.deepcopy(layer).half()
    assert other.alpha.dtype == torch.float32
    assert other.scale == layer.scale == 5e4
    layer.alpha.fill_(3)
    want = whole(layer)(x).detach()
    assert layer.scale == 1.5
    assert_close(layer(x), want, steps=4)
    again = made(name, dtype=torch.float64)
    again.load_state_dict(layer.state_dict())
    assert_close(torch.compile(again, backend="aot_eager", fullgraph=True)(x), want, steps=4)
    assert_close(torch.func.functional_call(again, layer.state_dict() | {"alpha": torch.tensor(3.0)}, x), want, steps=4)


def test_compiled_layers_see_that_they_were_merged() -> None:
    layer = made("linear", dtype=torch.float64)
    x = operand(layer)
    want, call = layer(x).detach(), torch.compile(layer, backend="aot_eager", fullgraph=True)
    for change in (lambda: None, layer.merge, layer.unmerge):
        change()
        assert_close(call(x), want, steps=8)


# ---- sums and decomposed weights ------------------------------------------------------------------

OTHERS: dict[str, Callable[..., Layer]] = {
    "terms": lambda **kw: LoKrLinear(24, 30, 2, terms=3, **kw),
    "terms_both": lambda **kw: LoKrLinear(64, 64, 2, decompose_both=True, terms=2, **kw),
    "linear_outputs": lambda **kw: LoKrLinear(24, 30, 2, weight_decompose=True, **kw),
    "linear_outputs_alone": lambda **kw: LoKrLinear(24, 30, 2, weight_decompose=True, bias=False, **kw),
    "linear_inputs": lambda **kw: LoKrLinear(24, 30, 2, weight_decompose=True, wd_on_out=False, **kw),
    "conv_outputs": lambda **kw: LoKrConv2d(24, 30, 3, 2, padding=1, weight_decompose=True, **kw),
    "conv_inputs": lambda **kw: LoKrConv2d(24, 30, (3, 2), 2, use_tucker=True, padding=1, weight_decompose=True, wd_on_out=False, **kw),
}


def other(name: str, **options: Any) -> tuple[Layer, nn.Module]:
    """A layer whose adapter is not 0, and its base layer with the weight that it stands for, in float64."""
    layer = OTHERS[name](alpha=3.0, **options)
    for n, p in layer.named_parameters():
        nn.init.normal_(p, std=0.3) if n != "dora_scale" else p.data.mul_(1 + torch.rand_like(p))
    base: Any = copy.deepcopy(layer.base_layer).double()
    w1, w2 = layer.adapter().w1.expanded().left.double(), layer.adapter().w2.expanded().double()
    for a, b in zip(w1, w2, strict=True) if w1.ndim == 3 else [(w1, w2)]:
        base.weight.data += (layer.scale * torch.einsum("ac,bd...->abcd...", a, b)).detach().reshape(base.weight.shape)
    if layer.dora_scale is not None:
        rows = base.weight.data.movedim(0 if layer.options.wd_on_out else 1, 0)  # a view
        rows.mul_((layer.dora_scale.double().flatten() / rows.flatten(1).norm(dim=1)).detach().view(-1, *[1] * (rows.ndim - 1)))
    return layer, base


@pytest.mark.parametrize("name", OTHERS)
def test_values_of_sums_and_decomposed_weights(name: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer, dense = other(name, dtype=dtype)
        x = operand(layer, dtype)
        want = dense(x.double()).detach()
        for got in (layer(x), torch.no_grad()(layer)(x)):
            assert_close(got.detach(), want, steps=24)
        assert_close(layer.weight.detach(), dense.weight.detach(), steps=8)  # type: ignore[arg-type, union-attr]
        layer.merge()
        assert_close(layer(x).detach(), want, steps=24)
        layer.unmerge()
        assert_close(layer(x).detach(), want, steps=64)


@pytest.mark.parametrize("name", OTHERS)
def test_a_new_sum_or_decomposed_weight_is_the_base_layers_and_learns(name: str) -> None:
    layer = OTHERS[name](dtype=torch.float64)
    x = operand(layer)
    torch.testing.assert_close(layer(x), layer.base_layer(x))
    layer, _ = other(name, dtype=torch.float64)
    own = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(layer(x).square().sum(), list(own.values()))
    convolve = isinstance(layer, LoKrConv2d)
    y = nn.functional.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding) if convolve else x @ layer.weight.mT
    y = y if convolve or layer.bias is None else y + layer.bias
    expected = torch.autograd.grad(y.square().sum(), list(own.values()))
    for n, got, want in zip(own, found, expected, strict=True):
        assert_close(got, want, steps=256, name=n)
    if name in ("terms", "linear_outputs", "conv_inputs"):  # of each kind one
        torch._dynamo.reset()  # its limit of recompilations is for all cases together
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
        assert all([p.grad is not None for p in own.values()])


def test_the_base_layers_attributes() -> None:
    layer = LoKrConv2d(24, 30, (3, 2), 2, padding=1, stride=2)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"):
        assert getattr(layer, name) == getattr(layer.base_layer, name)


def with_a_magnitude_of_0() -> LoKrLinear:
    layer = LoKrLinear(4, 4, 2, weight_decompose=True)
    layer.dora_scale.data[1] = 0  # type: ignore[union-attr]
    return layer


# ---- quantised base layers ------------------------------------------------------------------------


class Quantised(nn.Module):
    """A linear layer whose weight is stored otherwise: int8, float8, or two numbers of 4 bits in a byte."""

    def __init__(self, kind: str, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = 24, 30, kind
        numbers = torch.randint(-7, 8, (30, 24))
        self.numbers = numbers.double()
        if kind == "packed":
            stored = ((numbers[:, ::2] + 8) * 16 + numbers[:, 1::2] + 8).to(torch.uint8).view(-1, 1)
        else:
            stored = numbers.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        if kind == "nameless":
            self.register_buffer("qweight", stored)
        else:
            self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(30)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.numbers, None if self.bias is None else self.bias.double()).float()


@pytest.mark.parametrize("kind", ["int8", "float8", "packed", "nameless"])
def test_quantised_base_layers(kind: str) -> None:
    for dtype in [torch.float32, torch.bfloat16]:
        base = Quantised(kind)
        layer = LoKrLinear.from_linear(base, 2, alpha=3.0)
        own = [p for n, p in layer.named_parameters() if n.startswith("lokr")]
        assert {p.dtype for p in own} == {torch.float32}
        assert (layer.in_features, layer.out_features) == (24, 30)
        assert layer.bias is base.bias
        for p in own:
            nn.init.normal_(p, std=0.3)
        x = torch.randn(5, 24).to(dtype)
        w1, w2 = layer.adapter().w1.expanded().left.double(), layer.adapter().w2.expanded().double()
        want = layer.scale * (x.double() @ torch.kron(w1, w2).mT).detach()
        for got in (layer(x), torch.no_grad()(layer)(x)):  # float32, as the base layer's result is
            if dtype == torch.float32:
                assert_close(got.detach(), base(x).detach().double() + want, steps=8)
            else:
                assert_close((got - base(x)).detach().to(dtype), want, steps=8)
        layer(x).sum().backward()
        assert all([p.grad is not None for p in own])
        held = "None of None" if kind == "nameless" else f"torch.nn.parameter.Parameter of {base.weight.dtype}"
        with pytest.raises(TypeError, match=rf"^base_layer.weight: expected a floating-point parameter, .*; got {held}$"):
            layer.merge()
        assert not layer.is_merged
        assert hasattr(layer, "weight") == (kind != "nameless")
        if kind != "nameless":
            assert layer.weight is base.weight


def test_a_computed_weight_is_not_merged() -> None:
    layer = made("linear", dtype=torch.float64)
    nn.utils.parametrizations.weight_norm(layer.base_layer)
    x = operand(layer)
    want = layer(x).detach()
    with pytest.raises(TypeError, match=r"^base_layer\.weight: expected a floating-point parameter"):
        layer.merge()
    assert_close(layer(x), want)


# ---- other modules that read a layer's weight -----------------------------------------------------


@ALL
def test_the_weight_of_the_layer(name: str) -> None:
    for dtype in [torch.float64, torch.bfloat16]:
        layer = made(name, dtype=dtype, alpha=3.0)
        want = (layer.base_layer.weight.double() + weight_of(layer)).detach()  # type: ignore[union-attr, operator]
        assert layer.weight.dtype == dtype
        assert_close(layer.weight, want, steps=4)
        assert layer.bias is layer.base_layer.bias  # type: ignore[union-attr]
        layer.merge()
        assert layer.weight is layer.base_layer.weight  # type: ignore[union-attr]
        layer.unmerge()
        # By autograd it is the forward pass's.
        if dtype == torch.float64 and isinstance(layer, LoKrLinear):
            x, own = operand(layer), [p for p in layer.parameters() if p.requires_grad]
            loss = nn.functional.linear(x, layer.weight, layer.bias).square().sum()
            for got, expected in zip(torch.autograd.grad(loss, own), torch.autograd.grad(layer(x).square().sum(), own), strict=True):
                assert_close(got, expected, steps=256)


def test_torch_encoder_layers_read_the_weight() -> None:
    """Its path for inference multiplies by the weights of its layers, and attention always does by that of its last one."""
    encoder = nn.TransformerEncoderLayer(24, 2, 30, dropout=0.0, batch_first=True)
    encoder.linear1 = made("linear")  # type: ignore[assignment]
    encoder.linear2 = LoKrLinear.from_linear(encoder.linear2, 2)  # type: ignore[assignment]
    encoder.self_attn.out_proj = LoKrLinear.from_linear(encoder.self_attn.out_proj, 2)  # type: ignore[assignment]
    for n, p in encoder.named_parameters():
        if "lokr" in n:
            nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 5, 24)
    want, dense = encoder(x).detach(), copy.deepcopy(encoder).double()
    for owner, name in ((dense, "linear1"), (dense, "linear2"), (dense.self_attn, "out_proj")):
        setattr(owner, name, whole(getattr(owner, name)))
    assert_close(want, dense(x.double()).detach(), steps=64)
    with torch.no_grad():
        assert_close(encoder.eval()(x), want.double(), steps=64)
    encoder(x).sum().backward()
    assert all([p.grad is not None for n, p in encoder.named_parameters() if "lokr" in n])


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
def test_adapter_states(name: str) -> None:
    for style in ["lycoris", "peft"]:
        layer, other = made(name, alpha=3.0, dtype=torch.float64), made(name, alpha=3.0, dtype=torch.float64)
        other.base_layer.load_state_dict(layer.base_layer.state_dict())
        state = layer.adapter_state_dict(style)
        assert ("alpha" in state) == (style == "lycoris")
        other.load_adapter_state_dict({f"{k}.default" if style == "peft" else f"lycoris_q.{k}": v for k, v in state.items()})
        x = operand(layer)
        torch.testing.assert_close(other(x), layer(x))


def test_from_layers() -> None:
    linear, conv = nn.Linear(24, 30).eval(), nn.Conv2d(24, 30, 3)
    layers: list[Layer] = [LoKrLinear.from_linear(linear, 2, alpha=4), LoKrConv2d.from_conv(conv, 2, use_tucker=True)]
    for layer, base in zip(layers, (linear, conv), strict=True):
        assert layer.base_layer is base
        assert layer.training == base.training
        assert not any(p.requires_grad for p in base.parameters())


def merged() -> LoKrLinear:
    layer = LoKrLinear(24, 30, 2)
    layer.merge()
    return layer


REFUSED: dict[str, Refusal] = {
    "in_features": value(lambda: LoKrLinear(0, 3, 1), "in_features: expected a positive integer; got 0"),
    "rank": value(lambda: LoKrLinear(3, 3, 0), "rank: expected a positive integer; got 0"),
    "factor": value(lambda: LoKrLinear(3, 3, 1, 0), "factor: expected -1 or at least 1; got 0"),
    "decompose_both": wrong_type(lambda: LoKrLinear(3, 3, 1, -1, 1), "decompose_both: expected True or False; got int"),
    "alpha": value(lambda: LoKrLinear(3, 3, 1, alpha=float("nan")), "alpha: expected a finite number; got nan"),
    "alpha_tensor": wrong_type(lambda: LoKrLinear(3, 3, 1, alpha=torch.ones(())), "alpha: expected a number or None; got torch.Tensor"),
    "adapter_dtype": wrong_type(
        lambda: LoKrLinear(3, 3, 1, adapter_dtype=torch.int8),
        "adapter_dtype: expected one of float16, bfloat16, float32, float64, complex64, complex128; got torch.int8",
    ),
    "dropout": value(lambda: LoKrLinear(3, 3, 1, dropout=2.0), "dropout: expected a probability; got 2.0"),
    "layer": wrong_type(
        lambda: LoKrLinear.from_linear(nn.Conv2d(3, 3, 1), 1),
        "layer: expected an nn.Linear, or a module with in_features and out_features; got torch.nn.modules.conv.Conv2d",
    ),
    "lazy_layer": value(lambda: LoKrLinear.from_linear(nn.LazyLinear(3), 1), "layer.in_features: expected a positive integer; got 0"),
    "state_of_layers": value(
        lambda: LoKrLinear(4, 4, 2).load_adapter_state_dict({f"lycoris_{n}.lokr_w1": torch.ones(2, 2) for n in "qkvo"}),
        "state: expected the part of a file that is one layer's (load_lokr reads all of it); "
        "got names of 4 layers, 'lycoris_k' and 'lycoris_o' among them",
    ),
    "state_while_merged": value(
        lambda: merged().load_adapter_state_dict(merged().adapter_state_dict()), "is_merged: expected False: call unmerge() first; got True"
    ),
    "reset_while_merged": value(lambda: merged().reset_parameters(), "is_merged: expected False: call unmerge() first; got True"),
    "conv_layer": wrong_type(
        lambda: LoKrConv2d.from_conv(nn.Linear(3, 3), 1), "layer: expected an nn.Conv2d; got torch.nn.modules.linear.Linear"
    ),
    "groups": value(
        lambda: LoKrConv2d.from_conv(nn.Conv2d(4, 4, 1, groups=2), 1), "layer: expected a convolution of one group; got groups=2"
    ),
    "padding_mode": value(
        lambda: LoKrConv2d.from_conv(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), 1),
        "layer: expected padding_mode 'zeros'; got 'circular'",
    ),
    "terms": value(lambda: LoKrLinear(3, 3, 1, terms=0), "terms: expected a positive integer; got 0"),
    "terms_of_a_convolution": value(
        lambda: LoKrConv2d.from_conv(nn.Conv2d(4, 4, 1), 1, terms=2), "terms: expected 1 of a convolution; got 2"
    ),
    "dropout_of_a_decomposed_weight": value(
        lambda: LoKrLinear(3, 3, 1, weight_decompose=True, dropout=0.1),
        "dropout: expected 0 with weight_decompose, whose norms are of the whole weight; got 0.1",
    ),
    "quantised_weight_decompose": wrong_type(
        lambda: LoKrLinear.from_linear(Quantised("int8"), 2, weight_decompose=True),
        "base_layer.weight: expected a floating-point parameter, whose norms weight_decompose takes (dequantize the layer first); "
        "got torch.nn.parameter.Parameter of torch.int8",
    ),
    "merging_a_magnitude_of_0": value(
        lambda: with_a_magnitude_of_0().merge(), "dora_scale: expected no magnitude of 0, which cannot be unmerged; got 1 of them"
    ),
    "style": value(lambda: LoKrLinear(3, 3, 1).adapter_state_dict("kohya"), "style: expected one of lycoris, peft; got 'kohya'"),
    "state": value(
        lambda: LoKrLinear(24, 30, 2).load_adapter_state_dict({"lokr_w1": torch.ones(5, 4)}),
        "state: expected lokr_w1, lokr_w2_a, lokr_w2_b, as rank=2 and the layer's options make them (load_lokr makes layers of a file); "
        "got lokr_w1",
    ),
    "state_of_two": value(
        lambda: LoKrLinear(4, 4, 2).load_adapter_state_dict({"lokr_w1.a": torch.ones(2, 2), "lokr_w1.b": torch.ones(2, 2)}),
        "state: expected one adapter: pass the keys of one, as of 'lokr_w1.a'; got lokr_w1 twice, also as 'lokr_w1.b'",
    ),
    "state_shape": value(
        lambda: LoKrLinear(4, 4, 2).load_adapter_state_dict({"lokr_w1": torch.ones(2, 3), "lokr_w2": torch.ones(2, 2)}),
        "state['lokr_w1']: expected shape (2, 2); got shape (2, 3)",
    ),
}


def test_refused() -> None:
    assert_all_refused(REFUSED)


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
