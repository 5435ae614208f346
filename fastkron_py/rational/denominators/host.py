"""Polynomials by Horner's rule, and signs, in torch: parts that denominators are made of. Triton is not imported here.

Coefficients are lists of tensors that broadcast with x. Autograd can differentiate all of it, any number of times.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class _Memory(threading.local):
    is_reused = False


_memory = _Memory()


@contextlib.contextmanager
def reused_memory() -> Iterator[None]:
    """Within, steps write over tensors that the functions here made themselves: where nothing is recorded, batched or traced."""
    _memory.is_reused = True
    try:
        yield
    finally:
        _memory.is_reused = False


# Autograd takes less time for a product and a sum than for addcmul, whose derivative multiplies once more.


def _line(c: Sequence[Tensor], x: Tensor) -> Tensor:
    """``c_(m - 1) + c_m x``."""
    if _memory.is_reused and c[-1].shape[-1:] == x.shape[-1:]:  # it is slow where two operands broadcast along rows
        return torch.addcmul(c[-2], c[-1], x)
    value = c[-1] * x
    return value.add_(c[-2]) if _memory.is_reused else value + c[-2]


def _multiply_add(c: Tensor, value: Tensor, x: Tensor, is_own: bool = True) -> Tensor:
    """``value * x + c``, in value's memory if that was made here."""
    if not _memory.is_reused:
        return value * x + c
    return torch.addcmul(c, value, x, out=value) if is_own else torch.addcmul(c, value, x)


def _multiply(value: Tensor, x: Tensor) -> Tensor:
    """``value * x``, in value's memory, which was made here."""
    return value.mul_(x) if _memory.is_reused else value * x


def host_polynomial(c: Sequence[Tensor], x: Tensor) -> Tensor:
    """``sum_i c_i x^i``."""
    if len(c) == 1:
        return c[0] + torch.zeros_like(x)
    value = _line(c, x)
    for ci in c[-3::-1]:
        value = _multiply_add(ci, value, x)
    return value


def host_polynomial_slope(c: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(value, derivative) of ``sum_i c_i x^i``."""
    if len(c) < 3:
        return host_polynomial(c, x), torch.zeros_like(x) + (c[1] if len(c) == 2 else 0)
    value = _line(c, x)
    slope = _multiply_add(value, c[-1], x, is_own=False)
    value = _multiply_add(c[-3], value, x)
    for ci in c[-4::-1]:
        slope = _multiply_add(value, slope, x)
        value = _multiply_add(ci, value, x)
    return value, slope


def host_polynomial_from_one(b: Sequence[Tensor], x: Tensor) -> Tensor:
    """``sum_i b_i x^(i + 1)``."""
    return _multiply(host_polynomial(b, x), x)


def host_polynomial_slope_from_one(b: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(value, derivative) of ``sum_i b_i x^(i + 1)``."""
    value, slope = host_polynomial_slope(b, x)
    slope = _multiply_add(value, slope, x)
    return _multiply(value, x), slope


def host_powers(x: Tensor, count: int) -> list[Tensor]:
    """1, x, x^2, ...: count of them."""
    powers = [torch.ones_like(x), x][:count]
    for _ in range(count - 2):
        powers.append(powers[-1] * x)
    return powers


def host_multiples(t: Tensor, x: Tensor, count: int) -> Iterator[Tensor]:
    """t, t x, t x^2, ...: count of them."""
    for i in range(count):
        t = t * x if i else t
        yield t


def host_sign(t: Tensor) -> Tensor:
    """Detached, since its derivative is zero: torch 2.11 makes that a lazy zero, on which tracing fails (an internal assert)."""
    return t.detach().sgn()


def host_absolute(constant: float, s: Tensor) -> Tensor:
    """``constant + |s|``, in the memory of s, which was made here."""
    return s.abs_().add_(constant) if _memory.is_reused else constant + host_sign(s) * s


def host_signed(constant: float, sign: Tensor, s: Tensor) -> Tensor:
    """``constant + sign * s``, in the memory of s, which was made here."""
    return s.mul_(sign).add_(constant) if _memory.is_reused else constant + sign * s
