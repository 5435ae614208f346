"""Launches of the polynomial KAN kernels for Hopper GPUs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kan import config_hopper as tuning
from fastkron_py.kan.config import GROUP, Sizes
from fastkron_py.kan.config_hopper import Staged
from fastkron_py.kan.problem import ALIGNED, Kind, Sum
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.tiling.products import _sum_segments_kernel

_SUM_ROWS = 32


def takes(kind: Kind) -> bool:
    """Whether these kernels can do a layer's products on its device, and are better than plain Triton's."""
    if not kind.spec.found.any_dialect or not devices.has_staged(kind.device, kind.dtype):
        return False
    vector = 16 // kind.dtype.itemsize
    return kind.stride_x % vector == 0 and kind.stride_g % vector == 0 and tuning.takes(kind.sizes())


def _precision(kind: Kind) -> str:
    if kind.dtype != torch.float32:
        return "half"
    return "split" if kind.is_split else "cut"


class _Staged:
    """A launch, and what its caller has to prepare."""

    is_staged = True

    def __init__(self, kind: Kind) -> None:
        self.first = int(kind.spec.found.has_constant)  # degree in the product
        self.needs_low = kind.is_split
        # TF32 operands have to run along the reduction; 16-bit ones need not.
        self.turned = kind.dtype == torch.float32
        self.rounds = self.turned and not kind.is_split
        self.partial: tuple[int, ...] | None = None
        self.sum: Any = None

    def sizes(self, kind: Kind) -> Sizes:
        """What the closed form chooses by."""
        return kind.sizes()._replace(terms=max(1, kind.spec.terms - self.first))

    def constants(self, kind: Kind, choice: Staged, derivative: bool) -> dict[str, Any]:
        """What all three kernels take."""
        start, step, value = kind.spec.prologue(derivative)
        return {
            "rows": kind.rows,
            "num_in": kind.num_in,
            "num_out": kind.num_out,
            "stride_xm": kind.stride_x,
            "TERMS": kind.spec.terms,
            "FIRST": self.first,
            "PARAMS": kind.spec.constants,
            "START": start,
            "STEP": step,
            "VALUE": value,
            "NORM": kind.spec.normalizer.device_functions(True)[0],
            "BLOCK_N": choice.block_n,
            "BLOCK_K": choice.block_k,
            "STAGES": choice.stages,
            "FLUSH": choice.flush,
            "PRECISION": _precision(kind),
            "ALIGN_IN": math.gcd(kind.num_in, kind.stride_x, ALIGNED),
            "num_warps": 4 if choice.registers else 8,
        }


class _Described:
    """A launch whose operands at some places are given as descriptors of matrices of so many columns, in boxes, for the copy engine."""

    def __init__(self, config: LaunchConfig, places: tuple[int, ...], box: list[int], dtype: torch.dtype, columns: int) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        self._descriptor = TensorDescriptor
        self._launch = Launcher([config])
        self._places, self._box, self._columns = places, box, columns
        self._layout = gl.NVMMASharedLayout.get_default_for(box, getattr(gl, str(dtype).removeprefix("torch.")))

    def __call__(self, *given: Any) -> None:
        """Launch."""
        self._launch(*[self._described(g) if i in self._places else g for i, g in enumerate(given)])

    def _described(self, t: Tensor) -> Any:
        """Of a matrix whose rows begin on boundaries of 16 bytes, or of contiguous matrices, one below the other."""
        t = t.reshape(-1, t.shape[-1])[:, : self._columns]
        return self._descriptor(t, list(t.shape), [t.stride(0), 1], self._box, self._layout)


class StagedForward(_Staged):
    """y of x, ready to be launched."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        choice = tuning.forward(self.sizes(kind))
        kernel, _, _ = devices.staged_kernels()
        arguments = {
            **self.constants(kind, choice, False),
            "blocks_per_split": choice.blocks,
            "items": choice.items,
            "HAS_BIAS": kind.has_bias or self.first == 1,
            "BLOCK_M": tuning.BLOCK_M,
            "GROUP": GROUP,
            "REGISTERS": choice.registers,
            "ALIGN_OUT": math.gcd(kind.num_out, ALIGNED),
        }
        box = [choice.block_n, choice.block_k]
        self.launch = _Described(LaunchConfig(kernel, (choice.programs,), arguments), (1, 2), box, kind.dtype, kind.num_in)
        if choice.splits > 1:
            self.partial = (choice.splits, kind.rows, kind.num_out)
            self.sum = Sum(choice.splits, kind.rows * kind.num_out)


class StagedInputGradient(_Staged):
    """dx, ready to be launched, where there is enough of it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        choice = tuning.input_gradient(self.sizes(kind))
        self.is_possible = choice is not None
        if choice is None:
            return
        _, kernel, _ = devices.staged_kernels()
        arguments = {
            **self.constants(kind, choice, True),
            "stride_gm": kind.stride_g,
            "stride_co": 1 if self.turned else kind.num_in,
            "stride_ci": kind.num_out if self.turned else 1,
            "SLOPE": kind.spec.normalizer.device_functions(True)[1],
            "DEGREES": choice.degrees,
            "BLOCK_M": tuning.BLOCK_M,
            "GROUP": GROUP,
            "ALIGN_OUT": math.gcd(kind.num_out, ALIGNED),
            "ALIGN_GM": math.gcd(kind.stride_g, ALIGNED),
            "ALIGN_CO": 1 if self.turned else math.gcd(kind.num_in, ALIGNED),
            "ALIGN_CI": math.gcd(kind.num_out, ALIGNED) if self.turned else 1,
        }
        self.launch = Launcher([LaunchConfig(kernel, (choice.programs,), arguments)])


class StagedCoefficientGradient(_Staged):
    """dC, ready to be launched."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        sizes = self.sizes(kind)
        choice = tuning.coefficient_gradient(sizes)
        _, _, kernel = devices.staged_kernels()
        blocks = -(-kind.rows // choice.block_k)
        arguments = {
            **self.constants(kind, choice, False),
            "blocks": blocks,
            "parts": choice.items,
            "DEGREES": choice.degrees,
            "REGISTERS": choice.registers,
        }
        box = [tuning.BLOCK_M, choice.block_k] if self.turned else [choice.block_k, tuning.BLOCK_M]
        columns = kind.rows if self.turned else kind.num_out
        self.launch = _Described(LaunchConfig(kernel, (choice.programs,), arguments), (0, 1), box, kind.dtype, columns)
        tiles = -(-kind.num_out // tuning.BLOCK_M) * -(-kind.num_in // choice.block_n) * -(-sizes.terms // choice.degrees)
        segments = tuning.segments_of(tiles, blocks, choice.items)
        if segments > 1:
            self.partial = (segments, kind.spec.terms, kind.num_out, kind.num_in)
            self.sum = _SegmentSum(kind, choice, self.first, blocks, segments)


class _SegmentSum:
    """The second stage of dC."""

    def __init__(self, kind: Kind, choice: Staged, first: int, blocks: int, segments: int) -> None:
        arguments = {
            "num_in": kind.num_in,
            "num_out": kind.num_out,
            "blocks": blocks,
            "programs": choice.items,
            "segments": segments,
            "TERMS": kind.spec.terms,
            "FIRST": first,
            "DEGREES": choice.degrees,
            "BLOCK_M": tuning.BLOCK_M,
            "BLOCK_N": choice.block_n,
            "ROWS": _SUM_ROWS,
            "num_warps": 4,
        }
        parts = -(-kind.num_in // choice.block_n) * -(-kind.num_out // _SUM_ROWS)
        self._launch = Launcher([LaunchConfig(_sum_segments_kernel, (parts * (kind.spec.terms - first),), arguments)])

    def __call__(self, partial: Tensor, out: Tensor) -> None:
        """Add up."""
        self._launch(partial, out)
