"""One rank's own products: all that distributed products use of the single-device library, but for the cost of launches (`plan.cost`)."""

from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.functional import KroneckerSum as LocalKroneckerSum
from fastkron_py.functional import kron_matmul as local_kron_matmul
from fastkron_py.functional import kron_matmul_left as local_kron_matmul_left
from fastkron_py.kron.checks import check_factor_shapes, check_tensors, factors_and_identities, is_identity, shape_of
from fastkron_py.kron.into import gradients_into, in_blocks, multiply_into
from fastkron_py.kron.modes import filled, merged
from fastkron_py.kron.operators.algebra import SlogDet, built, check_square, kron_range, log_of, matrices
from fastkron_py.kron.operators.kronecker_sum import sum_slogdet
from fastkron_py.kron.operators.modes import terms
from fastkron_py.kron.operators.pencil import Basis, Share, are_hermitian, combined, eigenbasis
from fastkron_py.kron.operators.spectral import SumSystem, log_abs_det
from fastkron_py.kron.operators.spectral import solve as solve_by_basis
from fastkron_py.kron.planner import IN_WHOLE, InBlocks

__all__ = [
    "IN_WHOLE",
    "Basis",
    "InBlocks",
    "LocalKroneckerProduct",
    "LocalKroneckerSum",
    "Share",
    "SlogDet",
    "SumSystem",
    "are_hermitian",
    "built",
    "check_factor_shapes",
    "check_square",
    "check_tensors",
    "combined",
    "eigenbasis",
    "factors_and_identities",
    "filled",
    "gradients_into",
    "in_blocks",
    "is_identity",
    "kron_range",
    "local_kron_matmul",
    "local_kron_matmul_left",
    "log_abs_det",
    "log_of",
    "matrices",
    "merged",
    "multiply_into",
    "shape_of",
    "solve_by_basis",
    "sum_slogdet",
    "terms",
]
