"""Operators `fastkron::kron_matmul` and `fastkron::kron_matmul_backward`.

kron_matmul           y = alpha * x @ K + beta * z     (left: alpha * K @ x + beta * z), K = F1 (x) ... (x) FN
kron_matmul_backward  [dx] + [dF_i ...] of alpha * x @ K, only those asked for

Both are multilinear, so the derivative of each is made of the two: that gives every order of
derivative. The backward operator computes plain transposes; conjugation, for complex tensors, is
done where a derivative is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kernels import torch_backend
from fastkron_py.ops.backend import choose_backend
from fastkron_py.ops.canonical import canonical
from fastkron_py.shapes import result_shape

LIBRARY = torch.library.Library("fastkron", "DEF")
# No defaults: the dispatcher drops arguments that equal theirs, and the autograd wrapper then miscounts.
LIBRARY.define(
    "kron_matmul(Tensor x, Tensor[] factors, Tensor? z, float alpha, float beta, "
    "str? precision, str backend, bool left) -> Tensor"
)
LIBRARY.define(
    "kron_matmul_backward(Tensor dy, Tensor x, Tensor[] factors, bool need_x, bool[] need_factors, float alpha, "
    "str? precision, str backend, bool left) -> Tensor[]"
)


def _no_autocast(x: Tensor) -> Any:
    """Autocast has been applied to the arguments; it must not reach the multiplies inside."""
    return torch.autocast(x.device.type, enabled=False)


def _conj(t: Tensor) -> Tensor:
    return t.conj() if t.is_complex() else t


# ---- kron_matmul -----------------------------------------------------------------------------


def _kron_matmul(
    x: Tensor,
    factors: Sequence[Tensor],
    z: Tensor | None,
    alpha: float,
    beta: float,
    precision: str | None,
    backend: str,
    left: bool,
) -> Tensor:
    shape = result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left)
    if beta == 0:
        z = None
    y = x.new_empty(shape)
    if y.numel() == 0:
        return y
    if x.numel() == 0:  # a sum over nothing
        return y.zero_() if z is None else torch.mul(z, beta, out=y)
    chosen = choose_backend(backend, x)
    problem = canonical(x, factors, left)
    z4 = None if z is None else problem.pack(z.expand(shape))
    if chosen == "triton":
        from fastkron_py.kernels import triton_backend

        y4 = triton_backend.multiply(problem.x, problem.factors, z4, alpha, beta, precision)
    else:
        with _no_autocast(x):
            y4 = torch_backend.multiply(problem.x, problem.factors, z4, alpha, beta)
    return problem.unpack(y4)


LIBRARY.impl("kron_matmul", _kron_matmul, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::kron_matmul", lib=LIBRARY)
def _(x, factors, z, alpha, beta, precision, backend, left):  # type: ignore[no-untyped-def]
    return x.new_empty(result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, factors, z, alpha, beta, precision, backend, left = inputs
    ctx.save_for_backward(x, *factors)
    ctx.z_shape = None if z is None else z.shape
    ctx.options = (alpha, beta, precision, backend, left)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *factors = ctx.saved_tensors
    alpha, beta, precision, backend, left = ctx.options
    need_x, need_factors, need_z = _needed(ctx.needs_input_grad, len(factors))
    options = (alpha, precision, backend, left)
    dx, dfs = _gradients(dy, _conj(x), [_conj(f) for f in factors], need_x, need_factors, options)
    dz = (beta * dy).sum_to_size(ctx.z_shape) if need_z else None
    return dx, dfs, dz, None, None, None, None, None


torch.library.register_autograd("fastkron::kron_matmul", _backward, setup_context=_setup, lib=LIBRARY)


def _needed(flags: Sequence[Any], count: int) -> tuple[bool, list[bool], bool]:
    """Split needs_input_grad of (x, factors, z, ...)."""
    of_factors = flags[1]
    listed = [of_factors] * count if isinstance(of_factors, bool) else [bool(f) for f in of_factors]
    return bool(flags[0]), listed, bool(flags[2])


def _gradients(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], need_x: bool, need_factors: Sequence[bool], options: tuple[Any, ...]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The wanted of (dx, dF_1, ..., dF_N), None for the others; options as in the operator's schema."""
    if not need_x and not any(need_factors):
        return None, [None] * len(factors)
    found = iter(torch.ops.fastkron.kron_matmul_backward(dy, x, factors, need_x, list(need_factors), *options))
    return (next(found) if need_x else None), [next(found) if need else None for need in need_factors]


def _vmap(info: Any, in_dims: tuple[Any, ...], x, factors, z, *options: Any) -> tuple[Tensor, int]:  # type: ignore[no-untyped-def]
    x_dim, factor_dims, z_dim = in_dims[:3]
    x, factors, z = _batch_first([x, factors, z], [x_dim, factor_dims, z_dim])
    return torch.ops.fastkron.kron_matmul(x, factors, z, *options), 0


def _batch_first(arguments: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Move vmapped dimensions in front of every other batch dimension, so that they broadcast.

    Args:
        arguments: tensors, lists of tensors or None.
        dims: for each the vmapped dimension, or None; for a list a list (or one for all).
    """
    groups = [_pairs(argument, dim) for argument, dim in zip(arguments, dims, strict=True)]
    rank = max(t.ndim - (d is not None) for group in groups for t, d in group)

    def lift(t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t
        t = t.movedim(dim, 0)
        return t.reshape(t.shape[0], *[1] * (rank + 1 - t.ndim), *t.shape[1:])

    moved = [[lift(t, d) for t, d in group] for group in groups]
    return [
        group if isinstance(argument, list | tuple) else group[0] if group else None
        for argument, group in zip(arguments, moved, strict=True)
    ]


def _pairs(argument: Any, dim: Any) -> list[tuple[Tensor, int | None]]:
    """(tensor, vmapped dimension) for a tensor, a list of tensors or None."""
    if argument is None:
        return []
    if not isinstance(argument, list | tuple):
        return [(argument, dim)]
    return list(zip(argument, dim if isinstance(dim, list | tuple) else [dim] * len(argument), strict=True))


torch.library.register_vmap("fastkron::kron_matmul", _vmap, lib=LIBRARY)


# ---- kron_matmul_backward --------------------------------------------------------------------


def _kron_matmul_backward(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    need_x: bool,
    need_factors: Sequence[bool],
    alpha: float,
    precision: str | None,
    backend: str,
    left: bool,
) -> list[Tensor]:
    wanted = ([x] if need_x else []) + [f for f, need in zip(factors, need_factors, strict=True) if need]
    if dy.numel() == 0 or x.numel() == 0:
        return [t.new_zeros(t.shape) for t in wanted]
    chosen = choose_backend(backend, x)
    problem = canonical(x, factors, left)
    dy4 = problem.pack(dy)
    if chosen == "triton":
        from fastkron_py.kernels import triton_backend

        dx4, dfs = triton_backend.backward(dy4, problem.x, problem.factors, alpha, need_x, need_factors, precision)
    else:
        with _no_autocast(x):
            dx4, dfs = torch_backend.backward(dy4, problem.x, problem.factors, alpha, need_x, need_factors)
    results = [] if dx4 is None else [_fit(problem.unpack(dx4), x)]
    for df, f in zip(dfs, factors, strict=True):
        if df is not None:
            df = df.mT if left else df
            batch = problem.batch if df.shape[0] > 1 else ()
            results.append(_fit(df.reshape(*batch, *df.shape[-2:]), f))
    return results


def _fit(gradient: Tensor, argument: Tensor) -> Tensor:
    """Sum over dimensions that were broadcast; a fresh contiguous tensor of the argument's shape."""
    return gradient.sum_to_size(argument.shape).contiguous()


LIBRARY.impl("kron_matmul_backward", _kron_matmul_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::kron_matmul_backward", lib=LIBRARY)
def _(dy, x, factors, need_x, need_factors, alpha, precision, backend, left):  # type: ignore[no-untyped-def]
    wanted = ([x] if need_x else []) + [f for f, need in zip(factors, need_factors, strict=True) if need]
    return [t.new_empty(t.shape) for t in wanted]


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dy, x, factors, need_x, need_factors, alpha, precision, backend, left = inputs
    ctx.save_for_backward(dy, x, *factors)
    ctx.wanted = (need_x, list(need_factors))
    ctx.options = (alpha, precision, backend, left)


def _backward_second(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Derivative of <cx, dx> + sum_i <c_i, dF_i>, where dx and dF_i are the operator's results.

    With K_i the product whose i-th factor is c_i, that scalar is <cx @ K + sum_i x @ K_i, alpha dy>.
    """
    dy, x, *factors = ctx.saved_tensors
    flags = ctx.needs_input_grad
    need_x, need_factors, need_dy = _needed((flags[1], flags[2], flags[0]), len(factors))
    alpha, precision, backend, left = options = ctx.options
    dy_c, x_c, factors_c = _conj(dy), _conj(x), [_conj(f) for f in factors]
    cotangents = iter(grads)
    sums: list[Tensor | None] = [None] * (2 + len(factors))  # dy, x, factors

    def add(slot: int, term: Tensor | None) -> None:
        if term is not None:
            so_far = sums[slot]
            sums[slot] = term if so_far is None else so_far + term

    def forward(t: Tensor, fs: Sequence[Tensor]) -> None:
        if need_dy:
            y = torch.ops.fastkron.kron_matmul(t, fs, None, alpha, 0.0, precision, backend, left)
            add(0, y.sum_to_size(dy.shape))

    wanted_x, wanted_factors = ctx.wanted
    cx = next(cotangents) if wanted_x else None
    if cx is not None:
        forward(cx, factors_c)
        for j, term in enumerate(_gradients(dy_c, cx, factors_c, False, need_factors, options)[1]):
            add(2 + j, term)
    for i, wanted in enumerate(wanted_factors):
        c = next(cotangents) if wanted else None
        if c is None:
            continue
        replaced = [*factors_c[:i], c, *factors_c[i + 1 :]]
        forward(x_c, replaced)
        others = [need and j != i for j, need in enumerate(need_factors)]
        dx, dfs = _gradients(dy_c, x_c, replaced, need_x, others, options)
        add(1, dx)
        for j, term in enumerate(dfs):
            add(2 + j, term)
    return sums[0], sums[1], sums[2:], None, None, None, None, None, None


torch.library.register_autograd("fastkron::kron_matmul_backward", _backward_second, setup_context=_setup_second, lib=LIBRARY)


def _vmap_backward(  # type: ignore[no-untyped-def]
    info: Any, in_dims: tuple[Any, ...], dy, x, factors, *options: Any
) -> tuple[list[Tensor], list[int]]:
    x_dim, factor_dims = in_dims[1:3]
    need_x, need_factors = options[:2]
    wanted = [(x, x_dim)] if need_x else []
    wanted += [pair for pair, need in zip(_pairs(factors, factor_dims), need_factors, strict=True) if need]
    shapes = [t.shape if dim is None else t.movedim(dim, 0).shape[1:] for t, dim in wanted]
    dy, x, factors = _batch_first([dy, x, factors], in_dims[:3])
    rank = max(t.ndim for t in (dy, x, *factors))

    def per_sample(t: Tensor) -> Tensor:
        """Gradients are one for each sample, so an argument shared by all is repeated (as a view)."""
        return t if t.ndim == rank else t.expand(info.batch_size, *[1] * (rank - 1 - t.ndim), *t.shape)

    results = torch.ops.fastkron.kron_matmul_backward(dy, per_sample(x), [per_sample(f) for f in factors], *options)
    return [r.reshape(info.batch_size, *shape) for r, shape in zip(results, shapes, strict=True)], [0] * len(results)


torch.library.register_vmap("fastkron::kron_matmul_backward", _vmap_backward, lib=LIBRARY)
