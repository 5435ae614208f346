"""Kolmogorov-Arnold transformers in timm: registry, sizes, arithmetic, checkpoints, what is kept for the backward pass."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastkron_py import reference
from fastkron_py.integrations.timm import (
    KATMlp,
    KATVisionTransformer,
    checkpoint_filter_fn,
    convert_state_dict,
)
from fastkron_py.runtime.backend import backend
from fastkron_py.testing import assert_close

timm: Any = importlib.import_module("timm")

NAMES = ("kat_tiny_patch16_224", "kat_small_patch16_224", "kat_base_patch16_224")
TINY: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5, "num_groups": 4}


def tiny(**options: Any) -> KATVisionTransformer:
    model: KATVisionTransformer = timm.create_model("kat_tiny_patch16_224", **{**TINY, **options})
    return model


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def as_released(state_dict: dict[str, Tensor], names: tuple[str, str] = ("weight_numerator", "weight_denominator")) -> dict[str, Tensor]:
    """A state dict by the names of the released checkpoints, which have no layer's configuration."""
    numerator, denominator = names
    held = {k: v for k, v in state_dict.items() if not k.endswith("_extra_state")}
    return {k.replace(".numerator", f".{numerator}").replace(".denominator", f".{denominator}"): v.clone() for k, v in held.items()}


# ---- registry ----------------------------------------------------------------------------------


def test_is_in_the_registry_with_its_pretrained_configurations() -> None:
    assert set(timm.list_models("kat_*")) == set(NAMES)
    assert {f"{name}.vitft" for name in NAMES} <= set(timm.list_pretrained("kat_*"))


@pytest.mark.parametrize(("name", "count"), [*zip(NAMES, (5_718_328, 22_051_576, 86_568_568), strict=True)])
def test_has_as_many_parameters_as_published(name: str, count: int) -> None:
    model = timm.create_model(name, weight_init="skip")
    assert sum(p.numel() for p in model.parameters()) == count
    assert isinstance(model, KATVisionTransformer)


def test_bad_arguments() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"weight_init": "zeros"}, "weight_init: expected one of 'mimetic'"),
        ({"act_layer": nn.ReLU}, "act_layer: expected None"),
        ({"mlp_layer": nn.Linear}, "mlp_layer: expected None"),
        ({"num_groups": 5}, "num_groups: expected a divisor of num_features, 32"),
        ({"rational_version": "Z"}, "version: expected one of A, B, C, D, N"),
        ({"rational_init": ("identity", "sine")}, "init: expected one of identity"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            tiny(**options)


def test_bad_arguments_of_the_mlp() -> None:
    with pytest.raises(TypeError, match="recompute: expected one value or a pair of them"):
        KATMlp(16, recompute=(True, True, False))
    with pytest.raises(ValueError, match="bias: expected the same for both layers"):
        KATMlp(16, bias=(True, False))
    with pytest.raises(ValueError, match="norm_layer: expected None"):
        KATMlp(16, norm_layer=nn.LayerNorm)


# ---- arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("version", ["A", "B"])
def test_the_mlp_is_the_formula(version: str, recompute: bool) -> None:
    """fc2(F2(fc1(F1(x)))), with the reference's rational function in float64."""
    mlp = KATMlp(16, 48, 24, num_groups=4, version=version, recompute=recompute, dtype=torch.float64)
    for p in mlp.parameters():  # nothing that begins as zero or one may hide an error
        nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    h = x
    for act, fc in ((mlp.act1, mlp.fc1), (mlp.act2, mlp.fc2)):
        h = reference.rational(h, act.numerator, act.denominator, version=version) @ fc.weight.T + fc.bias
    assert_close(mlp(x), h)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_block_is_the_formula(name: str, recompute: bool) -> None:
    """Its norm and its first function in one pass or not: x + attn(norm1(x)), then y + mlp(norm2(y))."""
    place = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run: compiled, or interpreted
    block = tiny(depth=1, recompute=recompute).double().to(place).blocks[0]
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 3, 32, dtype=torch.float64, device=place, requires_grad=True)
    parameters = [x, *block.parameters()]
    y = x + block.attn(block.norm1(x))
    h = nn.functional.layer_norm(y, (32,), block.norm2.weight, block.norm2.bias, block.norm2.eps)
    for act, fc in ((block.mlp.act1, block.mlp.fc1), (block.mlp.act2, block.mlp.fc2)):
        h = reference.rational(h, act.numerator, act.denominator) @ fc.weight.T + fc.bias
    expected = torch.autograd.grad((y + h).square().sum(), parameters)
    with backend(name):
        found = block(x)
        gradients = torch.autograd.grad(found.square().sum(), parameters)
    assert_close(found, y + h)
    for ours, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12 * float(want.abs().max()))


def test_layers_in_place_of_a_linear_one_are_called() -> None:
    """Say an adapter's, or one with a hook: parameters are not read past them."""
    mlp, x = KATMlp(16, 32, num_groups=4, recompute=True), torch.randn(3, 16)
    seen = []
    mlp.fc1.register_forward_hook(lambda module, args, result: seen.append(args[0]))
    before = mlp(x)
    assert len(seen) == 1
    mlp.fc2 = nn.Sequential(mlp.fc2)  # type: ignore[assignment]
    assert_close(mlp(x), before)


class Halved(torch.Tensor):
    """A weight that stands for twice its numbers, as a quantised one stands for others than it stores."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, 2 * weight.as_subclass(torch.Tensor), bias)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_of_other_types_multiply_as_their_type_has_it(recompute: bool) -> None:
    mlp, x = KATMlp(16, 32, num_groups=4, recompute=recompute), torch.randn(3, 16)
    before = mlp(x).detach()
    for fc in (mlp.fc1, mlp.fc2):
        fc.weight = nn.Parameter((fc.weight.detach() / 2).as_subclass(Halved), requires_grad=False)
    assert_close(mlp(x), before)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16, bias=False), nn.RMSNorm(16), nn.Identity(), nn.LayerNorm((3, 16))])
def test_other_norms_are_called(norm: nn.Module) -> None:
    mlp, x = KATMlp(16, 32, num_groups=4), torch.randn(2, 3, 16)
    assert_close(mlp(x, norm), mlp(norm(x)))


def test_a_norm_with_a_hook_is_called() -> None:
    block, x, seen = tiny(depth=1).blocks[0], torch.randn(2, 3, 32), []
    before = block(x)
    block.norm2.register_forward_hook(lambda module, args, result: seen.append(result))
    torch.testing.assert_close(block(x), before)
    assert len(seen) == 1


# ---- what is kept for the backward pass -------------------------------------------------------


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of activations kept under autocast: storages that are neither parameters nor their copies in half precision."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weights = {tuple(s) for p in model.parameters() for s in (p.shape, p.mT.shape if p.ndim > 1 else p.shape)}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own and tuple(t.shape) not in weights:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        result = model(x)
    del result
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize(("recompute", "beyond_vit"), [(False, 0), ((True, False), 2), ((False, True), -8), (True, -6)])
def test_keeps_as_many_bytes_as_documented(recompute: Any, beyond_vit: int) -> None:
    """docs/how_it_works/rational.md's table: bytes a token, block and unit of width, beside a vision transformer with GELU."""
    options = {**TINY, "weight_init": "skip"}
    options.pop("num_groups")
    tokens = 3 * 5
    per_block = []
    for depth in (1, 2):
        kat = kept_bytes(tiny(depth=depth, recompute=recompute, weight_init=""), images(3))
        vit = kept_bytes(timm.create_model("vit_tiny_patch16_224", **{**options, "depth": depth, "weight_init": ""}), images(3))
        per_block.append(kat - vit)
    # The fused norm keeps as many numbers a row as the norm does.
    assert (per_block[1] - per_block[0]) / (tokens * 32) == beyond_vit


# ---- initialisation ----------------------------------------------------------------------------


def test_mimetic_attention_is_in_effect() -> None:
    """W_Q W_K^T of each head is near 0.7 Z + 0.7 I and W_V W_proj near 0.4 Z - 0.4 I, as far as their rank allows."""
    width, heads = 128, 2
    model = tiny(embed_dim=width, num_heads=heads, depth=1, num_groups=8)
    attention = model.blocks[0].attn
    q, k, v = (w.detach().double() for w in attention.qkv.weight.chunk(3))
    projection = attention.proj.weight.detach().double()
    values = (projection @ v).T  # x W_V W_proj is x (proj v)^T
    # The diagonal's mean has a deviation of 0.4 / width, entries beside it one of 0.4 / sqrt(width).
    assert float(values.diagonal().mean()) == pytest.approx(-0.4, abs=5 * 0.4 / width)
    off = values - values.diagonal().diag()
    assert float(off.std()) == pytest.approx(0.4 / width**0.5, rel=0.05)
    rank = width // heads
    for h in range(heads):
        rows = slice(h * rank, (h + 1) * rank)
        product = q[rows].T @ k[rows]
        assert 0.35 < float(product.diagonal().mean()) < 0.7  # half of the rank, but the larger half
        s = torch.linalg.svdvals(product)
        assert int((s > 1e-6 * s[0]).sum()) == rank
        # Balanced: queries and keys share the singular values evenly.
        torch.testing.assert_close(q[rows].norm(), k[rows].norm(), rtol=1e-4, atol=0)
    assert not attention.qkv.bias.any()
    assert not attention.proj.bias.any()


def test_mimetic_refuses_what_it_does_not_know() -> None:
    from fastkron_py.integrations.timm import init_attention_mimetic_

    with pytest.raises(TypeError, match="attention: expected a module with linear layers qkv and proj"):
        init_attention_mimetic_(nn.Linear(3, 3))


# ---- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("weight_numerator", "weight_denominator"), ("numerator_v", "denominator_v")])
def test_loads_the_released_layouts(names: tuple[str, str]) -> None:
    """KAT's and FlashKAT's, by load_state_dict itself, into a model of their version."""
    source, target = tiny(rational_version="A"), tiny(rational_version="A", weight_init="skip")
    for p in source.rational_parameters():
        nn.init.normal_(p)
    made = as_released(source.state_dict(), names)
    assert f"blocks.1.mlp.act2.{names[0]}" in made
    before = dict(made)
    target.load_state_dict(made)
    assert made.keys() == before.keys()  # the caller's is left as it was
    x = images()
    assert_close(target(x), source(x))
    nested = nn.ModuleDict({"net": tiny(rational_version="A", weight_init="skip")})
    nested.load_state_dict({f"net.{k}": v for k, v in made.items()})
    assert_close(nested["net"](x), source(x))


def test_refuses_released_coefficients_for_another_version() -> None:
    made = as_released(tiny(rational_version="A").state_dict())
    with pytest.raises(RuntimeError, match="make the model with rational_version='A'"):
        tiny(rational_version="B").load_state_dict(made)


def test_converts_what_the_training_script_writes(tmp_path: Path) -> None:
    """Wrapped, with averaged weights beside, and as saved by data parallel training; then by timm's own loader from a file."""
    source = tiny(rational_version="A")
    made = as_released(source.state_dict())
    wrapped = {"state_dict": {k: v + 1 for k, v in made.items()}, "state_dict_ema": {f"module.{k}": v for k, v in made.items()}, "epoch": 3}
    converted = convert_state_dict(wrapped)
    assert converted
    for key, value in converted.items():
        assert_close(value, source.state_dict()[key])
    assert convert_state_dict(source.state_dict()).keys() == source.state_dict().keys()
    file = tmp_path / "kat.pth"
    torch.save({"state_dict": made}, file)
    loaded = tiny(rational_version="A", checkpoint_path=str(file))
    x = images()
    assert_close(loaded(x), source(x))


def test_converting_refuses_what_is_no_state_dict() -> None:
    for wrong in ([1], {"a": 3}, {1: torch.zeros(1)}):
        with pytest.raises(TypeError, match="state_dict: expected tensors by name"):
            convert_state_dict(wrong)  # type: ignore[arg-type]


def test_pretrained_files_are_renamed_resized_and_of_version_a(tmp_path: Path) -> None:
    """`pretrained=True`, from a file in place of the published one, into a model for larger images and other classes."""
    source = tiny(rational_version="A")
    file = tmp_path / "kat.pth"
    torch.save({"model": as_released(source.state_dict())}, file)
    options = {k: v for k, v in TINY.items() if k != "num_classes"}
    model = timm.create_model(
        "kat_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file), "num_classes": 5},
        num_classes=3,
        **{**options, "img_size": 64},
    )
    assert model.blocks[0].mlp.act1.version == "A"
    assert_close(model.blocks[1].mlp.act2.numerator.detach(), source.blocks[1].mlp.act2.numerator.detach())
    assert model.pos_embed.shape == (1, 17, 32)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_becomes_a_vision_transformer_by_its_weights() -> None:
    """Weights of a ViT with GELU, rational functions that begin as identity and GELU: nearly the ViT."""
    options = {k: v for k, v in TINY.items() if k != "num_groups"}
    vit = timm.create_model("vit_tiny_patch16_224", **options)
    for p in vit.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    model = tiny(rational_init=("identity", "gelu"))
    missing, unexpected = model.load_state_dict(checkpoint_filter_fn(vit.state_dict(), model), strict=False)
    assert unexpected == []
    assert all(".act" in name for name in missing)
    x = images()
    found, expected = model(x).detach(), vit(x).detach()
    # The fit errs by 4e-4 on [-3, 3] and more outside.
    assert float((found - expected).norm() / expected.norm()) < 0.02


# ---- torch.fx -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_features_of_nodes(recompute: bool) -> None:
    """torchvision's way, whose graphs share the model's parameters."""
    from torchvision.models.feature_extraction import create_feature_extractor

    whole, x = tiny(recompute=recompute).eval(), images()
    extractor = create_feature_extractor(whole, {"blocks.0": "block", "blocks.1.mlp": "mlp", "norm": "norm"})
    found = extractor(x)
    kept: dict[str, torch.Tensor] = {}
    whole.blocks[0].register_forward_hook(lambda _m, _a, y: kept.update(block=y))
    whole.blocks[1].mlp.register_forward_hook(lambda _m, _a, y: kept.update(mlp=y))
    kept["norm"] = whole.forward_features(x)
    torch.testing.assert_close(found, {name: kept[name] for name in found})
    found["norm"].sum().backward()
    assert whole.blocks[0].mlp.act1.numerator.grad is not None
