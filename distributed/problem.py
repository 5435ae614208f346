"""`Problem`: the sizes of a product to plan."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkron_py.runtime.checks import DTYPES, check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error


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

    Example:
        >>> Problem(128, (64,) * 4, (64,) * 4).left
        False
    """

    m: int
    ps: tuple[int, ...]
    qs: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    left: bool = False
    gradients: bool = False

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

    @property
    def inner(self) -> tuple[int, ...]:
        """Sizes that x brings, and the sum runs over."""
        return self.qs if self.left else self.ps

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the result."""
        return self.ps if self.left else self.qs

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward product, factor by factor from the last."""
        before, after, total = math.prod(self.inner), 1, 0
        for p, q in zip(reversed(self.inner), reversed(self.outer), strict=True):
            before //= p
            total += 2 * self.m * before * p * q * after
            after *= q
        return total


def positive_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """Accept a sequence of one positive integer or more."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not all(isinstance(s, numbers.Integral) for s in sizes):
        raise type_error(name, "a sequence of integers", sizes if isinstance(sizes, Sequence) else type_name(sizes))
    if not sizes or min(sizes) < 1:
        raise value_error(name, "one positive size for each factor", tuple(sizes))
    return tuple(int(s) for s in sizes)
