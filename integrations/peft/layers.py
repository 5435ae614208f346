"""The forward pass of PEFT's LoKr layers without the adapters' weights."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lokr.layer import Conv1d
from peft.tuners.lokr.layer import Linear as LoKrLinear
from torch import Tensor

from fastkron_py.adapters.conv import Kernel, Window
from fastkron_py.adapters.factor import Factor
from fastkron_py.integrations.lokr import Adapter, kept_rows
from fastkron_py.integrations.replacement import Replacement
from fastkron_py.nn.modules import owns_result


class FastLoKr(Replacement):
    """PEFT's ``LoKrLayer.forward``, by `lokr_linear` and `lokr_conv`."""

    PREFIX = "Fast"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[*, in]`` to ``[*, out]``, or a convolution's."""
        layer: Any = self
        if layer.disable_adapters or layer.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        result: Tensor = layer.base_layer(x, *args, **kwargs)
        available, overwrites = layer._available_adapters, owns_result(layer.base_layer)
        for adapter in layer.active_adapters:
            if adapter in available and not (layer.training and _is_left_out(layer.module_dropout[adapter])):
                result = _added(layer, adapter, x, result, overwrites)
        return result.to(x.dtype)


def _is_left_out(rate: float) -> bool:
    """Module dropout, drawn as PEFT draws it, also for a rate of 0: the same numbers from the same seed."""
    drawn = torch.rand(1)
    return rate > 0 and bool(drawn <= rate)


def _added(layer: Any, name: str, x: Tensor, result: Tensor, overwrites: bool) -> Tensor:
    """The result plus that of an adapter; overwrites: whether the result may be written over."""
    if obstacle(layer, name) is not None:
        total: Tensor = result + layer._get_delta_activations(name, x)
        return total
    adapter = _adapter(layer, name)
    rate = layer.rank_dropout[name] if layer.training else 0
    if not rate:
        return adapter.added(x, result, overwrites)
    product = adapter.product(x)
    rows = kept_rows(layer.get_base_layer().weight.shape[0], rate, layer.rank_dropout_scale[name], torch.float32, x.device)
    return result + product * adapter.per_channel(rows).to(product.dtype)


def obstacle(layer: Any, name: str) -> str | None:
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
    w1 = Factor(layer.lokr_w1[name]) if name in layer.lokr_w1 else Factor(layer.lokr_w1_a[name], layer.lokr_w1_b[name])
    base = None if isinstance(layer, LoKrLinear) else layer.get_base_layer()
    return Adapter(w1, _kernel(layer, name, base), layer.scaling[name], None if base is None else Window.of(base))


def _kernel(layer: Any, name: str, base: Any) -> Kernel:
    if name in layer.lokr_w2:
        return Kernel(layer.lokr_w2[name])
    left, right = layer.lokr_w2_a[name], layer.lokr_w2_b[name]
    if base is None:
        return Kernel(right, left)
    if name in layer.lokr_t2:  # of a Conv1d it has a second window size of 1
        core = layer.lokr_t2[name]
        return Kernel(core.view(*core.shape[:2], *base.kernel_size), left.mT, right)
    return Kernel(right.unflatten(1, (-1, *base.kernel_size)), left)
