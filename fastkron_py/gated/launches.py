"""The launches of gated linear layers: forward, and the gradients of both of every pair."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor

from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.gated.kernels import (
    _gate_gradients_kernel,
    epilogue_gate,
    epilogue_gate_and_pair,
    epilogue_gradients,
    epilogue_gradients_and_gate,
)
from fastkron_py.gated.program import Options, Wide
from fastkron_py.gated.torch_backend import hidden_size
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.precision import resolved
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


def _params(options: Options, quick: bool) -> Params:
    """PARAMS of the kernels; quick: with the quick constants."""
    found = find_activation(options.activation)
    constants = (quick and found.quick_constants) or found.constants
    return Params(options.layout == "interleaved", constants, () if found.up is None else (found.up.value, found.up.derivative))


def _add_product(build: Builder, wide: Wide, options: Options, epilogue: Any, y: Any, pairs: Tensor | None, dy: Any = None) -> None:
    """Add the product with one of the epilogues, which stores y ``[M, H]`` and pairs ``[M, 2 H]``, and reads ``dy [M, H]``."""
    x, up, gate, bias = wide
    if gate is None and options.layout == "interleaved":  # views of every other row
        rows = add_rowwise(build, up)
        up, gate, bias = rows[0::2], rows[1::2], None if bias is None else bias.unflatten(0, (-1, 2)).mT
    elif gate is None:
        up, gate = up.unbind()
    found = find_activation(options.activation)
    quick = x.dtype.itemsize == 2 and devices.gpu_of(build.device).has_approximations
    # Both sums of a pair stand in two halves of a tile, and a thread has neighbours of both to store.
    light = epilogue is epilogue_gate and found.allows_overlap
    functions: dict[str, Any] = {"value": found.value, "slope": found.derivative, "params": _params(options, quick)}
    gemm = Gemm(epilogue, **functions, pairs="stacked", divisible=True, light=light)
    pair, pair2 = (pairs, None) if pairs is None or options.layout == "interleaved" else pairs.chunk(2, 1)
    add_gemm(build, x, up, bias, gemm, y, side=dy, pair=pair, pair2=pair2, precision=resolved(options.precision), b2=gate)


def add_forward(build: Builder, wide: Wide, options: Options, saving: bool = False) -> tuple[Tensor, Tensor | None]:
    """``y [M, H]``, and, saving, the pairs ``[M, 2 H]``; no operand is empty."""
    x, hidden = wide[0], hidden_size(*wide[1:3])
    y = build.empty((x.shape[0], hidden), x.dtype)
    pairs = build.empty((x.shape[0], 2 * hidden), x.dtype) if saving else None
    _add_product(build, wide, options, epilogue_gate_and_pair if saving else epilogue_gate, y, pairs)
    return y, pairs


def add_recomputed_gradients(build: Builder, dy: Tensor, wide: Wide, options: Options, again: bool = False) -> tuple[Tensor, Tensor | None]:
    """(gradients of the pairs ``[M, 2 H]``, the result ``[M, H]`` again) from ``dy [M, H]``.

    The product once more, with their making as its epilogue. The result is written over dy if possible.
    """
    dy = add_rowwise(build, dy)
    y = (dy if takes_descriptor(build, dy) else build.empty_like(dy)) if again else None
    d = build.empty((dy.shape[0], 2 * dy.shape[1]), wide[0].dtype)
    _add_product(build, wide, options, epilogue_gradients_and_gate if again else epilogue_gradients, y, d, dy)
    return d, y


def _gradients_launcher(dy: Tensor, options: Options, again: bool) -> Launcher:
    """The launch on (dy, pairs, their gradients, the result again)."""
    block_m, block_n = _ELEMENTWISE_BLOCK
    rows, columns = dy.shape
    found = find_activation(options.activation)
    arguments = {
        "M": rows,
        "columns": columns,
        "stride_dy": dy.stride(0),
        "VALUE": found.value,
        "SLOPE": found.derivative,
        "PARAMS": _params(options, False),
        "GATE": again,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "ACC": arithmetic(dy.dtype, "highest", True).acc,
        "num_warps": 4,
    }
    return Launcher([LaunchConfig(_gate_gradients_kernel, (-(-rows // block_m) * -(-columns // block_n),), arguments)])


def add_stored_gradients(
    build: Builder, dy: Tensor, pairs: Tensor, options: Options, in_place: bool, again: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(gradients of pairs ``[M, 2 H]`` that were stored, the result ``[M, H]`` again), from ``dy [M, H]``.

    In place over the pairs, if so; the result over dy, which is contiguous then.
    """
    dy = add_rowwise(build, dy)
    pairs = build.contiguous(pairs)  # hooks of saved tensors may have given others
    d = pairs if in_place else build.empty_like(pairs)
    build.launch(_gradients_launcher(dy, options, again), (dy, pairs, d, dy if again else d))
    return d, dy if again else None
