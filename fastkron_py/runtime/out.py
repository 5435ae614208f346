"""Results written to a tensor that the caller gives: ``out=``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.runtime.checks import check_tensor
from fastkron_py.runtime.eager import takes_fast_path, wants_gradient
from fastkron_py.runtime.errors import value_error


def check_out(out: Any, shape: Sequence[int], like: Tensor, tensors: Sequence[Tensor | None]) -> None:
    """A tensor of the result's shape, and of x's dtype and device; no gradient is recorded of writing to it.

    Args:
        out: the argument.
        shape: of the result.
        like: x.
        tensors: all operands.

    Raises:
        TypeError: no dense tensor, or another dtype.
        ValueError: another shape or device, or an argument whose gradient autograd would record.
    """
    check_tensor("out", out, like, "x")
    if tuple(out.shape) != tuple(shape):
        raise value_error("out", f"the result's shape {tuple(shape)}", f"shape {tuple(out.shape)}")
    if wants_gradient([*tensors, out]):
        raise value_error("out", "torch.no_grad(), or arguments that require no gradient", "one that requires a gradient")


def can_write(tensors: Sequence[Tensor], out: Tensor, in_place: bool) -> bool:
    """Whether a program may write to out: contiguous memory that it does not read, but for the last operand, element by element.

    Args:
        tensors: the operands.
        out: see above.
        in_place: whether out may be the last operand.
    """
    if torch.compiler.is_compiling() or not out.is_contiguous() or not takes_fast_path([*tensors, out]):
        return False
    return are_apart(tensors[:-1] if in_place and is_same(tensors[-1], out) else tensors, out)


def is_same(t: Tensor, out: Tensor) -> bool:
    """Whether two tensors of one shape have their elements at the same places."""
    return t.data_ptr() == out.data_ptr() and t.stride() == out.stride()


def are_apart(tensors: Sequence[Tensor], out: Tensor) -> bool:
    """Whether none of the tensors shares memory with out."""
    memory = out.untyped_storage().data_ptr()
    return all([t.untyped_storage().data_ptr() != memory for t in tensors])
