"""The gated form of an MLP: the forward pass that `use_fastkron` gives to it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.gated.api import gated_linear, gated_mlp
from fastkron_py.integrations.replacement import Replacement
from fastkron_py.integrations.transformers.adapters import added, base_of
from fastkron_py.integrations.transformers.form import Form, read_form
from fastkron_py.nn.modules import is_plain_linear
from fastkron_py.runtime.checks import HALF_DTYPES

OPTIONS: Final = ("_fastkron_backward", "_fastkron_precision")


class GatedProjections(Replacement):
    """The forward pass of a gated MLP, in place of that of the next class."""

    PREFIX = "Gated"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``[..., in]`` to ``[..., out]``."""
        mlp: Any = self
        form: Form = mlp._fastkron_form
        down = mlp._modules[form.down]
        wide = tuple([mlp._modules[name] for name in dict.fromkeys((form.up, form.gate))])
        bases = [base_of(module) for module in wide]
        if len(args) != 1 or kwargs or None in bases or not form.holds(mlp) or _is_wider(down, bases[0]):
            return super().forward(*args, **kwargs)
        if (bases[0].bias is None) != (bases[-1].bias is None):
            return super().forward(*args, **kwargs)
        options: dict[str, Any] = {
            "activation": form.activation,
            "backward": mlp._fastkron_backward,
            "precision": mlp._fastkron_precision,
            **_operands(form.layout, bases, added(wide, args[0], swap=form.layout == "gate, up")),
        }
        if is_plain_linear(down):
            y: Tensor = gated_mlp(args[0], options.pop("weight"), down.weight, down_bias=down.bias, **options)
        else:
            y = down(gated_linear(args[0], **options))
        return y if form.scale == 1 else y * form.scale


def _is_wider(down: Any, up: Any) -> bool:
    """Whether only the down projection is in float32, as in T5, whose forward pass converts what it gets."""
    weight = getattr(down, "weight", None)
    return isinstance(weight, Tensor) and weight.dtype == torch.float32 and up.weight.dtype in HALF_DTYPES


def _operands(layout: str, bases: list[Any], added: Tensor | None) -> dict[str, Any]:
    """Weight and bias, as of `gated_linear`, of two projections or of one that holds both, which adapters add ``[..., 2 H]`` to."""
    weights, biases = [base.weight for base in bases], [base.bias for base in bases if base.bias is not None]
    if layout:
        weights, biases = [[half for t in whole for half in t.unflatten(0, (2, -1)).unbind()] for whole in (weights, biases)]
    if layout == "gate, up":
        weights, biases = weights[::-1], biases[::-1]
    if added is None:
        return {"weight": tuple(weights), "bias": tuple(biases) or None}
    added = added.unflatten(-1, (2, -1))
    bias = added + torch.stack(biases) if biases else added
    return {"weight": tuple(weights), "bias": bias if bias.ndim > 2 else tuple(bias.unbind())}


def set_form(mlp: Any) -> None:
    """Give an MLP its form, or, if it has been changed back, take it."""
    if isinstance(mlp, GatedProjections):
        mlp.__dict__["_fastkron_form"] = read_form(mlp)
    else:
        mlp.__dict__.pop("_fastkron_form", None)
