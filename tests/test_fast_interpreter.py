"""`fast_interpreter`: kernels compute the same bits as in Triton's own interpreter, and raise the same errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fast_interpreter
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(not fast_interpreter.is_installed(), reason="there is a GPU, or a Triton that is left as it is")


@triton.jit
def _half_of(x):
    return x * 0.5


@triton.jit
def _norm_of(x, power: tl.constexpr):
    for _ in tl.static_range(power):
        x = _half_of(x * x)
    return tl.sqrt(tl.sum(x, axis=1))[:, None]


@triton.jit
def _normalise_kernel(x_ptr, y_ptr, rows, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """A device function within another, and one of Triton's; programs, masks, broadcasts and sums."""
    offs_m = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    offs_n = tl.arange(0, WIDTH)
    mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * columns + offs_n[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(x > 0, x, tl.exp(x)) / (1 + _norm_of(x, 2) + tl.max(x, 0)[None, :])
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _product_kernel(x_ptr, y_ptr, rows, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Products of tiles in a loop, a transposed and a reshaped tile, integers by division and shifts."""
    offs_m, offs_n = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, columns, WIDTH):
        mask = (offs_m < rows)[:, None] & (offs_n + start < columns)[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * columns + offs_n[None, :] + start, mask=mask, other=0.0)
        acc = tl.dot(x, tl.trans(x), acc)
    acc += tl.reshape(tl.reshape(acc, (SIZE * SIZE,)), (SIZE, SIZE)) * ((offs_m * 3 // 2) % 5 << 1)[:, None]
    acc += (offs_m * 715827883 >> 28)[:, None]  # exceeds 32 bits, which only a debug mode reports
    mask = (offs_m < rows)[:, None] & (offs_m < columns)[None, :]
    tl.store(y_ptr + offs_m[:, None] * columns + offs_m[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _raising_function(x):
    return tl.reshape(x, (3, 5))


@triton.jit
def _raising_kernel(x_ptr, y_ptr, rows, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    tl.store(y_ptr, 7.0)
    tl.store(y_ptr + tl.arange(0, SIZE), _raising_function(tl.load(x_ptr + tl.arange(0, SIZE))))


def launched(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.zeros_like(x)
    kernel[(3,)](x, y, rows, columns, SIZE=16, WIDTH=32)
    return y


def by_both(compute: Callable[[], Any]) -> list[Any]:
    results = [compute()]
    with fast_interpreter.uninstalled():
        results.append(compute())
    return [*results, compute()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", [_normalise_kernel, _product_kernel], ids=["normalise", "product"])
def test_the_same_bits(kernel: Any, dtype: torch.dtype) -> None:
    x = torch.randn(37, 29).to(dtype)
    results = [y.view(torch.uint8) for y in by_both(lambda: launched(kernel, x))]
    assert results[0].any()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_same_error_and_the_language_as_it_was() -> None:
    """Where a device function raises; what the kernel stored before is there."""
    x = torch.randn(16, 1)
    y = torch.zeros_like(x)

    def message() -> str:
        with pytest.raises(InterpreterError) as caught:
            _raising_kernel[(1,)](x, y, 16, 1, SIZE=16, WIDTH=1)
        return str(caught.value)

    places = tl, tl.core, tl.math, tl.tensor, tl.dtype
    before = [dict(vars(place)) for place in places]
    found = message()
    assert [dict(vars(place)) for place in places] == before
    assert y[0] == 7
    assert "power of 2" in found
    assert by_both(message) == [found] * 3
