"""The programs of polynomial KAN layers: which kernels are launched on which buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fastkron_py.kan import plan as tuning
from fastkron_py.kan import torch_backend
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.torch_products import column_sums

if TYPE_CHECKING:  # bases import Triton
    from fastkron_py.kan.layer_config import LayerConfig

_SHARED: Final = 1 << 20
_SMALL: Final = 1 << 18  # values of a layer whose operations autograd records in less time than a backward pass in Python takes


def forward(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::poly_kan`; arguments as in its schema."""
    x, coefficients, _ = tensors
    *layer_key, precision, backend = options
    layer = layer_of(coefficients, *layer_key)
    build = Builder(tensors, _most_shared(x, coefficients))
    operands = tuple(build.inputs)
    shape = (*x.shape[:-1], coefficients.shape[1])
    differentiable: Callable[..., Tensor] | None = None
    if not x.numel() or not math.prod(shape) or backend_of(backend, x, layer) == "torch":
        y = _add_forward_by_torch(build, operands, layer, precision)
        if precision is None and x.dtype not in HALF_DTYPES and 0 < x.numel() * layer.terms <= _SMALL:
            differentiable = lambda x, c, bias=None: torch_backend.evaluate(x, c, bias, layer, None)  # noqa: E731
    else:
        from fastkron_py.kan import launches

        y = launches.add_forward(build, operands, layer, resolved(precision))
    return build.program([y], [shape], differentiable=differentiable)


def gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::poly_kan_backward`."""
    dy, x, coefficients, _ = tensors
    need_x, need_coefficients, need_bias, *layer_key, precision, backend = options
    needs = (need_x, need_coefficients, need_bias)
    layer = layer_of(coefficients, *layer_key)
    build = Builder(tensors, _most_shared(x, coefficients))
    operands = tuple(build.inputs[:3])
    if not x.numel() or not dy.numel() or backend_of(backend, x, layer) == "torch":
        found = _add_gradients_by_torch(build, operands, needs, layer, precision)
    else:
        from fastkron_py.kan import launches

        found = launches.add_gradients(build, operands, needs, layer, resolved(precision))
    return build.program(found, wanted((x.shape, coefficients.shape, dy.shape[-1:]), needs))


def layer_of(coefficients: Tensor, basis: str, normalization: str, table_size: int) -> LayerConfig:
    """The layer config of an operator's arguments."""
    from fastkron_py.kan.layer_config import layer_config

    return layer_config(basis, int(coefficients.shape[0]), normalization, table_size)


def backend_of(backend: str, x: Tensor, layer: LayerConfig) -> str:
    """The backend in force; torch's for a basis without device functions."""
    return choose_backend(backend, x) if layer.has_prologue else "torch"


def _most_shared(x: Tensor, coefficients: Tensor) -> int | None:
    """Bytes of a buffer that stays for as long as all steps take: of large layers no more than the smallest, which cost more in turn."""
    work = x.numel() * coefficients.shape[0] * coefficients.shape[1]
    return None if work < tuning.MEASURED.large_products else _SHARED


def wanted(of_each: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Those that are needed."""
    return [each for each, need in zip(of_each, needs, strict=True) if need]


# ---- by torch ------------------------------------------------------------------------------------


def _add_forward_by_torch(build: Builder, operands: tuple[Any, ...], layer: LayerConfig, precision: str | None) -> Tensor:
    x, coefficients, _ = operands
    shape = (*x.shape[:-1], coefficients.shape[1])

    def by_torch(x: Tensor, c: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.numel() == 0:  # a sum over nothing
            return x.new_zeros(shape) if bias is None else bias.expand(shape).clone(memory_format=torch.contiguous_format)
        with torch_products(x, precision):
            return torch_backend.multiply(x.reshape(-1, x.shape[-1]), c, bias, layer).view(shape)

    return build.call(by_torch, operands, describe(shape, x.dtype))


def _add_gradients_by_torch(
    build: Builder, operands: tuple[Any, ...], needs: tuple[bool, bool, bool], layer: LayerConfig, precision: str | None
) -> list[Tensor]:
    dy, x, coefficients = operands
    if not any(needs):
        return []

    def by_torch(dy: Tensor, x: Tensor, c: Tensor) -> list[Tensor]:
        need_x, need_coefficients, need_bias = needs
        dy2, x2 = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (dy, x))
        found = []
        if not dy.numel() or not x.numel():
            found = [t.new_zeros(t.shape) for t in wanted((x, c), needs[:2])]
        elif need_x or need_coefficients:
            with torch_products(x, precision):
                found = torch_backend.gradients(dy2, x2, c, needs[:2], layer)
        if need_x:
            found[0] = found[0].view(x.shape)
        return [*found, column_sums(dy2)] if need_bias else found

    results = (describe(x.shape, x.dtype), describe(coefficients.shape, coefficients.dtype), describe(dy.shape[-1:], dy.dtype))
    made = build.call(by_torch, operands, *wanted(results, needs))
    return [made] if isinstance(made, Tensor) else list(made)
