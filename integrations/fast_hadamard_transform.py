"""The function of the package fast_hadamard_transform, which is not needed: nothing is compiled ahead, and CPUs have it too.

    sys.modules["fast_hadamard_transform"] = fastkron_py.integrations.fast_hadamard_transform

gives it to code that imports that package. Functions of its inner modules for lengths 12 N, 20 N, 28 N and 40 N are left out: they
have other matrices than `fastkron_py.hadamard`, and rotated weights of the one do not fit activations of the other.
"""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from fastkron_py.functional import hadamard
from fastkron_py.runtime.checks import check_tensor
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.gpu import next_power_of_two


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """Multiply rows by Sylvester's Hadamard matrix: ``scale * x @ H``, of rows padded with zeros to a power of two, n elements of each.

    Args:
        x: ``[*, n]``, of any floating-point dtype, device and strides. Gradients have the same padding.
        scale: a finite number, or a 0-dimensional tensor, which gets a gradient.

    Returns:
        ``[*, n]`` of x's dtype, under autocast as well.

    Raises:
        TypeError: x is no floating-point tensor, or scale no number.
        ValueError: x has no dimension.

    Example:
        >>> hadamard_transform(torch.ones(3)).tolist()
        [3.0, 1.0, 1.0]
    """
    check_tensor("x", x, x, "x")
    if x.ndim == 0:
        raise value_error("x", "at least one dimension", tuple(x.shape))
    n = index(x.shape[-1])  # a graph that is compiled or traced is one of this length
    padding = next_power_of_two(max(n, 1)) - n
    with without_autocast(x.device):
        y = hadamard(torch.nn.functional.pad(x, (0, padding)) if padding else x, scale=scale)
    return y[..., :n] if padding else y
