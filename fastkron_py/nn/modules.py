"""What layers share: memory of parameters, a configuration in their state, what hooks and compilers may do with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from fastkron_py.runtime.eager import is_tracing
from fastkron_py.runtime.errors import type_error, value_error


def is_materialized(t: Tensor) -> bool:
    """Whether numbers can be written to a tensor and read again; initial values are for those alone."""
    from torch._subclasses.fake_tensor import is_fake

    return not (t.is_meta or is_fake(t))


EXTRA: Final = "_extra_state"  # torch's name for it


class Configured(nn.Module):
    """A module that rejects a state of another configuration. A state without one, of an earlier version, loads as it is."""

    def configuration(self) -> dict[str, Any]:
        """What the state's tensors mean, in JSON's types."""
        raise NotImplementedError

    def configuration_in(self, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """The values that a state holds; none if it was saved by an earlier version."""
        extra = state.get(prefix + EXTRA)
        if not isinstance(extra, Tensor) or not is_materialized(extra):
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

    def __prepare_scriptable__(self) -> NoReturn:
        """Called first by `torch.jit.script`, for every module of a model.

        Raises:
            TypeError: always: TorchScript has no types for the arguments of operators.
        """
        alternatives = "a module for torch.jit.trace, torch.export.export or torch.compile, since TorchScript cannot compile it"
        raise type_error("torch.jit.script", alternatives, type(self).__name__)


# ---- modules that fused forms of layers replace ----------------------------------------------------


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward; torch asks the same of these."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    everywhere = nn.modules.module
    of_all = (
        everywhere._global_forward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_backward_hooks,
        everywhere._global_backward_pre_hooks,
    )
    return any(map(bool, own + of_all)) or "forward" in module.__dict__


def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether calling the module is computing with its parameters: no hooks, no parametrisation, no other class in its place."""
    return type(module) is kind and not is_hooked(module)


def is_plain_linear(module: Any) -> bool:
    """Whether calling a module is multiplying with its weight: no adapter, hook, quantised, parametrised or distributed weight."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked(module)


def owns_result(module: Any) -> bool:
    """Whether nobody but the caller sees the result of a call, autograd included: it may be written over."""
    return not torch.is_grad_enabled() and not is_tracing() and is_plain_linear(module)
