"""The library's own activations: every module of this package with an `ACTIVATION` has one."""

from typing import Final

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.runtime.registry import records

BUILT_IN: Final = records(__package__, Activation)
