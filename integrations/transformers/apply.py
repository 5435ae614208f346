"""`apply_to_llama`: which MLPs of a model are changed, which are not and why, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from fastkron_py.gated.api import BACKWARDS
from fastkron_py.integrations.replacement import Applied, Patch, names_read
from fastkron_py.integrations.transformers.layers import OPTIONS, GatedProjections, activation_name
from fastkron_py.nn.modules import is_hooked, is_plain_linear
from fastkron_py.runtime.checks import check_choice, check_precision
from fastkron_py.runtime.errors import type_name

# Classes whose forward is down_proj(act_fn(gate_proj(x)) * up_proj(x)), by the family that transformers files them under.
FAMILIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama": "LlamaMLP",
        "mistral": "MistralMLP",
        "qwen2": "Qwen2MLP",
        "qwen3": "Qwen3MLP",
        "gemma": "GemmaMLP",
        "gemma2": "Gemma2MLP",
        "gemma3": "Gemma3MLP",
    }
)
_PARTS: Final = ("gate_proj", "up_proj", "down_proj", "act_fn")
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AppliedToLlama(Applied):
    """The result of `apply_to_llama`: the MLPs that compute with `gated_mlp`, and those left alone."""


def apply_to_llama(model: nn.Module, *, backward: str = "save", precision: str | None = None) -> AppliedToLlama:
    """Let the MLPs of a Hugging Face model compute with `fastkron_py.functional.gated_mlp`.

    For Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2 and Gemma3. Modules, parameters, their names and their memory stay as they are, so
    optimizers, states, `save_pretrained` and checkpoints of either are the other's. An MLP whose projections get an adapter or a hook
    later on, or another activation, computes as before.

    Args:
        model: a model, or a part of one, on the device that it is to run on or not.
        backward: "save" or "recompute", as in `gated_linear`.
        precision: of products in float32, as in `kron_matmul`.

    Returns:
        The modules replaced, those left alone with the reason, and `close` to revert. A second call replaces no module again.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown backward or precision; a model in which there is nothing to replace: it says why.

    Example:
        >>> applied = apply_to_llama(model)
        >>> logits = model(input_ids).logits
        >>> applied.close()
    """
    check_choice("backward", backward, BACKWARDS)
    check_precision(precision)
    return _PATCH.apply(model, AppliedToLlama, backward, precision)


def revert_llama(model: nn.Module) -> None:
    """Revert the change by `apply_to_llama`, also in a copy of the model or in one from a file, which have no `AppliedToLlama`.

    Args:
        model: the model, or a part of one.

    Raises:
        TypeError: no module.

    Example:
        >>> applied = apply_to_llama(model)
        >>> revert_llama(copy.deepcopy(model))
    """
    _PATCH.revert(model)


# ---- obstacles --------------------------------------------------------------------


def _is_gated_mlp(module: nn.Module) -> bool:
    return all([isinstance(getattr(module, name, None), nn.Module) for name in _PARTS[:3]])


def _obstacle(mlp: Any) -> str | None:
    """Why an MLP is left alone, or None."""
    kind = type(mlp)
    known = [f"transformers.models.{family}.modeling_{family}.{name}" for family, name in FAMILIES.items()]
    if f"{kind.__module__}.{kind.__qualname__}" not in known or set(mlp._modules) != set(_PARTS):
        return f"its class {kind.__name__} is not among {', '.join(FAMILIES.values())} of transformers"
    if "forward" in mlp.__dict__ or names_read(kind.forward) != set(_PARTS):
        return "its forward is not down_proj(act_fn(gate_proj(x)) * up_proj(x)): another version's, or replaced by another library"
    if activation_name(mlp.act_fn) is None:
        return f"its activation {type(mlp.act_fn).__name__} is not supported, or has a hook"
    for name in _PARTS[:2]:
        reason = _projection_obstacle(name, getattr(mlp, name))
        if reason is not None:
            return reason
    return _pair_obstacle(mlp)


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


def _pair_obstacle(mlp: Any) -> str | None:
    up, gate = mlp.up_proj, mlp.gate_proj
    for what in ("shape", "dtype", "device"):
        if getattr(up.weight, what) != getattr(gate.weight, what):
            return f"its gate_proj and up_proj differ in {what}"
    if (up.bias is None) != (gate.bias is None):
        return "only one of its gate_proj and up_proj has a bias"
    return None


_EXPECTED: Final = f"MLPs that can be replaced, of {', '.join(FAMILIES.values())}"
_PATCH: Final = Patch("model", _EXPECTED, GatedProjections, _is_gated_mlp, _obstacle, OPTIONS)
