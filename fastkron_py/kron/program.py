"""The programs of Kronecker products: canonical form, backend, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron import torch_backend, torch_small
from fastkron_py.kron.canonical import Canonical, canonical
from fastkron_py.kron.matmul import has_onednn, matrix_product
from fastkron_py.kron.plan.torch_plan import Problem, differentiable_plan
from fastkron_py.kron.scale import Scale
from fastkron_py.kron.shapes import result_shape
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.runtime.program import Program, Scalar, bits

_ALPHA, _BETA = Scalar(0), Scalar(1)
_ONE, _ZERO = bits(1.0), bits(0.0)


def forward(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::kron_matmul`: x, the factors and z; alpha, beta, precision, backend and left."""
    _, beta, precision, backend, left = options
    build = Builder(tensors)
    x, *factors, z = build.inputs
    z = None if beta == 0 else z
    shape = result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left)
    result = describe(shape, x.dtype)
    if x.numel() == 0 or math.prod(shape) == 0:  # a sum over nothing
        operands = (x,) if z is None else (x, z)

        def of_nothing(x: Tensor, *z: Tensor, beta: float = 0.0) -> Tensor:
            return (beta * z[0]).expand(shape).contiguous() if z else x.new_zeros(shape)

        return build.program([build.call(lambda *given: of_nothing(*given[:-1], beta=given[-1]), operands, result, scalars=(_BETA,))])
    if choose_backend(backend, tensors[0]) == "torch":
        operands, scalars = (x, *factors) if z is None else (x, *factors, z), (_ALPHA, _BETA)
        small = _small(tensors, shape, precision, left, backward=False)
        # A backward pass under autocast would round the products of float32 factors that autograd differentiates.
        may_differentiate = precision is None and (z is not None or tensors[-1] is None) and all([f.dtype == x.dtype for f in factors])
        differentiable = _small(tensors, shape, precision, left, backward=True) if may_differentiate else None

        def by_torch(x: Tensor, *given: Any) -> Tensor:
            count = len(factors)
            matrices, z, (alpha, beta) = given[:count], given[count:-2], given[-2:]
            with torch_products(x, precision):
                problem = canonical(x, matrices, left)
                z4 = problem.pack(z[0].expand(shape)) if z else None
                return problem.unpack(torch_backend.multiply(problem.x, problem.factors, z4, alpha, beta))

        return build.program([build.call(small or by_torch, operands, result, scalars=scalars)], differentiable=differentiable)
    return _by_triton(tensors, options, shape)


def _by_triton(tensors: Sequence[Any], options: tuple[Any, ...], shape: tuple[int, ...], saves: bool = False) -> Program:
    """The program of Triton's backend; saves: the one that returns an intermediate too, for the backward pass."""
    from fastkron_py.kron.forward import add_multiply
    from fastkron_py.kron.saved_intermediate import add_multiply_saving, halves_of

    alpha, beta, precision, _, left = options
    precision = resolved(precision)
    build = Builder(tensors)
    x, *factors, z = build.inputs
    problem = canonical(x, _cast(build, factors, x.dtype), left, build.reshape)
    z4 = None if beta == 0 else problem.pack(z.expand(shape))
    scale = Scale(_ONE if alpha == 1 else _ALPHA, _ZERO if z4 is None else _BETA)
    halves = halves_of(problem, precision, build.device)
    if saves and halves is not None:
        y4, between = add_multiply_saving(build, problem, halves, precision, scale, z4)
        return build.program([y4, between], [shape, between.shape], saved=1)
    y4 = add_multiply(build, problem.x, problem.factors, precision, scale, z4)
    return build.program([y4], [shape], saving=None if halves is None else _by_triton(tensors, options, shape, saves=True))


def _small(tensors: Sequence[Any], shape: tuple[int, ...], precision: Any, left: bool, backward: bool) -> Callable[..., Tensor] | None:
    """The product of one matrix of x and one of each factor, if it is small: a function of x, the factors, z, alpha and beta.

    It takes no canonical form. The result is of its own memory, and z expands by itself.

    Args:
        tensors: x, the factors, z.
        shape: of the result.
        precision: of float32 products.
        left: the form.
        backward: whether autograd differentiates the function.
    """
    x, *factors, _ = tensors
    if x.ndim != 2 or any([f.ndim != 2 for f in factors]):
        return None
    count, (rows, columns) = len(factors), (1, x.shape[1]) if left else (x.shape[0], 1)
    shapes = tuple([(f.shape[1], f.shape[0]) if left else (f.shape[0], f.shape[1]) for f in factors])
    problem = Problem(shapes, rows, columns, 1, max(4, x.element_size()), backward, has_onednn(x))
    in_half = torch_small.takes_bfloat16(problem, x)
    is_mixed = any([f.dtype != x.dtype for f in factors])
    problem = problem._replace(itemsize=2) if in_half else problem
    is_one_product = count == 1 and not backward and x.element_size() >= 4  # whose result is all the memory that it takes
    if not (is_one_product or torch_small.is_small(problem)):
        return None
    steps = differentiable_plan(problem).steps

    def multiply(x: Tensor, *given: Any) -> Tensor:
        factors, z, (alpha, beta) = given[:count], given[count:-2], given[-2:]
        if is_mixed and in_half:
            factors = tuple([f.to(x.dtype) for f in factors])
        if count == 1 and alpha == 1 and not z and precision is None:
            return matrix_product(factors[0], x, False) if left else matrix_product(x, factors[0], True)
        matrices = [f.mT for f in factors] if left else factors
        with torch_products(x, precision):
            return torch_small.multiply_small(x, matrices, steps, shape, (rows, columns), z[0] if z else None, alpha, beta)

    return multiply if in_half else torch_small.in_float32(multiply, x.dtype)


def wanted(x: Tensor, factors: Sequence[Tensor], need_x: bool, need_factors: Sequence[bool]) -> list[Tensor]:
    """The arguments whose gradients are needed, in the order of `gradients`' results."""
    return ([x] if need_x else []) + [f for f, need in zip(factors, need_factors, strict=True) if need]


def gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::kron_matmul_backward`.

    Tensors are dy, x, the factors and the intermediate that was saved; options the gradients needed, alpha, precision, backend and left.
    """
    need_x, need_factors, alpha, precision, backend, left = options
    build = Builder(tensors)
    dy, x, *factors, between = build.inputs
    results = [describe(t.shape, t.dtype) for t in wanted(x, factors, need_x, need_factors)]
    if not results:
        return build.program([])
    if dy.numel() == 0 or x.numel() == 0:
        made = build.call(lambda x: [x.new_zeros(r.shape, dtype=r.dtype) for r in results], (x,), *results)
        return build.program([made] if len(results) == 1 else made)
    if choose_backend(backend, tensors[1]) == "torch":

        def by_torch(dy: Tensor, x: Tensor, *given: Any) -> list[Tensor]:
            *factors, alpha = given
            if x.is_complex():
                x, factors = x.conj(), [f.conj() for f in factors]
            with torch_products(x, precision):
                problem = canonical(x, factors, left)
                dx4, dfs = torch_backend.backward(problem.pack(dy), problem.x, problem.factors, alpha, need_x, need_factors)
            return [_fit(f, t) for f, t in zip(_unpacked(problem, dx4, dfs), wanted(x, factors, need_x, need_factors), strict=True)]

        made = build.call(by_torch, (dy, x, *factors), *results, scalars=(_ALPHA,))
        return build.program([made] if len(results) == 1 else made)
    from fastkron_py.kron.backward import add_backward
    from fastkron_py.kron.saved_intermediate import add_backward_saved, halves_of

    problem = canonical(x, _cast(build, factors, x.dtype), left, build.reshape)
    scale = Scale(_ONE if alpha == 1 else _ALPHA)
    needs = (need_x, *need_factors)
    dtype = torch.float32 if torch.float32 in [f.dtype for f in factors] else x.dtype
    precision, dy4 = resolved(precision), problem.pack(dy)
    # Without factor gradients, dx is a multiply as any other.
    halves = None if between is None or not any(need_factors) else halves_of(problem, precision, build.device)
    if halves is None:
        dx4, dfs = add_backward(build, dy4, problem.x, problem.factors, needs, precision, scale, dtype)
    else:
        dx4, dfs = add_backward_saved(build, problem, halves, (dy4, between), needs, precision, scale, dtype)
    found = [_fitted(build, f, r) for f, r in zip(_unpacked(problem, dx4, dfs), results, strict=True)]
    return build.program(found, [r.shape for r in results])


def _cast(build: Builder, factors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The factors in x's dtype; those of float32 beside an x of a half dtype are copied, in the same order of strides."""

    def cast(f: Tensor) -> Tensor:
        return torch.empty_like(f, dtype=dtype).copy_(f)

    likes = [torch.empty_like(f, dtype=dtype) for f in factors]
    pairs = zip(factors, likes, strict=True)
    return [f if f.dtype == dtype else build.call(cast, (f,), describe(f.shape, dtype, like.stride())) for f, like in pairs]


def _unpacked(problem: Canonical, dx4: Tensor | None, dfs: Sequence[Tensor | None]) -> list[Tensor]:
    """A backend's gradients, those that there are, as matrices with the result's batch dimensions; of one batch without."""
    results = [] if dx4 is None else [problem.unpack(dx4)]
    for df in dfs:
        if df is not None:
            df = df.mT if problem.left else df
            batched = df.shape[0] > 1  # else the factors' batch sizes are all 1
            shared = [1] * (len(problem.batch) - len(problem.factor_batch))
            results.append(df.unflatten(0, (*problem.factor_batch, *shared)) if batched else df[0])
    return results


def _fit(gradient: Tensor, argument: Tensor) -> Tensor:
    """Sum over dimensions that were broadcast; a contiguous tensor of the argument's shape and dtype."""
    few = gradient.numel() == argument.numel()  # none was
    return (gradient.reshape(argument.shape) if few else gradient.sum_to_size(argument.shape)).to(argument.dtype).contiguous()


def _fitted(build: Builder, gradient: Tensor, result: Tensor) -> Tensor:
    """The same as a step of a program, where there is something to do."""
    if gradient.is_contiguous() and gradient.numel() == result.numel() and gradient.dtype == result.dtype:
        return gradient
    made: Tensor = build.call(lambda t: _fit(t, result), (gradient,), result)
    return made
