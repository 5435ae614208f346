"""Problems in canonical form, which the Triton launchers take, and their dense product in float64."""

from __future__ import annotations

import math

import torch

from fastkron_py import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rounding_steps(dtype: torch.dtype, count: int) -> int:
    """Roundings of a result after count factors.

    Each factor may be rounded when neighbours are multiplied out and each intermediate once more; the
    interpreter truncates to bfloat16, which errs twice as much as rounding does.
    """
    interpreted = not torch.cuda.is_available()
    return 2 * count * (2 if dtype == torch.bfloat16 and interpreted else 1)


def problem(dtype, device, groups, rows, ps, qs, columns):
    x = torch.randn(groups, rows, math.prod(ps), columns, dtype=torch.float64).to(dtype)
    factors = [torch.randn(groups, p, q, dtype=torch.float64).to(dtype) for p, q in zip(ps, qs, strict=True)]
    return x.to(device), [f.to(device) for f in factors]


def dense(x, factors):
    """Canonical product in float64: [B, L, K, R] with [B, K, N]."""
    product = reference.kron_dense([f.double() for f in factors])
    return torch.einsum("blkr,bkn->blnr", x.double(), product)


CASES = {
    "one step": (1, 5, (31,), (17,), 1),
    "one step, loops over P and Q": (1, 3, (130,), (200,), 1),
    "merged twos": (1, 3, (2,) * 5, (2,) * 5, 1),
    "chain of two": (1, 4, (16, 32), (32, 16), 1),
    "chain of three": (1, 2, (16, 8, 16), (16, 8, 16), 1),
    "chain, padded digits": (1, 7, (11, 13), (13, 11), 1),
    "many rows": (1, 700, (3, 5), (5, 3), 1),
    "left form": (1, 2, (6, 7), (7, 6), 5),
    "left form, long": (1, 1, (5, 9, 11), (3, 9, 13), 33),
    "batched factors": (3, 2, (9, 4), (4, 9), 1),
    "batched factors, left": (2, 1, (9, 4), (4, 9), 6),
    "shrinking first": (1, 3, (40, 3), (2, 50), 1),
    "widths of one": (1, 4, (1, 5, 1), (1, 1, 3), 1),
}
