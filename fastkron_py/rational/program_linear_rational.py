"""The program of linear layers with a rational function on their result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.rational.config_linear import linear_tile
from fastkron_py.rational.denominators.registry import find_denominator
from fastkron_py.rational.kernels.gemm_epilogue import epilogue_rational, value_rational
from fastkron_py.rational.launches import is_approximate
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.gemm import epilogue_plain
from fastkron_py.tiling.gemm_config import GemmSizes, GemmTile
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm, add_rowwise, takes_descriptor


def params(a: Tensor, b: Tensor, columns: int, device: torch.device) -> tuple[Any, ...]:
    """The constants of the epilogues of `rational/kernels/gemm_epilogue.py`: sizes of the coefficients and of a result's columns."""
    groups = max(a.shape[0], b.shape[0])
    strides = [c.shape[1] if c.shape[0] > 1 else 0 for c in (a, b)]
    return a.shape[1], b.shape[1], columns // groups, is_approximate(a.dtype, device), *strides


def _tile(build: Builder, x: Tensor, weight: Tensor, keep: bool) -> GemmTile:
    size = x.element_size()
    passes = 3 if x.dtype == torch.float32 else 1
    stored = 2 * size if keep else size
    has_descriptors = takes_descriptor(build, x) and takes_descriptor(build, weight)
    sizes = GemmSizes(x.shape[0], weight.shape[0], x.shape[1], size, passes, stored, False, devices.gpu_of(build.device), has_descriptors)
    return linear_tile(sizes, has_descriptors)


def forward(tensors: Sequence[Any], options: tuple[Any, ...], keep: bool = False) -> Program:
    """The program of `fastkron::linear_rational`: ``P(z) / Q(z)`` with ``z = x @ weight.T + bias``, in memory only if it is kept.

    Args:
        tensors: x ``[..., K]``, float16, bfloat16 or float32, not empty; weight ``[N, K]``, like x; bias ``[N]`` or None; numerator
            ``[G, m + 1]`` or ``[1, m + 1]``, G dividing N; denominator ``[G, n]`` or ``[1, n]``, of version C with b_0 first.
        options: the denominator's name.
        keep: also return z.
    """
    (version,) = options
    build = Builder(tensors)
    x, weight, bias, a, b = build.inputs
    shape = *x.shape[:-1], weight.shape[0]
    x = add_rowwise(build, build.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])))
    weight = add_rowwise(build, weight)
    y = build.empty((x.shape[0], weight.shape[0]), x.dtype)
    z = build.empty_like(y) if keep else None
    about, functions = params(a, b, weight.shape[0], build.device), (find_denominator(version).device.complete(),)
    call = Gemm(epilogue_rational if keep else epilogue_plain, value=value_rational, params=about, functions=functions)
    coefficients = build.contiguous(a), build.contiguous(b)
    add_gemm(build, x, weight, bias, call, y, pair=z, tensors=coefficients, tile=_tile(build, x, weight, keep))
    return build.program([y] if z is None else [y, z], [shape] if z is None else [shape, shape])


def forward_saving(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::linear_rational_saving`."""
    return forward(tensors, options, True)
