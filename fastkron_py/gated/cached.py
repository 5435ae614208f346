"""Gated layers that were computed before, recognised in the fewest steps: see `records`.

The launch is the one that the long way makes, on descriptors equal to its; products with a projection are torch's in both. Of a backward
pass the launch is kept as well, and what its products are of.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.gated import operator
from fastkron_py.runtime import torch_internals as guards
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.call_cache import (
    MOST_TRIES,
    Guarded,
    Records,
    is_here,
    is_recordable,
    may_be_triton,
    may_repeat_backward,
    only_launch,
)
from fastkron_py.runtime.eager import KINDS, unseen_by_autograd
from fastkron_py.runtime.operator import batchable_one_by_one, undecorated
from fastkron_py.runtime.precision import resolved


def _gated(options: tuple[Any, ...]) -> Any:
    """What the kernels are told of the operator's options."""
    from fastkron_py.gated.launches import Gated

    activation, layout, precision, _ = options
    return Gated(activation, layout, resolved(precision))


class _Repeated:
    """A launch of the main loop on up's and gate's weight, in one tensor or in two, that can be repeated."""

    def __init__(self, plan: Any, shifts: tuple[int, ...]) -> None:
        self._plan, self._shifts = plan, shifts

    def is_current(self, weight: Tensor, gate: Tensor | None) -> bool:
        """Whether it may be repeated on such weights, which lie elsewhere."""
        return self._plan.is_current(weight, gate)  # type: ignore[no-any-return]

    def __call__(self, wide: operator.Wide, others: Sequence[Tensor | None]) -> None:
        """Launch; others are out, pair, pair2 and side."""
        x, weight, gate, bias = wide
        self._plan(x, weight, weight if gate is None else gate, bias, others, (), self._shifts)


def _repeated(seen: Sequence[Any], wide: operator.Wide, gated: Any) -> _Repeated | None:
    """The one launch that was made, if it read these tensors' memory; else None."""
    x, weight, gate, bias = wide
    # Of a packed weight the kernel is told where its second half begins.
    distance = gated.distance(weight) if gate is None else 0
    second = weight if gate is None else gate
    read = [x.data_ptr(), weight.data_ptr(), second.data_ptr() + distance, *([] if bias is None else [bias.data_ptr()])]
    plan = only_launch(seen, read)
    return None if plan is None else _Repeated(plan, (0, distance, 0, 0, 0, 0, 0))


class _Pass:
    """A backward pass that can be repeated."""

    def __init__(self, key: Hashable, given: Sequence[Tensor], options: tuple[Any, ...]) -> None:
        from fastkron_py.gated import launches as triton_gated

        self._key = key
        self._check = guards.guard(given)
        self._kernels = triton_gated
        self._gated = _gated(options)
        self._again: _Repeated | None = None  # of the product that is made once more
        self._over = False  # that launch writes y over its gradient

    def fits(self, key: Hashable, given: Sequence[Tensor]) -> bool:
        """Whether it does for these tensors what it did for its own; key is what guards do not tell of."""
        return self._key == key and self._check(*given)

    def stored(self, dy: Tensor, pairs: Tensor, in_place: bool, again: bool) -> tuple[Tensor, Tensor | None]:
        """As `triton_gated.stored_gradients`."""
        return self._kernels.stored_gradients(dy, pairs, self._gated, in_place, again)

    def recomputed(self, dy: Tensor, wide: operator.Wide, again: bool) -> Any:
        """As `triton_gated.recomputed_gradients`, in fewer steps from the second time on."""
        if self._again is None or not self._again.is_current(*wide[1:3]):
            return self._first(dy, wide, again)
        d = dy.new_empty((dy.shape[0], 2 * dy.shape[1]))
        y = (dy if self._over else torch.empty_like(dy)) if again else None
        self._again(wide, (y, *self._gated.pair_targets(d), dy))
        return d, y

    def _first(self, dy: Tensor, wide: operator.Wide, again: bool) -> Any:
        from fastkron_py.tiling.gemm_launch import watching

        with watching() as seen:
            found = self._kernels.recomputed_gradients(dy, wide, self._gated, again)
        if dy.stride(-1) == 1:  # else the launch read a copy
            self._again = _repeated(seen, wide, self._gated)
            self._over = found[1] is dy
        return found


class _Layer(Guarded):
    """A recorded layer, and the backward passes after it."""

    def __init__(self, tensors: operator.Tensors, launch: _Repeated, saving: bool, options: tuple[Any, ...]) -> None:
        super().__init__([t for t in tensors if t is not None])
        x, weight, gate, _, down, _ = tensors
        self._gated = _gated(options)
        self.launch, self.options = launch, options
        self._rows, self._hidden, self._shape = operator.sizes(x, weight, gate, down)
        self._keeps = saving and self.with_gradient
        self._passes: list[_Pass] = []
        self._tries = 0

    def __call__(self, *tensors: Any) -> Any:
        """(result, pairs ``[M, 2 H]`` where they are saved)."""
        x, _, _, _, down, down_bias = tensors
        with unseen_by_autograd(x):
            y = x.new_empty(self._shape if down is None else (self._rows, self._hidden))
            pairs = x.new_empty((self._rows, 2 * self._hidden)) if self._keeps else None
            pair, pair2 = (None, None) if pairs is None else self._gated.pair_targets(pairs)
            self.launch(tensors[:4], (y, pair, pair2, None))
            if down is not None:
                y = torch.nn.functional.linear(y, down, down_bias).view(self._shape)
        return y, pairs

    def gradients(self, dy: Tensor, tensors: Any, pairs: Tensor | None, needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """Gradients of the tensors, those that are needed."""
        if may_repeat_backward() and any(needs[:4]):
            given = [t for t in (dy, *tensors, pairs) if t is not None]
            one = self._pass(given, needs)
            if one is not None and is_here(given):
                return self._repeat(one, dy, tensors, pairs, needs)
        return operator.differentiable_gradients(dy, tensors, pairs, needs, self.options)

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
        in_place = operator.may_overwrite(pairs)
        with unseen_by_autograd(x):
            wide = (x.reshape(self._rows, x.shape[-1]), weight, gate, bias)

            def pair_gradients(dgated: Tensor, again: bool) -> tuple[Tensor, Tensor | None]:
                if pairs is not None:
                    return one.stored(dgated, pairs, in_place, again)
                found: tuple[Tensor, Tensor | None] = one.recomputed(dgated, wide, again)
                return found

            found = operator.chain(dy.reshape(self._rows, dy.shape[-1]), wide, down, needs, pair_gradients)
            if pairs is not None and in_place:
                torch.autograd.graph.increment_version(pairs)  # whoever reads them nevertheless gets an error
            return [f if f is None or f.shape == t.shape else f.view(t.shape) for f, t in zip(found, tensors, strict=True)]


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
    @batchable_one_by_one
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        *tensors, pairs = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if not any(needs):
            return (None,) * (1 + operator.COUNT)
        return None, *ctx.layer.gradients(dy, tensors, pairs, needs)


_apply: Any = undecorated(_Recorded)


def _key(tensors: Sequence[Any], activation: Any, layout: Any, backward: Any, precision: Any) -> Hashable:
    """What a call is looked up by; None for calls that are not recorded. Nothing has been checked yet."""
    for t in tensors:
        if t is not None and type(t) not in KINDS:
            return None
    if not (type(activation) is type(layout) is type(backward) is str and (precision is None or type(precision) is str)):
        return None
    from fastkron_py.gated.activations import known_activation

    _, weight, gate, *_ = tensors
    try:
        shape = tensors[0].shape
        # A launch on two weights begins at the lower address.
        swapped = gate is not None and gate.data_ptr() < weight.data_ptr()
    except (AttributeError, RuntimeError):  # of None, of a nested tensor, and of one without memory
        return None
    absent = tuple([t is None for t in tensors])
    # An explicit precision is also one of torch's products.
    return shape, absent, swapped, known_activation(activation), layout, backward, precision, resolved(precision), requested_backend()


def replay(tensors: Sequence[Any], activation: Any, layout: Any, backward: Any, precision: Any) -> Tensor | None:
    """The result of a call, if one like it was recorded; else None. Not for a graph that is being compiled.

    Args:
        tensors: the six tensors of a call, or what was given for them.
        activation: as in `functional.gated_linear`.
        layout: likewise.
        backward: likewise.
        precision: likewise.
    """
    key = _key(tensors, activation, layout, backward, precision)
    if key is None:
        return None
    given = [t for t in tensors if t is not None]
    layer = RECORDS.find(key, given)
    if layer is None or not is_here(given) or not layer.launch.is_current(*tensors[1:3]):
        return None
    y: Tensor = _apply(layer, *tensors) if layer.with_gradient else layer(*tensors)[0]
    return y


def gated_linear(tensors: operator.Tensors, backward: str, *options: Any) -> Tensor:
    """The operator's result on tensors that were checked, recorded where it can be repeated; options as in its schema."""
    saving = backward == "save"
    activation, layout, precision, _ = options
    x, weight, gate, bias, down, _ = tensors
    if torch.compiler.is_compiling() or not may_be_triton(x):
        return operator.gated_linear(tensors, saving, *options)
    key = _key(tensors, activation, layout, backward, precision)
    given = [t for t in tensors if t is not None]
    # Torch's products in a precision of their own are left to the long way, which sets and resets it.
    is_set = down is not None and precision is not None and x.dtype == torch.float32
    is_wanted = key is not None and not is_set and is_recordable(given) and is_here(given)
    slot = RECORDS.grant(key) if is_wanted else None
    if slot is None:
        return operator.gated_linear(tensors, saving, *options)
    from fastkron_py.tiling.gemm_launch import watching

    with watching() as seen:
        y = operator.gated_linear(tensors, saving, *options)
    launch = _repeated(seen, (x, weight, gate, bias), _gated(options))
    if launch is not None:
        slot.records.append(_Layer(tensors, launch, saving, options))
    return y
