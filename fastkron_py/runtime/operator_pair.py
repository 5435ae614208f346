"""The operator of another one's gradients: its fake, its derivatives and its vmap rule come from that operator's form in torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.runtime.batching import take
from fastkron_py.runtime.operator import GradientCall, Operator, Saved, second_order
from fastkron_py.runtime.program import Program


def gradient_schema(name: str, tensors: str, kept: str, options: str) -> str:
    """The schema of `gradient_operator`."""
    needs = ", ".join([f"bool need_{argument.split()[-1]}" for argument in tensors.split(", ")])
    return f"{name}({', '.join(filter(None, ('Tensor dy', tensors, kept, needs, options)))}) -> Tensor[]"


def fake_gradients(count: int, kept: bool = True) -> Callable[..., list[Tensor]]:
    """The fake of `gradient_operator` with this number of tensors beside dy; kept: whether there is one that only the program reads."""

    def fake(_: Tensor, *arguments: Any) -> list[Tensor]:
        given, needs = arguments[:count], arguments[count + kept : 2 * count + kept]
        return [t.new_empty(t.shape) for t, need in zip(given, needs, strict=True) if need and t is not None]

    return fake


def gradient_call(gradients: Operator) -> Callable[[Saved, Tensor], GradientCall]:
    """The `gradient_call` of an operator whose arguments, results that it keeps, and gradients are those of a `gradient_operator`."""
    return lambda saved, dy: GradientCall.of(gradients, (dy, *saved.tensors, *saved.kept), (*saved.needs, *saved.options), saved.needs)


def gradient_operator(
    name: str,
    tensors: str,
    options: str,
    *,
    program: Callable[..., Program],
    in_torch: Callable[..., Tensor],
    kept: str = "",
    fake: Callable[..., list[Tensor]] | None = None,
    context: Callable[[Tensor, Sequence[Any]], contextlib.AbstractContextManager[Any]] = lambda dy, options: contextlib.nullcontext(),
    **others: Any,
) -> Operator:
    """Declare ``NAME(dy, tensors, kept, a flag for each tensor, options)``, the gradients of the tensors whose flags are set.

    Flags are booleans one by one: a list of them would be a list of symbols to some of torch's transforms.

    Args:
        name: of the operator.
        tensors: the arguments that have gradients, as a schema has them: "Tensor x, Tensor? bias".
        options: the arguments that are no tensors, as a schema has them.
        program: from (tensors, options) to the program of the gradients.
        in_torch: from (tensors, options) to the result that dy is the gradient of, by operations of torch.
        kept: an argument that only the program reads, made of the others: it has no gradient. Empty if there is none.
        fake: of the operator; None where all gradients are contiguous.
        context: from (dy, options) to the settings in which torch derives it.
        **others: of `Operator`.

    Returns:
        The operator. Derivatives of gradients, and gradients inside of torch.func's transforms, are those of in_torch.

    Example:
        >>> made = {"program": gradients, "in_torch": product, "context": settings}
        >>> gradient_operator("product_backward", "Tensor x, Tensor? bias", "float scale", kept="Tensor? y", **made)
    """
    count = tensors.count(", ") + 1

    def gradients_in_torch(given: Sequence[Any], options: Sequence[Any]) -> list[Tensor]:
        dy, *operands = given[: count + 1]
        needs = [need and t is not None for t, need in zip(operands, options[:count], strict=True)]

        def function(*wanted: Tensor) -> Tensor:
            return in_torch([t if w is None else w for t, w in zip(operands, take(wanted, needs), strict=True)], options[count:])

        with context(dy, options[count:]):
            wanted = [t for t, need in zip(operands, needs, strict=True) if need]
            return list(torch.func.vjp(function, *wanted)[1](dy))

    def second(saved: Saved, *cotangents: Tensor | None) -> Sequence[Tensor | None]:
        if all([c is None for c in cotangents]):
            return [None] * len(saved.tensors)
        dy, *operands = saved.tensors[: count + 1]
        with context(dy, saved.options[count:]):
            of_operands = take(cotangents, saved.options[:count])
            found = second_order(lambda *own: in_torch(own, saved.options[count:]), dy, operands, of_operands)
        return [*found, *[None] * (len(saved.tensors) - count - 1)]

    return Operator(
        gradient_schema(name, tensors, kept, options),
        program=program,
        fake=fake or fake_gradients(count, bool(kept)),
        backward=second,
        vmap="samples",
        in_torch=gradients_in_torch,
        **others,
    )
