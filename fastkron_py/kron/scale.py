"""The scales of a multiply's result: scalars, and a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import Tensor

from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.program import Scalar, bits


class Scale(NamedTuple):
    """The scalars of the last launch: those of the run, or 1 and 0, as bit patterns."""

    alpha: Scalar | int = bits(1.0)
    beta: Scalar | int = bits(0.0)

    @property
    def is_one(self) -> bool:
        """Whether alpha changes nothing."""
        return isinstance(self.alpha, int)


PLAIN: Final = Scale()


def add_scaling(build: Builder, y: Tensor, z: Tensor, method: Callable[[Tensor, Tensor], Any]) -> None:
    """Add ``y *= z``, or ``y /= z``, by a method of torch's, to a program; z broadcasts to y."""

    def scale(y: Tensor, z: Tensor) -> None:
        method(y, z)

    build.call(scale, (y, z))
