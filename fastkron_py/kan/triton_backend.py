"""Steps of a polynomial KAN layer by Triton's kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton import knobs

from fastkron_py.kan import launches, operands, plan
from fastkron_py.kan.kernels.gradients import epilogue_input_gradient, fetch_input
from fastkron_py.kan.launches import Boxes, Problem, Product
from fastkron_py.kan.layer_config import LayerConfig
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.precision import wide_dtype
from fastkron_py.tiling.gemm import begin_nothing
from fastkron_py.tiling.gemm_config import GemmTile
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm
from fastkron_py.tiling.torch_products import column_sums


def add_forward(build: Builder, given: tuple[Any, ...], layer: LayerConfig, precision: str) -> Tensor:
    """``y [M, O]``.

    Args:
        build: of the program.
        given: ``x [..., I]``, M rows; coefficients ``[terms, O, I]``; bias ``[O]`` or None; none of them empty.
        layer: the other arguments.
        precision: "highest" or "high".
    """
    x, coefficients, bias = given
    x, coefficients = operands.matrix(build, x), build.contiguous(coefficients)
    bias = None if bias is None else build.contiguous(bias)
    problem = _problem(build, x, coefficients, None, bias is not None, layer, precision)
    product = launches.forward(problem)
    if product.first:  # degree 0 is a bias
        bias = operands.constant(build, coefficients, bias, problem.wide)
    coefficients, low = operands.halves(build, coefficients, product.with_low, product.pipelined)
    y = build.empty((problem.rows, problem.num_out), x.dtype)
    table = _table(build, x, layer)
    _add_product(build, product, (x, *_described(product.boxes, coefficients, low), table, x if bias is None else bias), (y,))
    return y


def add_gradients(
    build: Builder, given: tuple[Any, ...], needs: tuple[bool, bool, bool], layer: LayerConfig, precision: str
) -> list[Tensor]:
    """[``dx [M, I]``] + [``dC [terms, O, I]``] + [``db [O]``], those that are needed; dx and dC of a small layer in one launch.

    Args:
        build: of the program.
        given: ``dy [..., O]``, ``x [..., I]``, coefficients ``[terms, O, I]``.
        needs: dx, dC and db.
        layer: the other arguments.
        precision: "highest" or "high".
    """
    dy, x, coefficients = given
    dy = operands.matrix(build, dy)
    found = []
    if needs[0] or needs[1]:
        x, coefficients = operands.matrix(build, x), build.contiguous(coefficients)
        problem = _problem(build, x, coefficients, dy, False, layer, precision)
        found = _add_gradients_of_product(build, problem, dy, x, coefficients, needs[:2])
    if needs[2]:
        found.append(build.call(column_sums, (dy,), describe(dy.shape[1:], dy.dtype)))
    return found


def _add_gradients_of_product(
    build: Builder, problem: Problem, dy: Tensor, x: Tensor, coefficients: Tensor, needs: tuple[bool, bool]
) -> list[Tensor]:
    given = (build, problem, dy, x, coefficients, _table(build, x, problem.layer))
    if all(needs) and launches.takes_both(problem):
        return _add_both_gradients(*given)
    found = [_add_input_gradient(*given)] if needs[0] else []
    return [*found, _add_coefficient_gradient(*given)] if needs[1] else found


def _add_both_gradients(build: Builder, problem: Problem, dy: Tensor, x: Tensor, coefficients: Tensor, table: Tensor) -> list[Tensor]:
    product = launches.both_gradients(problem)
    coefficients = operands.aligned(build, coefficients)
    dx, dcoef = build.empty(x.shape, x.dtype), build.empty(coefficients.shape, x.dtype)
    _add_product(build, product, (dy, dy, x, coefficients, coefficients, table), (dx, dcoef))
    return [dx, dcoef]


def _add_input_gradient(build: Builder, problem: Problem, dy: Tensor, x: Tensor, coefficients: Tensor, table: Tensor) -> Tensor:
    by_gemm = gemm_choice(problem)
    if by_gemm is not None:
        return _add_input_gradient_by_gemm(build, problem, by_gemm, dy, x, coefficients, table)
    product = launches.input_gradient(problem)
    if not product.transposed:
        coefficients = low = operands.aligned(build, coefficients)
    else:
        first = product.first if product.pipelined else 0
        coefficients, low = operands.transposed(build, coefficients, product.with_low, product.rounds, product.pipelined, first)
    dx = build.empty(x.shape, x.dtype)
    if product.pipelined:
        halves = operands.halves(build, build.contiguous(dy), product.with_low, True)
        described = (*_described(product.boxes_of_dy, *halves), x, *_described(product.boxes, coefficients, low), table)
        _add_product(build, product, described, (dx,))
    else:
        _add_product(build, product, (dy, dy, x, coefficients, low, table), (dx, None))
    return dx


def _add_coefficient_gradient(build: Builder, problem: Problem, dy: Tensor, x: Tensor, coefficients: Tensor, table: Tensor) -> Tensor:
    product = launches.coefficient_gradient(problem)
    dcoef = build.empty(coefficients.shape, x.dtype)
    given = low = dy
    if product.transposed:
        given, low = operands.transposed(build, dy[None], product.with_low, product.rounds, True, 0)
    if product.pipelined:
        _add_product(build, product, (*_described(product.boxes, given, low), x, table), (dcoef,))
    else:
        _add_product(build, product, (given, low, x, x, x, table), (None, dcoef))
    if product.first:
        operands.store_column_sums(build, dy, dcoef)
    return dcoef


def _problem(
    build: Builder, x: Tensor, coefficients: Tensor, dy: Tensor | None, has_bias: bool, layer: LayerConfig, precision: str
) -> Problem:
    rows, num_in = x.shape
    stride_g = 0 if dy is None else dy.stride(0)
    return Problem(rows, num_in, coefficients.shape[1], x.stride(0), stride_g, has_bias, layer, precision, x.dtype, build.device)


def _table(build: Builder, x: Tensor, layer: LayerConfig) -> Tensor:
    """The samples that the kernels' basis reads; of the recurrence none, for which x stands in."""
    if not layer.table_size:
        return x
    dtype, device = x.dtype, build.device
    table: Tensor = build.call(lambda: layer.table(dtype, device), (), describe((layer.terms, layer.table_size), wide_dtype(dtype)))
    return table


def _described(boxes: Boxes | None, operand: Tensor, low: Tensor) -> tuple[Any, Any]:
    """An operand and its low halves as the kernel gets them."""
    return (operand, low) if boxes is None else (boxes.describe(operand), boxes.describe(low))


def _add_product(build: Builder, product: Product, operands: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> None:
    """Launch a product, and the second stage of each of its results that has one; None for a result that the kernel leaves alone."""
    made = [out for out in results if out is not None]
    targets = []
    for stored, out in zip(product.results, made, strict=True):
        targets.append(out if stored.partial is None else build.empty(stored.partial, wide_dtype(out.dtype)))
    given = iter(targets)
    build.launch(product.launcher, (*operands, *[operands[0] if out is None else next(given) for out in results]))
    for stored, target, out in zip(product.results, targets, made, strict=True):
        if stored.launcher is not None:
            build.launch(stored.launcher, (target, out), stored.scalars)


# ---- dx of a large layer on Hopper GPUs, by the linear layers' main loop ---------------------------


def gemm_choice(problem: Problem) -> tuple[GemmTile, int] | None:
    """Blocks, and how many degrees a tile has side by side; None where another kernel takes less time, or this one cannot be."""
    sizes = problem.sizes()
    return plan.input_gradient_gemm(sizes._replace(terms=sizes.terms - problem.layer.first)) if _can_copy(problem) else None


def _add_input_gradient_by_gemm(
    build: Builder, problem: Problem, choice: tuple[GemmTile, int], dy: Tensor, x: Tensor, coefficients: Tensor, table: Tensor
) -> Tensor:
    """``dx [M, I]``; rows of dy and x are runs of memory, from boundaries of 16 bytes."""
    tile, degrees = choice
    layer, first = problem.layer, problem.layer.first
    value, slope = layer.normalizer.device_functions(not knobs.runtime.interpret)
    call = Gemm(
        epilogue_input_gradient,
        value=value,
        slope=slope,
        params=(layer.terms, first, degrees, layer.constants),
        functions=layer.prologue(True),
        begin=begin_nothing if knobs.runtime.interpret else fetch_input,
        sums=degrees,
    )
    width = tile.block_n // tile.parts // degrees
    b = operands.transposed_in_blocks(build, coefficients, first, width, degrees, problem.dtype.itemsize == 4)
    dx = build.empty(x.shape, x.dtype)
    add_gemm(build, dy, b, None, call, dx, side=x, tensors=(table, x), precision=problem.precision, tile=tile)
    return dx


def _can_copy(problem: Problem) -> bool:
    """Whether TMA takes every operand."""
    itemsize = problem.dtype.itemsize
    sizes = (problem.num_in, problem.num_out, problem.stride_x, problem.stride_g)
    return itemsize < 8 and devices.gpu_of(problem.device).has_wgmma and all([size * itemsize % 16 == 0 for size in sizes])
