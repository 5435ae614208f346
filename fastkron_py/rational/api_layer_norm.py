"""`layer_norm_rational`: layer normalisation and the rational function of its result in one pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastkron_py.rational import operator_layer_norm as operator
from fastkron_py.rational.api import call_key, prepare
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.errors import type_error, type_name, value_error


def layer_norm_rational(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    *,
    eps: float = 1e-5,
    version: str = "B",
    training: bool = False,
    noise: float = 0.1,
) -> Tensor:
    """``rational(layer_norm(x))`` over the last dimension, in one pass over memory, and its gradients in another.

    Composed, the two write, read and keep the normalised x. Here it is made again in the backward pass from x, which any layer
    normalisation keeps. Everything is computed in float32, or float64 for float64, and rounded once. On a GPU up to 2,048 channels
    with up to 12 coefficients are fused; beyond, and on a CPU, the two are composed, with the same kept.

    Args:
        x: ``[..., C]``, as for `rational`.
        weight: ``[C]``, of the normalisation.
        bias: ``[C]``.
        numerator: ``[G, m + 1]`` or ``[1, m + 1]``.
        denominator: ``[G, n]`` or ``[1, n]``.
        eps: added to the variance.
        version: of the denominator.
        training: whether version D is noisy.
        noise: of version D.

    Returns:
        ``[..., C]``, of x's dtype, or of autocast's.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that disagree; or a value that `rational` refuses.

    Example:
        >>> x, one, zero = torch.randn(4, 197, 192), torch.ones(192), torch.zeros(192)
        >>> layer_norm_rational(x, one, zero, torch.randn(8, 6), torch.randn(8, 4)).shape
        torch.Size([4, 197, 192])
    """
    if not isinstance(x, Tensor):
        raise type_error("x", "a torch tensor", type_name(x))
    tensors = (x, weight, bias, numerator, denominator)
    key = call_key("layer_norm_rational", x, version, training, noise, eps, type(eps))
    entry = None if key is None else CACHE.find(key, tensors)
    if entry is not None:
        return entry(tensors)  # type: ignore[no-any-return]
    made = prepare(x, numerator, denominator, version, training, noise, key)
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise type_error("eps", "a number", type_name(eps))
    for name, t in (("weight", weight), ("bias", bias)):
        given: Any = t
        if not isinstance(given, Tensor):
            raise type_error(name, "a torch tensor", type_name(given))
        if not given.is_floating_point():
            raise type_error(name, "a floating dtype", given.dtype)
        if given.device != x.device:
            raise value_error(name, f"x's device {x.device}", given.device)
        if given.shape != x.shape[-1:]:
            raise value_error(name, f"shape [{x.shape[-1]}]", f"shape {tuple(given.shape)}")
    weight, bias = weight.contiguous(), bias.contiguous()
    is_same = weight is tensors[1] and bias is tensors[2]  # else the operator looks up its own tensors
    given = x, weight, bias, made.numerator, denominator
    y: Tensor = operator.layer_norm_rational(*given, float(eps), made.version, made.dtype, made.backend, key=made.key if is_same else None)
    return y
