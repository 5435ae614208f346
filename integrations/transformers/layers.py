"""Gated MLPs as fused products: their forward pass, which modules get it, and `use_fastkron`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastkron_py.gated.api import BACKWARDS, gated_linear, gated_mlp
from fastkron_py.integrations.replacement import Applied, Replacement, replace
from fastkron_py.integrations.transformers.adapters import added, base_of
from fastkron_py.integrations.transformers.form import Form, read_form
from fastkron_py.nn.modules import is_hooked, is_plain_linear
from fastkron_py.runtime.checks import HALF_DTYPES, REAL_DTYPES, check_choice, check_precision
from fastkron_py.runtime.errors import type_name


def use_fastkron(model: nn.Module, *, backward: str = "save", precision: str | None = None) -> Applied:
    """Let the gated MLPs of a Hugging Face model compute with `fastkron_py.functional.gated_mlp`.

    A gated MLP is a module whose forward pass is ``scale * down(up(x) * act(gate(x)))``, with two weights for up and gate or one for
    both. It is recognized by running its forward pass on a few numbers, not by its class, so models of other libraries work too.
    Constants such as clamps are read during this call.

    Modules, parameters, their names and their memory stay, so optimizers, states, `save_pretrained` and checkpoints do not change. If a
    projection gets an adapter or a hook later, or the activation changes, or dropout is active, the original forward pass runs.

    Args:
        model: a model, or a part of one, on the device that it is to run on or not.
        backward: "save" or "recompute", as in `gated_linear`.
        precision: of products in float32, as in `kron_matmul`.

    Returns:
        The modules replaced, those left alone with the reason, and `close` to revert; ``print`` shows a count for each class. A second
        call replaces no module again.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown backward or precision; a model without a module to replace; the message says why.

    Example:
        >>> applied = use_fastkron(model)
        >>> logits = model(input_ids).logits
        >>> applied.close()
    """
    check_choice("backward", backward, BACKWARDS)
    check_precision(precision)
    return replace(model, GatedProjections, backward, precision)


class GatedProjections(Replacement):
    """The forward pass of a gated MLP, in place of that of the next class."""

    PREFIX = "Gated"
    EXPECTED = "gated MLPs, down(up(x) * act(gate(x))), that can be replaced"
    OPTIONS = ("_fastkron_backward", "_fastkron_precision")

    @classmethod
    def is_candidate(cls, module: Any) -> bool:
        """Whether it looks like a gated MLP."""
        return read_form(module) is not None

    @classmethod
    def obstacle(cls, module: Any) -> str | None:
        """Why an MLP is left alone, or None."""
        if "forward" in module.__dict__:
            return "its forward was replaced by another library"
        form = read_form(module)
        return next(_obstacles(module, form), None) if isinstance(form, Form) else form

    @classmethod
    def on_change(cls, module: Any) -> None:
        """Give an MLP its form, or, if it has been changed back, take it."""
        if isinstance(module, GatedProjections):
            module.__dict__["_fastkron_form"] = read_form(module)
        else:
            module.__dict__.pop("_fastkron_form", None)

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
    return {"weight": tuple(weights), "bias": added + torch.stack(biases) if biases else added}


def _obstacles(module: Any, form: Form) -> Iterator[str]:
    """Why an MLP of this form is left alone."""
    bases = {name: base_of(getattr(module, name)) or getattr(module, name) for name in (form.gate, form.up)}
    for name, linear in bases.items():
        if type(linear) is not nn.Linear:
            yield f"its {name} is {type_name(linear)}, an adapter's or a quantised layer"
        elif is_hooked(linear):
            yield f"its {name} has hooks"
        elif not is_plain_linear(linear):
            yield f"the weight of its {name} is {type_name(linear.weight)}, no plain parameter"
        elif linear.weight.dtype not in REAL_DTYPES:
            yield f"the weight of its {name} is of dtype {linear.weight.dtype}"
    yield from [f"its {name} has hooks" for name, child in form.others if is_hooked(child)]
    gate, up = bases[form.gate], bases[form.up]
    for what in ("shape", "dtype", "device"):
        if getattr(up.weight, what) != getattr(gate.weight, what):
            yield f"its {form.gate} and {form.up} differ in {what}"
    if (up.bias is None) != (gate.bias is None):
        yield f"only one of its {form.gate} and {form.up} has a bias"
