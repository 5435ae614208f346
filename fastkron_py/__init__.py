"""Multiply with Kronecker products, fast, without building them.

``import fastkron_py`` imports torch and nothing else that is large; it does not touch a GPU.
"""

from fastkron_py import ops as _ops
from fastkron_py.functional import KroneckerProduct, gekmm, gemkm, kron_matmul, kron_matmul_left
from fastkron_py.ops.backend import backend, set_backend

__version__ = "0.1.0"

__all__ = ["KroneckerProduct", "backend", "gekmm", "gemkm", "kron_matmul", "kron_matmul_left", "set_backend"]
