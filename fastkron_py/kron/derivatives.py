"""Derivatives and vmap rules of the two Kronecker operators, written once for every way of calling them.

Both operators are linear in each argument, over the real numbers, so each derivative is a sum of calls of the two with one argument
replaced. Of complex numbers the gradients follow torch's convention: dx is dy by the conjugate transpose, dF_i is linear in the conjugate
of x. So no rule conjugates anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastkron_py.runtime.batching import take

Options = tuple[float, str | None, str, bool]  # alpha, precision, backend, left


class Calls(NamedTuple):
    """The two operators, which derive through themselves."""

    multiply: Callable[..., Tensor]  # (x, factors, z, alpha, beta, precision, backend, left)
    gradients: Callable[..., Sequence[Tensor]]  # (dy, x, factors, between, need_x, need_factors, alpha, precision, backend, left)


def _plus(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The sum of two terms that may be missing."""
    return total if term is None else term if total is None else total + term


class _Sums:
    """Sums of gradients of x and of the factors."""

    def __init__(self, factors: int) -> None:
        self.x: Tensor | None = None
        self.factors: list[Tensor | None] = [None] * factors

    def add(self, found: tuple[Tensor | None, list[Tensor | None]]) -> None:
        self.x = _plus(self.x, found[0])
        self.factors = [_plus(total, term) for total, term in zip(self.factors, found[1], strict=True)]


def _replaced(factors: Sequence[Tensor], i: int, factor: Tensor) -> list[Tensor]:
    return [*factors[:i], factor, *factors[i + 1 :]]


def reverse(
    calls: Calls,
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    need_x: bool,
    need_factors: Sequence[bool],
    options: Options,
    between: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Reverse rule of the multiply: the wanted of (dx, [dF_1, ..., dF_N]), None for the others; between is what was saved."""
    if not need_x and not any(need_factors):
        return None, [None] * len(factors)
    dx, *dfs = take(calls.gradients(dy, x, list(factors), between, need_x, list(need_factors), *options), (need_x, *need_factors))
    return dx, dfs


def forward(
    calls: Calls, x: Tensor, factors: Sequence[Tensor], tx: Tensor | None, tfactors: Sequence[Tensor | None], options: Options
) -> Tensor | None:
    """Forward rule of the multiply: the tangent of ``alpha * x @ K``, None if there is none."""
    alpha, precision, backend, left = options
    terms = [] if tx is None else [(tx, list(factors))]
    terms += [(x, _replaced(factors, i, tf)) for i, tf in enumerate(tfactors) if tf is not None]
    total: Tensor | None = None
    for t, fs in terms:
        total = _plus(total, calls.multiply(t, fs, None, alpha, 0.0, precision, backend, left))
    return total


def reverse_of_gradients(
    calls: Calls,
    cotangents: Sequence[Tensor | None],
    wanted: tuple[bool, Sequence[bool]],
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    needs: tuple[bool, bool, Sequence[bool]],
    options: Options,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Reverse rule of the gradients: cotangents of dy, x and the factors, those that needs says.

    The cotangents given are those of the results, dx and each dF_i, as far as wanted says that there are any. With c
    these and K_i the product whose i-th factor is c_i, the scalar <cx, dx> + sum_i <c_i, dF_i> is
    <cx @ K + sum_i x @ K_i, alpha * dy>, of complex numbers its real part: every term is a multiply again.
    """
    alpha, precision, backend, left = options
    need_dy, need_x, need_factors = needs
    cx, *cfactors = take(cotangents, (wanted[0], *wanted[1]))
    sum_dy: Tensor | None = None
    sums = _Sums(len(factors))

    def add(t: Tensor, fs: list[Tensor], with_x: bool, wanted: list[bool]) -> None:
        nonlocal sum_dy
        if need_dy:
            sum_dy = _plus(sum_dy, calls.multiply(t, fs, None, alpha, 0.0, precision, backend, left).sum_to_size(dy.shape))
        sums.add(reverse(calls, dy, t, fs, with_x, wanted, options))

    if cx is not None:
        add(cx, list(factors), False, list(need_factors))
    for i, c in enumerate(cfactors):
        if c is not None:
            add(x, _replaced(factors, i, c), need_x, [need and j != i for j, need in enumerate(need_factors)])
    return sum_dy, sums.x, sums.factors


def forward_of_gradients(
    calls: Calls,
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    tdy: Tensor | None,
    tx: Tensor | None,
    tfactors: Sequence[Tensor | None],
    need_x: bool,
    need_factors: Sequence[bool],
    options: Options,
) -> list[Tensor | None]:
    """Forward rule of the gradients: tangents of the results that were asked for, in their order."""
    sums = _Sums(len(factors))
    if tdy is not None:
        sums.add(reverse(calls, tdy, x, factors, need_x, need_factors, options))
    if tx is not None:
        sums.add(reverse(calls, dy, tx, factors, False, need_factors, options))
    for i, tf in enumerate(tfactors):
        if tf is not None:
            others = [need and j != i for j, need in enumerate(need_factors)]
            sums.add(reverse(calls, dy, x, _replaced(factors, i, tf), need_x, others, options))
    return ([sums.x] if need_x else []) + [total for total, need in zip(sums.factors, need_factors, strict=True) if need]


# ---- vmap: a vmapped dimension is one more batch dimension -----------------------------------------


def _pairs(argument: Any, dim: Any) -> list[tuple[Tensor, int | None]]:
    """(tensor, vmapped dimension) for a tensor, a list of tensors or None."""
    if argument is None:
        return []
    if not isinstance(argument, list | tuple):
        return [(argument, dim)]
    return list(zip(argument, dim if isinstance(dim, list | tuple) else [dim] * len(argument), strict=True))


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


def vmap_multiply(calls: Calls, in_dims: Sequence[Any], x: Tensor, factors: Any, z: Tensor | None, *options: Any) -> tuple[Tensor, int]:
    """Batched multiply; in_dims of (x, factors, z)."""
    only_z = all(dim is None for _, dim in [(x, in_dims[0]), *_pairs(factors, in_dims[1])])
    x, factors, z = _batch_first([x, factors, z], in_dims[:3])
    if z is not None and only_z:  # one product serves all samples
        alpha, beta, *rest = options
        return calls.multiply(x, factors, None, alpha, 0.0, *rest) + beta * z, 0
    return calls.multiply(x, factors, z, *options), 0


def vmap_gradients(
    calls: Calls, batch_size: int, in_dims: Sequence[Any], dy: Tensor, x: Tensor, factors: Any, *options: Any
) -> tuple[list[Tensor], list[int]]:
    """Batched gradients; in_dims of (dy, x, factors)."""
    need_x, need_factors = options[:2]
    wanted = [(x, in_dims[1])] if need_x else []
    wanted += [pair for pair, need in zip(_pairs(factors, in_dims[2]), need_factors, strict=True) if need]
    shapes = [t.shape if dim is None else t.movedim(dim, 0).shape[1:] for t, dim in wanted]
    dy, x, factors = _batch_first([dy, x, factors], in_dims[:3])
    rank = max(t.ndim for t in (dy, x, *factors))

    def per_sample(t: Tensor) -> Tensor:
        """Gradients are one for each sample, so an argument shared by all is repeated (as a view)."""
        return t if t.ndim == rank else t.expand(batch_size, *[1] * (rank - 1 - t.ndim), *t.shape)

    results = calls.gradients(dy, per_sample(x), [per_sample(f) for f in factors], None, *options)
    return [r.reshape(batch_size, *shape) for r, shape in zip(results, shapes, strict=True)], [0] * len(results)
