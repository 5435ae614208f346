"""Bases by name. Triton is imported with the library's own, when a name is first looked up."""

from __future__ import annotations

from typing import Final

from fastkron_py.kan.bases.basis import Basis
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.registry import Registry


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
        basis: the record of its functions.

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
