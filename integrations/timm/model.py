"""Kolmogorov-Arnold transformers: timm's vision transformer with rational functions in its MLPs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from timm.models import vision_transformer
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fastkron_py.integrations.timm.checkpoint import convert_state_dict, is_released_layout
from fastkron_py.integrations.timm.mimetic import init_attention_mimetic_
from fastkron_py.integrations.timm.mlp import KATMlp
from fastkron_py.runtime.errors import type_error, type_name, value_error

INITIALISATIONS: Final = ("mimetic", "", "jax", "jax_nlhb", "moco", "skip")


class KATBlock(Block):  # type: ignore[misc]
    """timm's `Block`, whose second norm and first rational function are computed in one pass."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """``[B, N, C]`` to the same; further arguments of timm's block go to its attention."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *args, **options)))
        y: Tensor = x + self.drop_path2(self.ls2(self.mlp(x, self.norm2)))
        return y


class KATVisionTransformer(VisionTransformer):  # type: ignore[misc]
    """Kolmogorov-Arnold transformer (Yang and Wang, ICLR 2025): timm's `VisionTransformer` whose MLPs are `KATMlp`.

    Everything else is timm's: patch embedding, attention, stochastic depth, layer scale, pooling, the head, feature extraction and
    gradient checkpointing, with its arguments and their defaults.

    Args:
        weight_init: "mimetic" (attention as Trockman and Kolter initialise it, the rest as ""), "" (timm's), "jax",
            "jax_nlhb" or "moco" (timm's too), or "skip". MLPs keep the variances of `GRKAN` in each of them.
        num_groups: of every rational function.
        degrees: of every rational function.
        rational_version: of the denominators: "B" is the paper's, "A" that of the released checkpoints.
        rational_init: the initial functions of a block.
        share_numerator: let the groups of a function have one numerator, as in the paper.
        recompute: which of a block's rational functions are computed again in the backward pass (`KATMlp`).
        options: for `timm.models.vision_transformer.VisionTransformer`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown weight_init; an mlp_layer or act_layer; a value that `KATMlp` rejects.

    Example:
        >>> model = KATVisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=10)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        *,
        weight_init: str = "mimetic",
        num_groups: int = 8,
        degrees: tuple[int, int] = (5, 4),
        rational_version: str = "B",
        rational_init: tuple[str, str] = ("identity", "swish"),
        share_numerator: bool = True,
        recompute: bool | Sequence[bool] = False,
        **options: Any,
    ) -> None:
        if weight_init not in INITIALISATIONS:
            raise value_error("weight_init", f"one of {', '.join(map(repr, INITIALISATIONS))}", repr(weight_init))
        for name in ("mlp_layer", "act_layer", "block_fn"):
            if options.get(name) is not None:
                raise value_error(name, "None: a KAT's blocks, MLPs and activations are its own", type_name(options[name]))
            options.pop(name, None)
        mlp: dict[str, Any] = {"num_groups": num_groups, "degrees": degrees, "version": rational_version, "act_init": rational_init}
        mlp |= {"share_numerator": share_numerator, "recompute": recompute}
        super().__init__(weight_init="skip", block_fn=KATBlock, mlp_layer=partial(KATMlp, **mlp), **options)
        self._weight_init = weight_init
        if weight_init != "skip":
            self.init_weights()

    def init_weights(self, mode: str = "", **options: Any) -> None:
        """Initialise everything: timm's scheme first, then the MLPs' own, then attention where it is mimetic.

        Args:
            mode: as weight_init of the class; that of the model unless given.
            options: for timm's method of this name.

        Raises:
            ValueError: an unknown mode.
        """
        mode = mode or self._weight_init
        if mode not in INITIALISATIONS or mode == "skip":
            raise value_error("mode", f"one of {', '.join(map(repr, INITIALISATIONS[:-1]))}", repr(mode))
        mimetic = mode == "mimetic"
        # timm's own mode, where an older timm asks for it by its argument and a newer one reads it from the model.
        self.weight_init_mode = "" if mimetic else mode
        accepted = inspect.signature(super().init_weights).parameters
        super().init_weights(self.weight_init_mode, **{k: v for k, v in options.items() if k in accepted})
        for module in self.modules():
            if isinstance(module, KATMlp):  # timm has given every linear layer a deviation of 0.02
                module.reset_parameters()
        if mimetic:
            for block in self.blocks:
                init_attention_mimetic_(block.attn)
        if getattr(self, "fix_init", False):
            self.fix_init_weight()

    def rational_parameters(self) -> list[nn.Parameter]:
        """The coefficients of all rational functions, say to exclude them from weight decay."""
        return [p for m in self.modules() if isinstance(m, KATMlp) for act in (m.act1, m.act2) for p in act.parameters()]


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Bring a checkpoint to a model's names and sizes: released ones are renamed, position embeddings resampled.

    Args:
        state_dict: of KAT, FlashKAT, this library or a vision transformer of timm.
        model: that the checkpoint is for.
        options: for timm's function of this name, which does the rest.

    Example:
        >>> model = timm.create_model("kat_tiny_patch16_224")
        >>> state = checkpoint_filter_fn(timm.create_model("kat_tiny_patch16_224").state_dict(), model)
        >>> model.load_state_dict(state)
        <All keys matched successfully>
    """
    if not isinstance(state_dict, Mapping):
        raise type_error("state_dict", "tensors by name, or a checkpoint that holds such", type_name(state_dict))
    names = state_dict.get("state_dict", state_dict.get("model", state_dict))
    if any(key.startswith("blocks.") or key.startswith("module.") for key in names) or is_released_layout(names):
        state_dict = convert_state_dict(state_dict)
    found: dict[str, Tensor] = vision_transformer.checkpoint_filter_fn(state_dict, model, **options)
    return found
