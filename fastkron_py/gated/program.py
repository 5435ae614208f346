"""The programs of gated linear layers: the product with its gate, and torch's products around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.gated import torch_backend
from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.runtime.backend import choose_backend, requested_backend
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.cpu_costs import ONEDNN_TERMS
from fastkron_py.tiling.torch_products import add_product, column_sums, has_onednn, linear, product

NUM_TENSORS: Final = 6  # tensors of a layer

Wide = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x ``[M, K]``, weight, packed or up's ``[H, K]``, None or gate's ``[H, K]``, bias."""

# Terms of a sum that float32 products of three TF32 passes may have: tensor cores cut their sums off (see `kan/operator.py`).
_LONGEST_SUM: Final = 512
_SMALL: Final = 1 << 16  # elements of a result whose operations autograd records in less time than a backward pass in Python takes


class Options(NamedTuple):
    """The operators' options."""

    activation: str
    layout: str
    precision: str | None
    backend: str

    def product(self, function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
        """A function with products of torch, in the precision asked for."""
        if self.precision is None or dtype != torch.float32:
            return function

        def with_precision(*operands: Tensor) -> Tensor:
            with torch_products(operands[0], self.precision):
                return function(*operands)

        return with_precision


def sizes(x: Tensor, weight: Tensor, gate: Tensor | None, down: Tensor | None) -> tuple[int, int, tuple[int, ...]]:
    """(rows, H, shape of the result)."""
    hidden = torch_backend.hidden_size(weight, gate)
    # Not numel(), which makes an integer of a symbol.
    return math.prod(x.shape[:-1]), hidden, (*x.shape[:-1], hidden if down is None else down.shape[0])


def is_by_triton(x: Tensor, weight: Tensor, options: Options) -> bool:
    """Whether Triton multiplies. It does not for empty or float64 tensors, nor, unless asked for, for float32 sums too long for it."""
    chosen = choose_backend(options.backend, x)
    if chosen == "torch" or x.dtype == torch.float64 or x.numel() == 0 or weight.numel() == 0:
        return False
    if find_activation(options.activation).value is None:
        return False
    exact = x.is_cuda and x.dtype == torch.float32 and x.shape[-1] > _LONGEST_SUM and resolved(options.precision) == "highest"
    return not (exact and (options.backend or requested_backend()) == "auto")


# ---- forward -----------------------------------------------------------------------------------


def forward(tensors: Sequence[Any], options: tuple[Any, ...], saving: bool = False) -> Program:
    """The program of `fastkron::gated_linear`, or, saving, of `gated_linear_saving`; arguments as in its schema."""
    chosen = Options(*options)
    by_triton = is_by_triton(tensors[0], tensors[1], chosen)
    build = Builder(tensors)
    x, weight, gate, bias, down, down_bias = build.inputs
    rows, hidden, shape = sizes(x, weight, gate, down)
    wide = (build.reshape(x, (rows, x.shape[-1])), weight, gate, _bias_of_rows(build, bias, rows, by_triton))
    y, pairs = _add_forward(build, wide, chosen, by_triton, saving)
    if down is not None:
        y = build.call(chosen.product(linear, y.dtype), (y, down, down_bias), describe((rows, down.shape[0]), y.dtype))
    results, shapes = ([y, pairs], [shape, (rows, 2 * hidden)]) if saving else ([y], [shape])
    # Autograd saves the pairs, and more.
    is_small = saving and not by_triton and chosen.precision is None and x.dtype not in HALF_DTYPES and 0 < rows * hidden <= _SMALL
    return build.program(results, shapes, differentiable=_recorded(tensors, chosen) if is_small else None)


def _bias_of_rows(build: Builder, bias: Any, rows: int, by_triton: bool) -> Any:
    """A bias ``[..., 2, H]`` as ``[M, 2, H]``, for kernels with runs of memory; another one as it is."""
    if bias is None or bias.ndim < 3:
        return bias
    bias = build.reshape(bias, (rows, *bias.shape[-2:]))
    return bias if bias.stride(-1) == 1 or not by_triton else build.contiguous(bias)


def _recorded(tensors: Sequence[Any], options: Options) -> Callable[..., Tensor]:
    """The layer as operations that autograd records, as a function of the tensors that are present."""
    there, forward = [t is not None for t in tensors], partial(torch_backend.forward, activation=options.activation, layout=options.layout)
    return lambda *given: forward(take(given, there))  # type: ignore[arg-type]


def _add_forward(build: Builder, wide: Wide, options: Options, by_triton: bool, saving: bool) -> tuple[Tensor, Any]:
    """(y ``[M, H]``, pairs ``[M, 2 H]`` where they are saved or torch makes them)."""
    if by_triton:
        from fastkron_py.gated import launches

        return launches.add_forward(build, wide, options, saving)
    if saving:
        pairs = _add_pairs(build, wide, options)
        return _add_gate(build, pairs, options), pairs
    activation, layout, *_ = options
    shape = wide[0].shape[0], torch_backend.hidden_size(*wide[1:3])
    multiply = partial(torch_backend.layer_by_slices, activation=activation, layout=layout)
    return _add_by_torch(build, wide, options, shape, multiply), None


def _add_pairs(build: Builder, wide: Wide, options: Options) -> Tensor:
    """Both of every pair ``[M, 2 H]`` by torch."""
    shape = wide[0].shape[0], 2 * torch_backend.hidden_size(*wide[1:3])
    return _add_by_torch(build, wide, options, shape, partial(torch_backend.pairs_of, multiply=linear))


def _add_by_torch(build: Builder, wide: Wide, options: Options, shape: tuple[int, int], function: Callable[..., Tensor]) -> Tensor:
    """A function of x, weight, gate and bias."""
    there, dtype = [t is not None for t in wide], wide[0].dtype
    return build.call(options.product(lambda *given: function(*take(given, there)), dtype), wide, describe(shape, dtype))


def _add_gate(build: Builder, pairs: Tensor, options: Options) -> Tensor:
    """``y [M, H]`` by torch."""
    gate = partial(torch_backend.gate_by_slices, activation=options.activation, layout=options.layout)
    return build.call(gate, (pairs,), describe((pairs.shape[0], pairs.shape[1] // 2), pairs.dtype))


# ---- backward ----------------------------------------------------------------------------------


def gradients(tensors: Sequence[Any], options: tuple[Any, ...], in_place: bool = False) -> Program:
    """The program of `fastkron::gated_linear_backward`, or in place, over the pairs, of `gated_linear_backward_`."""
    _, x, weight, *_ = tensors
    needs = [need and t is not None for need, t in zip(options, tensors[1 : NUM_TENSORS + 1], strict=False)]
    chosen = Options(*options[NUM_TENSORS:])
    rows = math.prod(x.shape[:-1])
    build = Builder(tensors)
    dy, *inputs, pairs = build.inputs
    by_triton = is_by_triton(x, weight, chosen)
    inputs[0] = build.reshape(inputs[0], (rows, x.shape[-1]))
    inputs[3] = _bias_of_rows(build, inputs[3], rows, by_triton)
    backward = _Backward(build, tuple(inputs), pairs, chosen, by_triton, in_place)
    found = backward.gradients(build.reshape(dy, (rows, dy.shape[-1])), needs)
    results = [(f, t.shape) for f, t in zip(found, tensors[1:], strict=False) if f is not None]
    return build.program([f for f, _ in results], [shape for _, shape in results])


class _Backward(NamedTuple):
    """A backward pass of a layer on matrices."""

    build: Builder
    tensors: tuple[Any, ...]
    pairs: Tensor | None
    options: Options
    by_triton: bool
    in_place: bool

    def gradients(self, dy: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """[dx, dW, dG, db, dD, dc], None for those that are not needed."""
        x, weight, gate, bias, down, _ = self.tensors
        need_x, need_weight, need_gate, need_bias, need_down, need_down_bias = needs
        dx = dweight = dgate = dbias = ddown = None
        if any(needs[:4]):
            # A projection's gradient of y is a fresh tensor, over which y may be written.
            dgated = dy if down is None else self._product(product, (dy, down), (len(dy), down.shape[1]))
            d, y = self._pair_gradients(dgated, need_down)
            if y is not None:
                ddown = self._product(_transposed_product, (dy, y), down.shape)
            first, second = (d, d) if gate is None else d.chunk(2, 1)
            if need_x and gate is None:
                dx = self._product(product, (first, weight.flatten(0, -2)), x.shape)
            elif need_x:
                dx = self._product(_sum_of_products, (first, weight, second, gate), x.shape)
            shape = first.shape[1], x.shape[1]
            dweight = self._product(_transposed_product, (first, x), shape) if need_weight else None
            dgate = self._product(_transposed_product, (second, x), shape) if need_gate else None
            if need_bias:
                dbias = self._column_sums(d) if bias.ndim < 3 else d
        elif need_down:
            y, _ = _add_forward(self.build, self.tensors[:4], self.options, self.by_triton, False)
            ddown = self._product(_transposed_product, (dy, y), down.shape)
        return [dx, dweight, dgate, dbias, ddown, self._column_sums(dy) if need_down_bias else None]

    def _pair_gradients(self, dy: Tensor, again: bool) -> tuple[Tensor, Tensor | None]:
        """(gradients of the pairs ``[M, 2 H]``, y ``[M, H]`` again, which may be written over dy)."""
        build, wide, pairs, options = self.build, self.tensors[:4], self.pairs, self.options
        if self.by_triton:
            from fastkron_py.gated import launches

            if pairs is None:
                return launches.add_recomputed_gradients(build, dy, wide, options, again)
            return launches.add_stored_gradients(build, dy, pairs, options, self.in_place, again)
        pairs = _add_pairs(build, wide, options) if pairs is None else pairs
        y = _add_gate(build, pairs, options) if again else None
        by_torch = partial(torch_backend.pair_gradients, activation=options.activation, layout=options.layout)
        return build.call(by_torch, (dy, pairs), describe(pairs.shape, pairs.dtype)), y

    def _product(self, function: Callable[..., Tensor], operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        dtype = operands[0].dtype
        return self.build.call(self.options.product(function, dtype), operands, describe(shape, dtype))

    def _column_sums(self, t: Tensor) -> Tensor:
        return self.build.call(column_sums, (t,), describe(t.shape[1:], t.dtype))


def _sum_of_products(t: Tensor, weight: Tensor, u: Tensor, gate: Tensor) -> Tensor:
    total = product(t, weight)
    add_product(total, u, gate)
    return total


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, I]^T @ b [M, J]``, the same; oneDNN's sums over many rows are cut, since they round more than BLAS's."""
    if a.shape[0] <= ONEDNN_TERMS or not has_onednn(a) or a.dtype != torch.float32:
        return product(a.mT, b)
    total = a.new_zeros(a.shape[1], b.shape[1])
    for u, v in zip(a.split(ONEDNN_TERMS), b.split(ONEDNN_TERMS), strict=True):
        add_product(total, u.mT, v)
    return total
