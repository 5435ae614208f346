"""The scalars of a multiply."""

from __future__ import annotations

from typing import Final, NamedTuple

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
