"""Is this an ordinary eager call, for which torch's dispatcher would do nothing but cost time?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

KINDS: Final = (Tensor, torch.nn.Parameter)  # of tensors that are ordinary; a subclass may want to see every call
_keys: dict[tuple[str, bool], int] = {}


def _in_force() -> int:
    """What the dispatcher adds to every call in this thread: keys of modes and transforms."""
    return int(torch._C._dispatch_tls_local_include_set().raw_repr())


_OUTSIDE = {False: _in_force()}
with torch.inference_mode():
    _OUTSIDE[True] = _in_force()


def _keys_of(t: Tensor) -> int:
    return int(torch._C._dispatch_keys(t).raw_repr())


def _plain_keys(device: torch.device, inference: bool) -> int:
    """Keys of a tensor without anything special: no lazy conjugate or negative, not sparse, no forward-mode partner."""
    found = _keys.get((device.type, inference))
    if found is None:
        ordinary = device.type in ("cpu", "cuda")
        found = _keys[device.type, inference] = _keys_of(torch.empty(0, device=device)) if ordinary else -1
    return found


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is in force.

    Never in a graph that is being compiled: that takes the operator itself, which vmap can batch.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def wants_gradient(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def is_ordinary(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch's dispatcher has nothing to do for an operation on these tensors, but for recording gradients.

    That is so where every tensor is an ordinary one, and no mode or transform (vmap, fake tensors, tracing, compilation,
    ...) is in force.
    """
    if torch.compiler.is_compiling():
        return False
    inference = torch.is_inference_mode_enabled()
    if _in_force() != _OUTSIDE[inference] or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_function_stack() or torch._C._get_tracing_state() is not None:
        return False
    return all([t is None or (type(t) in KINDS and _keys_of(t) == _plain_keys(t.device, inference)) for t in tensors])


_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def unseen_by_autograd(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside an implementation: autocast has been applied already, and no view is recorded.

    A result that is a view of a tensor made inside could not be changed in place later on.
    """
    guard: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING)
    return _without_autocast(guard, x.device.type) if torch.is_autocast_enabled(x.device.type) else guard


@contextlib.contextmanager
def _without_autocast(guard: contextlib.AbstractContextManager[Any], device_type: str) -> Iterator[None]:
    with guard, torch.autocast(device_type, enabled=False):
        yield
