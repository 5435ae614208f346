"""What the operators' derivatives share, and their twins as autograd functions, called with less ado."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

LIBRARY = torch.library.Library("fastkron", "DEF")
"""Every operator of the library is registered here."""

_MOST_LEVELS: Final = 64  # torch's own limit
# Of the vmap that torch.autograd has kept: in force, and of a tensor. They have no names in Python.
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_BATCHED: Any = torch._C._parse_dispatch_key("Batched")

_will_execute = getattr(torch._C, "_will_engine_execute_node", None)


def asked_for(ctx: Any, needs: Sequence[bool], first: int = 0) -> list[bool]:
    """needs_input_grad of some neighbouring inputs, without those that this backward pass does nothing with.

    ``torch.autograd.grad(y, x, create_graph=True)`` needs no gradient of a layer's parameters, which torch's flags do not say. Where
    no graph is recorded, all that is needed is taken to be asked for: that is a whole backward pass, of which calls are recognised.

    Args:
        ctx: the function's.
        needs: of inputs that are tensors, one after the other, but that one with False may be none at the end.
        first: how many tensors there are among the inputs before.
    """
    following = getattr(ctx, "next_functions", None)
    if _will_execute is None or following is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return list(needs)

    def is_asked(index: int) -> bool:
        node = following[index][0]
        try:
            return node is None or bool(_will_execute(node))
        except RuntimeError:  # of a leaf that gradients are taken of
            return True

    return [need and is_asked(first + i) for i, need in enumerate(needs)]


def batchable(rule: Callable[..., Any], over: Callable[..., Any] = torch.func.vmap) -> Callable[..., Any]:
    """Let a backward or forward rule take the batched tensors of torch.autograd's own vmap, which is not torch.func's.

    ``torch.autograd.grad(is_grads_batched=True)`` and the vectorized ``jacobian`` and ``hessian`` run a backward pass on such tensors, of
    which operators and autograd functions know nothing.

    Args:
        rule: of an autograd function, or of an operator: (ctx, cotangents or tangents ...) to gradients.
        over: takes the rule over them: `torch.func.vmap`, or `one_by_one` for rules that it cannot transform.
    """

    @functools.wraps(rule)
    def call(ctx: Any, *given: Any) -> Any:
        if not torch._C._dispatch_tls_is_dispatch_key_included(_VMAP):
            return rule(ctx, *given)
        leaves, spec = tree_flatten(given)
        found_spec: Any = None
        present: list[bool] = []

        def of_sample(*values: Any) -> list[Tensor]:  # vmap takes no None
            nonlocal found_spec, present
            found, found_spec = tree_flatten(rule(ctx, *tree_unflatten(values, spec)))
            present = [t is not None for t in found]
            return [t for t in found if t is not None]

        return tree_unflatten(take(_over_levels(of_sample, leaves, over), present), found_spec)

    return call


def _over_levels(function: Callable[..., Any], values: Sequence[Any], over: Callable[..., Any]) -> list[Tensor]:
    """A function of each sample, over the batches of every level."""
    levels: list[int] = []
    while any([_has_batches(t) for t in values]):
        level = next(level for level in range(1, _MOST_LEVELS + 1) if any([_is_batched(t, level) for t in values]))
        dims = tuple([0 if _is_batched(t, level) else None for t in values])
        values = [t if dim is None else torch._remove_batch_dim(t, level, 1, 0) for t, dim in zip(values, dims, strict=True)]
        function = over(function, dims)
        levels.append(level)
    found = list(function(*values))
    for dim, level in zip(reversed(range(len(levels))), levels, strict=True):
        found = [torch._add_batch_dim(t, dim, level) for t in found]
    return found


def one_by_one(function: Callable[..., Sequence[Tensor]], dims: Sequence[int | None]) -> Callable[..., list[Tensor]]:
    """What `torch.func.vmap` gives, by one call for each sample; dims are 0 or None."""

    def call(*tensors: Any) -> list[Tensor]:
        size = next(len(t) for t, dim in zip(tensors, dims, strict=True) if dim is not None)
        found = [function(*[t if dim is None else t[i] for t, dim in zip(tensors, dims, strict=True)]) for i in range(size)]
        return [torch.stack(of_one) for of_one in zip(*found, strict=True)]

    return call


batchable_one_by_one = functools.partial(batchable, over=one_by_one)


def _has_batches(t: Any) -> bool:
    return isinstance(t, Tensor) and torch._C._dispatch_keys(t).has(_BATCHED)


def _is_batched(t: Any, level: int) -> bool:
    """Whether it is a tensor with a batch of this level; one without is given one, of the size that is told."""
    return _has_batches(t) and any([torch._remove_batch_dim(t, level, size, 0).shape[0] != size for size in (0, 1)])


def take(found: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Each result in its argument's place, None for those that were not asked for."""
    given = iter(found)
    return [next(given) if need else None for need in needs]


def sign(*functions: type[torch.autograd.Function]) -> None:
    """Keep the signature of ``forward``: else torch works it out at every call, which takes longer than a small kernel."""
    for function in functions:
        function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]


def undecorated(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` without what torch.autograd.Function adds for torch.func's transforms, in which nothing is replayed."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
