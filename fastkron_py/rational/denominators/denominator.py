"""The record of a denominator of the rational function.

A denominator Q is a function of x and of the coefficients b_j of ``S(x) = sum_j b_j x^j``. Kernels take its device functions as one
argument, a tuple with names; torch takes its host functions, which it can differentiate any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

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
            way than by ``odd``; APPROXIMATE: PTX may be used. None stands for ``c - odd * slope``.
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
