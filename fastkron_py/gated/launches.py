"""The launches of gated linear layers: forward, and the gradients of both of every pair."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.gated.kernels import (
    _gate_gradients_kernel,
    epilogue_gate,
    epilogue_gate_and_pair,
    epilogue_gradients,
    epilogue_gradients_and_gate,
)
from fastkron_py.gated.torch_backend import hidden_size
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm, add_rowwise, takes_descriptor
from fastkron_py.tiling.products import arithmetic

_ELEMENTWISE_BLOCK: Final = (16, 128)


class Params(NamedTuple):
    """PARAMS of the kernels: whether pairs are stored interleaved, an activation's constants, and, if there is one, its up's functions."""

    interleaved: bool
    constants: tuple[Any, ...]
    up: tuple[Any, ...]

    @property
    def cache_key(self) -> str:
        """The key by which Triton keeps compiled kernels: of the functions' code, where a tuple's text has their names alone."""
        return str([getattr(each, "cache_key", each) for each in (self.interleaved, *self.constants, *self.up)])


class Gated(NamedTuple):
    """The options of a layer, besides its tensors."""

    activation: str
    layout: str
    precision: str  # "highest" or less

    def gemm(self, epilogue: Any, dtype: torch.dtype, device: torch.device) -> Gemm:
        """The main loop's parameters with one of the epilogues, for results of this dtype."""
        found = find_activation(self.activation)
        quick = dtype.itemsize == 2 and devices.gpu_of(device).has_approximations
        # Both sums of a pair stand in two halves of a tile, and a thread has neighbours of both to store.
        light = epilogue is epilogue_gate and found.allows_overlap
        options: dict[str, Any] = {"value": found.value, "slope": found.derivative, "params": self.params(quick)}
        return Gemm(epilogue, **options, pairs="stacked", divisible=True, light=light)

    def params(self, quick: bool) -> Params:
        """PARAMS of the kernels; quick: with the quick constants."""
        found = find_activation(self.activation)
        constants = (quick and found.quick_constants) or found.constants
        return Params(self.layout == "interleaved", constants, () if found.up is None else (found.up.value, found.up.derivative))

    def operands(self, build: Builder, weight: Tensor, gate: Tensor | None, bias: Tensor | None) -> tuple[Any, Any, Any]:
        """Weights ``[H, K]`` and bias ``[2, H]`` as the main loop takes them: views, of an interleaved weight each of every other row."""
        if gate is not None:
            return weight, gate, bias
        if self.layout == "stacked":
            return weight[0], weight[1], bias
        weight = add_rowwise(build, weight)
        return weight[0::2], weight[1::2], None if bias is None else bias.unflatten(0, (-1, 2)).mT

    def pair_targets(self, pairs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where epilogues store pairs ``[M, 2 H]``: `add_gemm`'s pair and pair2."""
        if self.layout == "interleaved":
            return pairs, None
        up, gate = pairs.chunk(2, 1)
        return up, gate


Wide = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x ``[M, K]``, weight, packed or up's ``[H, K]``, None or gate's ``[H, K]``, bias; none of them empty."""


def add_forward(build: Builder, wide: Wide, gated: Gated, saving: bool = False) -> tuple[Tensor, Tensor | None]:
    """``y [M, H]``, and, saving, the pairs ``[M, 2 H]``."""
    x, weight, gate, bias = wide
    shape = x.shape[0], hidden_size(weight, gate)
    y = build.empty(shape, x.dtype)
    pairs = build.empty((shape[0], 2 * shape[1]), x.dtype) if saving else None
    pair, pair2 = (None, None) if pairs is None else gated.pair_targets(pairs)
    call = gated.gemm(epilogue_gate_and_pair if saving else epilogue_gate, x.dtype, build.device)
    weight, gate, bias = gated.operands(build, weight, gate, bias)
    add_gemm(build, x, weight, bias, call, y, pair=pair, pair2=pair2, precision=gated.precision, b2=gate)
    return y, pairs


def add_recomputed_gradients(build: Builder, dy: Tensor, wide: Wide, gated: Gated, again: bool = False) -> tuple[Tensor, Tensor | None]:
    """(gradients of the pairs ``[M, 2 H]``, the result ``[M, H]`` again) from ``dy [M, H]``.

    The product once more, with their making as its epilogue. The result is written over dy if possible.
    """
    x, weight, gate, bias = wide
    dy = add_rowwise(build, dy)
    y = (dy if takes_descriptor(build, dy) else build.empty_like(dy)) if again else None
    d = build.empty((x.shape[0], 2 * hidden_size(weight, gate)), x.dtype)
    call = gated.gemm(epilogue_gradients_and_gate if again else epilogue_gradients, x.dtype, build.device)
    pair, pair2 = gated.pair_targets(d)
    weight, gate, bias = gated.operands(build, weight, gate, bias)
    add_gemm(build, x, weight, bias, call, y, side=dy, pair=pair, pair2=pair2, precision=gated.precision, b2=gate)
    return d, y


def _gradients_launcher(dy: Tensor, gated: Gated, again: bool) -> Launcher:
    """The launch on (dy, pairs, their gradients, the result again)."""
    block_m, block_n = _ELEMENTWISE_BLOCK
    rows, columns = dy.shape
    found = find_activation(gated.activation)
    arguments = {
        "M": rows,
        "columns": columns,
        "stride_dy": dy.stride(0),
        "VALUE": found.value,
        "SLOPE": found.derivative,
        "PARAMS": gated.params(False),
        "GATE": again,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "ACC": arithmetic(dy.dtype, "highest", True).acc,
        "num_warps": 4,
    }
    return Launcher([LaunchConfig(_gate_gradients_kernel, (-(-rows // block_m) * -(-columns // block_n),), arguments)])


def add_stored_gradients(
    build: Builder, dy: Tensor, pairs: Tensor, gated: Gated, in_place: bool, again: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(gradients of pairs ``[M, 2 H]`` that were stored, the result ``[M, H]`` again), from ``dy [M, H]``.

    In place over the pairs, if so; the result over dy, which is contiguous then.
    """
    dy = add_rowwise(build, dy)
    pairs = build.contiguous(pairs)  # hooks of saved tensors may have given others
    d = pairs if in_place else build.empty_like(pairs)
    build.launch(_gradients_launcher(dy, gated, again), (dy, pairs, d, dy if again else d))
    return d, dy if again else None
