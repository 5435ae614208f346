"""PEFT: LoKr adapters on `fastkron_py.lokr_linear`, which builds no weight; and its configuration of a model's LoKr layers.

``use_fastkron(model)`` is all that is needed. Needs the extra "peft": PEFT 0.18 or newer.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.adapters.adapter import Adapter, kept_rows
from fastkron_py.adapters.conv import Window
from fastkron_py.integrations.replacement import Applied, Replacement, names_read, replace, revert_fastkron
from fastkron_py.integrations.versions import of_extra
from fastkron_py.nn.lokr_files import common_factor, lokr_layers
from fastkron_py.nn.modules import owns_result
from fastkron_py.runtime.errors import type_name

with of_extra("peft", "peft", (0, 18)):
    from peft import LoKrConfig
    from peft.tuners.lokr.layer import Conv1d, Conv2d, LoKrLayer
    from peft.tuners.lokr.layer import Linear as LoKrLinear

__all__ = ["lokr_config", "revert_fastkron", "use_fastkron"]

# Names that the forward pass reads in the versions that were tested, 0.18 to 0.21.
_FORWARD: Final = frozenset(
    {"dtype", "disable_adapters", "merged", "unmerge", "base_layer", "active_adapters", "_available_adapters"}
    | {"module_dropout", "training", "torch", "rand", "_get_delta_activations", "to"}
)


def use_fastkron(model: nn.Module) -> Applied:
    """Let the LoKr layers of a PEFT model compute with `fastkron_py.lokr_linear`, which builds no weight.

    Modules, parameters, their names and their memory stay as they are, and so do saving, merging, `disable_adapter`, several
    adapters, and rank and module dropout. Adapters that are added to the same layers later use it too. Layers that
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
    return replace(model, FastLoKr)


class FastLoKr(Replacement):
    """PEFT's ``LoKrLayer.forward``, by `lokr_linear` and `lokr_conv`."""

    PREFIX = "Fast"
    EXPECTED = "LoKr layers of PEFT (peft.get_peft_model with a LoKrConfig) that can be replaced"

    @classmethod
    def is_candidate(cls, module: Any) -> bool:
        """Whether it is a LoKr layer of PEFT."""
        return isinstance(module, LoKrLayer)

    @classmethod
    def obstacle(cls, module: Any) -> str | None:
        """Why a layer is left alone, or None."""
        if type(module) not in (LoKrLinear, Conv2d, Conv1d):
            return f"its class {type_name(module)} is not among PEFT's Linear, Conv2d and Conv1d"
        if "forward" in module.__dict__ or names_read(type(module).forward) != _FORWARD:
            return "its forward is another version's, or was replaced by another library"
        found = [_obstacle(module, adapter) for adapter in module._available_adapters]
        return found[0] if found and all(found) else None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[*, in]`` to ``[*, out]``, or a convolution's."""
        layer: Any = self
        if layer.disable_adapters or layer.merged:
            return super().forward(x, *args, **kwargs)
        result: Tensor = layer.base_layer(x, *args, **kwargs)
        available, overwrites = layer._available_adapters, owns_result(layer.base_layer)
        for adapter in layer.active_adapters:
            if adapter in available and not (layer.training and _is_left_out(layer.module_dropout[adapter])):
                result = _added(layer, adapter, x, result, overwrites)
        return result.to(x.dtype)


def _is_left_out(rate: float) -> bool:
    """Module dropout, sampled as PEFT samples it, also for a rate of 0: the same numbers from the same seed."""
    drawn = torch.rand(1)
    return rate > 0 and bool(drawn <= rate)


def _added(layer: Any, name: str, x: Tensor, result: Tensor, overwrites: bool) -> Tensor:
    """The result plus that of an adapter; overwrites: whether the result may be written over."""
    if _obstacle(layer, name) is not None:
        return result + layer._get_delta_activations(name, x)
    adapter = _adapter(layer, name).fitting(x)
    rate = layer.rank_dropout[name] if layer.training else 0
    if not rate:
        return adapter.added(x, result, overwrites)
    product = adapter.product(x)
    rows = kept_rows(layer.get_base_layer().weight.shape[0], rate, layer.rank_dropout_scale[name], torch.float32, x.device)
    return result + product * adapter.per_channel(rows).to(product.dtype)


def _obstacle(layer: Any, name: str) -> str | None:
    """Why PEFT itself computes an adapter, or None."""
    if isinstance(layer, LoKrLinear):
        return None
    base = layer.get_base_layer()
    if base.groups != 1:
        return f"its convolution has {base.groups} groups"
    if isinstance(layer, Conv1d) and name in layer.lokr_w2:
        return "PEFT's weight of a Conv1d with a whole lokr_w2 is no Kronecker product"
    return None


def _adapter(layer: Any, name: str) -> Adapter:
    def get(parameter: str) -> Any:
        return getattr(layer, parameter).get(name)

    if isinstance(layer, LoKrLinear):
        return Adapter.of(get, layer.scaling[name])
    base = layer.get_base_layer()
    return Adapter.of(get, layer.scaling[name], Window.of(base), base.kernel_size)


# ---- the configuration -----------------------------------------------------------------------------


def lokr_config(model: nn.Module, **options: Any) -> LoKrConfig:
    """The configuration with which PEFT reads ``nn.lokr_state(model, "peft")``.

    Args:
        model: with `nn.LoKrLinear` or `nn.LoKrConv2d` layers.
        **options: more of PEFT's, such as task_type.

    Raises:
        TypeError: no module.
        ValueError: a model without such layers, or factors that PEFT cannot have in one configuration.

    Example:
        >>> from fastkron_py.nn import LoKrLinear, lokr_state
        >>> ours = torch.nn.Sequential(LoKrLinear(64, 64, rank=2))
        >>> theirs = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 64)), lokr_config(ours))
        >>> peft.set_peft_model_state_dict(theirs, lokr_state(ours, "peft")).unexpected_keys
        []
    """
    layers = lokr_layers(model)
    ranks = {name: _rank(layer) for name, layer in layers.items()}
    common, alphas = Counter(ranks.values()).most_common(1)[0][0], {name: layers[name].scale * rank for name, rank in ranks.items()}
    return LoKrConfig(
        r=common,
        alpha=common,
        rank_pattern={f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != common},
        alpha_pattern={f"^{re.escape(name)}": alpha for name, alpha in alphas.items() if alpha != common},
        target_modules="|".join(re.escape(name) for name in layers),
        decompose_factor=common_factor(layers),
        decompose_both=any(layer.lokr_w1 is None for layer in layers.values()),
        use_effective_conv2d=any(layer.lokr_t2 is not None for layer in layers.values()),
        **options,
    )


def _rank(layer: Any) -> int:
    """The layer's; of whole factors one by which PEFT makes whole factors."""
    whole = layer.lokr_w1 is not None and layer.lokr_w2 is not None
    return int(max(layer.lokr_w2.shape[:2]) if whole else layer.options.rank)
