"""What an MLP becomes: an instance of a subclass of its own class, with the same modules and parameters.

The parameters stay what they are, objects and names; only the memory of gate_proj.weight is laid behind that of up_proj.weight, so that
both together are one stacked weight ``[2, hidden, in]``. Whoever separates them again (an assigned weight, sharding) makes the layer
join them by a copy, in every call: slower, not wrong.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.functional.gated import gated_linear, gated_mlp
from fastkron_py.nn.hooks import is_hooked
from fastkron_py.ops.gated_split import gated_split, join, lie_together
from fastkron_py.ops.recorded_gated import of_halves

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


def is_plain_linear(module: Any) -> bool:
    """Whether calling a module is multiplying with its weight: no adapter, hook, quantised, parametrised or distributed weight."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked(module)


def lay_together(mlp: Any) -> None:
    """Lay the weight of mlp's gate_proj behind that of its up_proj. Both remain the parameters that they are."""
    up, gate = mlp.up_proj, mlp.gate_proj
    if not (is_plain_linear(up) and is_plain_linear(gate)) or up.weight.is_meta or lie_together(up.weight, gate.weight):
        return
    if up.weight is gate.weight or up.weight.device != gate.weight.device or up.weight.dtype != gate.weight.dtype:
        return
    with torch.no_grad():
        packed = torch.stack([up.weight.detach(), gate.weight.detach()])
    up.weight.data, gate.weight.data = packed[0], packed[1]


def lay_apart(mlp: Any) -> None:
    """Give both weights memory of their own again."""
    up, gate = mlp.up_proj, mlp.gate_proj
    if is_plain_linear(up) and is_plain_linear(gate) and lie_together(up.weight, gate.weight):
        up.weight.data, gate.weight.data = up.weight.data.clone(), gate.weight.data.clone()


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
        bias = None if up.bias is None else torch.stack([up.bias, gate.bias])
        whole = is_plain_linear(down)
        after = (down.weight, down.bias) if whole else (None, None)
        backward, precision = mlp._fastkron_backward, mlp._fastkron_precision
        if torch.compiler.is_compiling() and _agree(x, up.weight, gate.weight, bias, *after):
            y = gated_split((x, up.weight, gate.weight, bias, *after), backward == "save", activation, precision)
        else:
            options: dict[str, Any] = {"activation": activation, "layout": "stacked", "backward": backward, "precision": precision}

            def call(weight: Tensor) -> Tensor:
                if not whole:
                    return gated_linear(x, weight, bias=bias, **options)
                made: Tensor = gated_mlp(x, weight, down.weight, bias=bias, down_bias=down.bias, **options)
                return made

            if torch.compiler.is_compiling():
                y = call(join(up.weight, gate.weight))
            else:
                y = of_halves((x, up.weight, gate.weight, bias, *after), activation, backward, precision, call)
        return y if whole else down(y)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As torch's; what was converted, one weight after the other, is laid together again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        lay_together(self)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self).__mro__[2],), self.__getstate__()  # type: ignore[no-untyped-call]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        lay_together(self)


def _agree(x: Tensor, *tensors: Tensor | None) -> bool:
    """Whether nothing has to be converted first, or refused."""
    given = [t for t in tensors if t is not None]
    if torch.is_autocast_enabled(x.device.type) or x.shape[-1] != given[0].shape[-1]:
        return False
    return all([t.dtype == x.dtype and t.device == x.device for t in given]) and given[0].shape == given[1].shape


_classes: dict[type[nn.Module], type[GatedProjections]] = {}


def gated_class(base: type[nn.Module]) -> type[GatedProjections]:
    """The subclass of an MLP's class that its instances are given."""
    if base not in _classes:
        attributes = {"__module__": __name__, "__doc__": GatedProjections.__doc__}
        _classes[base] = type(f"Gated{base.__name__}", (GatedProjections, base), attributes)
    return _classes[base]


def _blank(base: type[nn.Module]) -> Any:
    """An object for a copy's, or a file's, state."""
    kind = gated_class(base)
    return kind.__new__(kind)


def enter(mlp: nn.Module, backward: str, precision: str | None) -> None:
    """Change an MLP, in place."""
    lay_together(mlp)
    mlp.__dict__.update(zip(OPTIONS, (backward, precision), strict=True))
    mlp.__class__ = gated_class(type(mlp))


def leave(mlp: nn.Module) -> None:
    """Change it back; without effect on one that is not changed."""
    if isinstance(mlp, GatedProjections):
        mlp.__class__ = type(mlp).__mro__[2]
        for name in OPTIONS:
            mlp.__dict__.pop(name, None)
        lay_apart(mlp)
