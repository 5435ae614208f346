"""The record of a basis of polynomial KAN layers: functions B_0, B_1, ... on [-1, 1] (or wider), on the device and on the host.

On the device a basis is three jit functions, a *prologue*:

====================================  ==============================================================================
``start(t, TERMS, PARAMS)``           the state at degree 0: a tuple of tiles, made of the normalised argument's tile
``step(state, d, TERMS, PARAMS)``     the state at degree d + 1, of that at degree d
``value(state, d, table_ptr, TERMS,   B_d of the tile, from the state at degree d
PARAMS)``
====================================  ==============================================================================

and three more that give the derivatives B_d' in the same way. TERMS is the number of functions and PARAMS the basis's parameters, both
constants of compilation; d is a number of the running kernel. On the host a basis is two generators, of values and of derivatives,
which torch can differentiate. Triton is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

MOST_DEGREE: Final = 64

Parameters = tuple[float, ...]
Terms = Callable[[Tensor, int, Parameters], Iterator[Tensor]]
Prologue = tuple[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Basis:
    """A basis by name, on the host and on the device.

    Attributes:
        name: the argument ``basis`` by which users ask for it.
        values: ``(t, terms, parameters)`` to B_0(t), ..., B_{terms-1}(t), each of t's shape.
        derivatives: the same of B_d'.
        value_prologue: (start, step, value) as this module's text says; None leaves the basis to torch.
        derivative_prologue: the same of B_d'.
        parameters: names of the parameters, in order, and their defaults.
        check: raises ValueError for (terms, parameters) that are not possible.
        has_constant: B_0 is 1 everywhere, so that degree 0 is a bias.
        any_dialect: the prologues use nothing of Triton that Gluon lacks (no `tl.zeros_like`: see `device.constant`), so that Hopper's
            kernels take them.
        formula: B_d(t) in a line of text.
        normalization: that of layers that are given none.
        frequency: how fast B_d varies, by its d, to which `nn.smooth_init_` scales coefficients; None where functions differ in
            place instead, as B-splines do.
    """

    name: str
    values: Terms
    derivatives: Terms
    value_prologue: Prologue | None = None
    derivative_prologue: Prologue | None = None
    parameters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    check: Callable[[int, Parameters], None] = lambda terms, parameters: None
    has_constant: bool = False
    any_dialect: bool = False
    formula: str = ""
    normalization: str = "tanh"
    frequency: Callable[[int], float] | None = float
