"""Attention that begins as trained attention looks (Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", ICML 2023)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.runtime.errors import type_error, type_name, value_error

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
    """Initialise a timm attention layer in place.

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
