"""Gated layers that were computed before, recognised in the fewest steps: see `records`.

The launch is the one that the long way makes, on descriptors equal to its; products with a projection are torch's in both. Backward
passes are the operator's own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kernels.precision import resolved
from fastkron_py.ops import gated as operator
from fastkron_py.ops.autograd import undecorated
from fastkron_py.ops.backend import requested_backend
from fastkron_py.ops.implementation import unseen_by_autograd
from fastkron_py.ops.plain import KINDS
from fastkron_py.ops.records import Guarded, Records, is_here, is_recordable, may_be_triton, only_launch


class _Layer(Guarded):
    """A recorded layer."""

    def __init__(self, tensors: operator.Tensors, plan: Any, saving: bool, options: tuple[Any, ...]) -> None:
        super().__init__([t for t in tensors if t is not None])
        x, weight, _, down, _ = tensors
        self.plan, self.options = plan, options
        self._rows, self._hidden, self._shape = operator.sizes(x, weight, down)
        self._saving = saving and self.with_gradient
        self._stacked = options[1] == "stacked"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, down_bias: Tensor | None) -> Any:
        """(result, pairs ``[M, 2 H]`` where they are saved)."""
        y = x.new_empty(self._shape if down is None else (self._rows, self._hidden))
        pairs = pair = pair2 = None
        if self._saving:
            pair = pairs = x.new_empty((self._rows, 2 * self._hidden))
            if self._stacked:
                with unseen_by_autograd(x):
                    pair, pair2 = pairs.chunk(2, 1)
        self.plan(x, weight, bias, (y, pair, pair2, None), ())
        if down is not None:
            with unseen_by_autograd(x):
                y = torch.nn.functional.linear(y, down, down_bias).reshape(self._shape)
        return y, pairs


RECORDS: Final[Records[_Layer]] = Records()


class _Recorded(torch.autograd.Function):
    """A recorded layer whose gradients are wanted."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, options: tuple[Any, ...], *tensors: Any) -> Tensor:
        y, pairs = layer(*tensors)
        ctx.save_for_backward(*tensors, pairs)
        ctx.options = options
        return y  # type: ignore[no-any-return]

    backward = staticmethod(operator.backward)


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


def replay(tensors: Sequence[Any], activation: Any, layout: Any, backward: Any, precision: Any) -> Tensor | None:
    """The result of a call, if one like it was recorded; else None. Not for a graph that is being compiled.

    Args:
        tensors: the five tensors of a call, or what was given for them.
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
    if layer is None or not is_here(given) or not layer.plan.is_current():
        return None
    y: Tensor = _apply(layer, layer.options, *tensors) if layer.with_gradient else layer(*tensors)[0]
    return y


def gated_linear(tensors: operator.Tensors, backward: str, *options: Any) -> Tensor:
    """The operator's result on tensors that were checked, recorded where it can be repeated; options as in its schema."""
    saving = backward == "save"
    activation, layout, precision, _ = options
    x, weight, bias, down, _ = tensors
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
    from fastkron_py.kernels.gemm_launch import watching

    with watching() as seen:
        y = operator.gated_linear(tensors, saving, *options)
    plan = only_launch(seen, (x, weight) if bias is None else (x, weight, bias))
    if plan is not None:
        slot.records.append(_Layer(tensors, plan, saving, options))
    return y
