"""`Problem`: the sizes of a product to plan."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastkron_py.kron.modes import merged
from fastkron_py.runtime.checks import DTYPES, check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error


class Run(NamedTuple):
    """Neighbouring factors between identities, multiplied where their modes stand.

    Attributes:
        rows: of the multiply, for each slice of the factors that it was asked of.
        ps: rows of the factors, as they multiply from the right.
        qs: columns of the factors.
    """

    rows: int
    ps: tuple[int, ...]
    qs: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A product to plan: ``x [m, prod(ps)] @ (F1 (x) ... (x) FN)``, or with left ``(F1 (x) ... (x) FN) @ x [prod(qs), m]``.

    Attributes:
        m: rows of x; with left its columns.
        ps: rows of each factor.
        qs: columns of each factor.
        dtype: of all tensors; a floating-point one that products take.
        left: the product stands to the left of x.
        gradients: of x and all factors are wanted.
        identities: the indices of factors that are identities, given to products as integers. Neighbours become one factor, and I_1 none:
            ps, qs and identities are those of the factors that are left.

    Raises:
        TypeError: an attribute of another type.
        ValueError: sizes that are not positive or not as many as each other, or an identity that is not square.

    Example:
        >>> Problem(128, (64,) * 4, (64,) * 4).left
        False
        >>> Problem(128, (4, 16, 8), (4, 16, 8), identities=(0, 1)).ps  # I_64 (x) F
        (64, 8)
    """

    m: int
    ps: tuple[int, ...]
    qs: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    left: bool = False
    gradients: bool = False
    identities: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ps", positive_sizes("ps", self.ps))
        object.__setattr__(self, "qs", positive_sizes("qs", self.qs))
        if len(self.ps) != len(self.qs):
            raise value_error("qs", f"{len(self.ps)} sizes, as ps has", len(self.qs))
        if check_integer("m", self.m) < 0:
            raise value_error("m", "a number of rows", self.m)
        dtype: Any = self.dtype
        if dtype not in DTYPES:
            expected = "a dtype among " + ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise type_error("dtype", expected, dtype if isinstance(dtype, torch.dtype) else type_name(dtype))
        for name in ("left", "gradients"):
            if not isinstance(getattr(self, name), bool):
                raise type_error(name, "True or False", type_name(getattr(self, name)))
        if self.identities != ():
            self._merge()

    def _merge(self) -> None:
        """Check the identities, and put neighbours together."""
        given: Any = self.identities
        if not isinstance(given, Sequence) or not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in given):
            raise type_error("identities", "a sequence of integers", given if isinstance(given, Sequence) else type_name(given))
        square = [i for i, (p, q) in enumerate(zip(self.ps, self.qs, strict=True)) if p == q]
        if not set(given) <= set(square):
            raise value_error("identities", f"indices of square factors, among {square}", tuple(given))
        factors = merged([p if i in given else (p, q) for i, (p, q) in enumerate(zip(self.ps, self.qs, strict=True))])
        pairs = [f if isinstance(f, tuple) else (f, f) for f in factors]
        object.__setattr__(self, "ps", tuple([p for p, _ in pairs]))
        object.__setattr__(self, "qs", tuple([q for _, q in pairs]))
        object.__setattr__(self, "identities", tuple([i for i, f in enumerate(factors) if not isinstance(f, tuple)]))

    @property
    def identity_first(self) -> bool:
        """Whether the first factor is an identity: slices of the other factors are products of their own then, side by side."""
        return 0 in self.identities

    @property
    def inner(self) -> tuple[int, ...]:
        """Sizes that x brings, and the sum runs over."""
        return self.qs if self.left else self.ps

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the result."""
        return self.ps if self.left else self.qs

    def runs(self, start: int, stop: int) -> list[Run]:
        """The multiplies of factors start to stop: the runs between identities, those that shrink x first."""
        sizes = list(zip(self.inner, self.outer, strict=True))
        groups: list[list[tuple[int, int]]] = [[]]
        for i in range(start, stop):
            if i in self.identities:
                groups.append([])
            else:
                groups[-1].append(sizes[i])
        width, found = math.prod([p for p, _ in sizes[start:stop]]), []
        for group in sorted([g for g in groups if g], key=lambda g: math.prod([q for _, q in g]) / math.prod([p for p, _ in g])):
            ps, qs = tuple([p for p, _ in group]), tuple([q for _, q in group])
            rows = width // math.prod(ps)
            width = rows * math.prod(qs)
            found.append(Run(rows, ps, qs))
        return found

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward product, factor by factor from the last of a run."""
        total = 0
        for rows, ps, qs in self.runs(0, len(self.ps)):
            before, after = math.prod(ps), 1
            for p, q in zip(reversed(ps), reversed(qs), strict=True):
                before //= p
                total += 2 * self.m * rows * before * p * q * after
                after *= q
        return total


def positive_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """Accept a sequence of one positive integer or more."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not all(isinstance(s, numbers.Integral) for s in sizes):
        raise type_error(name, "a sequence of integers", sizes if isinstance(sizes, Sequence) else type_name(sizes))
    if not sizes or min(sizes) < 1:
        raise value_error(name, "one positive size for each factor", tuple(sizes))
    return tuple(int(s) for s in sizes)
