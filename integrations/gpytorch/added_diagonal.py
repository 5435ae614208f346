"""Kronecker products plus diagonals that have their structure: densities and solves by eigenvectors of each factor.

Where GPyTorch's fast computations are off, as BoTorch has them, linear_operator takes the Cholesky factor of the whole matrix, of n rows in
n^3 operations. `KroneckerProduct.add_diagonal` has the same numbers from the factors alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from gpytorch import settings
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    KroneckerProductAddedDiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    LinearOperator,
)
from torch import Tensor

from fastkron_py.integrations.gpytorch.operators import KroneckerLinearOperator
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal
from fastkron_py.kron.operators.product import KroneckerProduct

_Singular: Final[type[Exception]] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def structured(operator: LinearOperator) -> KroneckerPlusDiagonal | None:
    """A Kronecker product of ours plus ``s * I`` or plus a Kronecker product of as many diagonals; None for any other operator."""
    if not isinstance(operator, KroneckerProductAddedDiagLinearOperator) or not isinstance(operator.linear_op, KroneckerLinearOperator):
        return None
    parts, diagonal = operator.linear_op.linear_ops, operator.diag_tensor
    if any(part.shape[-2] != part.shape[-1] or part.dtype not in (torch.float32, torch.float64) for part in parts):
        return None
    if isinstance(diagonal, ConstantDiagLinearOperator):
        return KroneckerProduct([part.to_dense() for part in parts]).add_diagonal(diagonal.diag_values)
    if isinstance(diagonal, KroneckerProductDiagLinearOperator):
        mine = diagonal.linear_ops
        if [d.shape[-1] for d in mine] == [part.shape[-1] for part in parts]:
            return KroneckerProduct([part.to_dense() for part in parts]).add_diagonal([d._diagonal() for d in mine])
    return None


def log_prob(original: Callable[..., Tensor], self: Any, value: Tensor) -> Tensor:
    """A Gaussian's log density, by the factors where it would take a Cholesky factor of the whole covariance."""
    # Of a dense Gaussian the lazy covariance would have to be computed.
    takes_cholesky = self.islazy and settings.fast_computations.log_prob.off()
    shifted = structured(self.lazy_covariance_matrix.evaluate_kernel()) if takes_cholesky else None
    if shifted is None:
        return original(self, value)
    if self._validate_args:
        self._validate_sample(value)
    difference = (value - self.loc).unsqueeze(-1)
    try:
        quadratic, logdet = shifted.inv_quad_logdet(difference)
    except (ValueError, _Singular):  # not positive definite but for rounding: the Cholesky factor gets a jitter
        return original(self, value)
    found: Tensor = -0.5 * (quadratic + logdet + value.shape[-1] * math.log(2 * math.pi))
    return found


def solve(original: Callable[..., Tensor], self: LinearOperator, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
    """An operator's solve, by the factors where it would take a Cholesky factor of the whole matrix."""
    takes_cholesky = settings.fast_computations.solves.off() or self.shape[-1] <= settings.max_cholesky_size.value()
    shifted = structured(self) if takes_cholesky else None
    if shifted is None:
        return original(self, right_tensor, left_tensor)
    try:
        found: Tensor = shifted.solve(right_tensor)
    except (ValueError, _Singular):
        return original(self, right_tensor, left_tensor)
    return found if left_tensor is None else left_tensor @ found
