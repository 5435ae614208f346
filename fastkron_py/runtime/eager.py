"""The eager fast path: calls for which torch's dispatcher has nothing to do but record gradients; constants that are right in any mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime import torch_internals

TENSOR_TYPES: Final = (Tensor, torch.nn.Parameter)  # on the fast path; a subclass may want to see every call


@lru_cache(maxsize=1)
def _outside() -> dict[bool, int]:
    """The dispatch keys in force outside of all modes and transforms, by whether inference mode is on.

    Asked in a new thread: the caller may be inside of some.
    """

    def ask() -> dict[bool, int]:
        found = {}
        for inference in (False, True):
            with torch.inference_mode(inference):
                found[inference] = torch_internals.keys_in_force()
        return found

    return torch_internals.apart(ask)


@lru_cache(maxsize=8)
def _plain_keys(device_type: str, inference: bool) -> int:
    """The dispatch keys of a dense tensor, made in inference mode or not, without a lazy conjugate or negative and without a tangent."""
    with torch.inference_mode(inference):
        return torch_internals.keys_of(torch.empty(0, device=device_type)) if device_type in ("cpu", "cuda") else -1


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is in force.

    Never in a graph that is being compiled: that takes the operator itself, which vmap can batch.
    """
    if torch.compiler.is_compiling():
        return False
    # The path for transforms is correct without one, too. With one, the dispatcher may leave out a tangent.
    return not torch_internals.works("transforms") or torch_internals.is_transforming()


def is_functionalizing() -> bool:
    """Whether `torch.func.functionalize` is in force.

    Raises:
        NotImplementedError: with another transform around it or in it.
    """
    names = torch_internals.transforms() if torch_internals.works("transforms") else []
    if torch_internals.FUNCTIONALIZE not in names:
        return False
    if len(set(names)) > 1:
        raise NotImplementedError(f"torch.func.functionalize: expected no other transform with it; got {' in '.join(names[::-1])}")
    return True


def is_tracing() -> bool:
    """Whether `torch.jit.trace` runs: it compares the graphs of two calls, with gradients and without, which have to be the same."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def wants_gradient(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def takes_fast_path(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch's dispatcher has nothing to do for an operation on these tensors but record gradients.

    Every tensor must be a dense `torch.Tensor` or `Parameter` on a CPU or a CUDA device, and no mode or transform (vmap, fake
    tensors, tracing, compilation, ...) may be in force but inference mode, where tensors may be made in it or not.
    """
    if torch.compiler.is_compiling() or torch_internals.obstacle() is not None:
        return False
    inference = torch.is_inference_mode_enabled()
    if torch_internals.keys_in_force() != _outside()[inference]:
        return False
    if torch_internals.is_watching():
        return False
    for t in tensors:
        if t is None:
            continue
        if type(t) not in TENSOR_TYPES or torch_internals.keys_of(t) != _plain_keys(t.device.type, inference and t.is_inference()):
            return False
    return True


def unseen_by_autograd(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Inside an implementation: autocast has been applied already, and no view is recorded.

    A result that is a view of a tensor made inside could not be changed in place later on.
    """
    guard = torch_internals.without_views()()
    return _without_autocast(guard, device_type) if torch.is_autocast_enabled(device_type) else guard


@contextlib.contextmanager
def _without_autocast(guard: contextlib.AbstractContextManager[Any], device_type: str) -> Iterator[None]:
    with guard, torch.autocast(device_type, enabled=False):
        yield


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Dtypes were settled before; a caller of backward() may be under autocast again."""
    device_type = device.type
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else contextlib.nullcontext()


def constants(make: Callable[..., Sequence[Any]], arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """The tensors, among other values, that a function makes on the CPU, on this device.

    They are made in no mode and kept. A call inside of a mode gets them as tensors of that mode: fake ones, functional ones.

    Args:
        make: names the dtype of each tensor that it makes, and depends on nothing but its arguments.
        arguments: of make; they can be hashed.
        device: of the result.
    """
    kept = _kept(make, arguments, device)
    if takes_fast_path(()):
        return kept
    # By this operation torch.tensor, too, takes what it has made into a mode.
    return tuple([torch.ops.aten.lift_fresh(value).to(device) if isinstance(value, Tensor) else value for value in kept])


@lru_cache(maxsize=512)
def _kept(make: Callable[..., Sequence[Any]], arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    # The GPU of a fake tensor need not be there.
    home = torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device

    def made() -> tuple[Any, ...]:
        with torch.device("cpu"):
            return tuple([value.to(home) if isinstance(value, Tensor) else value for value in make(*arguments)])

    return torch_internals.apart(made)
