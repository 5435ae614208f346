"""The launches of `adapters/kernels.py`, and their tiles: a closed form."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.adapters.factor import Operands
from fastkron_py.adapters.kernels import _indexed_lokr_kernel, _sort_rows_kernel
from fastkron_py.adapters.plan import FactorSize
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.program import Scalar
from fastkron_py.tiling.products import arithmetic

_SORTED: Final = 2048  # rows that a program looks at at a time
_NARROWEST: Final = 16  # that a tensor core takes
_WARPGROUP: Final = 64  # rows of a warpgroup's product
_MOST_STAGES: Final = 3
_FEWEST_ROWS: Final = 4  # a thread has two neighbours of a product's sums


class _Sums(NamedTuple):
    """The sums of a program's first product: as many as do not spill.

    Attributes:
        columns: rows times groups of a row's elements; more where there are more groups.
        most: in all.
        of_thread: as many of a thread.
        depth: elements of x and w2 that are multiplied in a step.
        width: columns of the product with w2, at most.
    """

    columns: int
    most: int
    of_thread: int
    depth: int
    width: int


# By the bytes of an element.
_SUMS: Final = {2: _Sums(128, 128 * 256, 128, 64, 256), 4: _Sums(128, 128 * 64, 32, 32, 64), 8: _Sums(64, 64 * 64, 32, 16, 64)}

_HALF_FROM_REGISTERS: Final = _Sums(128, 128 * 128, 64, 64, 128)  # where tensor cores read operands from there


def _sums(dtype: torch.dtype, device: torch.device) -> _Sums:
    if dtype.itemsize == 2 and not devices.gpu_of(device).has_shared_operands:
        return _HALF_FROM_REGISTERS
    return _SUMS[dtype.itemsize]


def _rows(sums: _Sums, groups: int, is_pair: bool) -> int:
    """The rows of a program; those of a pair are a side of a second product."""
    return max(_NARROWEST if is_pair else _FEWEST_ROWS, sums.columns // groups)


def most_rank(dtype: torch.dtype, in1: int, device: torch.device) -> int:
    """The largest rank of a w2 that the kernel takes as a pair; 0 where as many as a product sums at least do not fit."""
    sums, groups = _sums(dtype, device), next_power_of_two(in1)
    most = sums.most // (groups * _rows(sums, groups, True))
    return most if most >= _NARROWEST else 0


def _tile(dtype: torch.dtype, in1: int, w2: FactorSize, device: torch.device) -> dict[str, int]:
    """The blocks of a program."""
    sums, groups, is_pair = _sums(dtype, device), next_power_of_two(in1), w2.rank is not None
    rows = _rows(sums, groups, is_pair)
    most = min(sums.width, sums.most // (groups * rows))
    least = _WARPGROUP if is_pair else _NARROWEST  # zeros cost less than other instructions
    width = min(most, max(least, next_power_of_two(w2.rank or w2.rows)))
    return {
        "BLOCK_M": rows,
        "BLOCK_I": groups,
        "BLOCK_N": width,
        "BLOCK_O": max(_NARROWEST, min(128 if dtype.itemsize == 2 else 64, next_power_of_two(w2.rows))),
        "BLOCK_K": max(_NARROWEST, min(sums.depth, next_power_of_two(w2.columns))),
        "num_warps": min(8, max(4, width * groups * rows // (32 * sums.of_thread))),
    }


def add_indexed(build: Builder, given: Operands, index: Tensor, y: Tensor, precision: str) -> None:
    """Add both launches: rows are sorted by adapter, and multiplied. The program's first scalar is the product's.

    X is ``[rows, in1 * in2]``, base, if there is one, and y ``[rows, out1 * out2]``, w1 ``[adapters, out1, in1]``, w2 ``[adapters, out2,
    in2]`` or a pair of at most `most_rank`, index ``[rows]``. None has gaps in memory.
    """
    x, (w1, _), w2, base = given
    rows, (adapters, out1, in1) = x.shape[0], w1.shape
    order, ends = build.empty((rows,), torch.int32), build.empty((adapters + 1,), torch.int32)
    sort = {"rows": rows, "adapters": adapters, "BLOCK": min(_SORTED, next_power_of_two(rows)), "num_warps": 4}
    build.launch(Launcher([LaunchConfig(_sort_rows_kernel, (adapters + 1,), sort)]), (index, order, ends))
    tile, numbers = _tile(x.dtype, in1, w2.size, build.device), arithmetic(x.dtype, precision, given=True)
    right, left = (w2.left, x) if w2.right is None else (w2.right, w2.left)
    arguments = {
        "adapters": adapters,
        "OUT1": out1,
        "IN1": in1,
        "OUT2": w2.size.rows,
        "IN2": w2.size.columns,
        "WIDTH": right.shape[1],
        "IS_PAIR": w2.right is not None,
        "HAS_BASE": base is not None,
        "GROUPS": next_power_of_two(adapters + 1),
        "COMPUTE": numbers.compute,
        "ACC": numbers.acc,
        "PRECISION": numbers.precision,
        **tile,
    }
    # Each group of rows, those without an adapter among them, has at most one tile that is not full.
    tiles = min(rows, rows // tile["BLOCK_M"] + adapters + 1)
    grid = (tiles * (1 if w2.right is not None else math.ceil(w2.size.rows / tile["BLOCK_N"])),)
    step = (tile["BLOCK_N"] + tile["BLOCK_M"] * tile["BLOCK_I"]) * tile["BLOCK_K"] * x.dtype.itemsize
    most = max(1, min(_MOST_STAGES, devices.gpu_of(build.device).shared_memory // step))
    configs = [LaunchConfig(_indexed_lokr_kernel, grid, {**arguments, "num_stages": stages}) for stages in range(most, 0, -1)]
    build.launch(Launcher(configs), (x, w1, right, left, x if base is None else base, order, ends, y), (Scalar(0),))
