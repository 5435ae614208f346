"""LoKr products written to a given tensor, which may be the base layer's result: no other memory of the result's size."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from fastkron_py.adapters import program
from fastkron_py.adapters.factor import Operands
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.call_cache import CACHE, about
from fastkron_py.runtime.program import Program


def write(given: Operands, scale: float, precision: str | None, out: Tensor, key: Hashable) -> None:
    """Write ``base + scale * x @ kron(w1, w2).T`` to out, where `can_write` of `runtime.checks` allows it; arguments have been checked.

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
        CACHE.keep(key, tensors, made, partial(_in_place, made), options, "lokr_linear")


def _in_place(made: Program, given: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    """Run a program whose out is base, the last of the tensors."""
    made(given, options[:2])
    increment_version(given[-1])
    return given[-1]
