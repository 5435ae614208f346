"""Layers (`torch.nn.Module`) over the functional interface."""

from fastkron_py.gated.activations.registry import Activation, register_activation
from fastkron_py.gated.api import pack_gated, unpack_gated
from fastkron_py.kan.bases.registry import Basis, register_basis
from fastkron_py.nn.gated import GatedMLP
from fastkron_py.nn.lokr import LoKrConv2d, LoKrLinear
from fastkron_py.nn.lokr_files import load_lokr, lokr_state, shard_lokr
from fastkron_py.nn.poly_kan import KAN, PolyKANConv2d, PolyKANLinear, smooth_init_
from fastkron_py.nn.poly_kan_conversion import SplineKANLinear, convert_kan, from_chebykan, from_efficient_kan
from fastkron_py.nn.rational import GRKAN, GroupRational
from fastkron_py.rational.denominators.registry import Denominator, DeviceFunctions, register_denominator

__all__ = [
    "GRKAN",
    "KAN",
    "Activation",
    "Basis",
    "Denominator",
    "DeviceFunctions",
    "GatedMLP",
    "GroupRational",
    "LoKrConv2d",
    "LoKrLinear",
    "PolyKANConv2d",
    "PolyKANLinear",
    "SplineKANLinear",
    "convert_kan",
    "from_chebykan",
    "from_efficient_kan",
    "load_lokr",
    "lokr_state",
    "pack_gated",
    "register_activation",
    "register_basis",
    "register_denominator",
    "shard_lokr",
    "smooth_init_",
    "unpack_gated",
]


def __dir__() -> list[str]:
    """The public names alone, without the files that they come from."""
    return sorted(__all__)
