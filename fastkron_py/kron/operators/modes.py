"""Products with sums of Kronecker products that differ in one factor: one mode of x after the other, into one accumulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kron.api import kron_matmul, kron_matmul_left
from fastkron_py.kron.checks import Factor, Shape, broadcast_batch, shape_of
from fastkron_py.kron.operators.algebra import dense

# Elements of x, from which on the passes that are spared take longer than making a small matrix: on CPUs, and on GPUs, where that is some
# twenty microseconds of small launches (measured on an H200).
LARGE: Final = 1 << 16
LARGE_ON_GPU: Final = 1 << 22
# Widths of neighbours that are summed up to one matrix, on GPUs, and on CPUs and of complex numbers: products with wider ones take longer
# than the passes that they spare.
WIDEST: Final = 64
NARROWER: Final = 16


def terms(factors: Sequence[Factor], masses: Sequence[Factor]) -> list[list[Factor]]:
    """The factors of each term of a Kronecker sum: its own, and masses or identities for the other modes."""
    units = masses or [shape_of(f)[-1] for f in factors]
    return [[*units[:i], f, *units[i + 1 :]] for i, f in enumerate(factors)]


def merged(factors: Sequence[Factor], masses: Sequence[Factor], widest: int) -> tuple[list[Factor], list[Factor]]:
    """The same sum of fewer terms: neighbours whose sizes multiply to at most `widest` become one matrix, their own Kronecker sum."""
    groups: list[list[int]] = []
    for i, f in enumerate(factors):
        last = groups[-1] if groups else []
        sizes = [shape_of(factors[j])[-1] for j in (*last, i)]
        if last and math.prod(sizes) <= widest and isinstance(f, Tensor) and isinstance(factors[last[-1]], Tensor):
            last.append(i)
        else:
            groups.append([i])
    found, weights = list[Factor](), list[Factor]()
    for first, *others in groups:
        span = slice(first, first + 1 + len(others))
        own, units = factors[span], masses[span]
        if not others:
            found.extend(own)
            weights.extend(units)
            continue
        found.append(reduce(torch.add, map(dense, terms(own, units))))
        if masses:
            is_unit = not any(isinstance(u, Tensor) for u in units)
            weights.append(math.prod([shape_of(u)[-1] for u in units]) if is_unit else dense(units))
    return found, weights


def mode_product(x: Tensor, f: Tensor, z: Tensor | None) -> Tensor:
    """``f @ x + z`` over one mode.

    Args:
        x: ``[*batch, before, P, after]``; batch dimensions hold those of f.
        f: ``[*batch_f, P, P]``.
        z: like x, or None.
    """
    return kron_matmul_left([f.unsqueeze(-3)], x, beta=0.0 if z is None else 1.0, z=z)


def sum_matmul(factors: Sequence[Factor], masses: Sequence[Factor], x: Tensor, left: bool) -> Tensor:
    """``(sum_i M1 (x) ... (x) F_i (x) ... (x) MN) @ x``, or x times it.

    Args:
        factors: ``[*batch_i, P_i, P_i]``, or integers for identities.
        masses: one for each factor, ``[*batch_i, P_i, P_i]`` or integers; none for identities.
        x: ``[*batch, n, M]`` (left) or ``[*batch, M, n]``.
        left: the sum stands to the left of x.
    """
    batch = broadcast_batch([tuple(x.shape[:-2]), *[shape_of(f)[:-2] for f in (*factors, *masses)]], "x, factors")
    x = x.expand(*batch, *x.shape[-2:])
    if x.numel() >= (LARGE_ON_GPU if x.is_cuda else LARGE):
        factors, masses = merged(factors, masses, WIDEST if x.is_cuda and not x.is_complex() else NARROWER)
    sizes = [shape_of(f)[-1] for f in factors]
    rows, columns = (1, x.shape[-1]) if left else (x.shape[-2], 1)

    def term(i: int, z: Tensor | None) -> Tensor:
        if masses:
            own, beta = terms(factors, masses)[i], 0.0 if z is None else 1.0
            return kron_matmul_left(own, x, z=z, beta=beta) if left else kron_matmul(x, own, z=z, beta=beta)
        modes: Shape = (*batch, rows * math.prod(sizes[:i]), sizes[i], math.prod(sizes[i + 1 :]) * columns)
        f = factors[i]
        if not isinstance(f, Tensor):
            return x if z is None else z + x.to(z.dtype)
        f = f if left else f.mT
        return mode_product(x.reshape(modes), f, None if z is None else z.reshape(modes)).reshape(x.shape)

    total = term(0, None)
    for i in range(1, len(factors)):
        total = term(i, total)
    return total
