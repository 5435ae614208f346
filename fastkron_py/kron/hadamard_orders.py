"""Hadamard matrices by their constructions: entries 1 and -1, ``H H^T = m I``; and the factors of a transform of any length.

Sylvester: powers of two.

Paley, "On Orthogonal Matrices", J. Math. Phys. 12 (1933): m = q + 1 for a prime q = 3 mod 4, and m = 2 (q + 1) for a prime q = 1 mod 4.
Goethals and Seidel, "A skew Hadamard matrix of order 36", J. Austral. Math. Soc. 11 (1970): m = 4 n from four circulant matrices of
order n whose periodic autocorrelations cancel (Williamson's are those that are symmetric).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import index
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fastkron_py.runtime.eager import constants
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.torch_internals import constant_in_graphs, mark_static

Matrix = np.ndarray[Any, np.dtype[np.int64]]

MOST: Final = 1024  # the largest order that is tried
# The first rows of Goethals and Seidel's circulant matrices, by m: -1 for each bit that is 1, the highest one first. They were found by a
# search over sequences that are constant on the orbits of a multiplication modulo n. Orders to 256 that are missing have none of these.
_CIRCULANT: Final = {
    52: (0x606, 0x9F9, 0xE97, 0xE97),
    92: (0x144C8A, 0x16331A, 0x3E529F, 0x3D2F0),
    100: (0x9318C9, 0xB0660D, 0x7A005E, 0xA68165),
    116: (0x2439C24, 0xA7606E5, 0xD3801CB, 0xAF264F5),
    156: (0x241163E229, 0xDFAB4B813, 0x29EFD51B1E, 0x1B26981DC4),
    172: (0x3E6FEF286EB, 0x1B540DC8E3D, 0x3E4C4F086AB, 0x3E4C4F086AB),
    244: (0x6B70C3BAAFCF5A9, 0x392F24751E9DB11, 0xFFA478305FAD967, 0xFEC4F82A73AD967),
}


@lru_cache(maxsize=32)
def hadamard_matrix(m: int) -> Matrix | None:
    """A Hadamard matrix of order m ``[m, m]``; None where no construction here gives one."""
    if (m % 4 and m > 2) or m > MOST:
        return None
    if not m & (m - 1):
        found = _sylvester(m)
    elif _is_prime(m - 1):
        found = _paley(m - 1)
    elif m // 2 % 4 == 2 and _is_prime(m // 2 - 1):
        found = _paley_doubled(m // 2 - 1)
    elif m in _CIRCULANT:
        found = _goethals_seidel(m // 4, _CIRCULANT[m])
    else:
        return None
    if not np.array_equal(found.astype(np.float64) @ found.T, m * np.eye(m)):  # integers take a second
        raise AssertionError(f"the rows of the matrix of order {m} are not orthogonal")
    return found


def _sylvester(m: int) -> Matrix:
    """Order m, a power of two."""
    two = np.array([[1, 1], [1, -1]])
    return reduce(np.kron, [two] * (m.bit_length() - 1), np.ones((1, 1), np.int64))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _circulant(row: Matrix) -> Matrix:
    """``[n, n]``, with element (i - j) mod n of the row at (i, j)."""
    i = np.arange(len(row))
    return np.asarray(row[(i[:, None] - i) % len(row)])


def _quadratic_characters(q: int) -> Matrix:
    """``[q, q]``: whether i - j is a square modulo q (1) or not (-1), 0 where it is 0."""
    squares = {i * i % q for i in range(1, q)}
    return _circulant(np.array([0] + [1 if i in squares else -1 for i in range(1, q)]))


def _bordered(q: int, side: int) -> Matrix:
    """``[q + 1, q + 1]``: quadratic characters behind a row of 1 and a column of these numbers."""
    return np.block([[np.zeros((1, 1), np.int64), np.ones((1, q), np.int64)], [np.full((q, 1), side), _quadratic_characters(q)]])


def _paley(q: int) -> Matrix:
    """Order q + 1, q = 3 mod 4."""
    return _bordered(q, -1) + np.eye(q + 1, dtype=np.int64)


def _paley_doubled(q: int) -> Matrix:
    """Order 2 (q + 1), q = 1 mod 4."""
    plus, minus = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
    return np.kron(_bordered(q, 1), plus) + np.kron(np.eye(q + 1, dtype=np.int64), minus)


def _goethals_seidel(n: int, rows: Sequence[int]) -> Matrix:
    """Order 4 n."""
    a, b, c, d = (_circulant(1 - 2 * np.array([row >> i & 1 for i in reversed(range(n))])) for row in rows)
    b, c, d = (t[:, ::-1] for t in (b, c, d))  # times the matrix with ones on its other diagonal
    bt, ct, dt = (t[::-1].T[::-1] for t in (b, c, d))
    return np.block([[a, b, c, d], [-b, a, dt, -ct], [-c, -dt, a, bt], [-d, ct, -bt, a]])


# ---- the factors of a transform -------------------------------------------------------------------

CHUNK: Final = 3  # a factor is 8 x 8 at most, but for that of order m: plans multiply neighbours out as the dtype wants
CPU_BITS: Final = 5  # on CPUs the last one is 32 x 32, two vectors wide, and the others are about equal
# Two steps in half precision take 128 on both sides at most, 32 behind at least, and a factor of 2 or 4 between them: factors of two go
# next to that of order m accordingly.
_INSTEAD: Final = "for other sizes, hadamard of blocks (x.unflatten(-1, (-1, block))), or an orthogonal matrix in kron_matmul"
MOST_BITS: Final = 7
MIDDLE_BITS: Final = (1, 2)
LEAST_BITS: Final = 5


@constant_in_graphs
@lru_cache(maxsize=256)
def split(n: int, name: str = "x.shape[-1]") -> tuple[int, int]:
    """(m, k) of n = m * 2^k, the length of rows; name: of n in an error.

    Raises:
        ValueError: there is no such m.
    """
    if n < 1:
        raise value_error(name, "a positive length", n)
    twos = (n & -n).bit_length() - 1
    odd = n >> twos
    used = next((j for j in range(2, twos + 1) if odd << j <= MOST and hadamard_matrix(odd << j) is not None), None) if odd > 1 else 0
    if used is None:
        raise value_error(name, f"m * 2^k with m = 1 or the order of a known Hadamard matrix (12, 20, 28, 36, ...); {_INSTEAD}", n)
    return odd << used, twos - used


@constant_in_graphs
@lru_cache(maxsize=256)
def factor_sizes(n: int, device_type: str = "cuda") -> tuple[int, ...]:
    """The orders of the factors for rows of length n, from the first on.

    Args:
        n: see `split`.
        device_type: that multiplies.

    Raises:
        ValueError: there is no such m.
    """
    m, bits = split(n)
    first = (m,) if m > 1 else ()
    if device_type == "cpu":
        rest = max(0, bits - CPU_BITS)
        count = -(-rest // CPU_BITS)
        return (*first, *[1 << ((rest + i) // count) for i in range(count)], *([1 << (bits - rest)] if bits else [])) or (1,)
    room = MOST_BITS - (m - 1).bit_length()
    middle = bits - room - MOST_BITS
    if room >= 0 and middle in MIDDLE_BITS:
        return (*first, *_chunks(room), 1 << middle, *_chunks(MOST_BITS))
    if m == 1:
        return (*_chunks(bits - bits // 2), *_chunks(bits // 2)) or (1,)
    room += bits - room > MOST_BITS  # a wide first step, so that two are enough
    beside = max(0, min(room, bits - LEAST_BITS))
    return (m, *_chunks(beside), *_chunks(bits - beside))


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


def _entries(order: int) -> Tensor:
    """The matrix of an order that `factor_sizes` gives, on the CPU."""
    return torch.from_numpy(cast("Matrix", hadamard_matrix(order)))


@constant_in_graphs
def matrices(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """The factors on the CPU, in float16 made smaller.

    Their sizes are static: a guard of torch.compile(dynamic=True) on a symbol needs an argument that it is a size of.
    """
    shrink = [2.0 ** -_exponent(order) if dtype == torch.float16 else 1.0 for order in sizes]
    return [mark_static(_entries(order).double().mul(s).to(dtype)) for order, s in zip(sizes, shrink, strict=True)]


@constant_in_graphs
def padded_matrix(m: int) -> list[Tensor | None]:
    """The matrix of order m on the CPU, in bfloat16, with rows and columns of zeros up to a power of two; None where m is 1."""
    if m == 1:
        return [None]
    matrix = torch.zeros((1 << (m - 1).bit_length(),) * 2, dtype=torch.bfloat16, device="cpu")
    matrix[:m, :m] = _entries(m)
    return [mark_static(matrix)]


def constants_of(make: Callable[..., Sequence[Any]], arguments: tuple[Any, ...], device: torch.device) -> Sequence[Any]:
    """Constants on a device, also of a graph that is being compiled."""
    if torch.compiler.is_compiling():
        return [None if t is None else t.to(device) for t in make(*arguments)]
    return constants(make, arguments, device)


class Hadamard(NamedTuple):
    """A Hadamard matrix as a factor of any function: ``scale * H``, entries of H are 1 and -1, as `hadamard` multiplies with.

    A kernel that adds and subtracts never reads its values. Other kernels build the matrix, which rounds scale to x's dtype.

    Args:
        order: m * 2^k, as in `hadamard`.
        scale: of all entries; ``order ** -0.5`` makes the matrix orthogonal.

    Raises:
        ValueError: when it is used, if no Hadamard matrix of this order is known.

    Example:
        >>> Hadamard(2).matrix(torch.empty(0)).tolist()
        [[1.0, 1.0], [1.0, -1.0]]
    """

    order: int
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """``[order, order]``."""
        return self.order, self.order

    @property
    def is_sylvester(self) -> bool:
        """Whether the order is a power of two."""
        return self.order > 0 and not self.order & (self.order - 1)

    def matrix(self, like: Tensor) -> Tensor:
        """The matrix itself, of this tensor's dtype and device."""
        in_graph = torch.compiler.is_compiling()  # where a number that differs from call to call is a symbol
        (made,) = constants_of(_dense, (index(self.order), 1.0 if in_graph else self.scale, like.dtype), like.device)
        return cast("Tensor", made * self.scale if in_graph else made)


@constant_in_graphs
def _dense(order: int, scale: float, dtype: torch.dtype) -> list[Tensor]:
    m, bits = split(order, "Hadamard: order")
    made = torch.kron(_entries(m), torch.from_numpy(_sylvester(1 << bits)))
    return [mark_static(made.double().mul(scale).to(dtype))]


def with_matrices(factors: Sequence[Any], like: Tensor) -> list[Any]:
    """The factors with matrices in place of `Hadamard`."""
    return [f.matrix(like) if isinstance(f, Hadamard) else f for f in factors]
