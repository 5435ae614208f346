"""Multiply with Kronecker products, fast, without building them.

``import fastkron_py`` imports torch and nothing else that is large; it does not touch a GPU. The
submodules ``distributed``, ``integrations``, ``nn``, ``reference`` and ``testing`` are imported on first use.
"""

from typing import TYPE_CHECKING

from fastkron_py.functional import (
    Hadamard,
    KroneckerProduct,
    KroneckerSum,
    families,
    gated_linear,
    gekmm,
    gemkm,
    hadamard,
    khatri_rao_matmul,
    kron_matmul,
    kron_matmul_left,
    kron_plan,
    kron_quantize,
    lokr_linear,
    mode_matmul,
    poly_kan,
    rational,
    tune,
)
from fastkron_py.runtime.backend import backend, host_time, set_backend

__version__ = "0.1.0"

__all__ = [
    "Hadamard",
    "KroneckerProduct",
    "KroneckerSum",
    "backend",
    "families",
    "gated_linear",
    "gekmm",
    "gemkm",
    "hadamard",
    "host_time",
    "khatri_rao_matmul",
    "kron_matmul",
    "kron_matmul_left",
    "kron_plan",
    "kron_quantize",
    "lokr_linear",
    "mode_matmul",
    "poly_kan",
    "rational",
    "set_backend",
    "tune",
]

if TYPE_CHECKING:  # a type checker shall see these modules, and no others
    from fastkron_py import distributed as distributed
    from fastkron_py import integrations as integrations
    from fastkron_py import nn as nn
    from fastkron_py import reference as reference
    from fastkron_py import testing as testing
else:

    def __getattr__(name):
        if name in ("distributed", "integrations", "nn", "reference", "testing"):
            from importlib import import_module

            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        """The public names alone: a completion of ``kron`` offers functions, not the subpackages behind them."""
        return sorted([*__all__, "__version__", "distributed", "functional", "integrations", "nn", "reference", "testing"])
