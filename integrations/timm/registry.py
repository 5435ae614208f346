"""KAT-T, KAT-S and KAT-B for `timm.create_model`."""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from fastkron_py.integrations.timm.checkpoint import RELEASED_VERSION
from fastkron_py.integrations.timm.model import KATVisionTransformer, checkpoint_filter_fn

__all__ = ["kat_base_patch16_224", "kat_small_patch16_224", "kat_tiny_patch16_224"]
_RELEASED = "https://huggingface.co/adamdad/kat_pretained/resolve/main/"


def _cfg(file: str) -> dict[str, Any]:
    return {
        "url": _RELEASED + file,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


# The files end in the first digits of their SHA-256, which torch.hub checks.
default_cfgs = generate_default_cfgs(
    {
        "kat_tiny_patch16_224": _cfg("kat_tiny_patch16_224_1f3ad3b2e69821f3d412f2924cf159a0e266f142d739cb68f68f796f5a0fe289.pth"),
        "kat_tiny_patch16_224.vitft": _cfg(
            "kat_tiny_patch16_224-finetune_64f124d003803e4a7e1aba1ba23500ace359b544e8a5f0110993f25052e402fb.pth"
        ),
        "kat_small_patch16_224": _cfg("kat_small_patch16_224_32487885cf13d2c14e461c9016fac8ad43f7c769171f132530941e930aeb5fe2.pth"),
        "kat_small_patch16_224.vitft": _cfg(
            "kat_small_patch_224-finetune_3ae087a4c28e2993468eb377d5151350c52c80b2a70cc48ceec63d1328ba58e0.pth"
        ),
        "kat_base_patch16_224": _cfg("kat_base_patch16_224_abff874d925d756d15cde97303f772a3460ddbd44b9c53fb9ce5cf15be230fb6.pth"),
        "kat_base_patch16_224.vitft": _cfg(
            "kat_base_patch16_224-finetune_440bf1ead9dd8ecab642078cfb60ae542f1fa33ca65517260501e02c011e38f2.pth"
        ),
    }
)


def _create(variant: str, pretrained: bool, sizes: dict[str, Any], options: dict[str, Any]) -> KATVisionTransformer:
    arguments = {"patch_size": 16, "depth": 12, **sizes, **options}
    if pretrained:
        arguments = {"rational_version": RELEASED_VERSION, "weight_init": "", **arguments}
    model: KATVisionTransformer = build_model_with_cfg(
        KATVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"},
        **arguments,
    )
    return model


def kat_tiny_patch16_224(pretrained: bool = False, **options: Any) -> KATVisionTransformer:
    """KAT-T: 12 blocks of width 192, 3 heads, 5,718,328 parameters.

    Example:
        >>> model = timm.create_model("kat_tiny_patch16_224", num_classes=10)
        >>> model.num_classes
        10
    """
    return _create("kat_tiny_patch16_224", pretrained, {"embed_dim": 192, "num_heads": 3}, options)


def kat_small_patch16_224(pretrained: bool = False, **options: Any) -> KATVisionTransformer:
    """KAT-S: 12 blocks of width 384, 6 heads, 22,051,576 parameters.

    Example:
        >>> model = timm.create_model("kat_small_patch16_224", num_classes=10)
        >>> model.num_classes
        10
    """
    return _create("kat_small_patch16_224", pretrained, {"embed_dim": 384, "num_heads": 6}, options)


def kat_base_patch16_224(pretrained: bool = False, **options: Any) -> KATVisionTransformer:
    """KAT-B: 12 blocks of width 768, 12 heads, 86,568,568 parameters.

    Example:
        >>> model = timm.create_model("kat_base_patch16_224", num_classes=10)
        >>> model.num_classes
        10
    """
    return _create("kat_base_patch16_224", pretrained, {"embed_dim": 768, "num_heads": 12}, options)


for _entry in (kat_tiny_patch16_224, kat_small_patch16_224, kat_base_patch16_224):
    register_model(_entry)
