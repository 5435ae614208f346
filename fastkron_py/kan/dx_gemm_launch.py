"""The launcher of a large polynomial KAN layer's dx on Hopper GPUs, by the linear layers' main loop."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from fastkron_py.kan import config as tuning
from fastkron_py.kan.kernels.dx_gemm import epilogue_input_gradient, fetch_input
from fastkron_py.kan.problem import Kind, turned_in_blocks
from fastkron_py.runtime import device as devices
from fastkron_py.tiling.gemm import begin_nothing
from fastkron_py.tiling.gemm_launch import gemm
from fastkron_py.tiling.gemm_problem import Gemm


class GemmInputGradient:
    """dx, ready to be launched, where there is enough of it."""

    def __init__(self, kind: Kind) -> None:
        spec = kind.spec
        first = int(spec.found.has_constant)  # degree in the product
        self._kind = kind
        self._first = first
        choice = tuning.input_gradient_gemm(kind.sizes()._replace(terms=spec.terms - first)) if _can_copy(kind) else None
        self.is_possible = choice is not None
        if choice is None:
            return
        self._tile, self._degrees = choice
        self._width = self._tile.block_n // self._tile.parts // self._degrees
        value, slope = spec.normalizer.device_functions(not knobs.runtime.interpret)
        self._call = Gemm(
            epilogue_input_gradient,
            value=value,
            slope=slope,
            params=(spec.terms, first, self._degrees, spec.constants),
            functions=spec.prologue(True),
            begin=begin_nothing if knobs.runtime.interpret else fetch_input,
            sums=self._degrees,
        )

    def __call__(self, dy: Tensor, x: Tensor, coefficients: Tensor, table: Tensor) -> Tensor:
        """``dx [M, I]``; rows of dy and x are runs of memory, from boundaries of 16 bytes."""
        kind = self._kind
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        b = turned_in_blocks(coefficients, self._first, self._width, self._degrees, kind.dtype == torch.float32)
        gemm(dy, b, None, self._call, dx, side=x, tensors=(table, x), precision=kind.precision, tile=self._tile)
        return dx


def _can_copy(kind: Kind) -> bool:
    """Whether the device's copy engine takes every operand."""
    vector = 16 // kind.dtype.itemsize
    sizes = (kind.num_in, kind.num_out, kind.stride_x, kind.stride_g)
    return devices.has_chained(kind.device, kind.dtype) and all([size % vector == 0 for size in sizes])
