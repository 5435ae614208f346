"""The programs of LoKr products: pairs multiplied out, casts and multiplies as steps of one, and their gradients as steps of another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.adapters.composed import add_product, plan_of
from fastkron_py.adapters.factor import Factor, product
from fastkron_py.kron.canonical import PLAIN, Scale
from fastkron_py.kron.multiply import Multiply, backend_of, cast, fitted, scale_of
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.precision import has_precisions, torch_products
from fastkron_py.runtime.program import Program

COUNT = 5  # of x and the factors' matrices
Side = tuple[int, bool]  # a matrix: the number of its factor, and whether it is the right one of a pair


def forward(tensors: Sequence[Any], options: tuple[Any, ...], saves: bool = False, out: Tensor | None = None) -> Program:
    """The program of `fastkron::lokr_linear`: x, the factors' matrices and base; scale, beta, precision and backend.

    With saves it also returns tensors for a backward pass: matrices that it made, its intermediate, and those of multiplies.
    With out it writes the result there, and returns nothing: to base, or to one more tensor.
    """
    scale, _, precision, backend = options
    is_base = out is not None and out is tensors[-1]
    build = Builder([*tensors, None if is_base else out])
    x, *matrices, base, target = build.inputs
    target = base if is_base else target
    weights = _Weights(build, x, matrices, backend_of(backend, tensors[0]), precision)
    stages = weights.stages(scale_of(scale, base is not None))
    saved, betweens, y = list(weights.made), [], x
    for stage in stages:
        is_last = stage is stages[-1]
        z = base.view(stage.result) if is_last and base is not None else None
        into = target.view(stage.result) if is_last and target is not None else None
        y, between = stage.call.add(build, y.view(stage.shape), z, saves, into)
        saved += [] if is_last else [y]
        betweens += [] if between is None else [between]
    shape = (*x.shape[:-1], math.prod([w.size.rows for w in weights.given]))
    if target is not None:
        return build.program([])
    if weights.backend == "torch":  # whose multiplies autograd records
        return build.program([y], [shape], differentiable=_composed([t is not None for t in tensors], precision, backend))
    saved = [*saved, *betweens] if saves else []
    return build.program([y, *saved], [shape, *[t.shape for t in saved]], saved=len(saved))


def gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::lokr_linear_backward`: dy, x, the factors' matrices, the kept tensors; needs, scale, precision, backend."""
    needs, (scale, precision, backend) = options[:COUNT], options[COUNT:]
    build = Builder(tensors)
    dy, x, *matrices = build.inputs[: COUNT + 1]
    results = [describe(t.shape, t.dtype) for t, need in zip((x, *matrices), needs, strict=True) if need]
    kept = list(build.inputs[COUNT + 1 :])
    weights = _Weights(build, x, matrices, backend_of(backend, tensors[1]), precision, kept)
    stages = weights.stages(scale_of(scale, False))
    operands = [x]
    for stage in stages[:-1]:
        operands.append(kept.pop(0) if kept else stage.call.add(build, operands[-1], None)[0])
    found: dict[Side, Tensor] = {}
    dx = dy
    for i in reversed(range(len(stages))):
        stage, operand = stages[i], operands[i].view(stages[i].shape)
        between = kept.pop() if kept and stage.call.saves(operand, build.device) else None
        wanted = [weights.is_needed(needs, side) for side in stage.sides]
        goes_on = needs[0] or any([weights.is_needed(needs, side) for earlier in stages[:i] for side in earlier.sides])
        made = stage.call.add_gradients(build, build.reshape(dx, stage.result), operand, (goes_on, *wanted), stage.dtype, between)
        dx, *dfs = take(made, (goes_on, *wanted))
        found |= {side: df if stage.call.left else df.mT for side, df in zip(stage.sides, dfs, strict=True) if df is not None}
        if not goes_on:
            break
    ordered = ([dx] if needs[0] else []) + weights.gradients(build, needs, found)
    return build.program([fitted(build, t, r) for t, r in zip(ordered, results, strict=True)], [r.shape for r in results])


def _composed(present: Sequence[bool], precision: str | None, backend: str) -> Callable[..., Tensor]:
    """The composed product, as a function of the tensors that are present, scale and beta."""

    def call(*given: Any) -> Tensor:
        *tensors, scale, _ = given
        x, left1, right1, left2, right2, base = take(tensors, present)
        return add_product(x, Factor(left1, right1), Factor(left2, right2), base, scale, precision, backend)

    return call


class _Stage(NamedTuple):
    """One of the one or two multiplies of a product.

    Attributes:
        call: the multiply.
        shape: of its operand.
        result: shape of its result.
        sides: the matrices that its factors are.
        dtype: of its factors' gradients.
    """

    call: Multiply
    shape: tuple[int, ...]
    result: tuple[int, ...]
    sides: tuple[Side, ...]
    dtype: torch.dtype


class _Weights:
    """Both factors of a LoKr weight, each as a matrix or as a pair.

    Attributes:
        given: as in the call.
        backend: of the multiplies.
        precision: of float32 products.
        is_expanded: of each, whether it is a pair that is multiplied out.
        ready: operands of multiplies: for Triton of x's dtype.
        made: the matrices of these that are not the call's own.
    """

    def __init__(
        self,
        build: Builder,
        x: Tensor,
        matrices: Sequence[Any],
        backend: str,
        precision: str | None,
        kept: list[Tensor] | None = None,
    ) -> None:
        """Add the steps that make them to a program, or take them from the front of the kept tensors."""
        self.x, self.given = x, (Factor(*matrices[:2]), Factor(*matrices[2:]))
        self.backend, self.precision = backend, precision
        plan = plan_of(*self.given, math.prod(x.shape[:-1]), build.device)
        self.is_expanded = [is_dense and w.right is not None for w, is_dense in zip(self.given, plan, strict=True)]
        self.made: list[Tensor] = []
        self.ready = [
            Factor(self._expanded(build, i, kept)) if self.is_expanded[i] else Factor(*[self._cast(build, t, kept) for t in w])
            for i, w in enumerate(self.given)
        ]

    def _cast(self, build: Builder, t: Any, kept: list[Tensor] | None) -> Any:
        """A matrix of the call in the dtype that a multiply takes."""
        if t is None or t.dtype == self.x.dtype or self.backend == "torch":
            return t
        self.made.append(kept.pop(0) if kept else cast(build, t, self.x.dtype))
        return self.made[-1]

    def _expanded(self, build: Builder, index: int, kept: list[Tensor] | None) -> Tensor:
        """A pair multiplied out, in the dtype that a multiply takes."""
        dtype = self._dtype((index, False)) if self.backend == "torch" else self.x.dtype
        self.made.append(kept.pop(0) if kept else add_expanded(build, self.given[index], dtype, self.precision))
        return self.made[-1]

    def stages(self, scale: Scale) -> list[_Stage]:
        """The multiplies: one by two matrices; or one by a matrix or right matrix of each, and one by the left matrices."""
        w1, w2 = self.ready
        lead, rows = tuple(self.x.shape[:-1]), (w1.left.shape[0], w2.left.shape[0])
        shape, result = tuple(self.x.shape), (*lead, math.prod(rows))
        both: tuple[Side, Side] = (0, False), (1, False)
        if w1.right is None and w2.right is None:
            return [self._stage(both, scale, shape, result)]
        inner: tuple[Side, Side] = (0, w1.right is not None), (1, w2.right is not None)
        between = tuple([self._matrix(side).shape[0] for side in inner])
        first = self._stage(inner, PLAIN, shape, (*lead, math.prod(between)))
        if w1.right is not None and w2.right is not None:
            return [first, self._stage(both, scale, first.result, result)]
        # One mode is finished: the other one alone is multiplied.
        left = w2.right is None
        return [first, self._stage(both[:1] if left else both[1:], scale, (*lead, *between), (*lead, *rows), left)]

    def _matrix(self, side: Side) -> Tensor:
        weight = self.ready[side[0]]
        return weight.right if side[1] and weight.right is not None else weight.left

    def _stage(self, sides: tuple[Side, ...], scale: Scale, shape: tuple[int, ...], result: tuple[int, ...], left: bool = False) -> _Stage:
        matrices = [self._matrix(side) for side in sides]
        call = Multiply([m if left else m.mT for m in matrices], self.backend, self.precision, left, scale)
        is_wide = torch.float32 in [self._dtype(side) for side in sides]
        return _Stage(call, shape, result, sides, torch.float32 if is_wide else self.x.dtype)

    def _dtype(self, side: Side) -> torch.dtype:
        """The dtype of a matrix before it was cast."""
        left, right = self.given[side[0]]
        if right is None or not self.is_expanded[side[0]]:
            return right.dtype if side[1] and right is not None else left.dtype
        return torch.promote_types(left.dtype, right.dtype)

    def is_needed(self, needs: Sequence[bool], side: Side) -> bool:
        """Whether the gradient of a matrix is, where those of x and of the call's matrices are."""
        index, is_right = side
        left, right = needs[1 + 2 * index : 3 + 2 * index]
        return left or right if self.is_expanded[index] else right if is_right else left

    def gradients(self, build: Builder, needs: Sequence[bool], found: dict[Side, Tensor]) -> list[Tensor]:
        """The gradients of the call's matrices that are needed, from those of the matrices."""
        gradients: list[Tensor] = []
        for index, weight in enumerate(self.given):
            needed = needs[1 + 2 * index : 3 + 2 * index]
            if self.is_expanded[index] and any(needed):
                gradients += _gradients_of_pair(build, found[index, False], weight, needed, self._dtype((index, False)), self.precision)
            else:
                gradients += [found[index, is_right] for is_right in (False, True) if needed[is_right]]
        return gradients


def add_expanded(build: Builder, pair: Any, dtype: torch.dtype, precision: str | None) -> Tensor:
    """Add the product of a pair, or of each of several, to a program, in this dtype."""

    def call(left: Tensor, right: Tensor) -> Tensor:
        left = left.to(torch.promote_types(left.dtype, right.dtype))
        with torch_products(left, precision):
            return product(left, right).to(dtype)

    function = torch.mm if pair.left.ndim == 2 and _is_plain(pair, dtype) else call
    return build.call(function, pair, describe((*pair.left.shape[:-1], pair.right.shape[-1]), dtype))


def _is_plain(pair: Any, dtype: torch.dtype) -> bool:
    """Whether products of a pair are torch's as they are: in this one dtype, which has one precision."""
    return all([t.dtype == dtype for t in pair]) and not has_precisions(dtype)


def _gradients_of_pair(
    build: Builder, dw: Tensor, weight: Factor, needs: Sequence[bool], dtype: torch.dtype, precision: str | None
) -> list[Tensor]:
    """The gradients of a pair's matrices that are needed, from that of the product, of this dtype."""
    pair: Any = weight
    results = [describe(t.shape, t.dtype) for t, need in zip(pair, needs, strict=True) if need]
    if _is_plain(pair, dw.dtype) and not dtype.is_complex:
        left, right = pair
        operands = [given for given, need in zip(((dw, right.mT), (left.mT, dw)), needs, strict=True) if need]
        return [build.call(torch.mm, given, result) for given, result in zip(operands, results, strict=True)]

    def call(dw: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        dw, found = dw.to(dtype), []
        with torch_products(dw, precision):
            if needs[0]:
                found.append(dw.mm(right.to(dtype).mH).to(left.dtype))
            if needs[1]:
                found.append(left.to(dtype).mH.mm(dw).to(right.dtype))
        return tuple(found)

    made = build.call(call, (dw, *pair), *results)
    return [made] if len(results) == 1 else made
