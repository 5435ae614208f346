"""Many LoKr adapters on one base layer: each row has its own, by an index that the host never reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastkron_py.adapters.factor import Factor, Operands
from fastkron_py.adapters.plan import is_second_first
from fastkron_py.adapters.program import add_expanded
from fastkron_py.kron.multiply import backend_of, cast
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.eager import transforms_active, wants_gradient
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.operator import Operator
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.runtime.program import Program, Scalar

_ALIGNED: Final = 16  # bytes of a row in torch's grouped products
_GROUPED: Final = (torch.float32, torch.float16, torch.bfloat16)
_MOST_GROUPS: Final = 64  # columns of w1, which the kernel mixes in registers


def check_index(index: Any, given: Operands) -> None:
    """An adapter for each row, and as many adapters in both factors; values are not looked at.

    Raises:
        TypeError: no tensor of integers.
        ValueError: another shape or device, or factors without adapters.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        got = index.dtype if isinstance(index, Tensor) else type_name(index)
        raise type_error("index", "a tensor of torch.int32 or torch.int64", got)
    if index.shape != given.x.shape[:-1] or index.device != given.x.device:
        expected = f"shape {tuple(given.x.shape[:-1])}, as x has rows, on {given.x.device}"
        raise value_error("index", expected, f"shape {tuple(index.shape)} on {index.device}")
    if given.w1.left.ndim != 3:
        raise value_error("w1 and w2", "factors [adapters, out, in], since index is given", f"shape {tuple(given.w1.left.shape)}")


def add_indexed(given: Operands, index: Tensor, scale: Any, precision: str | None) -> Tensor:
    """``base + scale * x @ kron(w1[i], w2[i]).T`` with each row's i, of arguments that have been checked."""
    if isinstance(scale, Tensor | complex):
        given, scale = given._replace(w1=Factor(_wide(given.w1) * scale)), 1.0
    if wants_gradient(given.present) or transforms_active():  # which derive torch's products
        return _in_torch(given, index, scale, precision)
    return lokr_indexed(*given.listed, index, float(scale), precision, backend_of_call())


def _wide(w1: Factor) -> Tensor:
    """Each adapter's w1 in float32 or more."""
    matrices = w1.expanded().left
    return matrices.to(torch.promote_types(matrices.dtype, torch.float32))


# ---- by torch ----------------------------------------------------------------------------------------


def _in_torch(given: Operands, index: Tensor, scale: Any, precision: str | None) -> Tensor:
    """W2 multiplies rows that are sorted by their adapters; w1, which is small, is gathered for each row, with the scale in it.

    A row without an adapter is multiplied as zeros of the first one's. What it holds, and its gradient, reaches nothing but base's.
    """
    x, w1, w2, base = given
    index, adapters = index.flatten(), w1.left.shape[0]
    has_none = ((index < 0) | (index >= adapters))[:, None]
    if not adapters:
        w1, w2 = (Factor(*[None if t is None else pad(t, (0, 0, 0, 0, 0, 1)) for t in w]) for w in (w1, w2))  # type: ignore[arg-type]
    adapter = index.clamp(0, w1.left.shape[0] - 1)
    # Gathered in float32, in which the gradients of its rows are summed.
    first = (_wide(w1) * scale)[adapter].to(x.dtype)  # [rows, out1, in1]
    rows = x.reshape(len(index), x.shape[-1]).masked_fill(has_none, 0).unflatten(1, (w1.size.columns, w2.size.columns))
    with torch_products(x, precision):
        y = first @ _by_second(rows, w2, adapter) if is_second_first(w1.size, w2.size) else _by_second(first @ rows, w2, adapter)
    y = y.flatten(1).masked_fill(has_none, 0).view(given.result_shape)
    return y if base is None else y + base  # in the layout of the first


def _by_second(rows: Tensor, w2: Factor, adapter: Tensor) -> Tensor:
    """Rows ``[rows, n, in2]``, each times its adapter's w2: ``[rows, n, out2]``.

    In one grouped product for all adapters, or two of low rank. torch groups bfloat16 without the host; float16 and float32 wait for it.
    In compiled graphs these, and other dtypes everywhere, gather w2 for each row.
    """
    # [adapters, in, out]. Grouped products refuse matrices with gaps in their rows.
    matrices = [factor.to(rows.dtype).contiguous().mT for factor in ((w2.left,) if w2.right is None else (w2.right, w2.left))]
    if rows.dtype != torch.bfloat16 and (rows.dtype not in _GROUPED or torch.compiler.is_compiling()):
        for matrix in matrices:
            rows = rows @ matrix[adapter]
        return rows
    sorted_adapters, order = adapter.sort(stable=True)
    numbers = torch.arange(len(w2.left), dtype=adapter.dtype, device=adapter.device)
    ends = torch.searchsorted(sorted_adapters, numbers, right=True, out_int32=True) * rows.shape[1]
    flat = rows[order].flatten(0, 1)
    for matrix in matrices:
        size, step = matrix.shape[2], _ALIGNED // rows.element_size()
        more = [-n % step if n else step for n in matrix.shape[1:]]
        if any(more):
            flat, matrix = pad(flat, (0, more[0])), pad(matrix.mT, (0, more[0], 0, more[1])).mT
        flat = torch.nn.functional.grouped_mm(flat, matrix, offs=ends)[:, :size]
    found = flat.unflatten(0, rows.shape[:2])
    return torch.empty_like(found, memory_format=torch.contiguous_format).index_copy_(0, order, found)


# ---- by a kernel: rows sorted in one launch, multiplied in another ----------------------------------


def program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::lokr_indexed`: x, the factors' matrices, base and index; scale, precision and backend."""
    _, precision, backend = options
    build = Builder(tensors)
    x, *matrices, base, index = build.inputs
    given = Operands(x, Factor(*matrices[:2]), Factor(*matrices[2:]), base)
    result, groups = describe(given.result_shape, x.dtype), given.w1.size.columns
    by_kernel = backend_of(backend, tensors[0]) == "triton" and not x.is_complex() and groups <= _MOST_GROUPS
    if not by_kernel or 0 in (result.numel(), given.w1.left.shape[0]):
        present = [t is not None for t in tensors]

        def by_torch(*given: Any) -> Tensor:
            *own, scale = given
            x, left1, right1, left2, right2, base, index = take(own, present)
            return _in_torch(Operands(x, Factor(left1, right1), Factor(left2, right2), base), index, scale, precision)

        operands = [t for t in build.inputs if t is not None]
        return build.program([build.call(by_torch, operands, result, scalars=(Scalar(0),))])
    from fastkron_py.adapters.launches import add_indexed, most_rank

    w1 = _prepared(build, given.w1, given.w1.left.dtype, 0, precision)
    w2 = _prepared(build, given.w2, x.dtype, most_rank(x.dtype, groups, build.device), precision)
    rows = math.prod(x.shape[:-1])
    x, index = build.contiguous(x).view(rows, x.shape[-1]), build.contiguous(index).view(rows)
    y = build.empty((rows, result.shape[-1]), x.dtype)
    base = None if base is None else build.contiguous(base).view(y.shape)
    add_indexed(build, Operands(x, w1, w2, base), index, y, resolved(precision))
    return build.program([y], [result.shape])


def _prepared(build: Builder, w: Factor, dtype: torch.dtype, most_rank: int, precision: str | None) -> Factor:
    """A factor of this dtype without gaps in memory; a pair of a higher rank is multiplied out."""
    if w.right is not None and not 0 < w.right.shape[-2] <= most_rank:
        w = Factor(add_expanded(build, w, dtype, precision))
    left, right = (None if t is None else build.contiguous(cast(build, t, dtype)) for t in w)
    return Factor(left, right)  # type: ignore[arg-type]


def _fake(x: Tensor, left1: Tensor, right1: Any, left2: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], left1.shape[1] * left2.shape[1]))


lokr_indexed = Operator(
    "lokr_indexed(Tensor x, Tensor left1, Tensor? right1, Tensor left2, Tensor? right2, Tensor? base, Tensor index, float scale, "
    "str? precision, str backend) -> Tensor",
    program=program,
    fake=_fake,
    vmap="samples",
    scalars=(0,),
)
"""Without derivatives: a call that wants gradients is made of torch's products."""
