"""The public functions: argument checks, array conversion, autocast, then one operator call each."""

from fastkron_py.adapters.api import lokr_linear
from fastkron_py.gated.api import gated_linear, gated_mlp
from fastkron_py.kan.api import poly_kan
from fastkron_py.kron.api import gekmm, gemkm, kron_matmul, kron_matmul_left
from fastkron_py.kron.hadamard import hadamard
from fastkron_py.kron.hadamard_orders import Hadamard
from fastkron_py.kron.kron_plan import families, kron_plan
from fastkron_py.kron.modes import khatri_rao_matmul, mode_matmul
from fastkron_py.kron.operators.kronecker_sum import KroneckerSum
from fastkron_py.kron.operators.product import KroneckerProduct
from fastkron_py.kron.quantize import Quantized, kron_quantize
from fastkron_py.kron.tune.api import tune
from fastkron_py.rational.api import layer_norm_rational, linear_rational, rational, rational_linear

__all__ = [
    "Hadamard",
    "KroneckerProduct",
    "KroneckerSum",
    "Quantized",
    "families",
    "gated_linear",
    "gated_mlp",
    "gekmm",
    "gemkm",
    "hadamard",
    "khatri_rao_matmul",
    "kron_matmul",
    "kron_matmul_left",
    "kron_plan",
    "kron_quantize",
    "layer_norm_rational",
    "linear_rational",
    "lokr_linear",
    "mode_matmul",
    "poly_kan",
    "rational",
    "rational_linear",
    "tune",
]
