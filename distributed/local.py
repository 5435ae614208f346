"""One rank's own products: all that distributed products use of the single-device library, but for the cost of launches (`plan.cost`)."""

from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.functional import kron_matmul as local_kron_matmul
from fastkron_py.functional import kron_matmul_left as local_kron_matmul_left
from fastkron_py.kron.checks import check_tensors, factors_and_identities, is_identity, shape_of
from fastkron_py.kron.identity import filled, merged
from fastkron_py.kron.into import in_blocks, multiply_into
from fastkron_py.kron.operators.algebra import SlogDet, check_square, kron_range, per_factor
from fastkron_py.kron.operators.pencil import are_hermitian
from fastkron_py.kron.plan.plan import IN_WHOLE, InBlocks
from fastkron_py.kron.shapes import check_factor_shapes

__all__ = [
    "IN_WHOLE",
    "InBlocks",
    "LocalKroneckerProduct",
    "SlogDet",
    "are_hermitian",
    "check_factor_shapes",
    "check_square",
    "check_tensors",
    "factors_and_identities",
    "filled",
    "in_blocks",
    "is_identity",
    "kron_range",
    "local_kron_matmul",
    "local_kron_matmul_left",
    "merged",
    "multiply_into",
    "per_factor",
    "shape_of",
]
