"""State dicts of the released KAT and FlashKAT models, brought to the names used here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from fastkron_py.runtime.errors import type_error, type_name

RELEASED_VERSION: Final = "A"
"""The denominator that the released kernels compute, though the paper's equation is that of version B."""

_NAMES: Final = {
    # KAT's, then FlashKAT's
    "weight_numerator": "numerator",
    "weight_denominator": "denominator",
    "numerator_v": "numerator",
    "denominator_v": "denominator",
}
_WRAPPERS: Final = ("state_dict_ema", "model_ema", "state_dict", "model")


def renamed(key: str) -> str | None:
    """The name here of a coefficient in a released checkpoint; None for every other key."""
    stem, dot, last = key.rpartition(".")
    return stem + dot + _NAMES[last] if last in _NAMES else None


def is_released_layout(state_dict: Mapping[str, Any]) -> bool:
    """Whether rational functions are named as in the released checkpoints."""
    return any(renamed(key) is not None for key in state_dict)


def convert_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Unwrap a released checkpoint and rename its coefficients.

    Released models' coefficients are of version A: load them into a model made with ``rational_version="A"``.

    Args:
        state_dict: of KAT or FlashKAT, bare or as their training script writes it, where averaged weights are preferred; or one of
            this library, which comes back as it is.

    Returns:
        Tensors by the names of `KATVisionTransformer`.

    Raises:
        TypeError: something that is no state dict.

    Example:
        >>> model.load_state_dict(convert_state_dict(torch.load(path, weights_only=True)))  # doctest: +SKIP
    """
    found: Any = state_dict
    while isinstance(found, Mapping) and (wrapper := next((w for w in _WRAPPERS if isinstance(found.get(w), Mapping)), None)):
        found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise type_error("state_dict", "tensors by name, or a checkpoint that holds such", type_name(state_dict))
    bare = {key.removeprefix("module."): value for key, value in found.items()}
    return {renamed(key) or key: value for key, value in bare.items()}
