"""Kronecker products plus diagonals that have their structure: densities and solves by eigenvectors of each factor.

Where GPyTorch's fast computations are off, as BoTorch has them, linear_operator takes the Cholesky factor of the whole matrix, of n rows in
n^3 operations. `KroneckerProduct.add_diagonal` has the same numbers from the factors alone. Of some rows and columns (`missing`), solves go
by conjugate gradients that the whole grid preconditions, and determinants by the Cholesky factor or by an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from gpytorch import settings
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    LinearOperator,
    MaskedLinearOperator,
)
from torch import Tensor

from fastkron_py.integrations.gpytorch import missing
from fastkron_py.integrations.gpytorch.operators import KroneckerLinearOperator, ScaledKroneckerLinearOperator
from fastkron_py.kron.operators.lazy import DENSE_LIMIT
from fastkron_py.kron.operators.masked import MaskedKroneckerProduct, masked
from fastkron_py.kron.operators.product import KroneckerProduct
from fastkron_py.kron.operators.solvable import Solvable

_PRODUCTS: Final = (KroneckerLinearOperator, ScaledKroneckerLinearOperator)
_Singular: Final[type[Exception]] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def structured(operator: LinearOperator) -> Solvable | None:
    """A Kronecker product of ours plus ``s * I`` or plus a product of as many diagonals, or rows and columns of that; else None."""
    if isinstance(operator, MaskedLinearOperator):
        whole = structured(operator.base) if operator.row_eq_col_mask else None
        return None if whole is None else masked(whole, operator.row_mask, operator.row_mask)
    if not isinstance(operator, AddedDiagLinearOperator) or not isinstance(operator._linear_op, _PRODUCTS):
        return None
    parts, scale = operator._linear_op._factors()
    diagonal = operator._diag_tensor
    if any(part.shape[-2] != part.shape[-1] or part.dtype not in (torch.float32, torch.float64) for part in parts):
        return None
    factors = [part.to_dense() for part in parts]
    if scale is not None:
        factors[0] = factors[0] * scale[..., None, None]
    if isinstance(diagonal, ConstantDiagLinearOperator):
        return KroneckerProduct(factors).add_diagonal(diagonal.diag_values)
    if isinstance(diagonal, KroneckerProductDiagLinearOperator):
        mine = diagonal.linear_ops
        if [d.shape[-1] for d in mine] == [part.shape[-1] for part in parts]:
            return KroneckerProduct(factors).add_diagonal([d._diagonal() for d in mine])
    return None


def _is_large(operator: Any) -> bool:
    """Whether an operator has too many rows of a grid for their Cholesky factor to be the first choice."""
    return isinstance(operator, MaskedLinearOperator) and operator.shape[-1] > settings.max_cholesky_size.value()


def log_prob(original: Callable[..., Tensor], self: Any, value: Tensor) -> Tensor:
    """A Gaussian's log density, by the factors where it would take a Cholesky factor of the whole covariance."""
    is_exact = settings.fast_computations.log_prob.off()
    # Of a dense Gaussian the lazy covariance would have to be computed.
    shifted = None
    if self.islazy and (is_exact or _is_large(self.lazy_covariance_matrix)):
        shifted = structured(self.lazy_covariance_matrix.evaluate_kernel())
    if shifted is None:
        return original(self, value)
    if self._validate_args:
        self._validate_sample(value)
    difference = (value - self.loc).unsqueeze(-1)
    try:
        quadratic, logdet = shifted.inv_quad_logdet(difference, **_estimate(shifted, is_exact))
    except (ValueError, _Singular):  # not positive definite but for rounding: the Cholesky factor gets a jitter
        return original(self, value)
    found: Tensor = -0.5 * (quadratic + logdet + value.shape[-1] * math.log(2 * math.pi))
    return found


def _estimate(shifted: Solvable, is_exact: bool) -> dict[str, Any]:
    """The options of a determinant that is estimated: of rows of a grid, if GPyTorch would estimate it or no dense matrix is built.

    Where it would not, as under BoTorch, an optimizer expects the same value of the same parameters: the probe vectors are fixed.
    """
    if not isinstance(shifted, MaskedKroneckerProduct) or (is_exact and math.prod(shifted.shape) <= DENSE_LIMIT):
        return {}
    is_fixed = is_exact or settings.deterministic_probes.on()
    generator = torch.Generator(shifted.device).manual_seed(0) if is_fixed else None
    return {"probes": settings.num_trace_samples.value(), "generator": generator}


def solve(original: Callable[..., Tensor], self: LinearOperator, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
    """An operator's solve, by the factors where it would take a Cholesky factor of the whole matrix; a NaN masks its row (`missing`)."""
    if left_tensor is None:
        columns = right_tensor.unsqueeze(-1) if right_tensor.ndim == 1 else right_tensor
        observed = missing.observed_rows(self, columns.mT)
        if observed is not None:
            return missing.solve(self, columns, observed).reshape(right_tensor.shape)
    takes_cholesky = settings.fast_computations.solves.off() or self.shape[-1] <= settings.max_cholesky_size.value()
    shifted = structured(self) if _is_large(self) or (takes_cholesky and not isinstance(self, MaskedLinearOperator)) else None
    if shifted is None:
        return original(self, right_tensor, left_tensor)
    try:
        found: Tensor = shifted.solve(right_tensor)
    except (ValueError, _Singular):
        return original(self, right_tensor, left_tensor)
    return found if left_tensor is None else left_tensor @ found
