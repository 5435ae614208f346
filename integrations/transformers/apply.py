"""`use_fastkron`: which MLPs of a model are changed, which are not and why, and the way back."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from fastkron_py.gated.api import BACKWARDS
from fastkron_py.integrations.replacement import Applied, Patch
from fastkron_py.integrations.transformers.adapters import base_of
from fastkron_py.integrations.transformers.form import read_form
from fastkron_py.integrations.transformers.layers import OPTIONS, GatedProjections, set_form
from fastkron_py.nn.modules import is_hooked, is_plain_linear
from fastkron_py.runtime.checks import check_choice, check_precision
from fastkron_py.runtime.errors import type_name

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def use_fastkron(model: nn.Module, *, backward: str = "save", precision: str | None = None) -> Applied:
    """Let the gated MLPs of a Hugging Face model compute with `fastkron_py.functional.gated_mlp`.

    A module is one if its forward pass is ``scale * down(up(x) * act(gate(x)))``, with two weights for up and gate or one weight for
    both. That is found by running the forward pass on a few numbers, not by its class: models of other libraries are served too.
    Numbers such as clamps and multipliers are those that the module has during this call.

    Modules, parameters, their names and their memory stay as they are, so optimizers, states, `save_pretrained` and checkpoints of either
    are the other's. An MLP whose projections get an adapter or a hook later on, or another activation, computes as before, and so does one
    with a dropout that is active.

    Args:
        model: a model, or a part of one, on the device that it is to run on or not.
        backward: "save" or "recompute", as in `gated_linear`.
        precision: of products in float32, as in `kron_matmul`.

    Returns:
        The modules replaced, those left alone with the reason, and `close` to revert; ``print`` shows how many of which class. A second
        call replaces no module again.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown backward or precision; a model in which there is nothing to replace: it says why.

    Example:
        >>> applied = use_fastkron(model)
        >>> logits = model(input_ids).logits
        >>> applied.close()
    """
    check_choice("backward", backward, BACKWARDS)
    check_precision(precision)
    return _PATCH.apply(model, Applied, backward, precision)


def revert_fastkron(model: nn.Module) -> None:
    """Revert the change by `use_fastkron`, also in a copy of the model or in one from a file, which have no `Applied`.

    Args:
        model: the model, or a part of one.

    Raises:
        TypeError: no module.

    Example:
        >>> applied = use_fastkron(model)
        >>> revert_fastkron(copy.deepcopy(model))
    """
    _PATCH.revert(model)


# ---- obstacles --------------------------------------------------------------------


def _is_candidate(module: Any) -> bool:
    return read_form(module) is not None


def _obstacle(mlp: Any) -> str | None:
    """Why an MLP is left alone, or None."""
    if "forward" in mlp.__dict__:
        return "its forward was replaced by another library"
    form = read_form(mlp)
    if form is None or isinstance(form, str):
        return form
    bases = {name: base_of(getattr(mlp, name)) or getattr(mlp, name) for name in (form.gate, form.up)}
    for name, linear in bases.items():
        reason = _projection_obstacle(name, linear)
        if reason is not None:
            return reason
    hooked = [name for name, child in form.others if is_hooked(child)]
    if hooked:
        return f"its {hooked[0]} has hooks"
    return _pair_obstacle(form.gate, form.up, bases[form.gate], bases[form.up])


def _projection_obstacle(name: str, linear: Any) -> str | None:
    if type(linear) is not nn.Linear:
        return f"its {name} is {type_name(linear)}, an adapter's or a quantised layer"
    if is_hooked(linear):
        return f"its {name} has hooks"
    weight = linear.weight
    if not is_plain_linear(linear):
        return f"the weight of its {name} is {type_name(weight)}, no plain parameter"
    if weight.dtype not in _DTYPES:
        return f"the weight of its {name} is of dtype {weight.dtype}"
    return None


def _pair_obstacle(gate_name: str, up_name: str, gate: Any, up: Any) -> str | None:
    for what in ("shape", "dtype", "device"):
        if getattr(up.weight, what) != getattr(gate.weight, what):
            return f"its {gate_name} and {up_name} differ in {what}"
    if (up.bias is None) != (gate.bias is None):
        return f"only one of its {gate_name} and {up_name} has a bias"
    return None


_EXPECTED: Final = "gated MLPs, down(up(x) * act(gate(x))), that can be replaced"
_PATCH: Final = Patch("model", _EXPECTED, GatedProjections, _is_candidate, _obstacle, OPTIONS, set_form)
