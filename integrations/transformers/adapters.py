"""LoRA adapters of PEFT on the wide projections of a gated MLP: their sums are added before the activation, in the fused product."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fastkron_py.nn.modules import is_hooked, is_plain_linear


def base_of(module: Any) -> Any:
    """A plain linear layer, or the one inside a LoRA layer which only adds to its result; None for other modules.

    DoRA and other variants scale that result. A layer that is merged and disabled is unmerged by its own forward pass.
    """
    if is_plain_linear(module):
        return module
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or type(module) is not lora.Linear or is_hooked(module) or not is_plain_linear(module.base_layer):
        return None
    if module.lora_variant or (module.merged and module.disable_adapters):
        return None
    inner = [*module.lora_A.values(), *module.lora_B.values()]
    is_plain = all([is_plain_linear(layer) for layer in inner]) and all([layer.bias is None for layer in module.lora_B.values()])
    return module.base_layer if is_plain else None


def added(projections: tuple[Any, ...], x: Tensor, swap: bool) -> Tensor | None:
    """``[..., 2 H]``, what adapters add to the results of both projections, or of one that holds both; None if there is no adapter.

    Swapped, the second half comes first.
    """
    if all([is_plain_linear(module) for module in projections]):
        return None
    factors = [_factors(module, x) for module in reversed(projections)][::-1]  # dropout draws for the gate first, as models do
    narrow = torch.cat([h for h, _ in factors], -1)
    weight = torch.block_diag(*[b for _, b in factors])
    return torch.nn.functional.linear(narrow, weight.roll(len(weight) // 2, 0) if swap else weight)


def _factors(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., R]`` and ``[H, R]``, whose product the module's active adapters add, in the dtype of x."""
    base = base_of(module)
    narrow, wide = [x.new_empty(*x.shape[:-1], 0)], [x.new_empty(base.out_features, 0)]
    if base is not module and not (module.merged or module.disable_adapters):
        for name in module.active_adapters:
            if name in module.lora_A:
                operand = module.lora_dropout[name](module._cast_input_dtype(x, module.lora_A[name].weight.dtype))
                narrow.append((module.lora_A[name](operand) * module.scaling[name]).to(x.dtype))
                wide.append(module.lora_B[name].weight.to(x.dtype))
    return torch.cat(narrow, -1), torch.cat(wide, -1)
