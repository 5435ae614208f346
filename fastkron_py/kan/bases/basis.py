"""Bases of polynomial KAN layers, their tables, and how x is brought onto [-1, 1]: device functions, with the host's beside them.

A basis is a sequence of functions B_0, B_1, ... on [-1, 1] (or wider). On the device it is three jit functions, a *prologue*:

====================================  ==============================================================================
``start(t, TERMS, PARAMS)``           the state at degree 0: a tuple of tiles, made of the normalised argument's tile
``step(state, d, TERMS, PARAMS)``     the state at degree d + 1, of that at degree d
``value(state, d, table_ptr, TERMS,   B_d of the tile, from the state at degree d
PARAMS)``
====================================  ==============================================================================

and three more that give the derivatives B_d' in the same way. TERMS is the number of functions and PARAMS the basis's parameters, both
constants of compilation; d is a number of the running kernel. On the host a basis is two generators, of values and of derivatives,
which torch can differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton
from fastkron_py.runtime.registry import Registry
from fastkron_py.tiling.approximations import quick_exp2, quick_reciprocal

MOST_DEGREE: Final = 64

Parameters = tuple[float, ...]
Terms = Callable[[Tensor, int, Parameters], Iterator[Tensor]]
Prologue = tuple[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Basis:
    """A basis by name, on the host and on the device.

    Attributes:
        name: what users call it.
        values: ``(t, terms, parameters)`` to B_0(t), ..., B_{terms-1}(t), each of t's shape.
        derivatives: the same of B_d'.
        value_prologue: (start, step, value) as this module's text says; None leaves the basis to torch.
        derivative_prologue: the same of B_d'.
        parameters: names of the parameters, in order, and their defaults.
        check: raises ValueError for (terms, parameters) that are not possible.
        has_constant: B_0 is 1 everywhere, so that degree 0 is a bias.
        any_dialect: the prologues use nothing of Triton that Gluon lacks (no `tl.zeros_like`: see `constant`), so that Hopper's kernels
            take them.
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


BASES: Final = Registry("basis", Basis, "a Basis")
find_basis = BASES.find
basis_names = BASES.names
unregister_basis = BASES.unregister

__all__ = [
    "MOST_DEGREE",
    "NORMALIZERS",
    "Basis",
    "Normalizer",
    "Parameters",
    "Prologue",
    "basis_names",
    "constant",
    "find_basis",
    "register_basis",
    "unregister_basis",
]


def register_basis(basis: Basis) -> Basis:
    """Add a basis, which `poly_kan` and the layers then know by its name.

    Raises:
        TypeError: not a `Basis`.
        ValueError: the name is taken, empty, or has a colon in it.
    """
    BASES.check(basis)
    if ":" in basis.name:
        raise value_error("basis", "a name without colons", repr(basis.name))
    return BASES.register(basis)


@triton.jit
def constant(t, VALUE: tl.constexpr):
    """A tile like t of one number, in Triton and in Gluon, where a tile of no one's likeness would need a layout."""
    return tl.where(t < 0, VALUE, VALUE).to(t.dtype)


# ---- how x is brought onto [-1, 1], element by element -----------------------------------------


@triton.jit
def _tanh(x):
    # By exp of what is not positive: finite, however large x is.
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _tanh_derivative(x):
    e = tl.exp(-2 * tl.abs(x))
    return 4 * e / ((1 + e) * (1 + e))


@triton.jit
def _quick_parts(x):
    """(e, 1 / (1 + e)) by the hardware's units alone, whose numbers need no care here: both lie between 0 and 1."""
    e = quick_exp2(tl.abs(x) * -2.8853900817779268)
    return e, quick_reciprocal(1 + e)


@triton.jit
def _quick_tanh(x):
    e, share = _quick_parts(x)
    t = (1 - e) * share
    return tl.where(x < 0, -t, t)


@triton.jit
def _quick_tanh_derivative(x):
    e, share = _quick_parts(x)
    return 4 * e * (share * share)


@triton.jit
def _clamp(x):
    # By selection: a minimum would lose a NaN.
    return tl.where(x > 1, 1.0, tl.where(x < -1, -1.0, x))


@triton.jit
def _clamp_derivative(x):
    return tl.where((x > 1) | (x < -1), 0.0, x * 0 + 1)


@triton.jit
def _same(x):
    return x


@triton.jit
def _same_derivative(x):
    return x * 0 + 1


def _host_tanh_derivative(x: Tensor) -> Tensor:
    e = torch.exp(-2 * x.abs())
    return 4 * e / (1 + e) ** 2


def _host_clamp_derivative(x: Tensor) -> Tensor:
    return torch.where((x > 1) | (x < -1), 0.0, torch.ones_like(x))


@dataclass(frozen=True)
class Normalizer:
    """An elementwise normalisation: value and derivative, on the host and as jit functions; the quick ones are for float32 on Hopper."""

    host: Callable[[Tensor], Tensor]
    host_derivative: Callable[[Tensor], Tensor]
    value: Any
    derivative: Any
    quick_value: Any = None
    quick_derivative: Any = None

    def device_functions(self, quick: bool) -> tuple[Any, Any]:
        """(value, derivative) as jit functions; quick: the quick ones where there are such."""
        if not quick:
            return self.value, self.derivative
        return self.quick_value or self.value, self.quick_derivative or self.derivative


NORMALIZERS: Final[Mapping[str, Normalizer]] = MappingProxyType(
    {
        "tanh": Normalizer(torch.tanh, _host_tanh_derivative, _tanh, _tanh_derivative, _quick_tanh, _quick_tanh_derivative),
        "clamp": Normalizer(lambda x: x.clamp(-1, 1), _host_clamp_derivative, _clamp, _clamp_derivative),
        "none": Normalizer(lambda x: x, torch.ones_like, _same, _same_derivative),
    }
)
