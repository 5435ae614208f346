"""A multiply as two, whose intermediate autograd saves for the backward pass (`plan.saved_intermediate`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastkron_py.kron.launches import passes_of
from fastkron_py.kron.operator import kron_matmul
from fastkron_py.kron.plan.saved_intermediate import Cut, Whole, find_cut
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.precision import resolved


def cut_of(x: Tensor, factors: Sequence[Tensor], precision: str | None, left: bool) -> Cut | None:
    """Where the multiply is cut if a gradient is wanted; None if it is not, or if cutting would copy x.

    Args:
        x: ``[*batch, M, K]``; with left ``[*batch, K, M]``.
        factors: as of `kron_matmul`.
        precision: of float32 products.
        left: the form.
    """
    if len(factors) == 1 or x.ndim < 2 or not x.is_contiguous() or any([f.ndim != 2 or f.dtype != x.dtype for f in factors]):
        return None
    shapes = tuple([(f.shape[1], f.shape[0]) if left else (f.shape[0], f.shape[1]) for f in factors])
    columns = x.shape[-1] if left else 1
    rows = x.numel() // math.prod([p for p, _ in shapes]) // columns
    return find_cut(Whole(shapes, rows, columns, x.element_size(), passes_of(x.dtype, resolved(precision))), devices.gpu_of(x.device))


def cut_multiply(cut: Cut, count: int, shape: tuple[int, ...], precision: str | None, backend: str, left: bool) -> Callable[..., Tensor]:
    """The multiply as two: a function of x, the factors, z if there is one, alpha and beta.

    Args:
        cut: where.
        count: of factors.
        shape: of the result.
        precision: of float32 products.
        backend: of both multiplies.
        left: the form.
    """

    def call(t: Tensor, matrices: Sequence[Tensor], z: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
        found: Tensor = kron_matmul(t, list(matrices), z, alpha, beta, precision, backend, True)
        return found

    def multiply(x: Tensor, *given: Any) -> Tensor:
        *tensors, alpha, beta = given
        matrices = tensors[:count] if left else [f.mT for f in tensors[:count]]
        z = tensors[count].expand(shape) if len(tensors) > count else None
        first, last = matrices[: cut.at], matrices[cut.at :]
        (n1, k1), (n2, k2) = ([math.prod([m.shape[i] for m in side]) for i in (0, 1)] for side in (first, last))
        t = (x if left else x.unsqueeze(-1)).unflatten(-2, (k1, k2))  # [*batch, K1, K2, R]
        z = None if z is None else (z if left else z.unsqueeze(-1)).unflatten(-2, (n1, n2))
        if cut.last_first:
            y = call(call(t, last).flatten(-2), first, None if z is None else z.flatten(-2), alpha, beta)
        else:
            y = call(call(t.flatten(-2), first).unflatten(-1, (k2, t.shape[-1])), last, z, alpha, beta)
        return y.view(shape)

    return multiply
