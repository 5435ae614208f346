"""Polynomial KAN layers in torch: the backend of the CPU, and the operations that higher derivatives are taken of.

All degrees are one matrix product: the values ``[rows, degrees * I]`` of a slice of rows by the coefficients as a matrix. The program of a
call goes slice by slice, so that no more than a slice's values are alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from fastkron_py.runtime.precision import torch_products, wide
from fastkron_py.tiling.torch_products import PRODUCT_ROWS, add_product, linear, matrix_product, product_dtype, row_slices

if TYPE_CHECKING:  # bases import Triton
    from fastkron_py.kan.layer_config import LayerConfig

FEW_ROWS: Final = 8  # for which copying the coefficients takes longer than a product for each degree


def evaluate(x: Tensor, coefficients: Tensor, bias: Tensor | None, layer: LayerConfig, precision: str | None) -> Tensor:
    """``y [..., O]`` of ``x [..., I]``, multiplied in this precision; differentiable to any order, by every transform of torch."""
    with torch_products(x, precision):
        return forward(x, coefficients, bias, layer)


def forward(x: Tensor, coefficients: Tensor, bias: Tensor | None, layer: LayerConfig) -> Tensor:
    """``y [..., O]`` of ``x [..., I]`` and coefficients ``[terms, O, I]``; differentiable to any order."""
    dtype, addend = product_dtype(x), _addend(coefficients, bias, layer)
    if x.numel() <= FEW_ROWS * x.shape[-1]:
        return _of_few_rows(x, coefficients, addend, layer, dtype)
    y = wide(_values(x, layer, dtype) @ _matrix(coefficients, layer, dtype).mT)
    return (y if addend is None else y + addend).to(x.dtype)


def multiply(x: Tensor, coefficients: Tensor, bias: Tensor | None, layer: LayerConfig) -> Tensor:
    """The same slice by slice, without gradients."""
    if x.shape[0] <= FEW_ROWS:
        return forward(x, coefficients, bias, layer)
    dtype = product_dtype(x)
    matrix, addend = _matrix(coefficients, layer, dtype), _addend(coefficients, bias, layer)
    slices = row_slices(x, matrix.shape[1], PRODUCT_ROWS)
    if len(slices) == 1:
        return linear(_values(x, layer, dtype), matrix, addend).to(x.dtype)
    y = x.new_empty(x.shape[0], coefficients.shape[1])
    for rows in slices:
        y[rows] = linear(_values(x[rows], layer, dtype), matrix, addend)
    return y


def gradients(dy: Tensor, x: Tensor, coefficients: Tensor, needs: Sequence[bool], layer: LayerConfig) -> list[Tensor]:
    """[dx ``[M, I]``] + [dC ``[terms, O, I]``], those needed, slice by slice."""
    need_x, need_coefficients = needs
    dtype, (terms, num_out, num_in) = product_dtype(x), coefficients.shape
    columns = (terms - layer.first) * num_in
    matrix = _matrix(coefficients, layer, dtype) if need_x else None
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    total = x.new_zeros(num_out, columns, dtype=wide(x[:0]).dtype) if need_coefficients else None
    for rows in row_slices(x, columns, PRODUCT_ROWS):
        part, dy_part = x[rows], dy[rows].to(dtype)
        if total is not None:
            add_product(total, dy_part.mT, _values(part, layer, dtype))
        if matrix is not None and dx is not None:
            dx[rows] = _slice_dx(matrix_product(dy_part, matrix, True), part, layer)
    found = [] if dx is None else [dx]
    return found if total is None else [*found, _coefficients_of(total, dy, coefficients, layer)]


def _of_few_rows(x: Tensor, coefficients: Tensor, addend: Tensor | None, layer: LayerConfig, dtype: torch.dtype) -> Tensor:
    """A product for each degree, which reads the coefficients where they lie."""
    for value, c in zip(_degrees(x, layer), coefficients[layer.first :], strict=True):
        product = wide(value.to(dtype) @ c.to(dtype).mT)
        addend = product if addend is None else addend + product
    return addend.to(x.dtype)  # type: ignore[union-attr]


def _degrees(x: Tensor, layer: LayerConfig) -> list[Tensor]:
    """The values of the basis without a constant one, each ``[..., I]``; recurrences in half types would lose all their digits."""
    return list(layer.values(layer.normalizer.host(wide(x))))[layer.first :]


def _values(x: Tensor, layer: LayerConfig, dtype: torch.dtype) -> Tensor:
    """The same side by side ``[..., degrees * I]``, in this dtype."""
    return torch.cat(_degrees(x, layer), -1).to(dtype)


def _matrix(coefficients: Tensor, layer: LayerConfig, dtype: torch.dtype) -> Tensor:
    """The coefficients of these values ``[O, degrees * I]``, copied."""
    return coefficients[layer.first :].transpose(0, 1).flatten(1).to(dtype)


def _addend(coefficients: Tensor, bias: Tensor | None, layer: LayerConfig) -> Tensor | None:
    """The addend of each row ``[O]``: bias, and the sum of a constant value's coefficients."""
    parts = [] if bias is None else [wide(bias)]
    if layer.first:
        parts.append(wide(coefficients[0]).sum(-1))
    return sum(parts[1:], parts[0]) if parts else None


def _slice_dx(products: Tensor, x: Tensor, layer: LayerConfig) -> Tensor:
    """The gradient of a slice of x, from ``dy @ matrix``."""
    wide_x = wide(x)
    derivatives = list(layer.derivatives(layer.normalizer.host(wide_x)))[layer.first :]
    total = torch.zeros_like(wide_x)
    for derivative, product in zip(derivatives, wide(products).split(x.shape[1], 1), strict=True):
        total.addcmul_(derivative, product)
    return total.mul_(layer.normalizer.host_derivative(wide_x))


def _coefficients_of(total: Tensor, dy: Tensor, coefficients: Tensor, layer: LayerConfig) -> Tensor:
    """The gradient of the coefficients from the sum of ``dy^T @ values``; of a constant value it is sums of dy."""
    terms, num_out, num_in = coefficients.shape
    found = torch.empty_like(coefficients, memory_format=torch.contiguous_format)
    found[layer.first :] = total.view(num_out, terms - layer.first, num_in).transpose(0, 1)
    if layer.first:
        found[0] = dy.sum(0, dtype=total.dtype)[:, None]
    return found
