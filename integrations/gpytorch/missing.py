"""Targets with NaN under GPyTorch's ``observation_nan_policy("mask")``: the points of a grid where something was measured.

GPyTorch masks the covariance in likelihoods and in the mean of its default predictions. The hooks here add what it does not mask: solves
with NaN in the right-hand side, as interpolated grids and BoTorch's models have them, and covariances of predictions, which GPyTorch
computes as if every target were known. Only operators with a Kronecker product of ours in them are changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch import settings
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import DiagLinearOperator, LinearOperator, MaskedLinearOperator
from torch import Tensor

from fastkron_py.integrations.gpytorch.interpolation import is_ours


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


def solve(operator: LinearOperator, rhs: Tensor, observed: Tensor) -> Tensor:
    """The solution ``[*batch, n, C]`` of the observed rows and columns, 0 elsewhere."""
    known: Tensor = of_rows(operator, observed).solve(rhs[..., observed, :])
    found = known.new_zeros(*known.shape[:-2], *rhs.shape[-2:])
    return found.index_copy(-2, observed.nonzero().squeeze(-1), known)


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
