"""Kolmogorov-Arnold transformers under torch.fx, with which features are extracted, and under TorchScript."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import fastkron_py.integrations.timm  # noqa: F401 (registers the models)

timm: Any = importlib.import_module("timm")

SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_groups": 4}


def model(**options: Any) -> Any:
    return timm.create_model("kat_tiny_patch16_224", **SMALL, **options).eval()


@pytest.mark.parametrize("recompute", [False, True])
def test_features_of_nodes(recompute: bool) -> None:
    """torchvision's way, whose graphs share the model's parameters."""
    from torchvision.models.feature_extraction import create_feature_extractor

    whole, x = model(recompute=recompute), torch.randn(2, 3, 16, 16)
    extractor = create_feature_extractor(whole, {"blocks.0": "block", "blocks.1.mlp": "mlp", "norm": "norm"})
    found = extractor(x)
    kept: dict[str, torch.Tensor] = {}
    whole.blocks[0].register_forward_hook(lambda _m, _a, y: kept.update(block=y))
    whole.blocks[1].mlp.register_forward_hook(lambda _m, _a, y: kept.update(mlp=y))
    kept["norm"] = whole.forward_features(x)
    torch.testing.assert_close(found, {name: kept[name] for name in found})
    found["norm"].sum().backward()
    assert whole.blocks[0].mlp.act1.numerator.grad is not None


def test_features_by_fx_are_those_by_hooks() -> None:
    """timm's ``features_only``, with its two ways to take features."""
    by_fx, by_getter = (model(features_only=True, feature_cls=kind, out_indices=[0, 1]) for kind in ("fx", "getter"))
    assert [f.shape for f in by_fx(torch.randn(2, 3, 16, 16))] == [(2, 5, 16)] * 2
    assert [f.shape for f in by_getter(torch.randn(2, 3, 16, 16))] == [(2, 16, 2, 2)] * 2


def test_traced_and_exported() -> None:
    whole, x = model(), torch.randn(2, 3, 16, 16)
    expected = whole(x)
    for form in (torch.fx.symbolic_trace(whole), torch.export.export(whole, (x,)).module()):
        torch.testing.assert_close(form(x), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning", "ignore::torch.jit.TracerWarning")  # of timm's own checks of shapes
def test_torchscript_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"torch.jit.script: expected a module for torch.jit.trace, torch.export.export or torch.compile"):
        torch.jit.script(model())
    x = torch.randn(1, 3, 16, 16)
    whole = model()
    torch.testing.assert_close(torch.jit.trace(whole, x)(x), whole(x))
