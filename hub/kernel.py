"""Gated MLPs, rational activations and rotations of fastkron_py: Triton kernels on GPUs, torch elsewhere.

`hub/build.py` makes this file the ``__init__.py`` of a kernel for Hugging Face's `kernels` package.
"""

from fastkron_py.gated.api import gated_linear, gated_mlp, pack_gated, unpack_gated
from fastkron_py.kron.api import kron_matmul
from fastkron_py.kron.hadamard import hadamard
from fastkron_py.kron.hadamard_orders import Hadamard
from fastkron_py.kron.quantize import Quantized, kron_quantize
from fastkron_py.nn.gated import GatedMLP
from fastkron_py.nn.rational import GRKAN, GroupRational
from fastkron_py.rational.api import layer_norm_rational, linear_rational, rational, rational_linear
from fastkron_py.runtime.backend import backend, set_backend

from . import layers

__all__ = [
    "GRKAN",
    "GatedMLP",
    "GroupRational",
    "Hadamard",
    "Quantized",
    "backend",
    "gated_linear",
    "gated_mlp",
    "hadamard",
    "kron_matmul",
    "kron_quantize",
    "layer_norm_rational",
    "layers",
    "linear_rational",
    "pack_gated",
    "rational",
    "rational_linear",
    "set_backend",
    "unpack_gated",
]
