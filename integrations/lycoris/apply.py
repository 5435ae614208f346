"""`use_fastkron`: which LoKr modules of a LyCORIS network are changed, which are not and why, and the way back."""

from __future__ import annotations

from typing import Any, Final

from lycoris.modules.lokr import LokrModule
from torch import nn

from fastkron_py.integrations.lycoris.modules import FastLoKr, obstacle
from fastkron_py.integrations.replacement import Applied, Patch, names_read
from fastkron_py.runtime.errors import type_name

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
    return _PATCH.apply(network, Applied)


def revert_fastkron(network: nn.Module) -> None:
    """Revert the change by `use_fastkron`, also in a copy of the network or in one from a file.

    Args:
        network: the network, or a part of one.

    Raises:
        TypeError: no module.

    Example:
        >>> network = lycoris.create_lycoris(model, 1.0, linear_dim=16, linear_alpha=16, algo="lokr")
        >>> network.apply_to()
        >>> applied = use_fastkron(network)
        >>> revert_fastkron(network)
    """
    _PATCH.revert(network)


def _rebind(module: Any) -> None:
    """Let the layer, or the adapter, that calls the module's forward call the present one."""
    layer: Any = module.org_module[0]
    holders: list[tuple[Any, str]] = [
        (layer, "forward"),
        *[(wrapper, "org_forward") for wrapper in getattr(layer, "_lycoris_wrappers", ())],
    ]
    for holder, name in holders:
        is_bound_here = getattr(holder.__dict__.get(name), "__self__", None) is module
        if is_bound_here:
            setattr(holder, name, module.forward)


def _is_candidate(module: Any) -> bool:
    return isinstance(module, LokrModule)


def _reason(module: Any) -> str | None:
    """Why a module is left alone, or None."""
    kind = type(module)
    if kind is not LokrModule:
        return f"its class {type_name(module)} is not LyCORIS's LokrModule"
    if "forward" in module.__dict__:
        return "its forward was replaced, as for a parametrization"
    if names_read(kind.forward) != _FORWARD or names_read(kind.__dict__.get("_rebuild_forward")) != _REBUILD:
        return "its forward is another version's, or was replaced by another library"
    return obstacle(module)


_EXPECTED: Final = "LoKr modules of LyCORIS (its network, not the model) that can be replaced"
_PATCH: Final = Patch("network", _EXPECTED, FastLoKr, _is_candidate, _reason, moved=_rebind)
