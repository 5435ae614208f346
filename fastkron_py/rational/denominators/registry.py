"""Denominators by name. Triton is imported with the library's own, when a name is first looked up."""

from __future__ import annotations

from typing import Final

from fastkron_py.rational.denominators.denominator import Denominator
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.registry import Registry


def _built_in() -> list[Denominator]:
    from fastkron_py.rational.denominators.built_in import BUILT_IN  # a statement, which torch.compile runs and does not trace

    return BUILT_IN


DENOMINATORS: Final = Registry("version", Denominator, "a Denominator", _built_in)
find_denominator = DENOMINATORS.find
denominator_names = DENOMINATORS.names
unregister_denominator = DENOMINATORS.unregister


def register_denominator(denominator: Denominator) -> Denominator:
    """Add a denominator Q of the rational function ``P(x) / Q(x)``, which `rational` and the layers then know by its name.

    Its device functions work on tiles of elements in registers, on one program's coefficients. Its host functions work on tensors
    x ``[..., G, C / G]`` and b_j ``[G, 1]``, or of any shapes that broadcast. docs/extending.md has an example with all of them.

    Args:
        denominator: the record of its functions.

    Returns:
        The denominator.

    Raises:
        TypeError: not a `Denominator`.
        ValueError: the name is taken or empty, or the first power is neither 0 nor 1.

    Example:
        >>> from dataclasses import replace
        >>> from fastkron_py.rational.denominators.registry import find_denominator
        >>> known = find_denominator("B")
        >>> register_denominator(replace(known, name="same as B")).formula
        '1 + |S(x)|'
        >>> rational(torch.randn(3, 8), torch.randn(2, 6), torch.randn(2, 4), version="same as B").shape
        torch.Size([3, 8])
    """
    DENOMINATORS.check(denominator)
    if denominator.first not in (0, 1):
        raise value_error("denominator", "a first power of 0 or 1", denominator.first)
    return DENOMINATORS.register(denominator)
