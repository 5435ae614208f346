"""Batches: vmap rules of operators that are called for each sample, and batches of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.eager import is_functionalizing, transforms_active

_MOST_LEVELS: Final = 64  # torch's own limit
_BATCHES: Final = "batches of gradients"  # a word of `torch_internals.works`


def vmap_by_sample(
    call: Callable[..., Any], size: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None], options: Sequence[Any]
) -> tuple[Any, Any]:
    """A vmap rule of one call for each sample: (results stacked, their vmapped dimensions), in a tuple or list as `call` returns them."""
    samples = [[t] * size if t is None or dim is None else t.unbind(dim) for t, dim in zip(tensors, dims, strict=True)]
    found = [call(*sample, *options) for sample in zip(*samples, strict=True)]
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    container = type(found[0])
    results = container(torch.stack(of_one) for of_one in zip(*found, strict=True))
    return results, container(0 for _ in results)


def viewed(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.view(dtype)``, without gradients, of a dtype of the same width; torch 2.11 has no rule for vmap."""
    if transforms_active() and not is_functionalizing():  # where no autograd function may be
        return _View.apply(t, dtype)  # type: ignore[no-untyped-call]
    return t.view(dtype)


class _View(torch.autograd.Function):
    @staticmethod
    def forward(t: Tensor, dtype: torch.dtype) -> Tensor:
        return t.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], t: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return viewed(t, dtype), in_dims[0]


def take(found: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Each result in its argument's place, None for those that were not asked for."""
    given = iter(found)
    return [next(given) if need else None for need in needs]


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
        if not (torch_internals.works(_BATCHES) and torch_internals.is_batching()):
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
    while any([torch_internals.has_batches(t) for t in values]):
        level = next(level for level in range(1, _MOST_LEVELS + 1) if any([_is_batched(t, level) for t in values]))
        dims = tuple([0 if _is_batched(t, level) else None for t in values])
        values = [t if dim is None else torch_internals.without_batch(t, level, 1) for t, dim in zip(values, dims, strict=True)]
        function = over(function, dims)
        levels.append(level)
    found = list(function(*values))
    for dim, level in zip(reversed(range(len(levels))), levels, strict=True):
        found = [torch_internals.with_batch(t, dim, level) for t in found]
    return found


def one_by_one(function: Callable[..., list[Tensor]], dims: Sequence[int | None]) -> Callable[..., list[Tensor]]:
    """`torch.func.vmap` of a function, by one call for each sample; dims are 0 or None."""

    def call(*tensors: Any) -> list[Tensor]:
        size = next(len(t) for t, dim in zip(tensors, dims, strict=True) if dim is not None)
        return vmap_by_sample(function, size, dims, tensors, ())[0]

    return call


batchable_one_by_one = functools.partial(batchable, over=one_by_one)


def _is_batched(t: Any, level: int) -> bool:
    """Whether it is a tensor with a batch of this level; one without is given one, of the size that is told."""
    return torch_internals.has_batches(t) and any([torch_internals.without_batch(t, level, size).shape[0] != size for size in (0, 1)])
