"""Both wide projections of a gated layer as tensors of their own, which lie in memory one behind the other.

`join` is the stacked weight ``[2, H, K]`` that the operators of `ops/gated.py` take: a view of both, or a copy where they lie elsewhere.
Whether they do is known only when a graph runs; so graphs that are compiled get operators that join inside:

gated_split            y of up [H, K] and gate [H, K]; the rest as in `gated_linear`
gated_split_saving     the same, and both projections side by side
gated_split_backward   [dx] + [dW] + [db] + [dD] + [dc], only those asked for, dW [2, H, K]
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.ops import gated
from fastkron_py.ops.autograd import take, undecorated
from fastkron_py.ops.plain import is_ordinary, wants_gradient

LIBRARY = torch.library.Library("fastkron", "FRAGMENT")
_TENSORS = "Tensor x, Tensor up, Tensor gate, Tensor? bias, Tensor? down, Tensor? down_bias"
_OPTIONS = "str activation, str? precision, str backend"
_NEEDS = "bool need_x, bool need_weight, bool need_bias, bool need_down, bool need_down_bias"
LIBRARY.define(f"gated_split({_TENSORS}, {_OPTIONS}) -> Tensor")
LIBRARY.define(f"gated_split_saving({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(f"gated_split_backward(Tensor dy, {_TENSORS}, Tensor? pairs, {_NEEDS}, {_OPTIONS}) -> Tensor[]")
COUNT: Final = 6  # tensors


# ---- memory ----------------------------------------------------------------------------------


def lie_together(up: Tensor, gate: Tensor) -> bool:
    """Whether gate ``[H, K]`` begins in memory where up ``[H, K]`` ends."""
    if up.shape != gate.shape or up.dtype != gate.dtype or not (up.is_contiguous() and gate.is_contiguous()):
        return False
    if up.device != gate.device or up.device.type == "meta" or gate.storage_offset() != up.storage_offset() + up.numel():
        return False
    return bool(up.untyped_storage()._cdata == gate.untyped_storage()._cdata)


def halves(dweight: Tensor | None, need_up: bool, need_gate: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of up and gate, of that of both, or None."""
    if dweight is None:
        return None, None
    return dweight[0] if need_up else None, dweight[1] if need_gate else None


def _view(up: Tensor, gate: Tensor) -> Tensor:
    """``[2, H, K]``, of two that lie together; without a gradient."""
    return up.detach().as_strided((2, *up.shape), (up.numel(), *up.stride()))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, gate: Tensor) -> Tensor:
        # For the look at their versions: what shares their memory has a version of its own, lest autograd takes it for a view of up.
        ctx.save_for_backward(up, gate)
        return _view(up, gate).data

    @staticmethod
    def backward(ctx: Any, dweight: Tensor) -> tuple[Tensor, Tensor]:
        _ = ctx.saved_tensors
        return dweight[0], dweight[1]


_apply_join: Final[Any] = undecorated(_Join)  # of ordinary tensors: no transform has to see it


def join(up: Tensor, gate: Tensor) -> Tensor:
    """The stacked weight of two projections: a view where gate lies behind up in memory, else a copy.

    Args:
        up: ``[H, K]``.
        gate: ``[H, K]``.

    Returns:
        ``[2, H, K]``, through which gradients pass.
    """
    given = (up, gate)
    if not is_ordinary(given) or not lie_together(up, gate):
        return torch.stack([up, gate])
    if not wants_gradient(given):
        return _view(up, gate)
    weight: Tensor = _apply_join(up, gate)
    return weight


# ---- the operators ---------------------------------------------------------------------------


def _joined(tensors: Any) -> tuple[Any, ...]:
    x, up, gate, *rest = tensors
    with torch.no_grad():
        return x, _view(up, gate) if lie_together(up, gate) else torch.stack([up, gate]), *rest


def _options(given: Any) -> tuple[Any, ...]:
    activation, precision, backend = given
    return activation, "stacked", precision, backend


def _multiply(*given: Any) -> Tensor:
    return gated.multiply(*_joined(given[:COUNT]), *_options(given[COUNT:]))


def _multiply_saving(*given: Any) -> tuple[Tensor, Any]:
    return gated.multiply_saving(*_joined(given[:COUNT]), *_options(given[COUNT:]))


def _gradients(dy: Tensor, *given: Any) -> list[Tensor]:
    pairs_and_needs = given[COUNT : COUNT + 1 + gated.COUNT]
    return gated.gradients(dy, *_joined(given[:COUNT]), *pairs_and_needs, *_options(given[COUNT + 1 + gated.COUNT :]))


LIBRARY.impl("gated_split", _multiply, "CompositeExplicitAutograd")
LIBRARY.impl("gated_split_saving", _multiply_saving, "CompositeExplicitAutograd")
LIBRARY.impl("gated_split_backward", _gradients, "CompositeExplicitAutograd")


def _result(x: Tensor, up: Tensor, down: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], up.shape[0] if down is None else down.shape[0]))


@torch.library.register_fake("fastkron::gated_split", lib=LIBRARY)
def _(x, up, gate, bias, down, *rest):  # type: ignore[no-untyped-def]
    return _result(x, up, down)


@torch.library.register_fake("fastkron::gated_split_saving", lib=LIBRARY)
def _(x, up, gate, bias, down, *rest):  # type: ignore[no-untyped-def]
    return _result(x, up, down), x.new_empty((x.shape[:-1].numel(), 2 * up.shape[0]))


@torch.library.register_fake("fastkron::gated_split_backward", lib=LIBRARY)
def _(dy, x, up, gate, bias, down, down_bias, pairs, *rest):  # type: ignore[no-untyped-def]
    shapes = (x.shape, (2, *up.shape), *(None if t is None else t.shape for t in (bias, down, down_bias)))
    needs = rest[: gated.COUNT]
    return [x.new_empty(shape) for shape, need in zip(shapes, needs, strict=True) if need and shape is not None]


_setup, _setup_saving = gated.contexts(COUNT)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    need_x, need_up, need_gate, *rest = ctx.needs_input_grad[:COUNT]
    needs = (need_x, need_up or need_gate, *rest)
    found = torch.ops.fastkron.gated_split_backward(dy, *ctx.saved_tensors, *needs, *ctx.options) if any(needs) else []
    dx, dweight, *others = take(found, needs)
    return dx, *halves(dweight, need_up, need_gate), *others, None, None, None


torch.library.register_autograd("fastkron::gated_split", _backward, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("fastkron::gated_split_saving", _backward, setup_context=_setup_saving, lib=LIBRARY)


def gated_split(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    saving: bool,
    activation: str,
    precision: str | None,
) -> Tensor:
    """Call the operator, in a graph that is being compiled, where shapes and dtypes were checked by the caller.

    Args:
        tensors: x ``[..., K]``, up ``[H, K]``, gate ``[H, K]``, bias ``[2, H]``, down ``[O, H]``, down_bias ``[O]``.
        saving: whether both projections are kept for the backward pass.
        activation: of gate.
        precision: of float32 products.
    """
    options = (activation, precision, "")
    if saving and wants_gradient(tensors):
        y: Tensor = torch.ops.fastkron.gated_split_saving(*tensors, *options)[0]
        return y
    return torch.ops.fastkron.gated_split(*tensors, *options)  # type: ignore[no-any-return]
