"""A peer's kernels: the Chebyshev basis of x written to memory, and dx from the gradient of that basis, one pass each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _basis_kernel(x_ptr, basis_ptr, size, width, TERMS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = _tanh(tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32))
    at = basis_ptr + i // width * (TERMS * width) + i % width
    current, previous = tl.zeros_like(t) + 1, t
    for d in range(0, TERMS):
        tl.store(at + d * width, current.to(basis_ptr.dtype.element_ty), mask=i < size)
        current, previous = 2 * t * current - previous, current


@triton.jit
def _dx_kernel(x_ptr, g_ptr, dx_ptr, size, width, TERMS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = _tanh(tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32))
    at = g_ptr + i // width * (TERMS * width) + i % width
    current, previous = tl.zeros_like(t) + 1, tl.zeros_like(t)  # U_0 and U_{-1}; T_d' = d U_{d-1}
    dx = tl.zeros_like(t)
    for d in range(1, TERMS):
        dx += d * current * tl.load(at + d * width, mask=i < size, other=0.0).to(tl.float32)
        current, previous = 2 * t * current - previous, current
    tl.store(dx_ptr + i, (dx * (1 - t * t)).to(dx_ptr.dtype.element_ty), mask=i < size)


class BasisFunction(torch.autograd.Function):
    """``x [M, I]`` to its basis ``[M, terms * I]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.terms = terms
        basis = x.new_empty(x.shape[0], terms * x.shape[1])
        _basis_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, basis, x.numel(), x.shape[1], terms, BLOCK)
        return basis

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _dx_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, g.contiguous(), dx, x.numel(), x.shape[1], ctx.terms, BLOCK)
        return dx, None
