"""LoKr products written to a given tensor, which may be the base layer's result: no other memory of the result's size."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastkron_py.adapters import program
from fastkron_py.adapters.factor import Operands
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.call_cache import CACHE, about
from fastkron_py.runtime.checks import check_tensor
from fastkron_py.runtime.eager import takes_fast_path, wants_gradient
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.program import Program


def check_out(out: Any, given: Operands, scale: Tensor | None) -> None:
    """A tensor of the result's shape, dtype and device; no gradient is recorded of writing to it.

    Raises:
        TypeError: no dense tensor, or another dtype.
        ValueError: another shape or device, or an argument whose gradient autograd would record.
    """
    check_tensor("out", out, given.x, "x")
    if tuple(out.shape) != given.result_shape:
        raise value_error("out", f"the result's shape {given.result_shape}", f"shape {tuple(out.shape)}")
    if wants_gradient([*given.listed, scale, out]):
        raise value_error("out", "torch.no_grad(), or arguments that require no gradient", "one that requires a gradient")


def can_write(given: Operands, out: Tensor) -> bool:
    """Whether a program may write to out: contiguous memory that it does not read, but for base, element by element."""
    tensors, base = given.present, given.base
    if torch.compiler.is_compiling() or not out.is_contiguous() or not takes_fast_path([*tensors, out]):
        return False
    is_base = base is not None and base.data_ptr() == out.data_ptr() and base.stride() == out.stride()
    return are_apart(tensors[:-1] if is_base else tensors, out)


def are_apart(given: Sequence[Tensor], out: Tensor) -> bool:
    """Whether none of the tensors shares memory with out."""
    memory = out.untyped_storage().data_ptr()
    return all([t.untyped_storage().data_ptr() != memory for t in given])


def write(given: Operands, scale: float, precision: str | None, out: Tensor, key: Hashable) -> None:
    """Write ``base + scale * x @ kron(w1, w2).T`` to out, where `can_write` allows it; arguments have been checked.

    A call whose out is base is kept by this key, if there is one.
    """
    is_base = out is given.base
    tensors = given.present if is_base else [*given.present, out]
    options = (scale, 0.0 if given.base is None else 1.0, precision, requested_backend())
    full = ("lokr_linear_into", is_base, *[t is None for t in given.listed], scale == 1, precision, *about(tensors), given.x.device)
    made = CACHE.program(full, lambda: program.forward(given.listed, options, out=out))
    made(tensors, options[:2])
    increment_version(out)  # a backward pass that has saved base raises, as after torch's own writes
    if is_base and key is not None:
        CACHE.keep(key, tensors, made, _in_place, options, "lokr_linear")


def _in_place(made: Program, given: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    """Run a program whose out is base, the last of the tensors."""
    made(given, options[:2])
    increment_version(given[-1])
    return given[-1]
