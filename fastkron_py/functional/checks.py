"""Argument checks of the Kronecker verbs. Every refusal names the argument, the expectation and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.errors import type_error, value_error
from fastkron_py.shapes import Shape, result_shape

PRECISIONS: Final = ("highest", "high", "medium")
DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_scalar(name: str, value: Any) -> None:
    """Accept a finite real number or a 0-dimensional real tensor (whose value is not looked at)."""
    if isinstance(value, Tensor):
        if value.ndim != 0 or value.dtype not in DTYPES:
            raise value_error(name, "a number or a 0-dimensional floating-point tensor", f"a tensor of shape {tuple(value.shape)}, {value.dtype}")
        return
    if isinstance(value, bool) or not isinstance(value, int | float | complex | torch.SymFloat | torch.SymInt):
        raise type_error(name, "a number or a 0-dimensional floating-point tensor", type(value).__name__)
    if isinstance(value, complex):
        finite = math.isfinite(value.real) and math.isfinite(value.imag)
    else:
        finite = isinstance(value, torch.SymFloat | torch.SymInt) or math.isfinite(value)
    if not finite:
        raise value_error(name, "a finite number", value)


def check_precision(precision: Any) -> None:
    """Accept None or one of `PRECISIONS`."""
    if precision is None:
        return
    if not isinstance(precision, str):
        raise type_error("precision", f"None or one of {', '.join(PRECISIONS)}", type(precision).__name__)
    if precision not in PRECISIONS:
        raise value_error("precision", f"None or one of {', '.join(PRECISIONS)}", repr(precision))


def factor_list(factors: Any, name: str = "factors") -> list[Any]:
    """The factors as a list; a lone array is refused, since iterating over it would take rows for factors."""
    if not isinstance(factors, Sequence) or isinstance(factors, str | bytes):
        raise type_error(name, "a list or tuple of matrices", type(factors).__name__)
    return list(factors)


def check_tensors(x: Any, factors: Sequence[Any], z: Any, names: tuple[str, str, str]) -> None:
    """Every argument a floating-point tensor, all of one dtype and on one device."""
    named = [(names[0], x), *((f"{names[1]}[{i}]", f) for i, f in enumerate(factors))]
    if z is not None:
        named.append((names[2], z))
    for name, t in named:
        if not isinstance(t, Tensor):
            raise type_error(name, "a tensor, like the other arguments", type(t).__name__)
        if t.dtype not in DTYPES:
            raise type_error(name, "a dtype among " + ", ".join(str(d).removeprefix("torch.") for d in DTYPES), t.dtype)
        if t.layout != torch.strided:
            raise type_error(name, "a dense (strided) tensor", t.layout)
        if t.dtype != x.dtype:
            raise type_error(name, f"{names[0]}'s dtype {x.dtype}", t.dtype)
        if t.device != x.device:
            raise value_error(name, f"{names[0]}'s device {x.device}", t.device)


def check_problem(x: Tensor, factors: Sequence[Tensor], beta: Any, z: Tensor | None, left: bool, names: tuple[str, str, str]) -> Shape:
    """Shapes that chain, and a z where beta needs one. Returns the result's shape."""
    shape = result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left, names=names[:2])
    if z is None:
        if isinstance(beta, Tensor) or beta != 0:
            raise value_error(names[2], f"a tensor that broadcasts to the result {shape}, since beta is not 0", None)
        return shape
    try:
        fits = torch.broadcast_shapes(z.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise value_error(names[2], f"a shape that broadcasts to the result {shape}", f"shape {tuple(z.shape)}")
    return shape
