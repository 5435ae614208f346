"""Launchers of gated linear layers: forward, and the gradients of both of every pair."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kernels.gated import (
    _gate_gradients_kernel,
    finish_gate,
    finish_gate_and_pair,
    finish_gradients,
    finish_gradients_and_gate,
)
from fastkron_py.kernels.gated_activations import find_activation
from fastkron_py.kernels.gemm_launch import Gemm, gemm, rowwise
from fastkron_py.kernels.launcher import Launcher, Way
from fastkron_py.kernels.recipes import arithmetic
from fastkron_py.kernels.triton_backend import on_device
from fastkron_py.tuning.gemm import GemmTile

_ELEMENTWISE_BLOCK: Final = (16, 128)


class Gated(NamedTuple):
    """What a layer computes besides its tensors."""

    activation: str
    layout: str
    precision: str  # "highest" or less
    tile: GemmTile | None = None  # None: by the closed form

    def gemm(self, finish: Any) -> Gemm:
        """The main loop's parameters with one of the finishers."""
        found = find_activation(self.activation)
        # Weights of either layout are read as two matrices, one of them every other row of an interleaved one: then sums
        # of a pair stand in two halves of a tile, which store in wider runs than neighbours do.
        interleaved = self.layout == "interleaved"
        return Gemm(finish, value=found.value, slope=found.derivative, params=(interleaved,), pairs="stacked")

    def halves(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``[2, H, K]`` and ``[2, H]``, views."""
        if self.layout == "stacked":
            return weight, bias
        weight = rowwise(weight)
        weight = weight.unflatten(0, (-1, 2)).transpose(0, 1)
        return weight, None if bias is None else bias.unflatten(0, (-1, 2)).mT

    def pair_targets(self, pairs: Tensor) -> dict[str, Tensor]:
        """Where finishers store pairs ``[M, 2 H]``."""
        if self.layout == "interleaved":
            return {"pair": pairs}
        up, gate = pairs.chunk(2, 1)
        return {"pair": up, "pair2": gate}


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, gated: Gated, saving: bool = False) -> tuple[Tensor, Tensor | None]:
    """``y [M, H]`` of ``x [M, K]``, none of them empty, and, saving, the pairs ``[M, 2 H]``."""
    weight, bias = gated.halves(weight, bias)
    y = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    if not saving:
        gemm(x, weight, bias, gated.gemm(finish_gate), y, precision=gated.precision, tile=gated.tile)
        return y, None
    pairs = torch.empty((x.shape[0], 2 * weight.shape[1]), dtype=x.dtype, device=x.device)
    call = gated.gemm(finish_gate_and_pair)
    gemm(x, weight, bias, call, y, **gated.pair_targets(pairs), precision=gated.precision, tile=gated.tile)  # type: ignore[arg-type]
    return y, pairs


def recomputed_gradients(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gated: Gated, y: Tensor | None = None) -> Tensor:
    """Gradients of the pairs ``[M, 2 H]`` from ``dy [M, H]``: the product once more, with their making as its finish.

    Where y is given, ``[M, H]``, the layer's result is stored there too; it may be dy itself.
    """
    weight, bias = gated.halves(weight, bias)
    d = torch.empty((x.shape[0], 2 * weight.shape[1]), dtype=x.dtype, device=x.device)
    call = gated.gemm(finish_gradients if y is None else finish_gradients_and_gate)
    targets: dict[str, Any] = gated.pair_targets(d)
    gemm(x, weight, bias, call, y, side=rowwise(dy), **targets, precision=gated.precision, tile=gated.tile)
    return d


@lru_cache(maxsize=512)
def _gradients_launch(
    rows: int, columns: int, stride: int, value: Any, slope: Any, layout: str, gate: bool, dtype: torch.dtype
) -> Launcher:
    block_m, block_n = _ELEMENTWISE_BLOCK
    arguments = {
        "M": rows,
        "columns": columns,
        "stride_dy": stride,
        "VALUE": value,
        "SLOPE": slope,
        "INTERLEAVED": layout == "interleaved",
        "GATE": gate,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "ACC": arithmetic(dtype, "highest", True).acc,
        "num_warps": 4,
    }
    return Launcher([Way(_gate_gradients_kernel, (-(-rows // block_m) * -(-columns // block_n),), arguments)])


def stored_gradients(dy: Tensor, pairs: Tensor, gated: Gated, in_place: bool, y: Tensor | None = None) -> Tensor:
    """Gradients of pairs ``[M, 2 H]`` that were stored (contiguous), from ``dy [M, H]``; in place over the pairs, if so.

    Where y is given, ``[M, H]``, contiguous, the layer's result is stored there too; it may be dy itself.
    """
    with on_device(dy):
        dy = rowwise(dy)
        d = pairs if in_place else torch.empty_like(pairs)
        found = find_activation(gated.activation)
        launch = _gradients_launch(*dy.shape, dy.stride(0), found.value, found.derivative, gated.layout, y is not None, dy.dtype)
        launch(dy, pairs, d, d if y is None else y)
        return d


def forget_launches() -> None:
    """Choose every launch anew when it is next needed."""
    _gradients_launch.cache_clear()
