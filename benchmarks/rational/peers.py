"""The algorithms that rational's kernels are compared with, written afresh from the papers: version A, degrees 5 and 4.

KAT: one element a thread, each adds its share of every coefficient's gradient to memory atomically (FlashKAT's paper, algorithm 1).
FlashKAT: blocks of rows of one group, each adds its sums atomically (algorithm 2). Both gradients depend on the order of additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KAT_BLOCK = 256
FLASHKAT_ROWS = 8


@triton.jit
def _forward(x, a0, a1, a2, a3, a4, a5, b1, b2, b3, b4):
    """(P, dP/dx, Q, dQ/dx), b being absolute values."""
    t = tl.abs(x)
    p = ((((a5 * x + a4) * x + a3) * x + a2) * x + a1) * x + a0
    q = (((b4 * t + b3) * t + b2) * t + b1) * t + 1.0
    dp = (((5 * a5 * x + 4 * a4) * x + 3 * a3) * x + 2 * a2) * x + a1
    dq = (((4 * b4 * t + 3 * b3) * t + 2 * b2) * t + b1) * tl.where(x < 0, -1.0, tl.where(x > 0, 1.0, 0.0))
    return p, dp, q, dq


@triton.jit
def _coefficients(a_ptr, b_ptr, g, mask):
    """Of each element's group; g is a tensor of groups, or one group."""
    a0 = tl.load(a_ptr + g * 6, mask=mask, other=0.0)
    a1 = tl.load(a_ptr + g * 6 + 1, mask=mask, other=0.0)
    a2 = tl.load(a_ptr + g * 6 + 2, mask=mask, other=0.0)
    a3 = tl.load(a_ptr + g * 6 + 3, mask=mask, other=0.0)
    a4 = tl.load(a_ptr + g * 6 + 4, mask=mask, other=0.0)
    a5 = tl.load(a_ptr + g * 6 + 5, mask=mask, other=0.0)
    b1 = tl.load(b_ptr + g * 4, mask=mask, other=0.0)
    b2 = tl.load(b_ptr + g * 4 + 1, mask=mask, other=0.0)
    b3 = tl.load(b_ptr + g * 4 + 2, mask=mask, other=0.0)
    b4 = tl.load(b_ptr + g * 4 + 3, mask=mask, other=0.0)
    return a0, a1, a2, a3, a4, a5, b1, b2, b3, b4


@triton.jit
def _sign(b):
    return tl.where(b < 0, -1.0, tl.where(b > 0, 1.0, 0.0))


@triton.jit
def _kat_fwd_kernel(x_ptr, a_ptr, b_ptr, y_ptr, count, channels, width, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    a0, a1, a2, a3, a4, a5, b1, b2, b3, b4 = _coefficients(a_ptr, b_ptr, i % channels // width, mask)
    p, _dp, q, _dq = _forward(x, a0, a1, a2, a3, a4, a5, tl.abs(b1), tl.abs(b2), tl.abs(b3), tl.abs(b4))
    tl.store(y_ptr + i, (p / q).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _kat_bwd_kernel(x_ptr, dy_ptr, a_ptr, b_ptr, dx_ptr, da_ptr, db_ptr, count, channels, width, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + i, mask=mask, other=0.0).to(tl.float32)
    g = i % channels // width
    a0, a1, a2, a3, a4, a5, b1, b2, b3, b4 = _coefficients(a_ptr, b_ptr, g, mask)
    p, dp, q, dq = _forward(x, a0, a1, a2, a3, a4, a5, tl.abs(b1), tl.abs(b2), tl.abs(b3), tl.abs(b4))
    u = dy / q
    v = -u * p / q
    tl.store(dx_ptr + i, (u * dp + v * dq).to(dx_ptr.dtype.element_ty), mask=mask)
    t = tl.abs(x)
    power = u
    for k in tl.static_range(6):
        tl.atomic_add(da_ptr + g * 6 + k, power, mask=mask)
        power = power * x
    power = v * t
    tl.atomic_add(db_ptr + g * 4, power * _sign(b1), mask=mask)
    power = power * t
    tl.atomic_add(db_ptr + g * 4 + 1, power * _sign(b2), mask=mask)
    power = power * t
    tl.atomic_add(db_ptr + g * 4 + 2, power * _sign(b3), mask=mask)
    power = power * t
    tl.atomic_add(db_ptr + g * 4 + 3, power * _sign(b4), mask=mask)


@triton.jit
def _flashkat_tile(rows, channels, width, ROWS: tl.constexpr, PAD: tl.constexpr):
    """(offsets, mask) of a block of rows of one group."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PAD)
    offsets = row[:, None] * channels + tl.program_id(1) * width + column[None, :]
    return offsets, (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def _flashkat_fwd_kernel(x_ptr, a_ptr, b_ptr, y_ptr, rows, channels, width, ROWS: tl.constexpr, PAD: tl.constexpr):
    i, mask = _flashkat_tile(rows, channels, width, ROWS, PAD)
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    a0, a1, a2, a3, a4, a5, b1, b2, b3, b4 = _coefficients(a_ptr, b_ptr, tl.program_id(1), True)
    p, _dp, q, _dq = _forward(x, a0, a1, a2, a3, a4, a5, tl.abs(b1), tl.abs(b2), tl.abs(b3), tl.abs(b4))
    tl.store(y_ptr + i, (p / q).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _flashkat_bwd_kernel(x_ptr, dy_ptr, a_ptr, b_ptr, dx_ptr, da_ptr, db_ptr, rows, channels, width, ROWS: tl.constexpr, PAD: tl.constexpr):
    i, mask = _flashkat_tile(rows, channels, width, ROWS, PAD)
    g = tl.program_id(1)
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + i, mask=mask, other=0.0).to(tl.float32)
    a0, a1, a2, a3, a4, a5, b1, b2, b3, b4 = _coefficients(a_ptr, b_ptr, g, True)
    p, dp, q, dq = _forward(x, a0, a1, a2, a3, a4, a5, tl.abs(b1), tl.abs(b2), tl.abs(b3), tl.abs(b4))
    u = dy / q
    v = -u * p / q
    tl.store(dx_ptr + i, (u * dp + v * dq).to(dx_ptr.dtype.element_ty), mask=mask)
    t = tl.abs(x)
    power = u
    for k in tl.static_range(6):
        tl.atomic_add(da_ptr + g * 6 + k, tl.sum(power))
        power = power * x
    power = v * t
    tl.atomic_add(db_ptr + g * 4, tl.sum(power) * _sign(b1))
    power = power * t
    tl.atomic_add(db_ptr + g * 4 + 1, tl.sum(power) * _sign(b2))
    power = power * t
    tl.atomic_add(db_ptr + g * 4 + 2, tl.sum(power) * _sign(b3))
    power = power * t
    tl.atomic_add(db_ptr + g * 4 + 3, tl.sum(power) * _sign(b4))


def kat_forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x ``[..., C]`` contiguous, a ``[G, 6]``, b ``[G, 4]``."""
    y = torch.empty_like(x)
    c = x.shape[-1]
    _kat_fwd_kernel[(triton.cdiv(x.numel(), KAT_BLOCK),)](x, a, b, y, x.numel(), c, c // len(a), BLOCK=KAT_BLOCK)
    return y


def kat_backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, da, db)."""
    dx, da, db = torch.empty_like(x), torch.zeros_like(a), torch.zeros_like(b)
    c = x.shape[-1]
    grid = (triton.cdiv(x.numel(), KAT_BLOCK),)
    _kat_bwd_kernel[grid](x, dy, a, b, dx, da, db, x.numel(), c, c // len(a), BLOCK=KAT_BLOCK)
    return dx, da, db


def _blocks(x: Tensor, groups: int) -> tuple[int, int, int, tuple[int, int], int]:
    c = x.shape[-1]
    rows, width = x.numel() // c, c // groups
    return rows, c, width, (triton.cdiv(rows, FLASHKAT_ROWS), groups), triton.next_power_of_2(width)


def flashkat_forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x ``[..., C]`` contiguous, a ``[G, 6]``, b ``[G, 4]``."""
    y = torch.empty_like(x)
    rows, c, width, grid, pad = _blocks(x, len(a))
    _flashkat_fwd_kernel[grid](x, a, b, y, rows, c, width, ROWS=FLASHKAT_ROWS, PAD=pad)
    return y


def flashkat_backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, da, db)."""
    dx, da, db = torch.empty_like(x), torch.zeros_like(a), torch.zeros_like(b)
    rows, c, width, grid, pad = _blocks(x, len(a))
    _flashkat_bwd_kernel[grid](x, dy, a, b, dx, da, db, rows, c, width, ROWS=FLASHKAT_ROWS, PAD=pad)
    return dx, da, db
