"""One mode of a multiply, or its gradient, by torch's matrix products: in place, or through copies that these are fast on.

Torch's products in half precision are 4 to 10 times faster where sizes and rows are multiples of 16 bytes, and one product of all slices
takes less than one for each of many runs. So "copying" makes copies of such sizes, with the mode last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
import triton.language as tl
from torch import Tensor

from fastkron_py.kron.canonical import PLAIN, Scale, add_scaling
from fastkron_py.kron.families.torch_products import copied_width
from fastkron_py.kron.kernels import epilogues
from fastkron_py.kron.kernels.matmul_step import _copy_matrices_kernel, epilogue_axpby
from fastkron_py.kron.problem import LaunchProblem, batch_stride, in_words, parts_of
from fastkron_py.kron.torch_steps import Epilogue, matrices, mode_products, product, scaled_product, summed_products, wide_product
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.precision import has_precisions, to_be_set, torch_products
from fastkron_py.runtime.program import Scalar
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm
from fastkron_py.tiling.products import arithmetic, sum_launcher
from fastkron_py.tiling.torch_products import Cut, cut_of, write_parts

BY_TORCH: Final = ("matmul", "copying")  # algorithms
_UNIT: Final = 8  # 16-bit floats that take 16 bytes
_TILE_BYTES: Final = 8192  # of a program's elements
_TILE_SIDE: Final = 64  # elements of a tile's rows at least, where there are as many
_GEMM: Final = Gemm(epilogue_axpby, divisible=True)


def add_products(
    build: Builder,
    problem: LaunchProblem,
    x: Tensor,
    factors: Sequence[Tensor],
    z: Tensor | None,
    y: Tensor | None,
    scale: Scale,
    algorithm: str,
) -> Tensor:
    """Add one mode of a multiply by torch's products to a program, by this algorithm; see `problem.add_launch`.

    An epilogue by which z scales is an operation of its own, in place.
    """
    if problem.epilogue.scales_by is not None and z is not None:
        y = add_products(build, replace(problem, epilogue=epilogues.PLAIN), x, factors, None, y, scale, algorithm)
        add_scaling(build, y, z, problem.epilogue.scales_by)
        return y
    factor, after = factors[problem.launch.start], problem.shape[3]
    scale = PLAIN if problem.epilogue is epilogues.PLAIN else scale
    groups, p, q = factor.shape
    x, is_conj = build.reshape(x, (groups, -1, p, after)), factor.is_conj()  # which a copy's memory does not tell
    in_place = algorithm == "matmul"
    if in_place:
        factor = _aligned_factor(build, factor, after)
        is_one = after == 1 or groups == 1
        if y is None and z is None and is_one and not is_conj and _has_its_precision(build, x.dtype, problem.precision):
            ((a, b),) = mode_products(x, factor)
            return _new_product(build, a, b, scale.alpha).view(problem.result_shape)
    y = build.empty(problem.result_shape, x.dtype) if y is None else y
    out = y.view(groups, -1, q, after)
    z = None if z is None else build.reshape(z, out.shape)
    if in_place:
        _add_product(build, (x, factor, out), z, scale, is_conj, problem.precision)
        return y
    rows, found = _in_rows(build, x), _empty_rows(build, out)
    operands = _merged(rows), _padded_factor(build, factor), _merged(found)
    _add_product(build, operands, None, PLAIN, is_conj, problem.precision)
    _add_copy(build, found, out, z, scale)
    return y


def _add_product(
    build: Builder, tensors: tuple[Tensor, Tensor, Tensor], z: Tensor | None, scale: Scale, is_conj: bool, precision: str | None
) -> None:
    """Add the product of a mode's x and its factor, into out, the third of these tensors."""
    x, factor, out = tensors
    alpha = scale.alpha if isinstance(scale.alpha, Scalar) else 1.0
    beta = scale.beta if isinstance(scale.beta, Scalar) else 0.0
    is_first, to_set = x.shape[3] == 1, to_be_set(precision, build.device)  # whether x is the product's first operand

    def run(a: Tensor, b: Tensor, out: Tensor, *rest: Any) -> None:
        *given, alpha, beta = rest
        if is_conj:
            a, b = (a, b.conj()) if is_first else (a.conj(), b)
        with torch_products(a, to_set):
            product(a, b, out, Epilogue(alpha, beta, given[0] if given else None))

    is_plain = z is None and scale.is_one and not is_conj and _has_its_precision(build, x.dtype, precision)
    for operands in mode_products(x, factor, out, *([] if z is None else [z])):
        if is_plain:
            build.call(product, operands)
        else:
            build.call(run, operands, scalars=(alpha, beta))


def add_gemm_step(
    build: Builder, problem: LaunchProblem, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, y: Tensor | None, scale: Scale
) -> Tensor:
    """Add the last mode, with nothing after it, times a factor that all rows share, plus z, by the main loop of linear layers.

    Torch's product would copy z first. Arguments are those of `problem.add_launch`.
    """
    y = build.empty(problem.result_shape, x.dtype) if y is None else y
    factor = factors[problem.launch.start][0]
    p, q = factor.shape
    rows, side = build.reshape(x, (-1, p)), build.reshape(cast("Tensor", z), (-1, q))  # z is why this step was chosen
    add_gemm(build, rows, factor.mT, None, _GEMM, y.view(-1, q), side=side, scalars=(scale.alpha, scale.beta))
    return y


def _has_its_precision(build: Builder, dtype: torch.dtype, precision: str | None) -> bool:
    """Whether torch multiplies in this precision whenever the program runs, so that its products are calls of their own."""
    return not has_precisions(dtype) or to_be_set(precision, build.device) is None


def _new_product(build: Builder, a: Tensor, b: Tensor, alpha: Scalar | int) -> Tensor:
    """``alpha * a @ b`` of matrices or batches, in memory that torch makes: the fewest operations of the host."""
    if (cut := cut_of(a, b)) is not None:
        return _long_product(build, a, b, cut, alpha, a.dtype)
    described = describe((*a.shape[:-1], b.shape[-1]), a.dtype)
    if isinstance(alpha, Scalar):
        made: Tensor = build.call(scaled_product, (a, b), described, scalars=(alpha,))
    else:
        made = build.call(torch.mm if a.ndim == 2 else torch.bmm, (a, b), described)
    return made


def _without_padding(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)  # even where the rest of a matrix is contiguous


def _long_product(build: Builder, a: Tensor, b: Tensor, cut: Cut, alpha: Scalar | int, dtype: torch.dtype) -> Tensor:
    """The same of matrices whose sum is cut."""
    parts = build.empty((cut.all_parts, a.shape[0], b.shape[1]), torch.float32)
    build.call(partial(write_parts, cut=cut), (a, b, parts))
    total = build.empty(parts.shape[1:], dtype)
    build.launch(sum_launcher(math.prod(total.shape), cut.all_parts), (parts, total), (alpha,))
    return total


def add_gradient(build: Builder, u: Tensor, g: Tensor, alpha: Scalar | int, algorithm: str, precision: str, dtype: torch.dtype) -> Tensor:
    """The gradient ``[B, P, Q]`` of a factor.

    Args:
        build: of the program.
        u: the mode's input ``[B, n, P, after]``.
        g: the gradient of its result, ``[B, n, Q, after]``.
        alpha: scales the gradient.
        algorithm: one of `BY_TORCH`.
        precision: of float32 products.
        dtype: of the gradient: that of u, or float32 next to a half dtype.
    """
    groups, p, q = u.shape[0], u.shape[2], g.shape[2]
    if algorithm != "matmul":
        u, g = (_merged(_in_rows(build, t)) for t in (u, g))
    count, after, shape = u.shape[1], u.shape[3], (groups, p, q)
    if after > 1 and count > 1:
        a, b = u, g
    else:
        a, b = matrices(u[..., 0].mT, g[..., 0]) if after == 1 else matrices(u[:, 0], g[:, 0].mT)
        shape = (*a.shape[:-2], p, q)
        is_whole, is_plain = (p, q) == (a.shape[-2], b.shape[-1]), not dtype.is_complex and _has_its_precision(build, dtype, precision)
        if is_whole and is_plain and dtype == a.dtype:
            return _new_product(build, a, b, alpha).view(groups, p, q)
        if (cut := cut_of(a, b)) is not None:
            df = _long_product(build, a, b, cut, alpha, dtype)
            padded: Tensor = df if is_whole else build.call(_without_padding, (df[:p, :q],), describe((p, q), dtype))
            return padded.view(groups, p, q)

    to_set = to_be_set(precision, build.device)

    def run(a: Tensor, b: Tensor, alpha: float) -> Tensor:
        a = a.conj() if a.is_complex() else a
        with torch_products(a, to_set):
            if a.ndim < 4 and dtype == a.dtype:
                return scaled_product(a, b, alpha)[..., :p, :q].contiguous()
            df = summed_products(a, b, dtype) if a.ndim == 4 else wide_product(a, b, dtype)
        df = df[..., :p, :q].contiguous()
        return df if alpha == 1 else df.mul_(alpha)

    made: Tensor = build.call(run, (a, b), describe(shape, dtype), scalars=(alpha if isinstance(alpha, Scalar) else 1.0,))
    return made.view(groups, p, q)


def _empty_rows(build: Builder, like: Tensor) -> Tensor:
    """A buffer for a copy of ``[B, n, W, after]`` in padded rows over W."""
    groups, count, width, after = like.shape
    return build.empty((groups, count, after, copied_width(width, like.element_size())), like.dtype).mT


def _in_rows(build: Builder, t: Tensor) -> Tensor:
    """A copy of ``[B, n, W, after]`` as `_empty_rows` has it, with zeros for padding."""
    rows = _empty_rows(build, t)
    _add_copy(build, t, rows)
    return rows


def _merged(rows: Tensor) -> Tensor:
    """``[B, n, W, after]`` of `_empty_rows` as an operand ``[B, n * after, W, 1]``."""
    return rows.mT.flatten(1, 2)[..., None]


def _is_aligned(build: Builder, factor: Tensor) -> bool:
    """Whether a factor ``[B, P, Q]`` has rows or columns that begin on 16 bytes, or is of numbers for which that does not count."""
    if factor.element_size() > 2:
        return True
    views = [t for t in (factor, factor.mT) if t.stride(2) == 1 and all(n % _UNIT == 0 for n in t.stride()[:2])]
    return any(build.is_aligned(t) for t in views)


def _aligned_factor(build: Builder, factor: Tensor, after: int) -> Tensor:
    """The factor ``[B, P, Q]`` itself, or an aligned copy where that alone makes a product in place with this trailing stride fast."""
    if after == 1 or after % _UNIT or _is_aligned(build, factor):
        return factor
    for t, is_transposed in ((factor, False), (factor.mT, True)):
        if t.shape[2] % _UNIT == 0:
            copied = build.empty((t.shape[0], 1, *t.shape[1:]), t.dtype)
            _add_copy(build, t.unsqueeze(1), copied)
            return copied[:, 0].mT if is_transposed else copied[:, 0]
    return factor


def _padded_factor(build: Builder, factor: Tensor) -> Tensor:
    """The factor ``[B, P, Q]`` with as many rows and columns as operands have, and rows or columns that begin on 16 bytes."""
    groups, *sizes = factor.shape
    wanted = [copied_width(n, factor.element_size()) for n in sizes]
    if sizes == wanted and _is_aligned(build, factor):
        return factor
    padded = build.empty((groups, 1, *wanted), factor.dtype)
    _add_copy(build, factor.unsqueeze(1), padded)
    return padded[:, 0]


def _add_copy(build: Builder, x: Tensor, y: Tensor, z: Tensor | None = None, scale: Scale = PLAIN) -> None:
    """Add ``y = alpha * x + beta * z`` to a program, all ``[B, n, I, J]``; x is padded with zeros, or cut."""
    groups, count, *sizes = y.shape
    tile = _TILE_BYTES // x.element_size()
    block_j = min(next_power_of_two(sizes[1]), max(_TILE_SIDE, tile // next_power_of_two(sizes[0])))
    block_i = min(next_power_of_two(sizes[0]), tile // block_j)
    block_n = min(next_power_of_two(count), tile // block_i // block_j)
    addend, blocks = y if z is None else z, (block_n, block_i, block_j)
    reach = max(sum(abs(stride) * block for stride, block in zip(t.stride()[1:], blocks, strict=True)) for t in (x, addend, y))
    epilogue = epilogues.AXPBY if z is not None else epilogues.PLAIN if scale.is_one else epilogues.SCALE
    arguments = {
        "x_strides": in_words((batch_stride(x), *x.stride()[1:]), x.dtype),
        "z_strides": in_words((batch_stride(addend), *addend.stride()[1:]), x.dtype),
        "y_strides": in_words((batch_stride(y), *y.stride()[1:]), x.dtype),
        "count": count,
        "x_sizes": tuple(x.shape[2:]),
        "y_sizes": tuple(sizes),
        "BLOCK_N": block_n,
        "BLOCK_I": block_i,
        "BLOCK_J": block_j,
        "INDEX": tl.int32 if reach < 2**30 else tl.int64,
        "ACC": arithmetic(x.dtype, "highest", True).acc,
        "EPILOGUE": epilogue.function(x.dtype),
        "PARTS": parts_of(x.dtype),
        "num_warps": 4,
    }
    tiles = math.ceil(count / block_n) * math.ceil(sizes[0] / block_i) * math.ceil(sizes[1] / block_j)
    launcher = Launcher([LaunchConfig(_copy_matrices_kernel, (groups * tiles,), arguments)])
    build.launch(launcher, (x, addend, y), (scale.alpha, scale.beta))
