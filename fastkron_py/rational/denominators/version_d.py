"""Version D: version B, with noise on the numerator's coefficients in training."""

from typing import Final

from fastkron_py.rational.denominators import version_b

DENOMINATOR: Final = version_b.DENOMINATOR.with_noise("D")
