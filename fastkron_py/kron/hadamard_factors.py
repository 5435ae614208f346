"""The constants of a Hadamard transform: the orders and entries of its factors, and whether additions take their place."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, cast

import torch
from torch import Tensor

from fastkron_py.kron.hadamard_matrices import MOST, Matrix, hadamard_matrix
from fastkron_py.runtime.backend import choose_backend, is_interpreting
from fastkron_py.runtime.errors import value_error

CHUNK: Final = 3  # a factor is 8 x 8 at most, but for that of order m: plans multiply neighbours out as the dtype wants
# Two steps in half types take 128 on both sides at most, 32 behind at least, and a factor of 2 or 4 between them: factors of two go
# beside that of order m accordingly.
MOST_BITS: Final = 7
MIDDLE_BITS: Final = (1, 2)
LEAST_BITS: Final = 5
LEAST_ALONE: Final = 6  # bits that are transformed by a launch of their own in float64


@lru_cache(maxsize=256)
def split(n: int) -> tuple[int, int]:
    """(m, k) of rows of length n = m * 2^k.

    Raises:
        ValueError: there is no such m.
    """
    if n < 1:
        raise value_error("x.shape[-1]", "a positive length", n)
    twos = (n & -n).bit_length() - 1
    odd = n >> twos
    used = next((j for j in range(2, twos + 1) if odd << j <= MOST and hadamard_matrix(odd << j) is not None), None) if odd > 1 else 0
    if used is None:
        raise no_order(n)
    return odd << used, twos - used


@lru_cache(maxsize=256)
def factor_sizes(n: int) -> tuple[int, ...]:
    """The orders of the factors for rows of length n, from the first on.

    Raises:
        ValueError: there is no such m.
    """
    m, bits = split(n)
    first = (m,) if m > 1 else ()
    room = MOST_BITS - (m - 1).bit_length()
    middle = bits - room - MOST_BITS
    if room >= 0 and middle in MIDDLE_BITS:
        return (*first, *_chunks(room), 1 << middle, *_chunks(MOST_BITS))
    if m == 1:
        return (*_chunks(bits - bits // 2), *_chunks(bits // 2)) or (1,)
    room += bits - room > MOST_BITS  # a wide first step, so that two are enough
    beside = max(0, min(room, bits - LEAST_BITS))
    return (m, *_chunks(beside), *_chunks(bits - beside))


@lru_cache(maxsize=256)
def has_additions(m: int, bits: int, dtype: torch.dtype, device: torch.device, backend: str) -> bool:
    """Whether rows of m * 2^bits elements are transformed by additions in one launch, rather than multiplied by factors."""
    if device.type != "cuda" or is_interpreting() or not torch.cuda.is_available():  # a fake tensor's GPU may not be there
        return False
    if choose_backend(backend, torch.empty(0, dtype=dtype, device=device)) == "torch":
        return False
    from fastkron_py.kron.hadamard_launch import has_launch  # which imports Triton

    return has_launch(m, bits, dtype, device)


def no_order(n: int) -> ValueError:
    """The error of a length that no known matrix has."""
    return value_error("x.shape[-1]", "m * 2^k with m = 1 or the order of a known Hadamard matrix (12, 20, 28, 36, ...)", n)


def _chunks(bits: int) -> tuple[int, ...]:
    """Factors of 2^bits, the smaller one first."""
    rest = bits % CHUNK
    return (*((1 << rest,) if rest else ()), *((1 << CHUNK,) * (bits // CHUNK)))


def _exponent(order: int) -> int:
    """By which power of two a factor is made smaller in float16, so that intermediates of several launches stay in its range."""
    return math.ceil(math.log2(order) / 2)


def shrunk(sizes: tuple[int, ...], dtype: torch.dtype) -> float:
    """The scale that makes up for the smaller factors."""
    return float(1 << sum(_exponent(order) for order in sizes)) if dtype == torch.float16 else 1.0


@lru_cache(maxsize=64)
def _entries(order: int) -> tuple[tuple[int, ...], ...]:
    """Rows of the matrix of this order."""
    if order & (order - 1):
        return tuple(tuple(row) for row in cast("Matrix", hadamard_matrix(order)).tolist())  # factor_sizes has asked for it
    return tuple(tuple(1 - 2 * ((i & j).bit_count() & 1) for j in range(order)) for i in range(order))


def matrices(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """The factors on the CPU, in float16 made smaller."""
    shrink = [2.0 ** -_exponent(order) if dtype == torch.float16 else 1.0 for order in sizes]
    return [
        torch.tensor(_entries(order), dtype=torch.float64, device="cpu").mul(s).to(dtype) for order, s in zip(sizes, shrink, strict=True)
    ]


def padded_matrix(m: int) -> list[Tensor | None]:
    """The matrix of order m on the CPU, in bfloat16, with rows and columns of zeros up to a power of two; None where m is 1."""
    if m == 1:
        return [None]
    matrix = torch.zeros((1 << (m - 1).bit_length(),) * 2, dtype=torch.bfloat16, device="cpu")
    matrix[:m, :m] = torch.tensor(_entries(m), device="cpu")
    return [matrix]
