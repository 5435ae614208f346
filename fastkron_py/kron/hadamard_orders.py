"""Hadamard matrices by their constructions: entries 1 and -1, ``H H^T = m I``; and the factors of a transform of any length.

Sylvester: powers of two.

Paley, "On Orthogonal Matrices", J. Math. Phys. 12 (1933): m = q + 1 for a prime q = 3 mod 4, and m = 2 (q + 1) for a prime q = 1 mod 4.
Goethals and Seidel, "A skew Hadamard matrix of order 36", J. Austral. Math. Soc. 11 (1970): m = 4 n from four circulant matrices of
order n whose periodic autocorrelations cancel, which a search finds (Williamson's are those that are symmetric).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
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
_MOST_SEARCHED: Final = 256  # and that four sequences are searched for
_MOST_ORBITS: Final = 14  # 2 to this power sequences are searched
_PAIRS: Final = 1 << 23  # of sequences, that are compared at a time


def hadamard_matrix(m: int) -> Matrix | None:
    """A Hadamard matrix of order m ``[m, m]``; None where no construction here gives one."""
    return None if (m % 4 and m > 2) or m > MOST else _constructed(m)


@lru_cache(maxsize=32)
def _constructed(m: int) -> Matrix | None:
    found: Matrix | None
    if not m & (m - 1):
        found = _sylvester(m)
    elif _is_prime(m - 1):
        found = _paley(m - 1)
    elif m // 2 % 4 == 2 and _is_prime(m // 2 - 1):
        found = _paley_doubled(m // 2 - 1)
    else:
        found = _goethals_seidel(m // 4) if m <= _MOST_SEARCHED else None
    if found is not None and not np.array_equal(found.astype(np.float64) @ found.T, m * np.eye(m)):  # integers take a second
        raise AssertionError(f"the rows of the matrix of order {m} are not orthogonal")
    return found


def _sylvester(m: int) -> Matrix:
    """Order m, a power of two."""
    if m == 1:
        return np.ones((1, 1), np.int64)
    s = _sylvester(m // 2)
    return np.block([[s, s], [s, -s]])


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _quadratic_characters(q: int) -> Matrix:
    """``[q, q]``: whether i - j is a square modulo q (1) or not (-1), 0 where it is 0."""
    squares = {i * i % q for i in range(1, q)}
    row = np.array([0] + [1 if i in squares else -1 for i in range(1, q)])
    i = np.arange(q)
    return np.asarray(row[(i[:, None] - i) % q])


def _paley(q: int) -> Matrix:
    """Order q + 1, q = 3 mod 4."""
    s = np.zeros((q + 1, q + 1), np.int64)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, -1, _quadratic_characters(q)
    return s + np.eye(q + 1, dtype=np.int64)


def _paley_doubled(q: int) -> Matrix:
    """Order 2 (q + 1), q = 1 mod 4."""
    s = np.zeros((q + 1, q + 1), np.int64)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, 1, _quadratic_characters(q)
    plus, minus = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
    return np.kron(s, plus) + np.kron(np.eye(q + 1, dtype=np.int64), minus)


def _goethals_seidel(n: int) -> Matrix | None:
    """Order 4 n, n odd."""
    rows = _complementary(n)
    if rows is None:
        return None
    i = np.arange(n)
    a, b, c, d = (row[(i[:, None] - i) % n] for row in rows)
    b, c, d = (t[:, ::-1] for t in (b, c, d))  # times the matrix with ones on its other diagonal
    bt, ct, dt = (t[::-1].T[::-1] for t in (b, c, d))
    blocks = [[a, b, c, d], [-b, a, dt, -ct], [-c, -dt, a, bt], [-d, ct, -bt, a]]
    return np.block(blocks)


def _orbits(n: int, multiplier: int) -> list[list[int]]:
    """The cycles of the numbers from 1 to n - 1 under repeated multiplication modulo n."""
    seen: set[int] = set()
    found = []
    for i in range(1, n):
        if i not in seen:
            orbit = [i]
            while (j := orbit[-1] * multiplier % n) != i:
                orbit.append(j)
            seen.update(orbit)
            found.append(orbit)
    return found


def _complementary(n: int) -> Matrix | None:
    """Four sequences ``[4, n]`` of 1 and -1 whose periodic autocorrelations add up to 0, constant on the orbits of some multiplier."""
    candidates = [_orbits(n, k) for k in range(2, n) if math.gcd(k, n) == 1]
    for orbits in sorted((o for o in candidates if len(o) <= _MOST_ORBITS), key=len):
        found = _search(n, orbits)
        if found is not None:
            return found
    return None


def _search(n: int, orbits: list[list[int]]) -> Matrix | None:
    """Two pairs of sequences, constant on these orbits, whose autocorrelations cancel."""
    bits = (np.arange(1 << len(orbits))[:, None] >> np.arange(len(orbits))) & 1
    sequences = np.ones((len(bits), n), np.int64)
    for i, orbit in enumerate(orbits):
        sequences[:, orbit] = 1 - 2 * bits[:, i : i + 1]
    power = np.square(np.abs(np.fft.rfft(sequences)))
    sequences = sequences[(power <= 4 * n + 1e-6).all(1)]  # the four powers add up to 4 n at each frequency
    shifts = np.arange(1, n // 2 + 1)[:, None] + np.arange(n)
    correlations = np.stack([(sequences * sequences[:, s % n]).sum(1) for s in shifts], 1)
    sums = np.abs(sequences.sum(1))
    weights = np.random.default_rng(0).integers(1 << 40, size=n // 2)
    keys = correlations @ weights  # equal where correlations are, and hardly elsewhere: the matrix is checked
    for quadruple in _squares(4 * n):
        a, b, c, d = (np.flatnonzero(sums == s) for s in quadruple)
        if not 0 < len(a) * len(b) <= _PAIRS or not 0 < len(c) * len(d) <= _PAIRS:
            continue
        first, second = (np.add.outer(keys[i], keys[j]).ravel() for i, j in ((a, b), (c, d)))
        places = first.argsort()
        ordered = first[places]
        at = np.searchsorted(ordered, -second).clip(max=len(first) - 1)
        hits = np.flatnonzero(ordered[at] == -second)
        if len(hits):
            one, two = int(places[at[hits[0]]]), int(hits[0])
            return sequences[[a[one // len(b)], b[one % len(b)], c[two // len(d)], d[two % len(d)]]]
    return None


def _squares(total: int) -> Iterator[tuple[int, int, int, int]]:
    """Odd numbers in falling order whose squares add up to total, the largest and the smallest in one pair."""
    most = math.isqrt(total)
    for a in range(1, most + 1, 2):
        for b in range(1, a + 1, 2):
            for c in range(1, b + 1, 2):
                rest = total - a * a - b * b - c * c
                d = math.isqrt(max(rest, 0))
                if rest > 0 and d * d == rest and d <= c:
                    yield a, d, b, c


# ---- the factors of a transform -------------------------------------------------------------------

CHUNK: Final = 3  # a factor is 8 x 8 at most, but for that of order m: plans multiply neighbours out as the dtype wants
CPU_CHUNK: Final = 4  # on CPUs 16 x 16: a vector's width, and few operations for each bit
# Two steps in half types take 128 on both sides at most, 32 behind at least, and a factor of 2 or 4 between them: factors of two go
# beside that of order m accordingly.
_INSTEAD: Final = "for other sizes, hadamard of blocks (x.unflatten(-1, (-1, block))), or an orthogonal matrix in kron_matmul"
MOST_BITS: Final = 7
MIDDLE_BITS: Final = (1, 2)
LEAST_BITS: Final = 5


@constant_in_graphs
@lru_cache(maxsize=256)
def split(n: int, name: str = "x.shape[-1]") -> tuple[int, int]:
    """(m, k) of n = m * 2^k, the length of rows.

    Args:
        n: see above.
        name: of n in an error.

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
        return (*first, *_chunks(bits, CPU_CHUNK)) or (1,)
    room = MOST_BITS - (m - 1).bit_length()
    middle = bits - room - MOST_BITS
    if room >= 0 and middle in MIDDLE_BITS:
        return (*first, *_chunks(room), 1 << middle, *_chunks(MOST_BITS))
    if m == 1:
        return (*_chunks(bits - bits // 2), *_chunks(bits // 2)) or (1,)
    room += bits - room > MOST_BITS  # a wide first step, so that two are enough
    beside = max(0, min(room, bits - LEAST_BITS))
    return (m, *_chunks(beside), *_chunks(bits - beside))


def _chunks(bits: int, chunk: int = CHUNK) -> tuple[int, ...]:
    """Factors of 2^bits, the smaller one first."""
    rest = bits % chunk
    return (*((1 << rest,) if rest else ()), *((1 << chunk,) * (bits // chunk)))


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
    made = [_entries(order).double().mul(s).to(dtype) for order, s in zip(sizes, shrink, strict=True)]
    for t in made:
        mark_static(t)
    return made


@constant_in_graphs
def padded_matrix(m: int) -> list[Tensor | None]:
    """The matrix of order m on the CPU, in bfloat16, with rows and columns of zeros up to a power of two; None where m is 1."""
    if m == 1:
        return [None]
    matrix = torch.zeros((1 << (m - 1).bit_length(),) * 2, dtype=torch.bfloat16, device="cpu")
    matrix[:m, :m] = _entries(m)
    mark_static(matrix)
    return [matrix]


def constants_of(make: Callable[..., Sequence[Any]], arguments: tuple[Any, ...], device: torch.device) -> Sequence[Any]:
    """Constants on a device, also of a graph that is being compiled."""
    if torch.compiler.is_compiling():
        return [None if t is None else t.to(device) for t in make(*arguments)]
    return constants(make, arguments, device)


class Hadamard(NamedTuple):
    """A Hadamard matrix as a factor of any function: ``scale * H``, entries of H are 1 and -1, as `hadamard` multiplies with.

    A kernel that adds and subtracts never reads its values. Other kernels build the matrix.

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
    made = torch.from_numpy(np.kron(cast("Matrix", hadamard_matrix(m)), _sylvester(1 << bits)))
    made = made.double().mul(scale).to(dtype)
    mark_static(made)
    return [made]


def with_matrices(factors: Sequence[Any], like: Tensor) -> list[Any]:
    """The factors with matrices in place of `Hadamard`."""
    return [f.matrix(like) if isinstance(f, Hadamard) else f for f in factors]
