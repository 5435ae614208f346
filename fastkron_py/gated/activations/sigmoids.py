"""Device functions that activations have in their constants. A file of its own: `built_in` imports the activations, and none imports it."""

import math
from typing import Final

from fastkron_py.runtime.optional_triton import tl, triton
from fastkron_py.tiling.approximations import quick_exp2, quick_reciprocal

_LESS_LOG2_E: Final = tl.constexpr(-math.log2(math.e))


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def quick_sigmoid(x):
    """By the units for powers of two and reciprocals: eight instructions fewer, for which the next product waits."""
    return quick_reciprocal(1 + quick_exp2(x * _LESS_LOG2_E))
