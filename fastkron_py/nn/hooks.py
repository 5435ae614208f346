"""What fused forms of layers ask before they take the layers' place."""

from __future__ import annotations

from torch import nn


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
