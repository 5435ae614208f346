"""Factors and the comparison of the `KroneckerProduct` tests, in double precision."""

import torch

from fastkron_py.reference import kron_dense
from fastkron_py.testing import assert_close

SQUARE = [((3, 3),), ((2, 2), (3, 3)), ((1, 1), (4, 4), (3, 3)), ((2, 3, 3), (2, 2)), ((2, 1, 2, 2), (3, 4, 4), (1, 1))]


def random_factors(shapes, dtype, device, *, dominant=True):
    """Random matrices; square ones with a strong diagonal, so that they are far from singular, and det of either sign."""
    factors = []
    for i, shape in enumerate(shapes):
        f = torch.randn(*shape, dtype=dtype, device=device)
        if dominant and shape[-1] == shape[-2]:
            f = f + (-1) ** i * 2 * shape[-1] * torch.eye(shape[-1], dtype=dtype, device=device)
        factors.append(f)
    return factors


def hermitian(factors):
    """Positive definite matrices, from any."""
    return [f @ f.mH + torch.eye(f.shape[-1], dtype=f.dtype, device=f.device) for f in factors]


def definite(n: int) -> torch.Tensor:
    """A symmetric positive definite matrix."""
    a = torch.randn(n, n, dtype=torch.float64)
    return a @ a.mT / n + torch.eye(n)


def dense_sum(factors, masses=None):
    """A Kronecker sum."""
    units = masses or [torch.eye(f.shape[-1], dtype=f.dtype, device=f.device) for f in factors]
    return sum(kron_dense([*units[:i], f, *units[i + 1 :]]) for i, f in enumerate(factors))


def near(actual, expected):
    assert_close(actual, expected, rms_tol=1e-10, max_tol=1e-10)
