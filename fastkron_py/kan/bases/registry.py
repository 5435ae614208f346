"""All bases there are: the modules that register them are imported here."""

from fastkron_py.kan.bases import functions, polynomials  # noqa: F401
from fastkron_py.kan.bases.basis import MOST_DEGREE, NORMALIZERS, Basis, basis_names, find_basis, register_basis, unregister_basis

__all__ = ["MOST_DEGREE", "NORMALIZERS", "Basis", "basis_names", "find_basis", "register_basis", "unregister_basis"]
