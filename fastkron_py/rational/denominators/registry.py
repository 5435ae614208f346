"""Denominators of the rational function: their record, and the registry that finds them by name.

A denominator Q is a function of x and of the coefficients b_j of ``S(x) = sum_j b_j x^j``. Kernels take its device functions as one
argument, a tuple with names; torch takes its host functions, which it can differentiate any number of times. Triton is imported with the
library's own, when a name is first looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from torch import Tensor

from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.registry import Registry

Derivatives = tuple[Tensor, Tensor, Iterable[Tensor]]


class DeviceFunctions(NamedTuple):
    """A denominator's jit functions. Tiles and coefficients are float32 or float64, and broadcast with each other.

    Attributes:
        coefficient: ``(b)`` to the coefficient that a kernel keeps in registers in place of b_j.
        coefficient_slope: ``(cotangent, b)``, the cotangent of b_j from that of ``coefficient(b_j)``.
        sum: ``(c, x, COUNT)`` to (S, slope), c being a tuple of COUNT kept coefficients.
        value: ``(s)``, Q from S.
        slopes: ``(v, x, s)`` to (even, odd): from the cotangent v of Q, that of the kept coefficient j is ``even x^j`` or ``odd x^j``,
            as j is, and that of x is ``odd slope``.
        minus_slope: ``(c, odd, slope, v, x, APPROXIMATE)`` to c minus the cotangent of x, where that takes fewer instructions in another
            way than by ``odd``; APPROXIMATE: PTX may be used. None is ``c - odd * slope``.
    """

    coefficient: Any
    coefficient_slope: Any
    sum: Any
    value: Any
    slopes: Any
    minus_slope: Any = None

    def complete(self) -> DeviceFunctions:
        """The functions as kernels take them: all of them are there."""
        from fastkron_py.rational.denominators.device import minus_product  # imports Triton

        return self if self.minus_slope is not None else self._replace(minus_slope=minus_product)


@dataclass(frozen=True, eq=False)
class Denominator:
    """A denominator by name, on the host and on the device.

    Attributes:
        name: the value of the argument ``version``.
        formula: Q(x) in a line of text, with ``S(x)`` for the sum of all ``b_j x^j``.
        host_value: ``(b, x)`` to Q; b is a list of tensors that broadcast with x.
        host_derivatives: ``(b, x)`` to (Q, dQ/dx, all dQ/db_j), in operations that torch can differentiate further; each dQ/db_j may be
            made when it is asked for.
        device: the same as jit functions.
        first: the power that the first coefficient belongs to.
        constant: Q where S is zero.
        has_poles: Q may become zero.
        smooth_forms: names of denominators without kinks that are equal to this one where S is not negative and all coefficients are
            zero but those of the powers j that the function takes: fits begin with these.
        definition: Q from its terms ``b_j x^j``, stacked along the first dimension, written plainly: kernels are compared with it
            (`fastkron_py.reference`). None in a record that is compared with something else.
        noise_of: the same denominator without noise; None where this one has none itself. Noise multiplies the numerator in training.
    """

    name: str
    formula: str
    host_value: Callable[[Sequence[Tensor], Tensor], Tensor]
    host_derivatives: Callable[[Sequence[Tensor], Tensor], Derivatives]
    device: DeviceFunctions
    first: int = 1
    constant: float = 1.0
    has_poles: bool = False
    smooth_forms: tuple[tuple[str, Callable[[int], bool]], ...] = ()
    definition: Callable[[Tensor], Tensor] | None = None
    noise_of: Denominator | None = None

    @property
    def is_noisy(self) -> bool:
        """Whether the numerator's coefficients are multiplied by random numbers in training."""
        return self.noise_of is not None

    @property
    def without_noise(self) -> Denominator:
        """The same denominator without noise."""
        return self.noise_of or self

    def with_noise(self, name: str) -> Denominator:
        """The same denominator with noise on the numerator in training."""
        return replace(self, name=name, noise_of=self)

    def count(self, degree: int) -> int:
        """Coefficients of a denominator of this degree."""
        return degree + 1 - self.first


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
        denominator: its functions and properties.

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
