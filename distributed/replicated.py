"""Tensors that are equal on every rank, such as factors: their gradients are sums over ranks, taken in one all-reduce.

`replicate` hands them on, and its derivative sums the ranks' gradients; `total` is that sum, and its derivative hands on again. So where
a loss is the sum of the ranks' parts, gradients of replicated tensors come out whole and equal on every rank, and functions of these count
once in second derivatives. Where the loss is the mean of the ranks' losses, as wrappers for data parallelism take it, both are means.

LAPACK's results depend on its build and on its number of threads: by rounding, and where they are not unique, by anything (eigenvectors
of equal eigenvalues). What ranks compute for themselves and mix is therefore the first rank's: `from_first` and `as_first`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastkron_py.distributed.agreement import agree, refused_by_all
from fastkron_py.distributed.failures import check_plain, rank_text, stage
from fastkron_py.distributed.grid import ProcessGrid
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.eager import without_autocast

T = TypeVar("T")
Reduction = Literal["sum", "mean"]
REDUCTIONS: Final = ("sum", "mean")
Common = Literal["sum", "mean", "first"]
"""How ranks come to one value: "first" is the first rank's, of values that are equal but for rounding."""


class _Shared(torch.autograd.Function):
    """Hands tensors on, or sums them over the ranks: each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, where: tuple[dist.ProcessGroup, torch.device, Common], sums: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.where, ctx.sums = where, sums
        return _summed(tensors, *where) if sums else tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[2:]
        wanted = [g for g, need in zip(gradients, needs, strict=True) if need]
        return None, None, *take(_Shared.apply(ctx.where, not ctx.sums, *wanted), needs)  # type: ignore[no-untyped-call]


def _summed(parts: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, reduction: Common) -> tuple[Tensor, ...]:
    dtype = reduce(torch.promote_types, [torch.float32 if p.dtype in HALF_DTYPES else p.dtype for p in parts])
    flat = torch.cat([p.to(device, dtype).reshape(-1) for p in parts])
    plain = torch.view_as_real(flat) if flat.is_complex() else flat
    if reduction == "first":
        check_plain("values of the first rank", [plain])
        with stage("values of the first rank", group, device):
            dist.broadcast(plain, _ranks(group)[0], group)
    else:
        all_reduce(f"sum of the factors' gradients, {flat.nbytes / 1e6:.3g} MB with {rank_text(_ranks(group))}", plain, group)
    if reduction == "mean":
        flat /= dist.get_world_size(group)
    pieces = flat.split([math.prod(p.shape) for p in parts])
    # Copies: a gradient that is part of one large buffer would keep all of it.
    return tuple(_like(piece.view(p.shape), p) for piece, p in zip(pieces, parts, strict=True))


def _like(value: Tensor, part: Tensor) -> Tensor:
    value = value if part.is_complex() or not value.is_complex() else value.real
    return value.to(part.device, part.dtype, copy=True)


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def all_reduce(name: str, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce a tensor over a group, in place; a CollectiveError has the name."""
    check_plain(name, [tensor])
    with stage(name, group, tensor.device):
        dist.all_reduce(tensor, op, group)


def from_first(grid: ProcessGrid, description: Mapping[str, Any], compute: Callable[[], T]) -> T:
    """Tensors in plain lists and tuples, of the grid's first rank, on every rank; without derivatives. Collective, and an agreement.

    Every rank raises an error of the computation, or of the agreement on the description.
    """
    found: list[Any] = [None]
    if grid.rank == 0:
        with refused_by_all(grid, (Exception,)), torch.no_grad(), without_autocast(grid.device):
            found = [tree_map_only(Tensor, Tensor.cpu, compute())]
    agree(grid, description)
    with stage(f"{description['call']}: results of the first rank", grid.group):
        dist.broadcast_object_list(found, grid.ranks[0], grid.group, grid.device)
    return tree_map_only(Tensor, lambda t: t.to(grid.device), found[0])


def as_first(
    grid: ProcessGrid, description: Mapping[str, Any], tensors: Sequence[Tensor], compute: Callable[[list[Tensor]], Sequence[Any]]
) -> list[Any]:
    """Smooth functions of equal tensors, and integers: values and gradients are the first rank's. Collective, and an agreement.

    Every rank raises an error of the computation on any rank, or of the agreement on the description.
    """
    with refused_by_all(grid, (Exception,)), without_autocast(grid.device):
        found = list(compute(replicate(tensors, grid.group, grid.device, "first")))
    needs = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    agree(grid, {**description, "arguments that need gradients": needs})
    shared = iter(total([t for t in found if isinstance(t, Tensor)], grid.group, grid.device, "first"))
    return [next(shared) if isinstance(t, Tensor) else t for t in found]


def replicate(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, reduction: Common = "sum") -> list[Tensor]:
    """The same tensors, equal on every rank; one all-reduce over the group will sum their gradients, or as the reduction says."""
    return list(_Shared.apply((group, device, reduction), False, *tensors))  # type: ignore[no-untyped-call]


def total(parts: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, reduction: Common = "sum") -> list[Tensor]:
    """Sums or means over the group of each rank's parts, half types in float32; the inverse of `replicate` in derivatives."""
    return list(_Shared.apply((group, device, reduction), True, *parts))  # type: ignore[no-untyped-call]


class _Tied(torch.autograd.Function):
    """The same tensors after an empty one, which stands for all of them: a reference to it is one to them.

    The library records a product of one row in autograd by other operations than a product of many. Some of them refer in the derivative of
    x, say, to x itself, though it is 0 there, and some do not. In derivatives of second order, the exchanges that made x would then be
    exchanged back on some ranks, which would wait for the others. So the derivatives of every rank's own product refer to all its operands.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        token = tensors[0].new_empty(0)
        ctx.save_for_backward(token)
        return token, *[t.view_as(t) for t in tensors]

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return gradients
        (token,) = ctx.saved_tensors
        return _Tied.apply(token, *gradients)[2:]  # type: ignore[no-untyped-call]


def tied(tensors: Sequence[Any]) -> list[Any]:
    """The same tensors and numbers; in derivatives, the gradient of each tensor that needs one refers to all of these."""
    if not torch.is_grad_enabled():
        return list(tensors)
    own = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
    views = iter(_Tied.apply(*own)[1:] if own else ())  # type: ignore[no-untyped-call]
    return [next(views) if isinstance(t, Tensor) and t.requires_grad else t for t in tensors]
