"""Layers (`torch.nn.Module`) over the functional room."""

from fastkron_py.nn.poly_kan import KAN, PolyKANLinear
from fastkron_py.nn.poly_kan_conversion import SplineKANLinear, convert_kan, from_chebykan, from_efficient_kan
from fastkron_py.nn.poly_kan_init import smooth_init_
from fastkron_py.nn.rational import GRKAN, GroupRational

__all__ = [
    "GRKAN",
    "KAN",
    "GroupRational",
    "PolyKANLinear",
    "SplineKANLinear",
    "convert_kan",
    "from_chebykan",
    "from_efficient_kan",
    "smooth_init_",
]
