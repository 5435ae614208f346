"""`rational`, the learnable rational activation of Kolmogorov-Arnold transformers, and its fusions with neighbouring layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastkron_py.rational import operator
from fastkron_py.rational.denominators.registry import Denominator, find_denominator
from fastkron_py.runtime.arrays import through_bridge
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import REAL_DTYPES, check_dense, check_number, check_probability, check_type
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.precision import autocast_dtype, autocasted

ArrayT = TypeVar("ArrayT")

DEGREE_MOST: Final = 16
_NAMES: Final = ("x", "numerator", "denominator")


def rational(
    x: ArrayT, numerator: ArrayT, denominator: ArrayT, *, version: str = "B", training: bool = False, noise: float = 0.1
) -> ArrayT:
    """Apply a rational function ``P(x) / Q(x)`` to every element, with coefficients of its channel's group.

    The C channels are cut into G groups of neighbours. ``P(x) = sum_i a_i x^i``, and with ``S(x) = sum_j b_j x^j`` (Molina et al.,
    "Pade Activation Units", ICLR 2020; Yang and Wang, "Kolmogorov-Arnold Transformer", ICLR 2025):

    ========= ======================== =========
    version   Q(x)                     j
    ========= ======================== =========
    ``"A"``   ``1 + sum_j |b_j x^j|``  1 to n
    ``"B"``   ``1 + |S(x)|``           1 to n
    ``"C"``   ``0.1 + |S(x)|``         0 to n - 1
    ``"D"``   as B                     1 to n
    ``"N"``   ``1 + S(x)``             1 to n
    ========= ======================== =========

    In version D, each call in training multiplies the numerator's coefficients by random numbers between ``1 - noise`` and ``1 + noise``.
    Version N is unsafe: it has a pole where S(x) is -1, and results near it are large, infinite or NaN. The gradient of all
    coefficients takes one pass over memory and repeats bit for bit. The derivative of an absolute value at zero is zero, so
    denominators that are all zero never learn.

    Args:
        x: ``[..., C]`` of any rank and strides: a torch tensor, or a NumPy or CuPy array; float16, bfloat16, float32 or float64.
            Images whose channels come first are passed as ``x.movedim(1, -1)``, which copies nothing, here neither.
        numerator: ``[G, m + 1]``, the coefficients a_0 to a_m, m at most 16; or ``[1, m + 1]``, shared by all groups.
        denominator: ``[G, n]`` or ``[1, n]``: b_1 to b_n, for version C b_0 to b_{n-1}; n from 1 to 16, for version C to 17.
            Coefficients are float64 where x is, and of any other of these dtypes where it is not.
        version: of the denominator.
        training: whether version D is noisy; without meaning for the others.
        noise: of version D, from 0 to 1.

    Returns:
        A result of x's shape, dtype and order of dimensions in memory; under autocast, of autocast's dtype. The arithmetic is
        float32, or float64 for float64.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an unknown version; coefficients whose shapes disagree, or whose number of groups does not divide C; degrees
            out of range; devices that differ; a noise out of range.

    Example:
        >>> x = torch.randn(4, 197, 768)
        >>> a, b = torch.randn(8, 6), torch.randn(8, 4)
        >>> rational(x, a, b).shape
        torch.Size([4, 197, 768])
    """
    if isinstance(x, Tensor):
        return _apply(x, numerator, denominator, version, training, noise)  # type: ignore[arg-type, return-value]
    arrays = dict(zip(_NAMES, (x, numerator, denominator), strict=True))
    return through_bridge(arrays, lambda t: _apply(t["x"], t["numerator"], t["denominator"], version, training, noise))


class Prepared(NamedTuple):
    """The operator's arguments, from checked ones."""

    numerator: Tensor  # with noise, where there is some
    version: str  # of the denominator, the one without noise
    dtype: torch.dtype  # of the result
    is_autocast: bool  # whether that is autocast's
    backend: str  # that was asked for
    key: Hashable  # of the call, to be kept by; None for a noisy one, whose operands are made anew each time


def prepare(
    x: Tensor, numerator: Tensor, denominator: Tensor, version: str, training: bool, noise: float, key: Hashable = None
) -> Prepared:
    """Check, apply autocast to the result's dtype and a noisy version's noise to the numerator, and ask for the backend."""
    found = find_denominator(version)
    check_probability("noise", noise, "a number from 0 to 1")
    _check_tensors(x, numerator, denominator)
    _check_shapes(x, numerator, denominator, found)
    autocast = None if x.dtype == torch.float64 else autocast_dtype(x)
    if found.is_noisy and training and noise:
        key, numerator = None, numerator * (1 + noise * (2 * torch.rand_like(numerator) - 1))
    dtype = x.dtype if autocast is None else autocast
    return Prepared(numerator, found.without_noise.name, dtype, autocast is not None, backend_of_call(), key)


def call_key(verb: str, x: Tensor, version: str, training: bool, noise: float, *more: Any) -> Hashable:
    """The key of a call in the cache, beside its tensors; None for a call that is compiled. Nothing but x's type has been checked yet."""
    if not isinstance(x, Tensor):
        raise type_error("x", "a torch tensor", type_name(x))
    return None if torch.compiler.is_compiling() else (verb, version, training, noise, type(noise), autocast_dtype(x), *more)


def _apply(x: Tensor, numerator: Tensor, denominator: Tensor, version: str, training: bool, noise: float) -> Tensor:
    tensors = (x, numerator, denominator)
    key = call_key("rational", x, version, training, noise)
    entry = None if key is None else CACHE.find(key, tensors)
    if entry is not None:
        return entry.call(tensors, entry.options)
    made = prepare(x, numerator, denominator, version, training, noise, key)
    return operator.rational(x, made.numerator, denominator, made.version, made.dtype, made.backend, key=made.key)


def linear_rational(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numerator: Tensor,
    denominator: Tensor,
    *,
    version: str = "B",
    training: bool = False,
    noise: float = 0.1,
) -> Tensor:
    """``rational(linear(x, weight, bias), numerator, denominator)``, on Hopper GPUs in one kernel where that takes less time.

    Where gradients are wanted, the linear layer's result is kept for them; else it never is in memory.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        numerator: ``[G, m + 1]`` or ``[1, m + 1]``, as for `rational`; G divides N.
        denominator: ``[G, n]`` or ``[1, n]``.
        version: of the denominator.
        training: whether version D is noisy.
        noise: of version D.

    Returns:
        ``[..., N]``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that disagree; or a value that `rational` refuses.

    Example:
        >>> x, w = torch.randn(4, 197, 192), torch.randn(768, 192)
        >>> linear_rational(x, w, None, torch.randn(8, 6), torch.randn(8, 4)).shape
        torch.Size([4, 197, 768])
    """
    found = find_denominator(version)
    check_probability("noise", noise, "a number from 0 to 1")
    if not isinstance(x, Tensor):
        raise type_error("x", "a torch tensor", type_name(x))
    tensors = [t for t in (x, weight, bias, numerator, denominator) if t is not None]
    is_fixed = not (found.is_noisy and training and noise) and not torch.compiler.is_compiling()
    key = "linear_rational", found.without_noise.name, bias is None
    entry = CACHE.find(key, tensors) if is_fixed else None
    if entry is not None:
        return entry.call(tensors, entry.options)
    _check_tensors(x, numerator, denominator)
    dtype = autocast_dtype(x)
    _check_linear(weight, bias, x, x.dtype if dtype is None else None)
    if not is_fixed or not operator.is_fused(tensors, dtype):
        z = torch.nn.functional.linear(x, weight, bias)
        return rational(z, numerator, denominator, version=version, training=training, noise=noise)
    _check_shapes(weight.mT, numerator, denominator, found)  # whose last dimension is the function's
    x, (weight,), bias = autocasted(x, [weight], bias)
    # Under autocast it is called on other tensors than these.
    return operator.linear_rational(x, weight, bias, numerator, denominator, key[1], key=key if dtype is None else None)


# ---- checks ----------------------------------------------------------------------------------


def _check_tensors(*tensors: Any) -> None:
    for t, name in zip(tensors, _NAMES, strict=True):
        check_dense(name, t, "a torch tensor" if name == "x" else "a torch tensor, like x", REAL_DTYPES)
        if (t.dtype == torch.float64) != (tensors[0].dtype == torch.float64):
            raise type_error(name, f"float64 where x is float64, and only there, since x is of {tensors[0].dtype}", t.dtype)
        if t.device != tensors[0].device:
            raise value_error(name, f"x's device {tensors[0].device}", t.device)


def _check_shapes(x: Tensor, numerator: Tensor, denominator: Tensor, version: Denominator) -> None:
    if x.ndim == 0:
        raise value_error("x", "at least one dimension, [..., C]", "a 0-dimensional tensor")
    of_b = version.count(DEGREE_MOST)
    for name, c, least, most in (("numerator", numerator, 1, DEGREE_MOST + 1), ("denominator", denominator, 1, of_b)):
        if c.ndim != 2:
            raise value_error(name, "a matrix [G, coefficients]", f"shape {tuple(c.shape)}")
        if c.shape[0] < 1 or not least <= c.shape[1] <= most:
            raise value_error(name, f"[G, {least} to {most}] with G at least 1", f"shape {tuple(c.shape)}")
    groups = max(numerator.shape[0], denominator.shape[0])
    if min(numerator.shape[0], denominator.shape[0]) not in (1, groups):
        raise value_error("denominator", f"as many groups as numerator's {numerator.shape[0]}, or 1", denominator.shape[0])
    if x.shape[-1] % groups:
        raise value_error("x", f"a last dimension that the number of groups {groups} divides", x.shape[-1])


def _check_parameter(name: str, t: Any, x: Tensor, dtype: torch.dtype | None, expected: str = "a torch tensor") -> None:
    """A floating-point tensor on x's device; of this dtype, unless that is None."""
    check_type(name, t, Tensor, expected)
    if not t.is_floating_point() or dtype not in (None, t.dtype):
        raise type_error(name, "a floating dtype" if dtype is None else f"dtype {dtype}, as that of x", t.dtype)
    if t.device != x.device:
        raise value_error(name, f"x's device {x.device}", t.device)


def _check_linear(weight: Any, bias: Any, x: Tensor, dtype: torch.dtype | None) -> None:
    """A linear layer's parameters behind x, of this dtype unless that is None."""
    _check_parameter("weight", weight, x, dtype)
    if bias is not None:
        _check_parameter("bias", bias, x, dtype, "a torch tensor or None")
    if x.ndim == 0:
        raise value_error("x", "at least one dimension, [..., C]", "a 0-dimensional tensor")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise value_error("weight", f"shape [O, {x.shape[-1]}]", f"shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise value_error("bias", f"shape [{weight.shape[0]}]", f"shape {tuple(bias.shape)}")


# ---- a linear layer after the function -------------------------------------------------------------


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
        ValueError: shapes or devices that disagree, or a value that `rational` rejects.

    Example:
        >>> x, w = torch.randn(4, 197, 192), torch.randn(768, 192)
        >>> rational_linear(x, torch.randn(8, 6), torch.randn(8, 4), w).shape
        torch.Size([4, 197, 768])
    """
    tensors = (x, numerator, denominator, weight) if bias is None else (x, numerator, denominator, weight, bias)
    key = call_key("rational_linear", x, version, training, noise, bias is None)
    entry = None if key is None else CACHE.find(key, tensors)
    if entry is not None:
        return entry.call(tensors, entry.options)
    made: Prepared = prepare(x, numerator, denominator, version, training, noise, key)
    key = made.key
    _check_linear(weight, bias, x, None if made.is_autocast else made.dtype)
    if made.is_autocast:  # the operator looks up its own tensors
        key, weight, bias = None, weight.to(made.dtype), None if bias is None else bias.to(made.dtype)
    given = x, made.numerator, denominator, weight, bias
    return operator.rational_linear(*given, made.version, made.dtype, made.backend, key=key)


# ---- layer normalisation before the function -------------------------------------------------------


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
        ValueError: shapes or devices that disagree, or a value that `rational` rejects.

    Example:
        >>> x, one, zero = torch.randn(4, 197, 192), torch.ones(192), torch.zeros(192)
        >>> layer_norm_rational(x, one, zero, torch.randn(8, 6), torch.randn(8, 4)).shape
        torch.Size([4, 197, 192])
    """
    tensors = (x, weight, bias, numerator, denominator)
    key = call_key("layer_norm_rational", x, version, training, noise, eps, type(eps))
    entry = None if key is None else CACHE.find(key, tensors)
    if entry is not None:
        return entry.call(tensors, entry.options)
    made = prepare(x, numerator, denominator, version, training, noise, key)
    check_number("eps", eps)
    for name, t in (("weight", weight), ("bias", bias)):
        _check_parameter(name, t, x, None)
        if t.shape != x.shape[-1:]:
            raise value_error(name, f"shape [{x.shape[-1]}]", f"shape {tuple(t.shape)}")
    weight, bias = weight.contiguous(), bias.contiguous()
    is_same = weight is tensors[1] and bias is tensors[2]  # else the operator looks up its own tensors
    given = x, weight, bias, made.numerator, denominator
    return operator.layer_norm_rational(*given, float(eps), made.version, made.dtype, made.backend, key=made.key if is_same else None)
