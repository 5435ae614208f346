"""The record of a gate's activation. Triton is not imported here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Activation:
    """An activation by name, on the host and on the device.

    The jit functions take float32 tiles and give tiles of the same shape. An activation without them is left to torch.

    Attributes:
        name: the argument ``activation`` by which users ask for it.
        host: of a tensor, element by element, in operations that torch can differentiate.
        host_derivative: its derivative, in such operations too.
        value: the first as a jit function of a tile.
        derivative: the second as a jit function of a tile.
        quick_value: the first with an error of some 1e-7, in few instructions, for NVIDIA GPUs and results that are rounded to half types.
        quick_derivative: the second with such an error.
        formula: in a line of text.
        aliases: other names that `nn.GatedMLP` takes for it, as papers call a whole layer by its gate. A name comes before an alias, and an
            earlier activation's alias before a later one's.
        is_light: programs of two launches fit a multiprocessor's registers together with it, so that the second launch may begin early. For
            built-in ones only: tests see it by compiling for an H100.
    """

    name: str
    host: Callable[[Tensor], Tensor]
    host_derivative: Callable[[Tensor], Tensor]
    value: Any = None
    derivative: Any = None
    quick_value: Any = None
    quick_derivative: Any = None
    formula: str = ""
    aliases: tuple[str, ...] = ()
    is_light: bool = False

    @property
    def has_device_functions(self) -> bool:
        """Whether kernels can apply it."""
        return self.value is not None and self.derivative is not None

    def device_functions(self, quick: bool) -> tuple[Any, Any]:
        """(value, derivative) as jit functions; quick: the quick ones where there are such."""
        if not quick:
            return self.value, self.derivative
        return self.quick_value or self.value, self.quick_derivative or self.derivative
