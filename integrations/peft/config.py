"""PEFT's configuration of the LoKr layers of a model."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from peft import LoKrConfig
from torch import nn

from fastkron_py.nn.lokr_base import LoKrLayer
from fastkron_py.nn.lokr_files import common_factor, lokr_layers


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


def _rank(layer: LoKrLayer) -> int:
    """The layer's; of whole factors one by which PEFT makes whole factors."""
    whole = layer.lokr_w1 is not None and layer.lokr_w2 is not None
    return max(layer.lokr_w2.shape[:2]) if whole and layer.lokr_w2 is not None else layer.options.rank
