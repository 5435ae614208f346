"""The library's own activations, each with its derivative, and all records of this package."""

import math
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.registry import Activation
from fastkron_py.gated.activations.sigmoids import quick_sigmoid, sigmoid
from fastkron_py.runtime.optional_triton import tl, triton
from fastkron_py.runtime.registry import records

# Device functions that have a sigmoid take it in their constants: C[0] is the exact one, or the quick one.
_SIGMOIDS: Final[dict[str, Any]] = {"constants": (sigmoid,), "quick_constants": (quick_sigmoid,), "allows_overlap": True}

# ---- sigmoid: the logistic function ----------------------------------------------------------------


@triton.jit
def _sigmoid_value(x, C: tl.constexpr):
    return C[0](x)


@triton.jit
def _sigmoid_derivative(x, C: tl.constexpr):
    s = C[0](x)
    return s * (1 - s)


def _sigmoid_host_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


SIGMOID: Final = Activation(
    "sigmoid",
    torch.sigmoid,
    _sigmoid_host_derivative,
    _sigmoid_value,
    _sigmoid_derivative,
    formula="1 / (1 + exp(-x))",
    aliases=("glu",),
    **_SIGMOIDS,
)


# ---- silu, or swish: ``x sigmoid(x)`` --------------------------------------------------------------


@triton.jit
def _silu_value(x, C: tl.constexpr):
    return x * C[0](x)


@triton.jit
def _silu_derivative(x, C: tl.constexpr):
    s = C[0](x)
    return s + s * (x * (1 - s))


def _silu_host_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + s * (x * (1 - s))


SILU: Final = Activation(
    "silu",
    torch.nn.functional.silu,
    _silu_host_derivative,
    _silu_value,
    _silu_derivative,
    formula="x sigmoid(x)",
    aliases=("swish", "swiglu"),
    **_SIGMOIDS,
)


# ---- gelu: by the error function, ``x (1 + erf(x / sqrt(2))) / 2`` ---------------------------------

_ROOT_HALF: Final = tl.constexpr(math.sqrt(0.5))
_ROOT_HALF_PI: Final = tl.constexpr(math.sqrt(0.5 / math.pi))  # density of the normal distribution at 0


@triton.jit
def _gelu_value(x):
    return 0.5 * x * (1 + tl.erf(x * _ROOT_HALF))


@triton.jit
def _gelu_derivative(x):
    return 0.5 * (1 + tl.erf(x * _ROOT_HALF)) + x * (tl.exp(-0.5 * x * x) * _ROOT_HALF_PI)


GELU: Final = Activation(
    "gelu",
    torch.nn.functional.gelu,
    lambda x: 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi),
    _gelu_value,
    _gelu_derivative,
    formula="x (1 + erf(x / sqrt(2))) / 2",
    aliases=("geglu",),
    allows_overlap=True,
)


# ---- gelu_tanh: by the hyperbolic tangent, ``x sigmoid(2 z)``, ``z = sqrt(2 / pi) (x + 0.044715 x^3)`` ---

_SCALE: Final = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC: Final = tl.constexpr(0.044715)


@triton.jit
def _gelu_tanh_sigmoid(x, C: tl.constexpr):
    return C[0]((x + x * x * x * _CUBIC) * _SCALE)


@triton.jit
def _gelu_tanh_value(x, C: tl.constexpr):
    return x * _gelu_tanh_sigmoid(x, C)


@triton.jit
def _gelu_tanh_derivative(x, C: tl.constexpr):
    s = _gelu_tanh_sigmoid(x, C)
    return s + s * (1 - s) * ((x + x * x * x * (3 * _CUBIC)) * _SCALE)


def _gelu_tanh_host_derivative(x: Tensor) -> Tensor:
    scale = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(scale * (x + 0.044715 * x**3))
    return s + s * (1 - s) * (scale * (x + 3 * 0.044715 * x**3))


GELU_TANH: Final = Activation(
    "gelu_tanh",
    partial(torch.nn.functional.gelu, approximate="tanh"),
    _gelu_tanh_host_derivative,
    _gelu_tanh_value,
    _gelu_tanh_derivative,
    formula="x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2",
    aliases=("geglu_tanh",),
    **_SIGMOIDS,
)


# ---- relu: ``max(x, 0)`` ---------------------------------------------------------------------------


@triton.jit
def _relu_value(x):
    # By selection: a maximum would lose a NaN.
    return tl.where(x < 0, 0.0, x)


@triton.jit
def _relu_derivative(x):
    return tl.where(x > 0, 1.0, 0.0)


RELU: Final = Activation(
    "relu",
    torch.nn.functional.relu,
    lambda x: (x > 0).to(x.dtype),
    _relu_value,
    _relu_derivative,
    formula="max(x, 0)",
    aliases=("reglu",),
    allows_overlap=True,
)


# ---- relu2: ``max(x, 0)^2`` ------------------------------------------------------------------------


@triton.jit
def _relu2_value(x):
    r = _relu_value(x)
    return r * r


@triton.jit
def _relu2_derivative(x):
    return 2 * _relu_value(x)


RELU2: Final = Activation(
    "relu2",
    lambda x: torch.nn.functional.relu(x).square(),
    lambda x: 2 * torch.nn.functional.relu(x),
    _relu2_value,
    _relu2_derivative,
    formula="max(x, 0)^2",
    allows_overlap=True,
)


# ---- mish: ``x tanh(log(1 + exp(x)))`` -------------------------------------------------------------


@triton.jit
def _mish_tanh(x):
    """``tanh(log(1 + exp(x)))``, without exponentials that overflow."""
    e = tl.exp(-tl.abs(x))
    n = tl.where(x < 0, e * (e + 2), 1 + 2 * e)
    return n / (n + tl.where(x < 0, 2.0, 2 * e * e))


@triton.jit
def _mish_value(x):
    return x * _mish_tanh(x)


@triton.jit
def _mish_derivative(x):
    t = _mish_tanh(x)
    return t + x * ((1 - t * t) * sigmoid(x))


def _mish_host_derivative(x: Tensor) -> Tensor:
    t = torch.tanh(torch.nn.functional.softplus(x))
    return t + x * ((1 - t * t) * torch.sigmoid(x))


MISH: Final = Activation(
    "mish", torch.nn.functional.mish, _mish_host_derivative, _mish_value, _mish_derivative, formula="x tanh(log(1 + exp(x)))"
)


# ---- identity, whose gate is bilinear --------------------------------------------------------------


@triton.jit
def _identity_value(x):
    return x


@triton.jit
def _identity_derivative(x):
    return x * 0 + 1


IDENTITY: Final = Activation(
    "identity",
    lambda x: x,
    torch.ones_like,
    _identity_value,
    _identity_derivative,
    formula="x",
    aliases=("bilinear",),
    allows_overlap=True,
)


BUILT_IN: Final = records(__package__, Activation)
