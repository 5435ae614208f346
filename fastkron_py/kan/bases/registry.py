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
    """Add a basis, which `poly_kan` and the layers then know by its name.

    Raises:
        TypeError: not a `Basis`.
        ValueError: the name is taken, empty, or has a colon in it.
    """
    BASES.check(basis)
    if ":" in basis.name:
        raise value_error("basis", "a name without colons", repr(basis.name))
    return BASES.register(basis)
