"""Gated layers that were computed before, recognised in the fewest steps: see `records`.

The launch is the one that the long way makes, on descriptors equal to its; products with a projection are torch's in both. Of a backward
pass the launch is kept as well, and what its products are of. A weight in two halves, of which `gated_split` tells, has records of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kernels.precision import resolved
from fastkron_py.ops import gated as operator
from fastkron_py.ops import guards
from fastkron_py.ops.autograd import undecorated
from fastkron_py.ops.backend import requested_backend
from fastkron_py.ops.gated_split import halves, join, lie_together
from fastkron_py.ops.implementation import unseen_by_autograd
from fastkron_py.ops.plain import KINDS
from fastkron_py.ops.records import (
    MOST_TRIES,
    Guarded,
    Records,
    is_here,
    is_recordable,
    may_be_triton,
    may_repeat_backward,
    only_launch,
)

Split = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""x ``[..., K]``, weight, None, and the rest as `gated.Tensors`; or x, up ``[H, K]``, gate ``[H, K]``, which lies behind up, and so on."""
Halves = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _gated(options: tuple[Any, ...]) -> Any:
    """What the kernels are told of the operator's options."""
    from fastkron_py.kernels.gated.triton_gated import Gated

    activation, layout, precision, _ = options
    return Gated(activation, layout, resolved(precision))


class _Pass:
    """A backward pass that can be repeated."""

    def __init__(self, key: Hashable, given: Sequence[Tensor], options: tuple[Any, ...]) -> None:
        from fastkron_py.kernels.gated import triton_gated

        self._key = key
        self._check = guards.guard(given)
        self._kernels = triton_gated
        self._gated = _gated(options)
        self._plan: Any = None  # of the product that is made once more
        self._over = False  # that launch writes y over its gradient

    def fits(self, key: Hashable, given: Sequence[Tensor]) -> bool:
        """Whether it does for these tensors what it did for its own; key is what guards do not tell of."""
        return self._key == key and self._check(*given)

    def stored(self, dy: Tensor, pairs: Tensor, in_place: bool, again: bool) -> tuple[Tensor, Tensor | None]:
        """As `triton_gated.stored_gradients`."""
        return self._kernels.stored_gradients(dy, pairs, self._gated, in_place, again)

    def recomputed(self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, again: bool) -> Any:
        """As `triton_gated.recomputed_gradients`, in fewer steps from the second time on."""
        if self._plan is None or not self._plan.is_current():
            return self._first(dy, x, weight, bias, again)
        d = x.new_empty((dy.shape[0], 2 * dy.shape[1]))
        y = (dy if self._over else torch.empty_like(dy)) if again else None
        self._plan(x, weight, bias, (y, *self._gated.pair_targets(d), dy), ())
        return d, y

    def _first(self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, again: bool) -> Any:
        from fastkron_py.kernels.gemm_launch import watching

        with watching() as seen:
            found = self._kernels.recomputed_gradients(dy, x, weight, bias, self._gated, again)
        if dy.stride(-1) == 1:  # else the launch read a copy
            self._plan = only_launch(seen, (x, weight) if bias is None else (x, weight, bias))
            self._over = found[1] is dy
        return found


class _Layer(Guarded):
    """A recorded layer, and the backward passes after it."""

    def __init__(self, tensors: Split, shape: tuple[int, ...], plan: Any, saving: bool, options: tuple[Any, ...]) -> None:
        super().__init__([t for t in tensors if t is not None])
        x, weight, gate, *_ = tensors
        self._gated = _gated(options)
        self.plan, self.options = plan, options
        self._shape, self._saving = shape, saving
        self._rows = x.shape[:-1].numel()
        self._hidden = weight.shape[0] if gate is not None else operator.sizes(x, weight, None)[1]
        self._keeps = saving and self.with_gradient
        self._stacked = options[1] == "stacked"
        self._passes: list[_Pass] = []
        self._tries = 0

    def __call__(
        self, x: Tensor, weight: Tensor, _: Tensor | None, bias: Tensor | None, down: Tensor | None, down_bias: Tensor | None
    ) -> Any:
        """(result, pairs ``[M, 2 H]`` where they are saved)."""
        with unseen_by_autograd(x):
            y = x.new_empty(self._shape if down is None else (self._rows, self._hidden))
            pairs = x.new_empty((self._rows, 2 * self._hidden)) if self._keeps else None
            pair, pair2 = (None, None) if pairs is None else self._gated.pair_targets(pairs)
            self.plan(x, weight, bias, (y, pair, pair2, None), ())
            if down is not None:
                y = torch.nn.functional.linear(y, down, down_bias).view(self._shape)
        return y, pairs

    def halved(self, tensors: Split) -> _Layer:
        """The same of a weight in two halves."""
        return _Layer(tensors, self._shape, self.plan, self._saving, self.options)

    def gradients(self, dy: Tensor, tensors: Any, pairs: Tensor | None, needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """Gradients of x, of the whole weight and of the rest, those that are needed."""
        x, weight, gate, *rest = tensors
        if may_repeat_backward() and any(needs[:3]):
            given = [t for t in (dy, *tensors, pairs) if t is not None]
            one = self._pass(given, needs)
            if one is not None and is_here(given) and (gate is None or lie_together(weight, gate)):
                return self._repeat(one, dy, tensors, pairs, needs)
        whole = weight if gate is None else join(weight, gate)
        return operator.differentiable_gradients(dy, (x, whole, *rest), pairs, needs, self.options)

    def _pass(self, given: Sequence[Tensor], needs: tuple[bool, ...]) -> _Pass | None:
        activation, _, precision, backend = self.options
        key = needs, resolved(precision)
        for one in self._passes:
            if one.fits(key, given):
                return one
        # Torch's products in a precision of their own are left to the long way, which sets and resets it.
        is_set = precision is not None and given[0].dtype == torch.float32
        if self._tries >= MOST_TRIES or is_set or not is_recordable(given):
            return None
        self._tries += 1
        if operator.by_triton(given[1], given[2], activation, precision, backend):
            self._passes.append(_Pass(key, given, self.options))
            return self._passes[-1]
        return None

    def _repeat(self, one: _Pass, dy: Tensor, tensors: Any, pairs: Tensor | None, needs: tuple[bool, ...]) -> list[Tensor | None]:
        """The gradients, by a pass that fits."""
        x, weight, gate, bias, down, _ = tensors
        hidden, depth = self._hidden, x.shape[-1]
        in_place = operator.may_overwrite(pairs)
        with unseen_by_autograd(x):
            x2, dy2 = x.reshape(self._rows, depth), dy.reshape(self._rows, dy.shape[-1])
            wide = weight.reshape(2 * hidden, depth) if gate is None else weight.as_strided((2 * hidden, depth), (depth, 1))

            def pair_gradients(dgate: Tensor, again: bool) -> tuple[Tensor, Tensor | None]:
                if pairs is not None:
                    return one.stored(dgate, pairs, in_place, again)
                whole = wide.view(2, hidden, depth) if self._stacked else wide
                found: tuple[Tensor, Tensor | None] = one.recomputed(dgate, x2, whole, bias, again)
                return found

            dx, dwide, dbias, *others = operator.chain(dy2, x2, wide, down, needs, pair_gradients)
            if pairs is not None and in_place:
                torch.autograd.graph.increment_version(pairs)  # whoever reads them nevertheless gets an error
            if dx is not None and x.ndim != 2:
                dx = dx.view(x.shape)
            if dwide is not None and self._stacked:
                dwide = dwide.view(2, hidden, depth)
            if dbias is not None and self._stacked:
                dbias = dbias.view(2, hidden)
            return [dx, dwide, dbias, *others]


RECORDS: Final[Records[_Layer]] = Records()


class _Recorded(torch.autograd.Function):
    """A recorded layer whose gradients are wanted."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, *tensors: Any) -> Tensor:
        y, pairs = layer(*tensors)
        ctx.save_for_backward(*tensors, pairs)
        ctx.layer = layer
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        *tensors, pairs = ctx.saved_tensors
        _, need_x, need_weight, need_gate, *rest = ctx.needs_input_grad
        needs = (need_x, need_weight or need_gate, *rest)
        if not any(needs):
            return (None,) * (2 + operator.COUNT)
        dx, dweight, *others = ctx.layer.gradients(dy, tensors, pairs, needs)
        if tensors[2] is None:
            return None, dx, dweight, None, *others
        return None, dx, *halves(dweight, need_weight, need_gate), *others


_apply: Any = undecorated(_Recorded)


def _key(tensors: Sequence[Any], activation: Any, layout: Any, backward: Any, precision: Any) -> Hashable:
    """What a call is looked up by; None for calls that are not recorded. Nothing has been checked yet."""
    for t in tensors:
        if t is not None and type(t) not in KINDS:
            return None
    if not (type(activation) is type(layout) is type(backward) is str and (precision is None or type(precision) is str)):
        return None
    from fastkron_py.kernels.gated.activations import known_activation

    try:
        shape = tensors[0].shape
    except (AttributeError, RuntimeError):  # of None and of a nested tensor
        return None
    absent = tuple([t is None for t in tensors])
    # An explicit precision is also one of torch's products.
    return shape, absent, known_activation(activation), layout, backward, precision, resolved(precision), requested_backend()


def _replay(tensors: Sequence[Any], *described: Any) -> Tensor | None:
    key = _key(tensors, *described)
    if key is None:
        return None
    given = [t for t in tensors if t is not None]
    layer = RECORDS.find(key, given)
    if layer is None or not is_here(given) or not layer.plan.is_current():
        return None
    if tensors[2] is not None and not lie_together(tensors[1], tensors[2]):
        return None
    y: Tensor = _apply(layer, *tensors) if layer.with_gradient else layer(*tensors)[0]
    return y


def replay(tensors: Sequence[Any], activation: Any, layout: Any, backward: Any, precision: Any) -> Tensor | None:
    """The result of a call, if one like it was recorded; else None. Not for a graph that is being compiled.

    Args:
        tensors: the five tensors of a call, or what was given for them.
        activation: as in `functional.gated_linear`.
        layout: likewise.
        backward: likewise.
        precision: likewise.
    """
    x, weight, *rest = tensors
    return _replay((x, weight, None, *rest), activation, layout, backward, precision)


def of_halves(tensors: Halves, activation: str, backward: str, precision: str | None, call: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of a layer whose weight is in two halves, recorded where a call with the whole one is. Not for graphs being compiled.

    Args:
        tensors: x, up, gate, bias, down and down_bias.
        activation: as in `functional.gated_linear`.
        backward: likewise.
        precision: likewise.
        call: calls `functional.gated_linear` or `gated_mlp` with the same and, layout "stacked", the whole weight.
    """
    described = (activation, "stacked", backward, precision)
    y = _replay(tensors, *described)
    if y is not None:
        return y
    x, up, gate = tensors[:3]
    weight = join(up, gate)
    y = call(weight)
    if may_be_triton(x) and lie_together(up, gate):
        whole = (x, weight, None, *tensors[3:])
        found = RECORDS.find(_key(whole, *described), [t for t in whole if t is not None])
        slot = None if found is None else RECORDS.grant(_key(tensors, *described))
        if found is not None and slot is not None:
            slot.records.append(found.halved(tensors))
    return y


def gated_linear(tensors: operator.Tensors, backward: str, *options: Any) -> Tensor:
    """The operator's result on tensors that were checked, recorded where it can be repeated; options as in its schema."""
    saving = backward == "save"
    activation, layout, precision, _ = options
    x, weight, bias, down, _ = tensors
    if torch.compiler.is_compiling() or not may_be_triton(x):
        return operator.gated_linear(tensors, saving, *options)
    apart: Split = (*tensors[:2], None, *tensors[2:])
    key = _key(apart, activation, layout, backward, precision)
    given = [t for t in tensors if t is not None]
    # Torch's products in a precision of their own are left to the long way, which sets and resets it.
    is_set = down is not None and precision is not None and x.dtype == torch.float32
    is_wanted = key is not None and not is_set and is_recordable(given) and is_here(given)
    slot = RECORDS.grant(key) if is_wanted else None
    if slot is None:
        return operator.gated_linear(tensors, saving, *options)
    from fastkron_py.kernels.gemm_launch import watching

    with watching() as seen:
        y = operator.gated_linear(tensors, saving, *options)
    plan = only_launch(seen, (x, weight) if bias is None else (x, weight, bias))
    if plan is not None:
        slot.records.append(_Layer(apart, operator.sizes(x, weight, down)[2], plan, saving, options))
    return y
