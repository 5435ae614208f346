"""Kronecker products plus diagonals that have their structure: densities and solves by eigenvectors of each factor.

Where GPyTorch's fast computations are off, as BoTorch has them, linear_operator takes the Cholesky factor of the whole matrix, of n rows in
n^3 operations. `KroneckerProduct.add_diagonal` has the same numbers from the factors alone. Of some rows and columns, solves go
by conjugate gradients that the whole grid preconditions, and determinants by the Cholesky factor or by an estimate.

Those are the points of a grid where something was measured: the targets without NaN under ``observation_nan_policy("mask")``. GPyTorch
masks the covariance in likelihoods and in the mean of its default predictions. The hooks here add what it does not mask: solves with NaN in
the right-hand side, as interpolated grids and BoTorch's models have them, and covariances of predictions, which GPyTorch computes as if
every target were known. Only operators with a Kronecker product of ours in them are changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from gpytorch import settings
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    LinearOperator,
    MaskedLinearOperator,
)
from torch import Tensor

from fastkron_py.integrations.gpytorch.interpolation import is_ours
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
    return -0.5 * (quadratic + logdet + value.shape[-1] * math.log(2 * math.pi))


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
    """An operator's solve, by the factors where it would take a Cholesky factor of the whole matrix; a NaN masks its row."""
    if left_tensor is None:
        columns = right_tensor.unsqueeze(-1) if right_tensor.ndim == 1 else right_tensor
        observed = observed_rows(self, columns.mT)
        if observed is not None:
            known: Tensor = of_rows(self, observed).solve(columns[..., observed, :])
            whole = known.new_zeros(*known.shape[:-2], *columns.shape[-2:])  # 0 elsewhere
            return whole.index_copy(-2, observed.nonzero().squeeze(-1), known).reshape(right_tensor.shape)
    takes_cholesky = settings.fast_computations.solves.off() or self.shape[-1] <= settings.max_cholesky_size.value()
    shifted = structured(self) if _is_large(self) or (takes_cholesky and not isinstance(self, MaskedLinearOperator)) else None
    if shifted is None:
        return original(self, right_tensor, left_tensor)
    try:
        found: Tensor = shifted.solve(right_tensor)
    except (ValueError, _Singular):
        return original(self, right_tensor, left_tensor)
    return found if left_tensor is None else left_tensor @ found


# ---- targets with NaN ---------------------------------------------------------------------------


def observed_rows(operator: Any, targets: Tensor) -> Tensor | None:
    """The rows ``[n]`` that targets ``[*batch, n]`` know in every batch; None where nothing is to be masked here."""
    if settings.observation_nan_policy.value() != "mask" or not _has_ours(operator):
        return None
    missing = targets.isnan()
    return ~missing.reshape(-1, targets.shape[-1]).any(0) if bool(missing.any()) else None


def _has_ours(operator: Any) -> bool:
    """Whether a Kronecker product of ours is in an operator."""
    parts = [a for a in operator._args if isinstance(a, LinearOperator)]
    return is_ours(operator) or any(map(_has_ours, parts))


def of_rows(operator: LinearOperator, observed: Tensor) -> MaskedLinearOperator:
    """The rows and columns of a square operator."""
    return MaskedLinearOperator(operator, observed, observed)


def predicted_covariance(original: Callable[..., Any], self: Any, test_test_covar: Any, test_train_covar: Any) -> Any:
    """A prediction's covariance, given the observed targets alone."""
    if settings.observation_nan_policy.value() != "mask" or settings.skip_posterior_variances.on():
        return original(self, test_test_covar, test_train_covar)
    prior = self.train_prior_dist
    prior = prior.__class__(torch.zeros_like(prior.mean), prior.lazy_covariance_matrix)
    noisy = self.likelihood(prior, self.train_inputs).lazy_covariance_matrix.evaluate_kernel()
    observed = observed_rows(noisy, self.train_labels)
    if observed is None:
        return original(self, test_test_covar, test_train_covar)
    noisy = noisy.detach() if settings.detach_test_caches.on() else noisy
    cross = to_dense(test_train_covar)[..., observed]
    return to_linear_operator(to_dense(test_test_covar) - cross @ of_rows(noisy, observed).solve(cross.mT))


def multitask_posterior(original: Callable[..., None], self: Any, distribution: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of BoTorch's `MultitaskGPPosterior`, with variances given the observed targets alone."""
    original(self, distribution, *args, **kwargs)
    noisy = self.train_train_covar + self.train_noise
    observed = observed_rows(noisy, self.train_diff.reshape(*self.train_diff.shape[:-2], -1))
    if observed is None:
        return
    cross = to_dense(self.test_train_covar)[..., observed]
    told = (cross * of_rows(noisy, observed).solve(cross.mT).mT).sum(-1)
    variance = self.joint_covariance_matrix.diagonal(dim1=-1, dim2=-2)[..., -told.shape[-1] :] - told
    if self.test_noise is not None:
        variance = variance + self.test_noise.diagonal(dim1=-1, dim2=-2)
    self.distribution = distribution.__class__(distribution.mean, DiagLinearOperator(variance))
