"""torch's own functions on a `KroneckerProduct` (``__torch_function__``)."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

_SAME_NAME: Final = ("cholesky", "det", "eigh", "eigvalsh", "inverse", "kron", "logdet", "matrix_power", "slogdet", "solve", "trace")
_METHODS: Final[dict[Any, str]] = {
    torch.matmul: "__matmul__",
    Tensor.matmul: "__matmul__",
    Tensor.__matmul__: "__matmul__",
    torch.mul: "__mul__",
    Tensor.mul: "__mul__",
    Tensor.__mul__: "__mul__",
    torch.linalg.inv: "inverse",
    # torch.export(strict=True) leaves Python's operators as they are.
    **{function: f"__{function.__name__}__" for function in (operator.matmul, operator.mul, operator.truediv)},
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
