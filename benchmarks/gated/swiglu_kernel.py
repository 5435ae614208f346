"""A peer's kernels: SwiGLU after a product, and its gradients, one elementwise pass each, in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _swiglu_kernel(pairs_ptr, hidden, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row of ``pairs [M, 2 H]`` is up, then gate; the result goes over the gate."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = pairs_ptr + tl.program_id(0).to(tl.int64) * 2 * hidden
    mask = c < hidden
    up = tl.load(row + c, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(row + hidden + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(row + hidden + c, (up * gate * tl.sigmoid(gate)).to(pairs_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_result_kernel(pairs_ptr, y_ptr, hidden, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same to a tensor of its own, for training."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(0).to(tl.int64)
    mask = c < hidden
    up = tl.load(pairs_ptr + m * 2 * hidden + c, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(pairs_ptr + m * 2 * hidden + hidden + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * hidden + c, (up * gate * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(dy_ptr, pairs_ptr, hidden, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradients of up and gate over both."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(0).to(tl.int64)
    mask = c < hidden
    row = pairs_ptr + m * 2 * hidden
    dy = tl.load(dy_ptr + m * hidden + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + c, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(row + hidden + c, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(row + c, (dy * gate * s).to(pairs_ptr.dtype.element_ty), mask=mask)
    tl.store(row + hidden + c, (dy * up * s * (1 + gate * (1 - s))).to(pairs_ptr.dtype.element_ty), mask=mask)


def swiglu_in_place(pairs: Tensor) -> Tensor:
    """``[M, H]``, the right half of ``pairs [M, 2 H]``, which it is written over."""
    rows, hidden = pairs.shape[0], pairs.shape[1] // 2
    _swiglu_kernel[(rows, triton.cdiv(hidden, BLOCK))](pairs, hidden, BLOCK, num_warps=8)
    return pairs[:, hidden:]


class InPlaceSwiGLU(torch.autograd.Function):
    """``(x [M, K], weight [2 H, K], up before gate)`` to ``[M, H]``; gradients of both projections are written over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        pairs = x @ weight.mT
        rows, hidden = pairs.shape[0], pairs.shape[1] // 2
        y = x.new_empty(rows, hidden)
        _swiglu_result_kernel[(rows, triton.cdiv(hidden, BLOCK))](pairs, y, hidden, BLOCK, num_warps=8)
        ctx.save_for_backward(x, weight, pairs)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, pairs = ctx.saved_tensors
        rows, hidden = dy.shape
        _swiglu_backward_kernel[(rows, triton.cdiv(hidden, BLOCK))](dy, pairs, hidden, BLOCK, num_warps=8)
        return pairs @ weight, pairs.mT @ x
