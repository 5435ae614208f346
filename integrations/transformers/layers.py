"""The gated form of an MLP: the forward pass that `use_fastkron` gives to it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.gated.api import gated_linear, gated_mlp
from fastkron_py.integrations.replacement import Replacement
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
        up, gate, down = (mlp._modules[name] for name in form[:3])
        plain = len(args) == 1 and not kwargs and form.holds(mlp) and is_plain_linear(up) and is_plain_linear(gate)
        if not plain or (up.bias is None) != (gate.bias is None) or _is_wider(down, up):
            return super().forward(*args, **kwargs)
        options: dict[str, Any] = {
            "activation": form.activation,
            "backward": mlp._fastkron_backward,
            "precision": mlp._fastkron_precision,
            **_operands(form.layout, up, gate),
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


def _operands(layout: str, up: Any, gate: Any) -> dict[str, Any]:
    """Weight, bias and layout, as of `gated_linear`, of two projections or of one that holds both: views."""
    if layout == "":
        return {"weight": (up.weight, gate.weight), "bias": None if up.bias is None else (up.bias, gate.bias)}
    weight, bias = up.weight.unflatten(0, (2, -1)), None if up.bias is None else up.bias.unflatten(0, (2, -1))
    if layout == "up, gate":
        return {"weight": weight, "bias": bias, "layout": "stacked"}
    return {"weight": weight.unbind()[::-1], "bias": None if bias is None else bias.unbind()[::-1]}


def set_form(mlp: Any) -> None:
    """Give an MLP its form, or, if it has been changed back, take it."""
    if isinstance(mlp, GatedProjections):
        mlp.__dict__["_fastkron_form"] = read_form(mlp)
    else:
        mlp.__dict__.pop("_fastkron_form", None)
