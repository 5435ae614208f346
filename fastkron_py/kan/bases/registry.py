"""Bases of polynomial KAN layers, their record and their registry.

A basis is functions B_0, B_1, ... on [-1, 1] (or wider), on the device and on the host.

On the device a basis is three jit functions, a *prologue*:

====================================  ==============================================================================
``start(t, TERMS, PARAMS)``           the state at degree 0: a tuple of tiles, made of the normalised argument's tile
``step(state, d, TERMS, PARAMS)``     the state at degree d + 1, of that at degree d
``value(state, d, table_ptr, TERMS,   B_d of the tile, from the state at degree d
PARAMS)``
====================================  ==============================================================================

and three more that give the derivatives B_d' in the same way. TERMS is the number of functions and PARAMS the basis's parameters, both
constants of compilation; d is a number of the running kernel. On the host a basis is two generators, of values and of derivatives,
which torch can differentiate. Triton is imported with the library's own, when a name is first looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.registry import Registry

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
        constants: of the prologues, in PARAMS ahead of the parameters.
    """

    name: str
    values: Terms
    derivatives: Terms
    value_prologue: Prologue | None = None
    derivative_prologue: Prologue | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    check: Callable[[int, Parameters], None] = lambda terms, parameters: None
    has_constant: bool = False
    any_dialect: bool = False
    formula: str = ""
    normalization: str = "tanh"
    frequency: Callable[[int], float] | None = float
    constants: Parameters = ()


def _built_in() -> list[Basis]:
    from fastkron_py.kan.bases.built_in import BUILT_IN  # a statement, which torch.compile runs and does not trace

    return BUILT_IN


BASES: Final = Registry("basis", Basis, "a Basis", _built_in)
find_basis = BASES.find
basis_names = BASES.names
unregister_basis = BASES.unregister


def register_basis(basis: Basis) -> Basis:
    """Add a basis of functions B_0, B_1, ..., which `poly_kan` and the layers then know by its name.

    Its host functions take normalised arguments t of any shape, float32 or float64, and yield one tensor of that shape for each of
    degree + 1 functions. Its prologues work on tiles in registers; without them the basis runs in torch. docs/extending.md has an
    example with both.

    Args:
        basis: its functions and properties.

    Returns:
        The basis.

    Raises:
        TypeError: not a `Basis`.
        ValueError: the name is taken, empty, or has a colon in it.

    Example:
        >>> def powers(t, terms, parameters):
        ...     return (t**d for d in range(terms))
        >>> def slopes(t, terms, parameters):
        ...     return (d * t ** max(0, d - 1) for d in range(terms))
        >>> register_basis(Basis("powers of t", powers, slopes, has_constant=True, formula="t^d")).formula
        't^d'
        >>> poly_kan(torch.randn(100, 8), torch.randn(5, 3, 8), basis="powers of t").shape
        torch.Size([100, 3])
    """
    BASES.check(basis)
    if ":" in basis.name:
        raise value_error("basis", "a name without colons", repr(basis.name))
    return BASES.register(basis)
