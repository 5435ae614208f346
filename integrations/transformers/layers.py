"""The gated form of an MLP: an instance of a subclass of its own class, with the same modules and parameters.

The parameters stay as they are: objects, names and memory. Nothing that reads or writes a model's state sees a difference.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn

from fastkron_py.gated.api import gated_linear, gated_mlp
from fastkron_py.nn.hooks import is_hooked, is_plain_linear

# By class, torch's own and those of transformers.activations in the versions that were tested.
_ACTIVATIONS: Final = MappingProxyType(
    {
        "SiLU": "silu",
        "SiLUActivation": "silu",
        "GELUActivation": "gelu",
        "GELUTanh": "gelu_tanh",
        "PytorchGELUTanh": "gelu_tanh",
        "NewGELUActivation": "gelu_tanh",
        "ReLU": "relu",
        "Sigmoid": "sigmoid",
        "Identity": "identity",
        "LinearActivation": "identity",
    }
)
_HOMES: Final = ("torch.nn.modules", "transformers.activations")
OPTIONS: Final = ("_fastkron_backward", "_fastkron_precision")


def activation_name(module: Any) -> str | None:
    """Which of `gated_linear`'s activations a module is, or None."""
    kind = type(module)
    if not kind.__module__.startswith(_HOMES) or is_hooked(module):
        return None
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _ACTIVATIONS.get(kind.__name__)


class GatedProjections(nn.Module):
    """The forward pass of an MLP with gate_proj, up_proj, down_proj and act_fn, in place of that of the next class."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        mlp: Any = self
        up, gate, down = mlp.up_proj, mlp.gate_proj, mlp.down_proj
        activation = activation_name(mlp.act_fn)
        if activation is None or not (is_plain_linear(up) and is_plain_linear(gate)):
            return super().forward(x)  # type: ignore[no-any-return]
        if (up.bias is None) != (gate.bias is None):
            return super().forward(x)  # type: ignore[no-any-return]
        options: dict[str, Any] = {
            "bias": None if up.bias is None else (up.bias, gate.bias),
            "activation": activation,
            "backward": mlp._fastkron_backward,
            "precision": mlp._fastkron_precision,
        }
        weight = (up.weight, gate.weight)
        if is_plain_linear(down):
            y: Tensor = gated_mlp(x, weight, down.weight, down_bias=down.bias, **options)
        else:
            y = down(gated_linear(x, weight, **options))
        return y

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (own_class(self),), self.__getstate__()  # type: ignore[no-untyped-call]


_classes: dict[type[nn.Module], type[GatedProjections]] = {}


def gated_class(base: type[nn.Module]) -> type[GatedProjections]:
    """The subclass of an MLP's class that its instances are given."""
    if base not in _classes:
        attributes = {"__module__": __name__, "__doc__": GatedProjections.__doc__}
        _classes[base] = type(f"Gated{base.__name__}", (GatedProjections, base), attributes)
    return _classes[base]


def own_class(mlp: nn.Module) -> Any:
    """The class that an MLP had before it was changed."""
    classes = type(mlp).__mro__
    return classes[classes.index(GatedProjections) + 1]


def _blank(base: type[nn.Module]) -> Any:
    """An object for a copy's, or a file's, state."""
    kind = gated_class(base)
    return kind.__new__(kind)


def enter(mlp: nn.Module, backward: str, precision: str | None) -> None:
    """Change an MLP, in place."""
    mlp.__dict__.update(zip(OPTIONS, (backward, precision), strict=True))
    mlp.__class__ = gated_class(type(mlp))


def leave(mlp: nn.Module) -> None:
    """Change it back; without effect on one that is not changed."""
    if isinstance(mlp, GatedProjections):
        mlp.__class__ = own_class(mlp)
        for name in OPTIONS:
            mlp.__dict__.pop(name, None)
