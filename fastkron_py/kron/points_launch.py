"""The launch that takes points of a grid by a table."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastkron_py.kron.kernels.take_points import _take_points_kernel, _take_runs_kernel
from fastkron_py.kron.launches import parts_of
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.launch import LaunchConfig, Launcher

_TILE: Final = 1024  # words of a program
_THREADS: Final = 128
_WIDEST: Final = 256  # words of a point that a program takes


class Operand(NamedTuple):
    """A tensor ``[B, n, points, I]`` of words, whose I are neighbours.

    Attributes:
        sizes: of the dimensions.
        strides: of the first three.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def operand_of(x: Tensor, dim: int) -> Operand | None:
    """A tensor with its points in dimension -1 or -2; None where the kernels do not take its strides.

    Neighbours of the last dimension have to be neighbours in memory, and the dimensions before the points two runs at most. A complex
    number is a word of 64 bits, or two of float64.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    outer: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:dim], x.stride()[:dim], strict=True):
        if outer and outer[-1][1] == size * stride:
            outer[-1] = (outer[-1][0] * size, stride)
        elif size > 1:
            outer.append((size, stride))
    if len(outer) > 2:
        return None
    words = 2 if x.dtype == torch.complex128 else 1
    runs = [*[(1, 0)] * (2 - len(outer)), *outer, (x.shape[dim], x.stride(dim))]
    width = x.shape[-1] if dim == -2 else 1
    return Operand((*[size for size, _ in runs], width * words), tuple([stride * words for _, stride in runs]))


def points_launch(x: Operand, points: int, dtype: torch.dtype, span: int) -> Launcher:
    """The launch from x, the offsets and bases of a table, and y, which is contiguous.

    Args:
        x: whose points are taken.
        points: of y.
        dtype: of both.
        span: points that have a base in common.
    """
    batches, rows, count, width = x.sizes
    run = min(next_power_of_two(width), _WIDEST)
    block = min(next_power_of_two(points), _TILE // run)
    is_long = width == 1 and (batches * rows == 1 or points >= _TILE)
    touched = 0 if is_long or width > 1 else min(rows, _TILE)  # rows after a program's first one
    reach = max(x.strides[1] * touched + x.strides[2] * count + width, block * width)  # in x, and in a tile of y
    common: dict[str, Any] = {
        "x_strides": x.strides,
        "SPAN": span,
        "INDEX": tl.int32 if reach < 2**31 else tl.int64,
        "PARTS": parts_of(dtype),
        "num_warps": _THREADS // 32,
    }
    if width == 1:
        tiles = batches * rows * math.ceil(points / _TILE) if is_long else batches * math.ceil(rows * points / _TILE)
        arguments = common | {"sizes": (rows, points), "BLOCK": _THREADS, "STEPS": _TILE // _THREADS, "LONG": is_long}
        return Launcher([LaunchConfig(_take_points_kernel, (tiles,), arguments)])
    tiles = batches * rows * math.ceil(points / block) * math.ceil(width / run)
    arguments = common | {"sizes": (rows, points, width), "BLOCK_P": block, "BLOCK_I": run}
    return Launcher([LaunchConfig(_take_runs_kernel, (tiles,), arguments)])
