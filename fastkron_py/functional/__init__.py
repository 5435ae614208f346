"""The public verbs: argument checks, array conversion, autocast, then one operator call each."""

from fastkron_py.functional.gated import gated_linear, gated_mlp
from fastkron_py.functional.kron import gekmm, gemkm, kron_matmul, kron_matmul_left
from fastkron_py.functional.kronecker_product import KroneckerProduct
from fastkron_py.functional.poly_kan import poly_kan
from fastkron_py.functional.rational import rational
from fastkron_py.functional.tuner import tune

__all__ = [
    "KroneckerProduct",
    "gated_linear",
    "gated_mlp",
    "gekmm",
    "gemkm",
    "kron_matmul",
    "kron_matmul_left",
    "poly_kan",
    "rational",
    "tune",
]
