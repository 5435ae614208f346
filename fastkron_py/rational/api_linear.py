"""`rational_linear`: a rational activation and the linear layer behind it, with less kept for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastkron_py.rational import operator_rational_linear as operator
from fastkron_py.rational.api import Prepared, call_key, prepare
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.errors import type_error, type_name, value_error


def _check(weight: Any, bias: Any, x: Tensor, dtype: torch.dtype, is_cast: bool) -> None:
    for name, t in (("weight", weight), ("bias", bias)):
        if name == "bias" and t is None:
            continue
        if not isinstance(t, Tensor):
            raise type_error(name, "a torch tensor" + (" or None" if name == "bias" else ""), type_name(t))
        if not t.is_floating_point() or (t.dtype != dtype and not is_cast):
            raise type_error(name, f"dtype {dtype}, as that of x" if not is_cast else "a floating dtype", t.dtype)
        if t.device != x.device:
            raise value_error(name, f"x's device {x.device}", t.device)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise value_error("weight", f"shape [O, {x.shape[-1]}]", f"shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise value_error("bias", f"shape [{weight.shape[0]}]", f"shape {tuple(bias.shape)}")


def rational_linear(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    version: str = "B",
    training: bool = False,
    noise: float = 0.1,
) -> Tensor:
    """``rational(x) @ weight.T + bias``, which keeps x, and not ``rational(x)``, for the backward pass.

    Equal to `torch.nn.functional.linear` of `rational`, whose values are computed again for the weight's gradient: one more pass
    over x for one tensor of its size less in memory. The same under autocast, at second order and in `torch.compile`. Under torch.func's
    transforms the two are composed.

    Args:
        x: ``[..., C]``, as for `rational`.
        numerator: ``[G, m + 1]`` or ``[1, m + 1]``.
        denominator: ``[G, n]`` or ``[1, n]``.
        weight: ``[O, C]``, of x's dtype unless under autocast.
        bias: ``[O]``.
        version: of the denominator.
        training: whether version D is noisy.
        noise: of version D.

    Returns:
        ``[..., O]``, of x's dtype, or of autocast's.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that disagree; or a value that `rational` refuses.

    Example:
        >>> x, w = torch.randn(4, 197, 192), torch.randn(768, 192)
        >>> rational_linear(x, torch.randn(8, 6), torch.randn(8, 4), w).shape
        torch.Size([4, 197, 768])
    """
    if not isinstance(x, Tensor):
        raise type_error("x", "a torch tensor", type_name(x))
    tensors = (x, numerator, denominator, weight) if bias is None else (x, numerator, denominator, weight, bias)
    key = call_key("rational_linear", x, version, training, noise, bias is None)
    entry = None if key is None else CACHE.find(key, tensors)
    if entry is not None:
        return entry(tensors)  # type: ignore[no-any-return]
    made: Prepared = prepare(x, numerator, denominator, version, training, noise, key)
    key = made.key
    _check(weight, bias, x, made.dtype, made.is_autocast)
    if made.is_autocast:  # the operator looks up its own tensors
        key, weight, bias = None, weight.to(made.dtype), None if bias is None else bias.to(made.dtype)
    given = x, made.numerator, denominator, weight, bias
    z: Tensor = operator.rational_linear(*given, made.version, made.dtype, made.backend, key=key)
    return z
