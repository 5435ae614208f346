"""timm: Kolmogorov-Arnold transformers in its registry. Needs the extra "vision".

Importing this module registers ``kat_tiny_patch16_224``, ``kat_small_patch16_224`` and ``kat_base_patch16_224`` for
`timm.create_model`. timm has no entry points by which it would find them by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.integrations.versions import of_extra
from fastkron_py.nn import GRKAN, GroupRational
from fastkron_py.nn.modules import is_hooked, is_plain, is_plain_linear
from fastkron_py.rational.api import layer_norm_rational, rational_linear
from fastkron_py.runtime.checks import check_flag, check_pair, check_probability, check_type
from fastkron_py.runtime.errors import type_error, type_name, value_error

with of_extra("vision", "timm"):
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, vision_transformer
    from timm.models.vision_transformer import Block, VisionTransformer

__all__ = [
    "KATMlp",
    "KATVisionTransformer",
    "checkpoint_filter_fn",
    "convert_state_dict",
    "init_attention_mimetic_",
    "kat_base_patch16_224",
    "kat_small_patch16_224",
    "kat_tiny_patch16_224",
]

# ---- state dicts of the released KAT and FlashKAT models, brought to the names used here -----------

RELEASED_VERSION: Final = "A"
"""The denominator that the released kernels compute, though the paper's equation is that of version B."""

_NAMES: Final = {
    # KAT's, then FlashKAT's
    "weight_numerator": "numerator",
    "weight_denominator": "denominator",
    "numerator_v": "numerator",
    "denominator_v": "denominator",
}
_WRAPPERS: Final = ("state_dict_ema", "model_ema", "state_dict", "model")


def renamed(key: str) -> str | None:
    """The name here of a coefficient in a released checkpoint; None for every other key."""
    stem, dot, last = key.rpartition(".")
    return stem + dot + _NAMES[last] if last in _NAMES else None


def convert_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Unwrap a released checkpoint and rename its coefficients.

    Released models' coefficients are of version A: load them into a model made with ``rational_version="A"``.

    Args:
        state_dict: of KAT or FlashKAT, bare or as their training script writes it, where averaged weights are preferred; or one of
            this library, which comes back as it is.

    Returns:
        Tensors by the names of `KATVisionTransformer`.

    Raises:
        TypeError: something that is no state dict.

    Example:
        >>> model.load_state_dict(convert_state_dict(torch.load(path, weights_only=True)))  # doctest: +SKIP
    """
    found: Any = state_dict
    while isinstance(found, Mapping) and (wrapper := next((w for w in _WRAPPERS if isinstance(found.get(w), Mapping)), None)):
        found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise type_error("state_dict", "tensors by name, or a checkpoint that holds such", type_name(state_dict))
    bare = {key.removeprefix("module."): value for key, value in found.items()}
    return {renamed(key) or key: value for key, value in bare.items()}


# ---- attention that begins as trained attention looks ----------------------------------------------

QUERY_KEY: Final = (0.7, 0.7)
VALUE_PROJECTION: Final = (0.4, 0.4)
_OVERSAMPLING: Final = 16
_ITERATIONS: Final = 4


def _near_identity(noise: float, diagonal: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``noise * Z + diagonal * I``, the entries of Z normal with variance 1 over the width."""
    z = torch.randn(shape, dtype=torch.float32, device=like.device).mul_(noise / shape[-1] ** 0.5)
    z.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return z


def balanced_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors ``L [..., d, rank]`` and ``R [..., d, rank]`` with ``L @ R.mT`` (nearly) the best approximation of that rank.

    With ``matrix = U S V^T`` they are ``U sqrt(S)`` and ``V sqrt(S)``, cut off. Where the rank is small compared with d, the leading part
    of the decomposition is found from random directions (Halko, Martinsson and Tropp), which is several times faster.

    Args:
        matrix: ``[..., d, d]``.
        rank: at most d.
    """
    size = rank + _OVERSAMPLING
    if 2 * size < matrix.shape[-1]:
        u, s, v = torch.svd_lowrank(matrix, q=size, niter=_ITERATIONS)
    else:
        u, s, vh = torch.linalg.svd(matrix)
        v = vh.mT
    root = s[..., None, :rank].sqrt()
    return u[..., :rank] * root, v[..., :rank] * root


@torch.no_grad()
def init_attention_mimetic_(
    attention: nn.Module, query_key: tuple[float, float] = QUERY_KEY, value_projection: tuple[float, float] = VALUE_PROJECTION
) -> None:
    """Initialise a timm attention layer in place (Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", ICML 2023).

    With Z random, of each head ``W_Q W_K^T`` is the nearest matrix of the head's rank to ``a Z + b I``, and
    ``W_V W_projection`` of all heads together is ``a Z - b I``; biases are zero. Layers on the meta device are left alone.

    Args:
        attention: a module with ``qkv`` and ``proj``, linear, and ``num_heads``.
        query_key: (a, b) of the first.
        value_projection: (a, b) of the second.

    Raises:
        TypeError: a module without such parts.
        ValueError: a projection whose shapes are not those of self-attention of one width.

    Example:
        >>> init_attention_mimetic_(timm.create_model("vit_tiny_patch16_224").blocks[0].attn)
    """
    qkv: Any = getattr(attention, "qkv", None)
    proj: Any = getattr(attention, "proj", None)
    heads: Any = getattr(attention, "num_heads", None)
    if not (isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and isinstance(heads, int)):
        raise type_error("attention", "a module with linear layers qkv and proj, and num_heads", type_name(attention))
    width = proj.in_features
    if qkv.weight.shape != (3 * width, width) or proj.out_features != width or width % heads:
        found = f"qkv {tuple(qkv.weight.shape)}, proj {tuple(proj.weight.shape)}, {heads} heads"
        raise value_error("attention", "qkv [3 * width, width] and proj [width, width], width a multiple of num_heads", found)
    if qkv.weight.is_meta:
        return
    query, key = balanced_factors(_near_identity(*query_key, (heads, width, width), qkv.weight), width // heads)
    noise, diagonal = value_projection
    value, projection = balanced_factors(_near_identity(noise, -diagonal, (width, width), qkv.weight), width)
    # A linear layer multiplies with its weight's transpose. Queries of head h are rows h * rank to (h + 1) * rank.
    parts = [query.mT.reshape(width, width), key.mT.reshape(width, width), value.mT]
    qkv.weight.copy_(torch.cat(parts))
    proj.weight.copy_(projection)
    for layer in (qkv, proj):
        if layer.bias is not None:
            layer.bias.zero_()


# ---- the MLP, as timm's blocks build theirs --------------------------------------------------------

# torch.fx, with which features are extracted, traces calls of these, and does not look into them.
torch.fx.wrap("layer_norm_rational")
torch.fx.wrap("rational_linear")


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it is a plain layer normalisation of the last dimension: torch's, or timm's unless it rounds its input to half precision."""
    kind = type(module)
    if kind is not nn.LayerNorm and (kind.__name__ != "LayerNorm" or not kind.__module__.startswith("timm.")):
        return False
    norm: Any = module
    whole = len(norm.normalized_shape) == 1 and norm.weight is not None and norm.bias is not None
    return whole and not getattr(norm, "_fast_norm", False) and not is_hooked(module)


class KATMlp(GRKAN):
    """`GRKAN` (rational, linear, rational, linear) with the arguments that timm's blocks give their MLP.

    Args:
        in_features: of x.
        hidden_features: between the linear layers; in_features unless given.
        out_features: of the result; in_features unless given.
        act_layer: ignored; the activation of timm's other MLPs.
        norm_layer: None; timm's norm between the two layers is not part of the model.
        bias: of the linear layers: both or neither.
        drop: dropout after each rational function, one probability or two.
        num_groups: of both functions.
        degrees: of both.
        version: of both.
        act_init: the initial functions of both.
        share_numerator: let the groups of a function have one numerator.
        recompute: for each of the two pairs of a rational function and a linear layer, or for both, whether the function's values
            are computed again in the backward pass, in place of being kept. Where the first is, no norm is fused with it.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a norm_layer; two biases that differ; a value that `GRKAN` rejects.

    Example:
        >>> KATMlp(192, 768)(torch.randn(2, 197, 192)).shape
        torch.Size([2, 197, 192])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Any = None,
        norm_layer: Any = None,
        bias: bool | Sequence[bool] = True,
        drop: float | Sequence[float] = 0.0,
        *,
        num_groups: int = 8,
        degrees: tuple[int, int] = (5, 4),
        version: str = "B",
        act_init: tuple[str, str] = ("identity", "swish"),
        share_numerator: bool = True,
        recompute: bool | Sequence[bool] = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        biases = check_pair("bias", bias, check_flag)
        if biases[0] != biases[1]:
            raise value_error("bias", "the same for both layers", biases)
        if norm_layer is not None:
            raise value_error("norm_layer", "None: this MLP has no norm between its layers", type_name(norm_layer))
        first, second = check_pair("drop", drop, check_probability)
        options: dict[str, Any] = {"num_groups": num_groups, "degrees": degrees, "version": version, "init": act_init}
        options |= {"share_numerator": share_numerator, "bias": biases[0], "device": device, "dtype": dtype}
        super().__init__(in_features, hidden_features, out_features, dropout=first, **options)
        self.drop2 = nn.Dropout(second)
        self.recompute: tuple[bool, bool] = check_pair("recompute", recompute, check_flag)

    def forward(self, x: Tensor, norm: Any = None) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``.

        Args:
            x: the argument.
            norm: a layer normalisation to apply to x first, in one pass with the first function where it is an ordinary one.
        """
        act, plain = self.act1, norm is not None and not self.recompute[0] and _is_plain_norm(norm)
        if plain and is_plain(act, GroupRational):
            x = layer_norm_rational(x, norm.weight, norm.bias, act.numerator, act.denominator, eps=norm.eps, **act.options)
            x = self.fc1(self.drop1(x))
        else:
            x = x if norm is None else norm(x)
            x = self._pair_of_layers(x, act, self.drop1, self.fc1, self.recompute[0])
        return self._pair_of_layers(x, self.act2, self.drop2, self.fc2, self.recompute[1])

    def _pair_of_layers(self, x: Tensor, act: GroupRational, drop: nn.Dropout, linear: nn.Linear, recompute: bool) -> Tensor:
        dropping = self.training and drop.p > 0
        if recompute and not dropping and is_plain(act, GroupRational) and is_plain_linear(linear):
            return rational_linear(x, act.numerator, act.denominator, linear.weight, linear.bias, **act.options)
        return linear(drop(act(x)))

    def extra_repr(self) -> str:
        """The text of ``print(layer)``: whether values are computed again."""
        return f"recompute={self.recompute}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take coefficients by the names of the released checkpoints as well."""
        released = {key: name for key in state_dict if key.startswith(prefix) and (name := renamed(key)) is not None}
        if released and self.act1.version != RELEASED_VERSION:
            errors: list[str] = args[4] if len(args) > 4 else kwargs["error_msgs"]
            found = f"a released checkpoint's, which are of version {RELEASED_VERSION!r}"
            advice = f"make the model with rational_version={RELEASED_VERSION!r}"
            errors.append(f"{prefix}act1, {prefix}act2: expected coefficients of version {self.act1.version!r}; got {found}: {advice}.")
        for key, name in released.items():
            state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


# ---- timm's vision transformer with rational functions in its MLPs ---------------------------------

INITIALISATIONS: Final = ("mimetic", "", "jax", "jax_nlhb", "moco", "skip")


class KATBlock(Block):  # type: ignore[misc]
    """timm's `Block`, whose second norm and first rational function are computed in one pass."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """``[B, N, C]`` to the same; further arguments of timm's block go to its attention."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *args, **options)))
        return x + self.drop_path2(self.ls2(self.mlp(x, self.norm2)))


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
    check_type("state_dict", state_dict, Mapping, "tensors by name, or a checkpoint that holds such")
    names = state_dict.get("state_dict", state_dict.get("model", state_dict))
    if any(key.startswith("blocks.") or key.startswith("module.") for key in names) or any(map(renamed, names)):
        state_dict = convert_state_dict(state_dict)
    return vision_transformer.checkpoint_filter_fn(state_dict, model, **options)


# ---- KAT-T, KAT-S and KAT-B for `timm.create_model` ------------------------------------------------

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
    return build_model_with_cfg(
        KATVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"},
        **arguments,
    )


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
