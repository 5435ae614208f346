"""The library's own denominators: every module of this package with a `DENOMINATOR` has one."""

from typing import Final

from fastkron_py.rational.denominators.denominator import Denominator
from fastkron_py.runtime.registry import records

BUILT_IN: Final = records(__package__, Denominator)
