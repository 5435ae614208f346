"""LyCORIS: LoKr modules on `fastkron_py.lokr_linear`, which builds no weight.

``use_fastkron(network)`` is all that is needed. Needs the extra "lycoris": LyCORIS 4.0 or newer.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.adapters.adapter import Adapter, kept_rows, magnitude_ratio
from fastkron_py.adapters.conv import Window
from fastkron_py.integrations.replacement import Applied, Replacement, names_read, replace, revert_fastkron
from fastkron_py.integrations.versions import of_extra
from fastkron_py.runtime.errors import type_name

with of_extra("lycoris", "lycoris_lora", (4, 0)):
    from lycoris.modules.base import is_weight_only_fp8_linear
    from lycoris.modules.lokr import LokrModule

__all__ = ["revert_fastkron", "use_fastkron"]

# Names that the two forward passes read in the versions that were tested, 4.0 to 4.1.
_FORWARD: Final = frozenset(
    {"module_dropout", "training", "torch", "rand", "org_forward", "wd", "is_weight_only_fp8_linear", "org_module"}
    | {"bypass_mode", "bypass_forward", "multiplier", "_rebuild_forward"}
)
_REBUILD: Final = frozenset(
    {"org_forward", "_current_weight", "to", "device", "get_weight", "shape", "dtype", "scalar", "wd"}
    | {"apply_weight_decompose", "multiplier", "op", "kw_dict"}
)


def use_fastkron(network: nn.Module) -> Applied:
    """Let the LoKr modules of a LyCORIS network compute with `fastkron_py.lokr_linear`, which builds no weight.

    Call it after ``apply_to``, which registers the network's modules. Modules, parameters, their names and their memory stay as
    they are, and so do saving, merging, the multiplier, rank and module dropout, and weight decomposition, whose norms come from
    the factors.

    Args:
        network: a network, or one module of it.

    Returns:
        The modules replaced, those left alone with the reason, and `close` to revert. A second call replaces no module again.

    Raises:
        TypeError: no module.
        ValueError: a network in which there is nothing to replace: it says why.

    Example:
        >>> network = lycoris.create_lycoris(model, 1.0, linear_dim=16, linear_alpha=16, algo="lokr")
        >>> network.apply_to()
        >>> applied = use_fastkron(network)
        >>> len(applied.replaced)
        2
    """
    return replace(network, FastLoKr)


class FastLoKr(Replacement):
    """LyCORIS's ``LokrModule.forward``, by `lokr_linear` and `lokr_conv`."""

    PREFIX = "Fast"
    ARGUMENT = "network"
    EXPECTED = "LoKr modules of LyCORIS (its network, not the model) that can be replaced"

    @classmethod
    def is_candidate(cls, module: Any) -> bool:
        """Whether it is a LoKr module of LyCORIS."""
        return isinstance(module, LokrModule)

    @classmethod
    def obstacle(cls, module: Any) -> str | None:
        """Why a module is left alone, or None."""
        kind = type(module)
        if kind is not LokrModule:
            return f"its class {type_name(module)} is not LyCORIS's LokrModule"
        if "forward" in module.__dict__:
            return "its forward was replaced, as for a parametrization"
        if names_read(kind.forward) != _FORWARD or names_read(kind.__dict__.get("_rebuild_forward")) != _REBUILD:
            return "its forward is another version's, or was replaced by another library"
        return _obstacle(module)

    @classmethod
    def on_change(cls, module: Any) -> None:
        """Let the layer, or the adapter, that calls the module's forward call the present one."""
        layer: Any = module.org_module[0]
        holders: list[tuple[Any, str]] = [(layer, "forward")]
        holders += [(wrapper, "org_forward") for wrapper in getattr(layer, "_lycoris_wrappers", ())]
        for holder, name in holders:
            is_bound_here = getattr(holder.__dict__.get(name), "__self__", None) is module
            if is_bound_here:
                setattr(holder, name, module.forward)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[*, in]`` to ``[*, out]``, or a convolution's."""
        module: Any = self
        if _obstacle(module) is not None:
            return super().forward(x, *args, **kwargs)
        is_left_out = bool(module.module_dropout and module.training and torch.rand(1) < module.module_dropout)
        base: Tensor = module.org_forward(x, *args, **kwargs)
        if is_left_out:
            return base
        adapter, rows = _adapter(module), None
        if module.training and module.rank_dropout and not module.bypass_mode:
            weight_dtype = module.lokr_w1.dtype if module.use_w1 else module.lokr_w1_a.dtype
            rows = kept_rows(module.shape[0], module.rank_dropout, module.rank_dropout_scale, weight_dtype, x.device)
        if module.wd and not module.bypass_mode:
            return _decomposed(module, adapter, x, base, rows)
        adapter = adapter.fitting(x)._replace(scale=adapter.scale * module.multiplier)
        has_dropout = module.bypass_mode and module.training and isinstance(module.drop, nn.Dropout)
        if rows is None and not has_dropout:
            return adapter.added(x, base)
        product = adapter.product(x)
        change = module.drop(product) if rows is None else product * adapter.per_channel(rows).to(product.dtype)
        return base + change


def _obstacle(module: Any) -> str | None:
    """Why LyCORIS itself computes a module, or None."""
    if module.kw_dict.get("groups", 1) != 1:
        return f"its convolution has {module.kw_dict['groups']} groups"
    if module.wd and is_weight_only_fp8_linear(module.org_module[0]):
        return "its weight is decomposed, and the layer's of 8 bits"
    if not module.wd or module.bypass_mode:
        return None
    if not module.wd_on_out and module.rank_dropout:
        return "its weight is decomposed by inputs, with rank dropout"
    return None


def _adapter(module: Any) -> Adapter:
    """The adapter without the multiplier."""
    window = module.shape[2:]
    moves = Window(module.kw_dict["stride"], module.kw_dict["padding"], module.kw_dict["dilation"]) if window else None
    found = Adapter.of(lambda name: getattr(module, name, None), float(module.scale), moves, window)
    return found._replace(w1=found.w1.scaled(module.scalar))


def _decomposed(module: Any, adapter: Adapter, x: Tensor, base: Tensor, rows: Tensor | None) -> Tensor:
    """The result with a decomposed weight (DoRA): ``(W0 + K) * s``, with ``s = dora_scale / norms`` of its rows or columns.

    The base layer's product u = x W0^T is part of base already, so by rows ``base + (s - 1) * u + s * (x K^T)`` is left to add;
    by columns x is scaled, and W0 multiplies once more.
    """
    weight = module._current_weight().to(x.device)
    magnitudes = module.dora_scale.to(x.device)
    w1, w2 = adapter.w1.expanded().left, adapter.w2.expanded()
    dtype = magnitudes.dtype
    scaled = (w1 * adapter.scale).to(dtype)
    mask = None if rows is None else rows.to(dtype)
    ratio = magnitude_ratio(weight, magnitudes, scaled, w2.to(dtype), by_row=module.wd_on_out, row_mask=mask)
    adapter = adapter.fitting(x)
    if module.multiplier != 1:
        ratio = module.multiplier * (ratio - 1) + 1
    if not module.wd_on_out:
        change, factor = (adapter.per_channel(r).to(x.dtype) for r in (ratio - 1, ratio))
        return adapter.added(x * factor, base + module.op(x * change, weight, None, **module.kw_dict))
    change, factor = (adapter.per_channel(r).to(base.dtype) for r in (ratio - 1, ratio if mask is None else ratio * mask))
    return torch.addcmul(base, _of_weight(module, x, base, weight), change) + factor * adapter.product(x)


def _of_weight(module: Any, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
    """The base layer's result without its bias: base itself, less the bias, where nothing else has changed it."""
    layer = module.org_module[0]
    plain = type(layer) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and getattr(layer, "padding_mode", "zeros") == "zeros"
    if not plain or getattr(module.org_forward, "__func__", None) is not type(layer).forward:
        return module.op(x, weight, None, **module.kw_dict)
    if layer.bias is None:
        return base
    return base - layer.bias.detach().view(-1, *[1] * (weight.ndim - 2)).to(base.dtype)
