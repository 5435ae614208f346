"""The group-wise rational function in torch operations: the torch backend, and the operations of higher derivatives.

`forward` and `backward` go block by block, so that intermediates stay in the cache, and write over them. `evaluate` takes whole tensors;
autograd can differentiate and torch.func transform it, any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from fastkron_py.rational.denominators.host import host_multiples, host_polynomial, host_polynomial_slope, reused_memory
from fastkron_py.rational.denominators.registry import find_denominator
from fastkron_py.rational.plan import Runs
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.precision import wide_dtype
from fastkron_py.tiling.torch_products import slice_elements, slices, sum_dtype

INTERMEDIATES: Final = 4  # tensors of a block's size that follow each other in the cache
LEAST_ROWS: Final = 8  # for which coefficients are repeated over runs
WIDEST_RUN: Final = 1024  # over which they are: loops over short runs take longer than to read coefficients
Columns = Sequence[Tensor]
"""Coefficients, each ``[G, R]`` or ``[G, 1]``."""


def _width(t: Tensor) -> int:
    """Over how many elements of a run of ``[..., G, R]`` coefficients are repeated: all, or 1 for those that broadcast."""
    groups, run = t.shape[-2:]
    return run if groups > 1 and run <= WIDEST_RUN and t.numel() >= LEAST_ROWS * groups * run else 1


def _columns(c: Tensor, t: Tensor, dtype: torch.dtype) -> Columns:
    """The columns of coefficients ``[G, count]`` for t ``[..., G, R]``."""
    c, width = c.to(dtype), _width(t)
    if width == 1:
        return c.unsqueeze(-1).unbind(1)
    return c.mT.unsqueeze(-1).expand(-1, t.shape[-2], width).contiguous().unbind()


# ---- block by block ------------------------------------------------------------------------------


def _blocks(tensors: Sequence[Tensor], columns: Sequence[Columns]) -> Iterator[tuple[slice, Sequence[Tensor], Sequence[Columns]]]:
    """Parts of tensors ``[M, G, R]`` whose intermediates stay in the cache.

    Yields:
        The part's groups, the tensors, and their coefficients.
    """
    rows, groups, run = tensors[0].shape
    most = slice_elements(tensors[0]) // INTERMEDIATES
    if rows * groups * run <= most:
        yield slice(0, groups), tensors, columns
        return
    for r in slices(run, most):
        length = r.stop - r.start
        for g in slices(groups, max(1, most // length)):
            of_groups = [[c if c.shape[0] == 1 else c[g] for c in one] for one in columns]
            for m in slices(rows, max(1, most // ((g.stop - g.start) * length))):
                yield g, [t[m, g, r] for t in tensors], of_groups


def forward(x: Tensor, a: Tensor, b: Tensor, version: str, y: Tensor) -> None:
    """``P(x) / Q(x)`` into y.

    Args:
        x: ``[M, G, R]`` of any strides: rows of runs of one group's elements.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        version: of the denominator.
        y: ``[M, G, R]`` of any strides and dtype.
    """
    compute, denominator = wide_dtype(x.dtype, a.dtype, b.dtype), find_denominator(version)
    columns = _columns(a, x, compute), _columns(b, x, compute)
    with reused_memory():
        for _, (t, out), (of_a, of_b) in _blocks((x, y), columns):
            t = t.to(compute)
            torch.div(host_polynomial(of_a, t), denominator.host_value(of_b, t), out=out)


def backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, version: str, dx: Tensor | None, need_coefficients: bool) -> list[Tensor]:
    """The gradient of x into dx, unless that is None; [da, db] if they are needed, from sums over blocks in `sum_dtype`.

    Args:
        dy: ``[M, G, R]`` of any strides and dtype.
        x: ``[M, G, R]``, as for `forward`.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        version: of the denominator.
        dx: ``[M, G, R]`` of any strides and dtype.
        need_coefficients: whether da and db are.
    """
    compute, denominator = wide_dtype(x.dtype, a.dtype, b.dtype), find_denominator(version)
    columns = _columns(a, x, compute), _columns(b, x, compute)
    width, degrees = _width(x), (a.shape[1], b.shape[1])
    total = torch.zeros(sum(degrees), x.shape[1], width, dtype=sum_dtype(compute, x.device), device=x.device)
    with reused_memory():
        for groups, (u, t, *out), (of_a, of_b) in _blocks((dy, x) if dx is None else (dy, x, dx), columns):
            t = t.to(compute)
            p, dp = host_polynomial_slope(of_a, t)
            q, dq, dq_db = denominator.host_derivatives(of_b, t)
            u = u.to(compute) / q
            v = p.div_(q).mul_(u)  # less its sign
            if out:
                torch.addcmul(dp.mul_(u), v, dq, value=-1, out=out[0])
            if need_coefficients:
                terms = chain(host_multiples(u, t, degrees[0]), (v * slope for slope in dq_db))
                sums = torch.stack([term.sum((0, 2) if width == 1 else 0) for term in terms])
                total[:, groups] += sums.view(len(sums), -1, width)
    of_a, of_b = total.sum(-1).split(degrees)
    return [_as_gradient(of_a, a), _as_gradient(-of_b, b)] if need_coefficients else []


def _as_gradient(total: Tensor, c: Tensor) -> Tensor:
    """``[count, G]`` as the gradient of ``[G, count]``, or of ``[1, count]``."""
    total = total.sum(1, keepdim=True) if c.shape[0] < total.shape[1] else total
    return total.mT.to(c.dtype).contiguous()


# ---- of whole tensors ----------------------------------------------------------------------------


def evaluate(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype) -> Tensor:
    """``P(x) / Q(x)`` of ``x [..., C]``, in this dtype; differentiable to any order, by every transform of torch."""
    compute, groups = wide_dtype(x.dtype, a.dtype, b.dtype), max(a.shape[0], b.shape[0])
    t = x.to(compute).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    q = find_denominator(version).host_value(_columns(b, t, compute), t)
    return (host_polynomial(_columns(a, t, compute), t) / q).flatten(-2).to(dtype)


# ---- steps of programs, on runs of memory as the kernels do ----------------------------------------


def _view(t: Tensor, runs: Runs, index: int) -> Tensor:
    """A tensor that lies as the runs' tensor of this index, as ``[M, G, R]``."""
    return t.as_strided((runs.outer, runs.groups, runs.length), (runs.row_strides[index], runs.length, 1))


def add_forward(build: Builder, runs: Runs, x: Tensor, a: Tensor, b: Tensor, version: str, like: Tensor) -> Tensor:
    """``P(x) / Q(x)``.

    Args:
        build: of the program.
        runs: of x and the result.
        x: ``[..., C]``.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        version: of the denominator.
        like: without memory, as the result is to be.
    """
    shape, strides, dtype = tuple(like.shape), like.stride(), like.dtype

    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = x.new_empty_strided(shape, strides, dtype=dtype)
        forward(x, a, b, version, _view(y, runs, 1))
        return y

    return build.call(call, (_view(x, runs, 0), a, b), like)


def add_gradients(
    build: Builder, runs: Runs, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool], version: str, like: Tensor
) -> list[Tensor]:
    """[dx] + [da, db], those that are needed; arguments as of `add_forward`, with runs of x, dy and dx, and dx's likeness."""
    need_x, need_coefficients = needs
    shape, strides = tuple(like.shape), like.stride()

    def call(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        dx = [x.new_empty_strided(shape, strides)] if need_x else []
        of_x = _view(dx[0], runs, 2) if need_x else None
        return dx + backward(dy, x, a, b, version, of_x, need_coefficients)

    results = [like] * need_x + [describe(c.shape, c.dtype) for c in (a, b)] * need_coefficients
    made = build.call(call, (_view(dy, runs, 1), _view(x, runs, 0), a, b), *results)
    return [made] if isinstance(made, Tensor) else list(made)
