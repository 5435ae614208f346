"""Activations by name. Triton is imported with the library's own, when a name is first looked up."""

from __future__ import annotations

from typing import Any, Final

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.registry import Registry


def _built_in() -> list[Activation]:
    from fastkron_py.gated.activations.built_in import BUILT_IN  # a statement, which torch.compile runs and does not trace

    return BUILT_IN


ACTIVATIONS: Final = Registry("activation", Activation, "an Activation", _built_in)
find_activation = ACTIVATIONS.find
activation_names = ACTIVATIONS.names
unregister_activation = ACTIVATIONS.unregister


def register_activation(activation: Activation) -> Activation:
    """Add an activation of gates, ``up * act(gate)``, which `gated_linear` and `nn.GatedMLP` then know by its name.

    Its host functions take tensors of any shape, float32 or float64, and give tensors of that shape. Its jit functions take float32
    tiles in registers; without them the activation runs in torch. docs/extending.md has an example with both.

    Args:
        activation: the record of its functions.

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
