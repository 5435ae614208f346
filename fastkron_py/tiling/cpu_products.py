"""Products of two matrices on a CPU, by oneDNN or by torch's BLAS; on other devices by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.cpu import zen
from fastkron_py.runtime.eager import wants_gradient
from fastkron_py.tiling.cpu_costs import ONEDNN_TERMS, takes_onednn
from fastkron_py.tiling.long_products import by_parts

ROUNDS: Final = 8  # of a batch's products, one for each thread: where there are more, an idle thread in the last one is little
THREAD_WORK: Final = 1 << 21  # multiply-adds of a thread, from which all threads share one product well


def _onednn_product(x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    enabled: Any = torch.backends.mkldnn.enabled
    takes = enabled and x.device.type == "cpu" and x.dtype in (torch.float32, *HALF_DTYPES)
    return torch_internals.onednn_product() if takes else None


def has_onednn(x: Tensor) -> bool:
    """Whether plans count on oneDNN for products of tensors like x, half types in float32: not on Zen 4, where few are faster."""
    return _onednn_product(x) is not None and zen() != 4


def threads(x: Tensor) -> int:
    """Threads that share a product of tensors like x, as far as torch tells."""
    return torch.get_num_threads() if x.is_cpu else 1


def by_onednn(a: Tensor, b: Tensor, is_last: bool) -> Tensor | None:
    """``[I, J] @ [J, K]`` in new memory; None where BLAS takes less time, a matrix has gaps, or autograd is to record the product.

    Args:
        a: the operand; or the factor transposed.
        b: the factor; or the operand.
        is_last: whether b is the factor.
    """
    if a.dtype != torch.float32 or not a.is_cpu:
        return None
    (i, j), k = a.shape, b.shape[1]
    if not (takes_onednn(j, k, i, True) if is_last else takes_onednn(j, i, k, False)):
        return None
    multiply = _onednn_product(a)
    if multiply is None or wants_gradient((a, b)):
        return None
    is_dense = all([t.is_contiguous() or t.mT.is_contiguous() for t in (a, b)])  # others take oneDNN's reference loops
    return multiply(a, b) if is_dense else None


def matrix_product(a: Tensor, b: Tensor, is_last: bool) -> Tensor:
    """``[I, J] @ [J, K]`` by oneDNN or BLAS: see `by_onednn`."""
    found = by_onednn(a, b, is_last)
    return a.mm(b) if found is None else found


def batch_parts(a: Tensor, b: Tensor) -> list[slice]:
    """The parts of a batch of products, ``[A, I, J] @ [A, J, K]``, that take the least time one after the other: mostly one.

    BLAS on a CPU gives each thread whole products: three of them on two threads take as long as four. So the last products of a small
    batch of large ones are parts of their own, which all threads share. Half types are oneDNN's, which shares out a batch by itself.
    """
    count, sharing, work = a.shape[0], threads(a), a.shape[1] * a.shape[2] * b.shape[2]
    left = count % sharing
    is_worth = count < ROUNDS * sharing and work >= THREAD_WORK * sharing and 4 * left <= 3 * sharing
    whole = count - left if is_worth and a.dtype not in HALF_DTYPES else count
    return ([slice(0, whole)] if whole else []) + [slice(i, i + 1) for i in range(whole, count)]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which x is multiplied: x's, or float32 for half types that the CPU has no instructions for."""
    if x.device.type != "cpu" or x.dtype not in HALF_DTYPES:
        return x.dtype
    return x.dtype if x.dtype == torch.bfloat16 and torch_internals.multiplies_bfloat16() else torch.float32


def product(a: Tensor, b: Tensor) -> Tensor:
    """``[I, J] @ [J, K]`` of one dtype on any device."""
    if (found := by_parts(a, b)) is not None:
        return found.to(a.dtype)
    dtype = product_dtype(a)
    return matrix_product(a, b, True) if dtype == a.dtype else matrix_product(a.to(dtype), b.to(dtype), True).to(a.dtype)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, I]^T @ b [M, J]``, the same; oneDNN's sums over many rows are cut, since they round more than BLAS's."""
    if a.shape[0] <= ONEDNN_TERMS or not has_onednn(a) or a.dtype != torch.float32:
        return product(a.mT, b)
    total = a.new_zeros(a.shape[1], b.shape[1])
    for u, v in zip(a.split(ONEDNN_TERMS), b.split(ONEDNN_TERMS), strict=True):
        add_product(total, u.mT, v)
    return total


def linear(x: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """``x [M, K] @ weight [N, K]^T``, and ``addend [N]`` added to each row: of its dtype where there is one, which may be float32."""
    found = by_onednn(x, weight.mT, True)
    if found is None and addend is not None and addend.dtype == x.dtype == product_dtype(x):
        return torch.addmm(addend, x, weight.mT)
    y = product(x, weight.mT) if found is None else found
    return y if addend is None else y.to(addend.dtype).add_(addend)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total [I, K] += a [I, J] @ b [J, K]``; total may be of float32 beside half types."""
    found = by_onednn(a, b, True)
    if found is None and total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a.mm(b) if found is None else found)
