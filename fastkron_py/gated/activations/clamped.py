"""SwiGLU with constants: clamps of both projections, a factor inside the sigmoid, a number added to up, a factor of the result.

``(clamp(up, -limit, limit) + offset) * scale * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``; GPT-OSS has limit 7, alpha 1.702,
offset 1 and scale 1. quick_gelu has no limit. The constants C of device functions are (limit, alpha, offset, scale, sigmoid).
"""

import math
import re
from typing import Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.registry import Activation
from fastkron_py.gated.activations.sigmoids import quick_sigmoid, sigmoid
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _clamped(x, C: tl.constexpr):
    return tl.where(x > C[0], C[0], x)  # by selection: a minimum would lose a NaN


@triton.jit
def _value(x, C: tl.constexpr):
    g = _clamped(x, C)
    return g * C[4](g * C[1]) * C[3]


@triton.jit
def _derivative(x, C: tl.constexpr):
    g = _clamped(x, C)
    s = C[4](g * C[1])
    return tl.where(x > C[0], 0.0, (s + s * (g * (1 - s) * C[1])) * C[3])


@triton.jit
def _up_value(x, C: tl.constexpr):
    return tl.where(x < -C[0], -C[0], _clamped(x, C)) + C[2]


@triton.jit
def _up_derivative(x, C: tl.constexpr):
    return tl.where((x > C[0]) | (x < -C[0]), 0.0, 1.0)


def clamped_swiglu(
    name: str, limit: float, alpha: float = 1.0, offset: float = 0.0, scale: float = 1.0, *, formula: str = ""
) -> Activation:
    """The activation with these constants."""

    def at_most(x: Tensor) -> Tensor:  # torch.clamp has another derivative at the limit from torch 2.14 on
        return torch.where(x > limit, limit, x)

    def host(x: Tensor) -> Tensor:
        g = at_most(x)
        return scale * g * torch.sigmoid(alpha * g)

    def host_derivative(x: Tensor) -> Tensor:
        g = at_most(x)
        s = torch.sigmoid(alpha * g)
        return scale * (x <= limit) * (s + s * (alpha * g * (1 - s)))

    def host_up(x: Tensor) -> Tensor:
        return -at_most(-at_most(x)) + offset

    constants = float(limit), float(alpha), float(offset), float(scale)
    return Activation(
        name,
        host,
        host_derivative,
        _value,
        _derivative,
        formula=formula,
        up=Activation("up", host_up, lambda x: (x.abs() <= limit).to(x.dtype), _up_value, _up_derivative),
        constants=(*constants, sigmoid),
        quick_constants=(*constants, quick_sigmoid),
    )


def of_name(name: str) -> Activation:
    """The activation of a name with one to four numbers: "clamped_swiglu(limit, alpha, offset, scale)".

    Raises:
        ValueError: it has other text, or numbers that make no activation.
    """
    try:
        numbers = [float(number) for number in re.fullmatch(r"clamped_swiglu\((.+)\)", name)[1].split(",")]  # type: ignore[index]
        if numbers[0] > 0 and all(map(math.isfinite, numbers[1:])):
            return clamped_swiglu(name, *numbers)
    except (TypeError, ValueError):
        pass
    raise value_error("activation", "clamped_swiglu(limit, alpha, offset, scale), limit above 0, the others finite", repr(name))


CLAMPED_SWIGLU: Final = clamped_swiglu("clamped_swiglu", 7.0, 1.702, 1.0, formula="min(x, 7) sigmoid(1.702 min(x, 7))")
QUICK_GELU: Final = clamped_swiglu("quick_gelu", math.inf, 1.702, formula="x sigmoid(1.702 x)")
