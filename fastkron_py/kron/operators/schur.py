"""Solves by complex Schur forms ``A_i = Q_i T_i Q_i^H``, which every matrix has: Q_i is unitary and T_i upper triangular.

Kronecker products Q of the Q_i make a sum or a shifted product upper triangular, and back substitution goes from mode to mode: Bartels and
Stewart, "Solution of the matrix equation AX + XB = C" (Communications of the ACM 15, 1972), over any number of modes. Unlike eigenvectors,
unitary matrices cost no digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.operators.algebra import dense
from fastkron_py.kron.operators.modes import terms

_LEAF: Final = 128  # rows of triangular systems that are solved as they are: wider ones take longer than the steps that they spare


def schur(a: Tensor) -> tuple[Tensor, Tensor]:
    """T and Q of matrices ``[*batch, P, P]``, by LAPACK on the CPU: torch has no Schur forms."""
    import scipy.linalg  # takes a fifth of a second, and few solves come here

    size = a.shape[-1]
    flat = a.detach().reshape(math.prod(a.shape[:-2]), size, size).cpu().resolve_conj().numpy()
    dtype = a.dtype if a.is_complex() else a.dtype.to_complex()
    found = torch.zeros(2, len(flat), size, size, dtype=dtype)
    for i, matrix in enumerate(flat if size else []):
        t, q = scipy.linalg.schur(matrix, output="complex")
        found[0, i], found[1, i] = torch.from_numpy(t), torch.from_numpy(q)
    t, q = found.to(a.device).unflatten(1, a.shape[:-2]) if a.ndim > 2 else found.to(a.device)[:, 0]
    return t, q


def solve_triangular(ts: Sequence[Tensor], shift: Tensor, b: Tensor, sums: bool) -> Tensor:
    """The x of ``(shift + T1 (x) ... (x) TN) x = b``, or with sums of ``(shift + sum_i I (x) .. (x) T_i (x) .. (x) I) x = b``.

    Args:
        ts: upper triangular, ``[*batch_i, P_i, P_i]``.
        shift: ``[*batch_s]``.
        b: ``[*batch, n, M]``, with every batch dimension.
        sums: as said.
    """
    merged = [ts[-1]]
    for t in reversed(ts[:-1]):
        if t.shape[-1] * merged[0].shape[-1] <= _LEAF:
            pair = [t, merged[0]]
            merged[0] = reduce(torch.add, map(dense, terms(pair, ()))) if sums else dense(pair)
        else:
            merged.insert(0, t)
    return _substitute(merged, torch.ones_like(shift), shift, b, sums)


def _substitute(ts: Sequence[Tensor], scale: Tensor, shift: Tensor, b: Tensor, sums: bool) -> Tensor:
    """`solve_triangular` with a factor ``scale`` of the product: the lower half of the first mode's rows, then the upper half."""
    first, *rest = ts
    size = first.shape[-1]
    if not rest:
        unit = torch.eye(size, dtype=first.dtype, device=first.device)
        x: Tensor = torch.linalg.solve_triangular(scale[..., None, None] * first + shift[..., None, None] * unit, b, upper=True)
        return x
    if size == 1:
        value = first[..., 0, 0]
        return _substitute(rest, scale if sums else scale * value, shift + value if sums else shift, b, sums)
    half, n = size // 2, b.shape[-2] // size
    split = half * n
    lower = _substitute([first[..., half:, half:], *rest], scale, shift, b[..., split:, :], sums)
    corner = first[..., :half, half:]
    if sums:
        moved = (corner @ lower.unflatten(-2, (size - half, n)).flatten(-2)).unflatten(-1, (n, -1)).flatten(-3, -2)
    else:
        moved = scale[..., None, None] * kron_matmul_left([corner, *rest], lower)
    top = b[..., :split, :] - moved
    return torch.cat([_substitute([first[..., :half, :half], *rest], scale, shift, top, sums), lower], -2)
