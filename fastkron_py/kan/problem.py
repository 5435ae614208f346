"""The problem that a polynomial KAN layer's launches are chosen for, and one product's launch."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kan import config as tuning
from fastkron_py.kan.config import Sizes
from fastkron_py.kan.layer_config import LayerConfig, wide
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.program import bits
from fastkron_py.tiling.products import _sum_partials_kernel

ALIGNED: Final = 16  # elements: more makes no load wider
_SUM_BLOCK: Final = 256
_ONE: Final = bits(1.0)


class Problem(NamedTuple):
    """Everything that a layer's launches depend on, as plain values; strides are of rows."""

    rows: int
    num_in: int
    num_out: int
    stride_x: int
    stride_g: int  # of dy; 0 in the forward pass
    has_bias: bool
    layer: LayerConfig
    precision: str
    dtype: torch.dtype
    device: torch.device

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return wide(self.dtype)

    @property
    def is_split(self) -> bool:
        """Whether float32 products take three passes."""
        return self.dtype == torch.float32 and self.precision == "highest"

    @property
    def is_large(self) -> bool:
        """Whether operands are prepared."""
        return tuning.is_large(self.sizes())

    def sizes(self) -> Sizes:
        """The sizes that the closed form chooses by."""
        passes = 3 if self.is_split else 1
        return Sizes(self.rows, self.num_in, self.num_out, self.layer.terms, self.dtype.itemsize, passes, devices.gpu_of(self.device))


class Stored(NamedTuple):
    """Where a kernel stores a result, and the second stage that adds up partial sums.

    Attributes:
        partial: shape of the partial sums; None for the result itself.
        launcher: of the second stage, on partial sums and the result.
        scalars: of its launch.
    """

    partial: tuple[int, ...] | None = None
    launcher: Launcher | None = None
    scalars: tuple[int, ...] = ()


def stored(splits: int, shape: tuple[int, ...]) -> Stored:
    """The result, or partial sums ``[splits, ...]`` that are added in order."""
    if splits == 1:
        return Stored()
    size = math.prod(shape)
    # stride_b is of a batch of sums; there is one here.
    strides = {"stride_b": 0, "stride_r": size}
    arguments = {**strides, "programs": splits, "SIZE": size, "BLOCK_R": 4, "BLOCK": _SUM_BLOCK, "COLUMNS": 0, "num_warps": 4}
    return Stored((splits, *shape), Launcher([LaunchConfig(_sum_partials_kernel, (-(-size // _SUM_BLOCK),), arguments)]), (_ONE,))


class Boxes(NamedTuple):
    """How the copy engine reads matrices: as boxes of this number of rows and columns, beyond the first columns nothing."""

    shape: list[int]
    columns: int
    layout: Any

    def describe(self, t: Tensor) -> Any:
        """The descriptor of a matrix whose rows begin on boundaries of 16 bytes, or of contiguous matrices, one below the other."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        t = t.view(-1, t.shape[-1])[:, : self.columns]
        return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], self.shape, self.layout)


class Product(NamedTuple):
    """The launch of one of a layer's products, or of both gradients, and the operands it wants.

    Attributes:
        launcher: on the operands, then the results or their partial sums.
        first: degree in the product; that before is added apart.
        transposed: whether an operand runs along the reduction: TF32 in shared memory has to, 16-bit types need not.
        with_low: whether its low halves are operands too.
        rounds: whether TF32, which cuts, is given numbers that cutting rounds.
        results: how each of the results is stored.
        pipelined: whether the kernel is one for Hopper GPUs.
        boxes: of the operand with its low halves, where descriptors of these are given; of dx's two, the coefficients.
        boxes_of_dy: of dx's other one.
    """

    launcher: Launcher
    first: int
    transposed: bool
    with_low: bool
    rounds: bool
    results: tuple[Stored, ...]
    pipelined: bool = False
    boxes: Boxes | None = None
    boxes_of_dy: Boxes | None = None


def whole_vectors(count: int) -> int:
    """The least number from count on of float32 numbers that are vectors of 16 bytes."""
    return -(-count // 4) * 4
