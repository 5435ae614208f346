"""Activations of gates: their record, and the registry that finds them by name. Triton is imported when a name is first looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.registry import Registry


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
        formula: in a line of text.
        aliases: other names that `nn.GatedMLP` takes for it, as papers call a whole layer by its gate. A name comes before an alias, and an
            earlier activation's alias before a later one's.
        up: another activation, of the other projection: the result is ``up.host(up) * host(gate)``.
        constants: numbers and jit functions. If there are any, all jit functions, those of up too, take them as a second argument, a tuple.
        quick_constants: others with an error of some 1e-7, in few instructions, for NVIDIA GPUs and results that are rounded to 16 bits.
        allows_overlap: it fits programmatic dependent launch: programs of two launches share a multiprocessor's registers. For
            built-in ones only: tests see it by compiling for an H100.
    """

    name: str
    host: Callable[[Tensor], Tensor]
    host_derivative: Callable[[Tensor], Tensor]
    value: Any = None
    derivative: Any = None
    formula: str = ""
    aliases: tuple[str, ...] = ()
    up: Activation | None = None
    constants: tuple[Any, ...] = ()
    allows_overlap: bool = False
    quick_constants: tuple[Any, ...] = ()

    def gate(self, up: Tensor, gate: Tensor) -> Tensor:
        """The gated result, on the host."""
        return (up if self.up is None else self.up.host(up)) * self.host(gate)

    def up_gradient(self, dy: Tensor, up: Tensor, gate: Tensor) -> Tensor:
        """The gradient of up, on the host."""
        return dy * self.host(gate) if self.up is None else dy * self.host(gate) * self.up.host_derivative(up)

    def gate_gradient(self, dy: Tensor, up: Tensor, gate: Tensor) -> Tensor:
        """The gradient of gate, on the host."""
        return dy * (up if self.up is None else self.up.host(up)) * self.host_derivative(gate)


def _built_in() -> list[Activation]:
    from fastkron_py.gated.activations.built_in import BUILT_IN  # a statement, which torch.compile runs and does not trace

    return BUILT_IN


ACTIVATIONS: Final = Registry("activation", Activation, "an Activation", _built_in)
activation_names = ACTIVATIONS.names
unregister_activation = ACTIVATIONS.unregister


_with_constants: Final[dict[str, Activation]] = {}


def find_activation(name: Any) -> Activation:
    """Return the activation of this name, which may have constants: "clamped_swiglu(7, 1.702, 1)".

    Raises:
        TypeError: the name is not a string.
        ValueError: there is none.
    """
    if not isinstance(name, str) or not name.startswith("clamped_swiglu("):
        return ACTIVATIONS.find(name)
    if name not in _with_constants:
        from fastkron_py.gated.activations.clamped import of_name

        _with_constants[name] = of_name(name)
    return _with_constants[name]


def register_activation(activation: Activation) -> Activation:
    """Add an activation of gates, ``up * act(gate)``, which `gated_linear` and `nn.GatedMLP` then know by its name.

    Its host functions take tensors of any shape, float32 or float64, and give tensors of that shape. Its jit functions take float32
    tiles in registers; without them the activation runs in torch. docs/extending.md has an example with both.

    Args:
        activation: its functions and properties.

    Returns:
        The activation.

    Raises:
        TypeError: not an `Activation`.
        ValueError: the name is taken or empty, or only one of value and derivative is there.

    Example:
        >>> register_activation(Activation("x^2", torch.square, lambda x: 2 * x, formula="x^2")).formula
        'x^2'
        >>> gated_linear(torch.randn(100, 8), torch.randn(48, 8), activation="x^2").shape
        torch.Size([100, 24])
    """
    ACTIVATIONS.check(activation)
    if (activation.value is None) != (activation.derivative is None):
        raise value_error("activation", "both value and derivative, or neither", f"one of them, for {activation.name!r}")
    return ACTIVATIONS.register(activation)


def find_gate(name: Any) -> Activation:
    """Return the activation of this name, or else the first with this alias.

    Raises:
        TypeError: the name is not a string.
        ValueError: there is none.
    """
    if isinstance(name, str) and name not in activation_names():
        for known in map(find_activation, activation_names()):
            if name in known.aliases:
                return known
    return find_activation(name)
