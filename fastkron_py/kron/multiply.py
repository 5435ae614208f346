"""A Kronecker multiply as a part of a program, on either backend, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron import torch_backend, torch_steps
from fastkron_py.kron.canonical import PLAIN, Canonical, Scale, add_scaling, canonical
from fastkron_py.kron.checks import result_shape
from fastkron_py.kron.cpu import compiled, fused
from fastkron_py.kron.cpu.fused import Layout
from fastkron_py.kron.cpu.plan import Sizes
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.runtime.program import Scalar
from fastkron_py.tiling.torch_products import matrix_product

_ALPHA, _BETA = Scalar(0), Scalar(1)


def scale_of(alpha: float, adds: bool) -> Scale:
    """The scalars of a program that is run with alpha and beta; adds: whether there is a z."""
    plain = PLAIN if alpha == 1 else Scale(_ALPHA)
    return plain._replace(beta=_BETA) if adds else plain


def backend_of(name: str, x: Tensor) -> str:
    """The backend of a multiply of x; torch's has nothing to do for an empty one."""
    return "torch" if x.numel() == 0 else choose_backend(name, x)


class Multiply(NamedTuple):
    """``alpha * x @ (F1 (x) ... (x) FN) + beta * z``, or in the left form.

    Attributes:
        factors: for Triton of x's dtype; for torch also of float32 next to a half dtype.
        backend: "triton" or "torch".
        precision: of float32 products.
        left: the form.
        scale: alpha and beta.
    """

    factors: Sequence[Tensor]
    backend: str
    precision: str | None
    left: bool = False
    scale: Scale = PLAIN

    def result_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(result_shape(tuple(x.shape), [tuple(f.shape) for f in self.factors], left=self.left))

    def saves(self, x: Tensor, device: torch.device) -> bool:
        """Whether a multiply for gradients is another one, whose intermediate is saved."""
        if self.backend == "torch" or self._is_empty_product(x):
            return False
        from fastkron_py.kron.gradients import cut_of

        return cut_of(canonical(x, self.factors, self.left), device) is not None

    def add(
        self, build: Builder, x: Tensor, z: Tensor | None, saves: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add it to a program.

        Args:
            build: of the program.
            x: ``[*batch, M, K]`` (left: ``[*batch, K, M]``).
            z: that expands to the result, or None.
            saves: whether a gradient is wanted.
            out: where the result shall be, contiguous, where no gradient is; new memory if None.

        Returns:
            The result's elements in order, and the intermediate that is saved, if there is one.
        """
        is_empty = self._is_empty_product(x)
        if is_empty or self.backend == "torch":
            y = self._add_empty_product(build, x, z) if is_empty else self._add_by_torch(build, x, z)
            if out is not None:
                build.call(_write, (out, y))
            return y, None
        from fastkron_py.kron.forward import add_multiply

        precision = resolved(self.precision)
        problem = canonical(x, self.factors, self.left, build.reshape)
        z4 = None if z is None else problem.pack(z.expand(self.result_shape(x)))
        if saves:
            from fastkron_py.kron.gradients import add_multiply_saving, cut_of

            cut = cut_of(problem, build.device)
            if cut is not None:
                return add_multiply_saving(build, problem, cut, precision, self.scale, z4)
        out4 = None if out is None else problem.pack(out)
        return add_multiply(build, problem.x, problem.factors, precision, self.scale, z4, out4), None

    def add_scaled(self, build: Builder, x: Tensor, z: Tensor, divides: bool) -> Tensor:
        """Add the product, times or over z, to a program.

        Args:
            build: of the program.
            x: as in `add`.
            z: that broadcasts to the result.
            divides: whether z divides.

        Returns:
            The result's elements in order.
        """
        shape = self.result_shape(x)
        z4 = None if self.backend == "torch" or self._is_empty_product(x) else self._packed(x, cast(build, z, x.dtype))
        if z4 is None:
            y, _ = self.add(build, x, None)
            add_scaling(build, y.view(shape), z, Tensor.div_ if divides else Tensor.mul_)
            return y
        from fastkron_py.kron.forward import add_multiply
        from fastkron_py.kron.kernels.epilogues import OVER, TIMES

        problem = canonical(x, self.factors, self.left, build.reshape)
        epilogue = OVER if divides else TIMES
        return add_multiply(build, problem.x, problem.factors, resolved(self.precision), z=z4, epilogue=epilogue)

    def _packed(self, x: Tensor, z: Tensor) -> Tensor | None:
        """A view of z in canonical form, or None where there is none."""
        shape = self.result_shape(x)
        try:
            return canonical(x.new_empty(x.shape), self.factors, self.left)._replace(reshape=Tensor.view).pack(z.expand(shape))
        except RuntimeError:
            return None

    @property
    def _scalars(self) -> tuple[Scalar | float, Scalar | float]:
        """Alpha and beta, for torch."""
        alpha, beta = self.scale
        return alpha if isinstance(alpha, Scalar) else 1.0, beta if isinstance(beta, Scalar) else 0.0

    def _is_empty_product(self, x: Tensor) -> bool:
        """Whether the sum has no terms, or the result no elements."""
        return any([t.numel() == 0 for t in (x, *self.factors)])

    def _add_empty_product(self, build: Builder, x: Tensor, z: Tensor | None) -> Tensor:
        """Add zeros, or beta * z, for an empty product."""
        shape = self.result_shape(x)

        def empty_product(x: Tensor, *given: Any) -> Tensor:
            *z, beta = given
            return (beta * z[0]).expand(shape).contiguous() if z else x.new_zeros(shape)

        operands = (x,) if z is None else (x, z)
        made: Tensor = build.call(empty_product, operands, describe(shape, x.dtype), scalars=self._scalars[1:])
        return made

    def _add_by_torch(self, build: Builder, x: Tensor, z: Tensor | None) -> Tensor:
        """By the CPU's kernel once it is compiled, where it takes these operands; else by torch's products."""
        shape, count, (_, precision, left, _) = self.result_shape(x), len(self.factors), self[1:]
        problem = canonical(x, self.factors, left, build.reshape)
        given = [whole if _is_all(t, whole) else t for t, whole in zip((problem.x, *problem.factors), (x, *self.factors), strict=True)]
        x_layout, layouts = Layout.of(problem.x), tuple([Layout.of(f) for f in problem.factors])
        small, itemsize = small_product(build, x, self.factors, precision, left, backward=False), max(4, x.element_size())
        takes = build.device.type == "cpu" and fused.takes(problem.x, problem.factors)
        if small is not None and takes:
            (_, rows, _, columns), shapes = problem.x.shape, [(f.shape[1], f.shape[2]) for f in problem.factors]
            is_one = len(torch_steps.real_factors(shapes)) == 1 and x.dtype != torch.float16
            sizes = Sizes(tuple(shapes), 1, rows, columns, x.element_size(), torch.get_num_threads(), False, left)
            takes = not (is_one or is_by_products(x, sizes))
        planned = lru_cache(maxsize=8)(partial(fused.fused, x_layout, layouts))

        def multiply(*given: Any) -> Tensor:
            kernel = compiled.kernel(itemsize) if takes else None
            if small is not None and kernel is None:
                return small(*given)
            (x, *matrices), z, (alpha, beta) = given[: count + 1], given[count + 1 : -2], given[-2:]
            if kernel is not None:
                y = planned(alpha != 1, torch.get_num_threads())(kernel, x, matrices, alpha, shape)
            else:
                x, *matrices = [t.as_strided(v.shape, v.strides) for t, v in zip((x, *matrices), (x_layout, *layouts), strict=True)]
                with torch_products(x, precision):
                    y = torch_backend.by_torch(x, matrices, alpha).view(shape)
            return torch_steps.scaled(y, z[0], 1, beta) if z else y

        operands = given if z is None else (*given, z)
        made: Tensor = build.call(multiply, operands, describe(shape, x.dtype), scalars=self._scalars)
        return made

    def add_gradients(
        self,
        build: Builder,
        dy: Tensor,
        x: Tensor,
        needs: Sequence[bool],
        dtype: torch.dtype,
        between: Tensor | None = None,
        out: Tensor | None = None,
    ) -> list[Tensor]:
        """Add the gradients of x and of the factors, those needed, to a program; of any strides, and of any dimensions that were broadcast.

        Args:
            build: of the program.
            dy: like the result.
            x: of the multiply.
            needs: whether dx, and which factor gradients are needed.
            dtype: of the factor gradients, for Triton: x's, or float32 next to a half dtype.
            between: the intermediate that was saved, or None.
            out: where dx shall be, contiguous, where no intermediate was saved; new memory if None.
        """
        if not any(needs):
            return []
        if self.backend == "torch" or dy.numel() == 0 or x.numel() == 0:
            found = self._add_gradients_by_torch(build, dy, x, needs)
            if out is not None:
                build.call(_write, (out, found[0]))
            return found
        from fastkron_py.kron.gradients import add_backward, add_backward_saved, cut_of

        precision = resolved(self.precision)
        problem = canonical(x, self.factors, self.left, build.reshape)
        dy4 = problem.pack(dy)
        # Without factor gradients, dx is a multiply as any other.
        cut = None if between is None or not any(needs[1:]) else cut_of(problem, build.device)
        if cut is None or between is None:
            out4 = None if out is None else problem.pack(out)
            dx4, dfs = add_backward(build, dy4, problem.x, problem.factors, needs, precision, self.scale, dtype, out4)
        else:
            dx4, dfs = add_backward_saved(build, problem, cut, (dy4, between), needs, precision, self.scale, dtype)
        return _unpacked(problem, dx4, dfs)

    def _add_gradients_by_torch(self, build: Builder, dy: Tensor, x: Tensor, needs: Sequence[bool]) -> list[Tensor]:
        """The gradients as the arguments are."""
        (need_x, *need_factors), (_, precision, left, _) = needs, self[1:]
        results = [describe(t.shape, t.dtype) for t in wanted(x, self.factors, need_x, need_factors)]

        def empty_product(x: Tensor) -> list[Tensor]:
            return [x.new_zeros(r.shape, dtype=r.dtype) for r in results]

        if dy.numel() == 0 or x.numel() == 0:
            made = build.call(empty_product, (x,), *results)
            return [made] if len(results) == 1 else made
        problem = canonical(x, self.factors, left, build.reshape)
        operands, wholes = (problem.pack(dy), problem.x, *problem.factors), (dy, x, *self.factors)
        given = [whole if _is_all(t, whole) else t for t, whole in zip(operands, wholes, strict=True)]
        dy_layout, x_layout, *layouts = (Layout.of(t) for t in operands)
        planned, itemsize = lru_cache(maxsize=8)(partial(fused.fused, x_layout, tuple(layouts), False)), max(4, x.element_size())
        kernel_wanted = fused.Wanted(dy_layout, need_x, tuple(need_factors))
        takes = build.device.type == "cpu" and any(need_factors) and fused.takes(problem.x, problem.factors, is_gradient=True)
        form = Canonical(describe((0,), x.dtype), [], problem.batch, problem.factor_batch, left)

        def by_torch(dy: Tensor, x: Tensor, *given: Any) -> list[Tensor]:
            *factors, alpha = given
            kernel = compiled.kernel(itemsize) if takes else None
            if kernel is not None:
                run = planned(torch.get_num_threads(), kernel_wanted)
                dx4, dfs = run.gradients(kernel, dy, x, factors, alpha)
            else:
                dy, x, *factors = (
                    t.as_strided(v.shape, v.strides) for t, v in zip((dy, x, *factors), (dy_layout, x_layout, *layouts), strict=True)
                )
                if x.is_complex():
                    x, factors = x.conj(), [f.conj() for f in factors]
                with torch_products(x, precision):
                    dx4, dfs = torch_backend.backward(dy, x, factors, alpha, need_x, need_factors)
            return [_fit(f, t) for f, t in zip(_unpacked(form, dx4, dfs), results, strict=True)]

        made = build.call(by_torch, given, *results, scalars=self._scalars[:1])
        return [made] if len(results) == 1 else made


def _is_all(t: Tensor, whole: Tensor) -> bool:
    """Whether a view begins where a tensor does: of the other one its address is all that a call has to know."""
    return t.untyped_storage()._cdata == whole.untyped_storage()._cdata and t.storage_offset() == whole.storage_offset()


def _write(out: Tensor, y: Tensor) -> None:
    out.copy_(y)


def small_product(
    build: Builder, x: Tensor, factors: Sequence[Tensor], precision: str | None, left: bool, backward: bool
) -> Callable[..., Tensor] | None:
    """The product of one matrix of x and one of each factor, if it is small: a function of x, the factors, z, alpha and beta.

    It takes no canonical form. The result is of its own memory, and z expands by itself.

    Args:
        build: of the program.
        x: of the multiply.
        factors: of any dtypes.
        precision: of float32 products.
        left: the form.
        backward: whether autograd differentiates the function.
    """
    if x.ndim != 2 or any([f.ndim != 2 for f in factors]):
        return None
    shape = result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left)
    count, (rows, columns) = len(factors), (1, x.shape[1]) if left else (x.shape[0], 1)
    shapes = [(f.shape[1], f.shape[0]) if left else (f.shape[0], f.shape[1]) for f in factors]
    real = [shapes[i] for i in torch_steps.real_factors(shapes)]
    is_one_product = len(real) == 1 and not backward and not widens(x, factors)  # whose result is nearly all the memory that it takes
    sizes = Sizes(tuple(shapes), 1, rows, columns, max(4, x.element_size()), torch.get_num_threads(), backward, left)
    takes = build.device.type == "cpu" and compiled.is_installed() and fused.takes(x, factors, is_gradient=backward)
    is_faster = takes and is_by_products(x, sizes)
    if not (is_one_product or is_faster or torch_steps.is_small(real, rows * columns)):
        return None
    if backward and takes and not (is_faster or torch_steps.is_least(real, rows * columns)):
        return None
    multiply_small = torch_steps.small_multiply(sizes, shape, left)

    def multiply(x: Tensor, *given: Any) -> Tensor:
        factors, z, (alpha, beta) = given[:count], given[count:-2], given[-2:]
        if count == 1 and alpha == 1 and not z and precision is None:
            return matrix_product(factors[0], x, False) if left else matrix_product(x, factors[0], True)
        with torch_products(x, precision):
            return multiply_small(x, factors, z[0] if z else None, alpha, beta)

    return multiply if is_one_product else torch_steps.in_float32(multiply, x.dtype)


def is_by_products(x: Tensor, sizes: Sizes) -> bool:
    """Whether torch's products take less time than the CPU kernel, which keeps half types in float32."""
    return x.dtype not in HALF_DTYPES and torch_steps.is_faster(sizes)


def widens(x: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether torch's products on CPUs are of float32: of 16-bit floats beside it, or for which the CPU has no instructions."""
    is_native = x.dtype == torch.bfloat16 and torch_internals.multiplies_bfloat16() and all([f.dtype == x.dtype for f in factors])
    return x.dtype in HALF_DTYPES and not is_native


def plain_product(build: Builder, x: Tensor, factors: Sequence[Tensor], left: bool) -> Callable[..., Tensor] | None:
    """On a CPU the product of matrices of x and of the factors, of x's dtype, whose result is no view: of one real factor; else None."""
    if build.device.type != "cpu" or widens(x, factors) or any([t.ndim != 2 for t in (x, *factors)]):
        return None
    if len(factors) == 1:
        return (lambda x, f: matrix_product(f, x, False)) if left else lambda x, f: matrix_product(x, f, True)
    is_one = len(torch_steps.real_factors([(f.shape[0], f.shape[1]) for f in factors])) == 1
    multiply = small_product(build, x, factors, None, left, backward=False) if is_one else None
    return None if multiply is None else lambda *given: multiply(*given, 1.0, 0.0)


def wanted(x: Tensor, factors: Sequence[Tensor], need_x: bool, need_factors: Sequence[bool]) -> list[Tensor]:
    """The arguments whose gradients are needed, in the order of `gradients`' results."""
    return ([x] if need_x else []) + [f for f, need in zip(factors, need_factors, strict=True) if need]


def cast(build: Builder, f: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor in x's dtype; one of float32 next to an x of a half dtype is copied, in the same order of strides."""
    if f.dtype == dtype:
        return f
    strides = torch.empty_like(f).stride()
    made: Tensor = build.call(lambda f: torch.empty_like(f, dtype=dtype).copy_(f), (f,), describe(f.shape, dtype, strides))
    return made


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
    if gradient.shape != argument.shape:
        few = gradient.numel() == argument.numel()  # none was
        gradient = gradient.reshape(argument.shape) if few else gradient.sum_to_size(argument.shape)
    return gradient.to(argument.dtype).contiguous()


def fitted(build: Builder, gradient: Tensor, result: Tensor) -> Tensor:
    """The same as a step of a program, where there is something to do."""
    if gradient.is_contiguous() and gradient.numel() == result.numel() and gradient.dtype == result.dtype:
        return gradient
    made: Tensor = build.call(lambda t: _fit(t, result), (gradient,), result)
    return made
