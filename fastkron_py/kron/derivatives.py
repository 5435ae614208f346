"""Derivatives of the two Kronecker operators, written once for every way of calling them.

Both operators are linear in each argument, over the real numbers, so each derivative is a sum of calls of the two with one argument
replaced. Of complex numbers the gradients follow torch's convention: dx is dy by the conjugate transpose, dF_i is linear in the conjugate
of x. So no rule conjugates anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fastkron_py.runtime.batching import take

Options = tuple[float, str | None, str, bool]  # alpha, precision, backend, left


class Calls(NamedTuple):
    """The two operators, which derive through themselves."""

    multiply: Callable[..., Tensor]  # (x, factors, z, alpha, beta, precision, backend, left)
    gradients: Callable[..., Sequence[Tensor]]  # (dy, x, factors, between, need_x, need_factors, alpha, precision, backend, left)


class _Sum:
    """A sum of terms that may be missing."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, term: Tensor | None) -> None:
        if term is not None:
            self.total = term if self.total is None else self.total + term


def _replaced(factors: Sequence[Tensor], i: int, factor: Tensor) -> list[Tensor]:
    return [*factors[:i], factor, *factors[i + 1 :]]


def _gradients(
    calls: Calls,
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    need_x: bool,
    need_factors: Sequence[bool],
    options: Options,
    between: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The wanted of (dx, [dF_1, ..., dF_N]), None for the others."""
    if not need_x and not any(need_factors):
        return None, [None] * len(factors)
    dx, *dfs = take(calls.gradients(dy, x, list(factors), between, need_x, list(need_factors), *options), (need_x, *need_factors))
    return dx, dfs


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
    """Reverse rule of the multiply: cotangents of x and of the factors; between is the intermediate that was saved."""
    return _gradients(calls, dy, x, factors, need_x, need_factors, options, between)


def forward(
    calls: Calls, x: Tensor, factors: Sequence[Tensor], tx: Tensor | None, tfactors: Sequence[Tensor | None], options: Options
) -> Tensor | None:
    """Forward rule of the multiply: the tangent of ``alpha * x @ K``, None if there is none."""
    alpha, precision, backend, left = options
    total = _Sum()
    if tx is not None:
        total.add(calls.multiply(tx, list(factors), None, alpha, 0.0, precision, backend, left))
    for i, tf in enumerate(tfactors):
        if tf is not None:
            total.add(calls.multiply(x, _replaced(factors, i, tf), None, alpha, 0.0, precision, backend, left))
    return total.total


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
    given = list(factors)
    sum_dy, sum_x, sums = _Sum(), _Sum(), [_Sum() for _ in factors]

    def add_multiply(t: Tensor, fs: list[Tensor]) -> None:
        if need_dy:
            sum_dy.add(calls.multiply(t, fs, None, alpha, 0.0, precision, backend, left).sum_to_size(dy.shape))

    def add_gradients(t: Tensor, fs: list[Tensor], with_x: bool, wanted: list[bool]) -> None:
        dx, dfs = _gradients(calls, dy, t, fs, with_x, wanted, options)
        sum_x.add(dx)
        for total, term in zip(sums, dfs, strict=True):
            total.add(term)

    if cx is not None:
        add_multiply(cx, given)
        add_gradients(cx, given, False, list(need_factors))
    for i, c in enumerate(cfactors):
        if c is not None:
            fs = _replaced(given, i, c)
            add_multiply(x, fs)
            add_gradients(x, fs, need_x, [need and j != i for j, need in enumerate(need_factors)])
    return sum_dy.total, sum_x.total, [s.total for s in sums]


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
    sum_x, sums = _Sum(), [_Sum() for _ in factors]

    def add(dy_: Tensor, x_: Tensor, fs: Sequence[Tensor], with_x: bool, wanted: Sequence[bool]) -> None:
        dx, dfs = _gradients(calls, dy_, x_, fs, with_x, wanted, options)
        sum_x.add(dx)
        for total, term in zip(sums, dfs, strict=True):
            total.add(term)

    if tdy is not None:
        add(tdy, x, factors, need_x, need_factors)
    if tx is not None:
        add(dy, tx, factors, False, need_factors)
    for i, tf in enumerate(tfactors):
        if tf is not None:
            add(dy, x, _replaced(factors, i, tf), need_x, [need and j != i for j, need in enumerate(need_factors)])
    return ([sum_x.total] if need_x else []) + [s.total for s, need in zip(sums, need_factors, strict=True) if need]
