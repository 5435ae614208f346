"""The library's own bases: every module of this package with a `BASIS` has one."""

from typing import Final

from fastkron_py.kan.bases.registry import Basis
from fastkron_py.runtime.registry import records

BUILT_IN: Final = records(__package__, Basis)
