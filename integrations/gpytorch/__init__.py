"""GPyTorch and linear_operator: Kronecker products of Gaussian processes on `fastkron_py.kron_matmul_left`.

``with use_fastkron():`` around a model's training or prediction is all that is needed; `KroneckerLinearOperator` is the
operator that GPyTorch's kernels then make. Needs the extra "gp".
"""

from fastkron_py.integrations.versions import of_extra

with of_extra("gp", "gpytorch"):
    from fastkron_py.integrations.gpytorch.activation import use_fastkron
    from fastkron_py.integrations.gpytorch.operators import KroneckerLinearOperator

__all__ = ["KroneckerLinearOperator", "use_fastkron"]
