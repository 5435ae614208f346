"""Checks that fused forms of layers make before they replace the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkron_py.runtime.eager import is_tracing


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


def is_plain_linear(module: Any) -> bool:
    """Whether calling a module is multiplying with its weight: no adapter, hook, quantised, parametrised or distributed weight."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked(module)


def owns_result(module: Any) -> bool:
    """Whether nobody but the caller sees the result of a call, autograd included: it may be written over."""
    return not torch.is_grad_enabled() and not is_tracing() and is_plain_linear(module)
