"""A layer's configuration as part of its state: the same tensors in a layer of another configuration are another function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.nn.memory import has_memory
from fastkron_py.runtime.errors import value_error

EXTRA: Final = "_extra_state"  # torch's name for it


class Configured(nn.Module):
    """A module that rejects a state of another configuration. A state without one, of an earlier version, loads as it is."""

    def configuration(self) -> dict[str, Any]:
        """What the state's tensors mean, in JSON's types."""
        raise NotImplementedError

    def configuration_in(self, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """The values that a state holds; none if it was saved by an earlier version."""
        extra = state.get(prefix + EXTRA)
        if not isinstance(extra, Tensor) or not has_memory(extra):
            return {}
        try:
            return dict(json.loads(bytes(extra.to("cpu", torch.uint8).tolist())))
        except (TypeError, ValueError):
            raise value_error(f"state_dict[{prefix + EXTRA!r}]", "a configuration", "other numbers") from None

    def get_extra_state(self) -> Tensor:
        """The configuration as JSON's bytes: a tensor can be saved in every format."""
        return torch.tensor(list(json.dumps(self.configuration()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """The configuration was compared before anything was loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        own, given = self.configuration(), self.configuration_in(state_dict, prefix)
        others = [name for name, value in own.items() if name in given and given[name] != value]
        if others:
            mine, theirs = (", ".join(f"{name}={of[name]!r}" for name in others) for of in (own, given))
            raise value_error(f"state_dict[{prefix + EXTRA!r}]", f"a state of a {type(self).__name__} with {mine}", theirs)
        state_dict.setdefault(prefix + EXTRA, self.get_extra_state())  # which strict loading counts
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
