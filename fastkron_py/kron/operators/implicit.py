"""Derivatives of the solution of a linear system by implicit differentiation.

For ``A(p) x = b``, ``dx = A^-1 (db - dA x)``: the backward pass solves with the adjoint of A and multiplies once, keeps no iterate and
derives no eigenvector, so that equal eigenvalues do no harm. Both steps are differentiable in turn: derivatives of every order exist.
Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation" (2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.runtime.batching import batchable, take, vmap_by_sample
from fastkron_py.runtime.eager import transforms_active, without_autocast


class System(Protocol):
    """A family of regular matrices A, given by parameters, and how it solves with one of them."""

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A x``, or ``A^H x``, differentiable. x and the result are ``[*batch, n, M]``."""

    def invert(self, b: Tensor, parameters: Sequence[Tensor], constants: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A^-1 b``, or ``A^-H b``; autograd does not follow it."""


def constant(t: Tensor) -> Tensor:
    """The values of a tensor: `Tensor.detach` keeps the tangent of forward mode."""
    found: Tensor = forward_ad.unpack_dual(t).primal.detach()
    return found


def pull_back(
    function: Callable[..., Any], arguments: Sequence[Tensor], wanted: Sequence[bool], cotangent: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of a function of tensors, None for those that are not wanted; differentiable."""
    if not any(wanted):
        return (None,) * len(arguments)

    def of_chosen(*given: Tensor) -> Any:
        left = iter(given)
        return function(*[next(left) if want else t for t, want in zip(arguments, wanted, strict=True)])

    chosen = [t for t, want in zip(arguments, wanted, strict=True) if want]
    with without_autocast(chosen[0].device):
        return tuple(take(_vjp(of_chosen, chosen, cotangent), wanted))


def _vjp(function: Callable[..., Any], arguments: Sequence[Tensor], cotangent: Any) -> Sequence[Tensor]:
    if transforms_active():  # not otherwise: it imports torch's compiler
        found: Sequence[Tensor] = torch.func.vjp(function, *arguments)[1](cotangent)
        return found
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of their own: how other inputs depend on the arguments belongs to derivatives of those.
        own = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in arguments]
        results = function(*own)
        pairs = [(results, cotangent)] if isinstance(results, Tensor) else list(zip(results, cotangent, strict=True))
        pairs = [(r, c) for r, c in pairs if r.requires_grad]
        return torch.autograd.grad(
            [r for r, _ in pairs], own, [c for _, c in pairs], create_graph=again, allow_unused=True, materialize_grads=True
        )


class _Solve(torch.autograd.Function):
    """``A^-1 b``, or with the adjoint of A. Tensors are b, the parameters, and constants that `invert` needs."""

    @staticmethod
    def forward(system: System, adjoint: bool, count: int, b: Tensor, *tensors: Tensor) -> Tensor:
        with torch.no_grad(), without_autocast(b.device):
            return system.invert(b, tensors[:count], tensors[count:], adjoint)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.system, ctx.adjoint, ctx.count, _, *tensors = inputs
        ctx.save_for_backward(output, *tensors)
        ctx.save_for_forward(output, *tensors)

    @staticmethod
    @batchable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        system, adjoint, count = ctx.system, ctx.adjoint, ctx.count
        w = _Solve.apply(system, not adjoint, count, gradient, *tensors)  # type: ignore[no-untyped-call]
        wanted = ctx.needs_input_grad[4 : 4 + count]
        gradients = pull_back(lambda *p: system.apply(x, p, adjoint), tensors[:count], wanted, -w)
        return None, None, None, w, *gradients, *[None] * (len(tensors) - count)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, *tensors = ctx.saved_tensors
        count, tb = ctx.count, tangents[3]
        parameters, moved = tensors[:count], [t is not None for t in tangents[4 : 4 + count]]
        right = torch.zeros_like(x) if tb is None else tb
        if any(moved):

            def image(*given: Tensor) -> Tensor:
                left = iter(given)
                own = [next(left) if m else p for p, m in zip(parameters, moved, strict=True)]
                result: Tensor = ctx.system.apply(x, own, ctx.adjoint)
                return result

            chosen = tuple([p for p, m in zip(parameters, moved, strict=True) if m])
            moves = tuple([t for t in tangents[4 : 4 + count] if t is not None])
            right = right - torch.func.jvp(image, chosen, moves)[1]
        return _Solve.apply(ctx.system, ctx.adjoint, count, right, *tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], system: System, *rest: Any) -> tuple[Any, Any]:
        """Batched right-hand sides become more columns."""
        adjoint, count, b, *tensors = rest
        if any([dim is not None for dim in in_dims[4:]]):

            def one(*of_sample: Tensor) -> Any:
                return _Solve.apply(system, adjoint, count, *of_sample)  # type: ignore[no-untyped-call]

            return vmap_by_sample(one, info.batch_size, in_dims[3:], (b, *tensors), ())
        moved = b.movedim(in_dims[3], -2)  # [*batch, n, samples, M]
        x: Tensor = _Solve.apply(system, adjoint, count, moved.flatten(-2), *tensors)  # type: ignore[no-untyped-call]
        return x.unflatten(-1, moved.shape[-2:]).movedim(-2, 0), 0


class OfForm(torch.autograd.Function):
    """What functions of a form and tensors have in common: all tensors are saved, and a batch goes sample by sample."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save all tensors."""
        ctx.form, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[Any], form: Any, *tensors: Tensor) -> tuple[Any, Any]:
        """Apply the function sample by sample."""
        return vmap_by_sample(partial(cls.apply, form), info.batch_size, in_dims[1:], tensors, ())


class Last(OfForm):
    """A function of tensors whose own derivatives raise an error. The form has the function and the error's text."""

    @staticmethod
    def forward(form: tuple[Callable[..., Any], str], *tensors: Tensor) -> Any:
        """Apply the function."""
        with without_autocast(tensors[0].device):
            return form[0](*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save no tensor."""
        ctx.form = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        """Raise the error."""
        raise NotImplementedError(ctx.form[1])


def linear_solve(system: System, b: Tensor, parameters: Sequence[Tensor], constants: Sequence[Tensor], adjoint: bool = False) -> Tensor:
    """The x of ``A x = b``, or of ``A^H x = b``, with derivatives to b and to the parameters.

    Args:
        system: the matrices.
        b: ``[*batch, n, M]``, with every batch dimension of A.
        parameters: of A, any shapes.
        constants: of the solve, eigenvectors say; without derivatives.
        adjoint: as said.
    """
    x: Tensor = _Solve.apply(system, adjoint, len(parameters), b, *parameters, *constants)  # type: ignore[no-untyped-call]
    return x
