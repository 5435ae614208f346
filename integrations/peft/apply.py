"""`use_fastkron`: which LoKr layers of a PEFT model are changed, which are not and why, and the way back."""

from __future__ import annotations

from typing import Any, Final

from peft.tuners.lokr.layer import Conv1d, Conv2d, Linear, LoKrLayer
from torch import nn

from fastkron_py.integrations.peft.layers import FastLoKr, obstacle
from fastkron_py.integrations.replacement import Applied, Patch, names_read
from fastkron_py.runtime.errors import type_name

# Names that the forward pass reads in the versions that were tested, 0.18 to 0.21.
_FORWARD: Final = frozenset(
    {"dtype", "disable_adapters", "merged", "unmerge", "base_layer", "active_adapters", "_available_adapters"}
    | {"module_dropout", "training", "torch", "rand", "_get_delta_activations", "to"}
)


def use_fastkron(model: nn.Module) -> Applied:
    """Let the LoKr layers of a PEFT model compute with `fastkron_py.lokr_linear`, which builds no weight.

    Modules, parameters, their names and their memory stay as they are, and so do saving, merging, `disable_adapter`, several
    adapters, and rank and module dropout. Adapters that are added to the same layers later compute in the same way. Layers that
    PEFT makes later do not: call it again.

    Args:
        model: a model, or a part of one.

    Returns:
        The layers replaced, those left alone with the reason, and `close` to revert. A second call replaces no layer again.

    Raises:
        TypeError: no module.
        ValueError: a model in which there is nothing to replace: it says why.

    Example:
        >>> model = peft.get_peft_model(model, peft.LoKrConfig(target_modules=["q_proj", "v_proj"]))
        >>> applied = use_fastkron(model)
        >>> len(applied.replaced)
        2
    """
    return _PATCH.apply(model, Applied)


def revert_fastkron(model: nn.Module) -> None:
    """Revert the change by `use_fastkron`, also in a copy of the model or in one from a file.

    Args:
        model: the model, or a part of one.

    Raises:
        TypeError: no module.

    Example:
        >>> model = peft.get_peft_model(model, peft.LoKrConfig(target_modules=["q_proj", "v_proj"]))
        >>> applied = use_fastkron(model)
        >>> revert_fastkron(copy.deepcopy(model))
    """
    _PATCH.revert(model)


def _is_candidate(module: Any) -> bool:
    return isinstance(module, LoKrLayer)


def _reason(layer: Any) -> str | None:
    """Why a layer is left alone, or None."""
    if type(layer) not in (Linear, Conv2d, Conv1d):
        return f"its class {type_name(layer)} is not among PEFT's Linear, Conv2d and Conv1d"
    if "forward" in layer.__dict__ or names_read(type(layer).forward) != _FORWARD:
        return "its forward is another version's, or was replaced by another library"
    found = [obstacle(layer, adapter) for adapter in layer._available_adapters]
    return found[0] if found and all(found) else None


_EXPECTED: Final = "LoKr layers of PEFT (peft.get_peft_model with a LoKrConfig) that can be replaced"
_PATCH: Final = Patch("model", _EXPECTED, FastLoKr, _is_candidate, _reason)
