"""torch's own functions on a `KroneckerProduct` (``__torch_function__``)."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.errors import value_error

_SAME_NAME: Final = ("cholesky", "det", "eigh", "eigvalsh", "inverse", "kron", "logdet", "matrix_power", "slogdet", "solve", "trace")


def _norm(k: Any, ord: Any = None) -> Any:
    return k.norm("fro" if ord is None else ord)


def _diagonal(k: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if offset != 0 or {dim1 % k.ndim, dim2 % k.ndim} != {k.ndim - 2, k.ndim - 1}:
        raise value_error("offset, dim1, dim2", "0 and the last two dimensions, those of an operator's matrices", (offset, dim1, dim2))
    return k.diagonal()


_FUNCTIONS: Final[dict[Any, tuple[str, Callable[..., Any]]]] = {
    torch.linalg.norm: ("norm", _norm),
    torch.linalg.matrix_norm: ("norm", _norm),
    torch.diagonal: ("diagonal", _diagonal),
    torch.linalg.diagonal: ("diagonal", partial(_diagonal, dim1=-2, dim2=-1)),
}
_METHODS: Final[dict[Any, str]] = {
    torch.matmul: "__matmul__",
    Tensor.matmul: "__matmul__",
    Tensor.__matmul__: "__matmul__",
    torch.mul: "__mul__",
    Tensor.mul: "__mul__",
    Tensor.__mul__: "__mul__",
    torch.add: "__add__",
    torch.sub: "__sub__",
    torch.linalg.inv: "inverse",
    torch.linalg.pinv: "pinv",
    # torch.export(strict=True) leaves Python's operators as they are.
    **{function: f"__{function.__name__}__" for function in (operator.matmul, operator.mul, operator.truediv, operator.add, operator.sub)},
    **{getattr(module, name): name for name in _SAME_NAME for module in (torch, torch.linalg) if hasattr(module, name)},
}
_REFLECTED: Final = {"__matmul__": "__rmatmul__", "__mul__": "__rmul__"}


def torch_function(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call the operator's method for func; NotImplemented where there is none."""
    # Dynamo finds functions that are written in Python by identity only, not in a table.
    if func is Tensor.__rmatmul__:
        return args[1].__matmul__(args[0])
    if func is Tensor.__rtruediv__:
        return args[1].__truediv__(args[0])
    if func in _FUNCTIONS and hasattr(args[0], _FUNCTIONS[func][0]):
        return _FUNCTIONS[func][1](*args, **(kwargs or {}))
    method = _METHODS.get(func)
    if method is None:
        return NotImplemented
    if not isinstance(args[0], Tensor):
        return getattr(args[0], method)(*args[1:], **(kwargs or {})) if hasattr(args[0], method) else NotImplemented
    if method not in _REFLECTED or len(args) != 2 or kwargs or not hasattr(args[1], _REFLECTED[method]):
        return NotImplemented
    return getattr(args[1], _REFLECTED[method])(args[0])


def mend_dynamo() -> None:
    """Let Dynamo tell ``K @ x`` from ``x @ K``; to be called whenever ``__torch_function__`` is looked up.

    For an operation of a tensor and an object with ``__torch_function__``, Dynamo puts the tensor first and, where
    that swaps the two, takes the reflected method from a table. That table of torch 2.13 lacks ``@``, and Dynamo
    then asks for ``x @ K`` in both cases. It looks for ``__torch_function__`` before it reads the table.
    """
    dynamo = sys.modules.get("torch._dynamo.variables.builtin")
    reflected = getattr(dynamo, "BUILTIN_TO_TENSOR_RFN_MAP", None)
    if isinstance(reflected, dict):
        reflected.setdefault(operator.matmul, Tensor.__rmatmul__)
