"""vmap rules: a vmapped dimension is one more batch dimension of the Kronecker operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastkron_py.kron.derivatives import Calls


def _pairs(argument: Any, dim: Any) -> list[tuple[Tensor, int | None]]:
    """(tensor, vmapped dimension) for a tensor, a list of tensors or None."""
    if argument is None:
        return []
    if not isinstance(argument, list | tuple):
        return [(argument, dim)]
    return list(zip(argument, dim if isinstance(dim, list | tuple) else [dim] * len(argument), strict=True))


def _batch_first(arguments: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Move vmapped dimensions in front of every other batch dimension, so that they broadcast.

    Args:
        arguments: tensors, lists of tensors or None.
        dims: for each the vmapped dimension, or None; for a list a list (or one for all).
    """
    groups = [_pairs(argument, dim) for argument, dim in zip(arguments, dims, strict=True)]
    rank = max(t.ndim - (d is not None) for group in groups for t, d in group)

    def lift(t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t
        t = t.movedim(dim, 0)
        return t.reshape(t.shape[0], *[1] * (rank + 1 - t.ndim), *t.shape[1:])

    moved = [[lift(t, d) for t, d in group] for group in groups]
    return [
        group if isinstance(argument, list | tuple) else group[0] if group else None
        for argument, group in zip(arguments, moved, strict=True)
    ]


def vmap_multiply(calls: Calls, in_dims: Sequence[Any], x: Tensor, factors: Any, z: Tensor | None, *options: Any) -> tuple[Tensor, int]:
    """Batched multiply; in_dims of (x, factors, z)."""
    only_z = all(dim is None for _, dim in [(x, in_dims[0]), *_pairs(factors, in_dims[1])])
    x, factors, z = _batch_first([x, factors, z], in_dims[:3])
    if z is not None and only_z:  # one product serves all samples
        alpha, beta, *rest = options
        return calls.multiply(x, factors, None, alpha, 0.0, *rest) + beta * z, 0
    return calls.multiply(x, factors, z, *options), 0


def vmap_gradients(
    calls: Calls, batch_size: int, in_dims: Sequence[Any], dy: Tensor, x: Tensor, factors: Any, *options: Any
) -> tuple[list[Tensor], list[int]]:
    """Batched gradients; in_dims of (dy, x, factors)."""
    need_x, need_factors = options[:2]
    wanted = [(x, in_dims[1])] if need_x else []
    wanted += [pair for pair, need in zip(_pairs(factors, in_dims[2]), need_factors, strict=True) if need]
    shapes = [t.shape if dim is None else t.movedim(dim, 0).shape[1:] for t, dim in wanted]
    dy, x, factors = _batch_first([dy, x, factors], in_dims[:3])
    rank = max(t.ndim for t in (dy, x, *factors))

    def per_sample(t: Tensor) -> Tensor:
        """Gradients are one for each sample, so an argument shared by all is repeated (as a view)."""
        return t if t.ndim == rank else t.expand(batch_size, *[1] * (rank - 1 - t.ndim), *t.shape)

    results = calls.gradients(dy, per_sample(x), [per_sample(f) for f in factors], None, *options)
    return [r.reshape(batch_size, *shape) for r, shape in zip(results, shapes, strict=True)], [0] * len(results)
