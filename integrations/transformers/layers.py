"""The gated form of an MLP: the forward pass that `apply_to_llama` gives to it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn

from fastkron_py.gated.api import gated_linear, gated_mlp
from fastkron_py.integrations.replacement import Replacement
from fastkron_py.nn.modules import is_hooked, is_plain_linear

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


class GatedProjections(Replacement):
    """The forward pass of an MLP with gate_proj, up_proj, down_proj and act_fn, in place of that of the next class."""

    PREFIX = "Gated"

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
