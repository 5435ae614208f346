"""A factor of a LoKr weight: a matrix, or a pair of low rank. Checks, dtypes and multiplying out."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.adapters.plan import FactorSize
from fastkron_py.runtime.arrays import ACCEPTED
from fastkron_py.runtime.checks import check_tensor
from fastkron_py.runtime.errors import type_error, value_error

_EXPECTED: Final = "a matrix [out, in] or a pair of matrices [out, rank] and [rank, in]"
_MATRIX: Final = "a matrix [out, in], or terms of a sum [terms, out, in]"


class Factor(NamedTuple):
    """``left`` itself, ``[out, in]``, or ``left @ right`` with ``left [out, rank]`` and ``right [rank, in]``.

    The terms of a sum, or several adapters, are a leading dimension of each.
    """

    left: Tensor
    right: Tensor | None = None

    @property
    def size(self) -> FactorSize:
        """The sizes of the factor."""
        if self.right is None:
            return FactorSize(self.left.shape[-2], self.left.shape[-1])
        return FactorSize(self.left.shape[-2], self.right.shape[-1], self.right.shape[-2])

    def expanded(self) -> Factor:
        """The factor as one matrix."""
        return self if self.right is None else Factor(product(self.left, self.right))

    def scaled(self, scale: Any) -> Factor:
        """The factor times a scalar."""
        return self._replace(left=self.left * scale)


class Operands(NamedTuple):
    """The tensors of ``base + scale * x @ kron(w1, w2).T``; without a base nothing is added."""

    x: Tensor
    w1: Factor
    w2: Factor
    base: Tensor | None

    @property
    def listed(self) -> tuple[Tensor | None, ...]:
        """All of them, one after the other: x, both factors' matrices, base."""
        return (self.x, *self.w1, *self.w2, self.base)

    @property
    def present(self) -> list[Tensor]:
        """Those that there are."""
        return [t for t in self.listed if t is not None]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.x.shape[:-1], self.w1.size.rows * self.w2.size.rows)


def product(left: Tensor, right: Tensor) -> Tensor:
    """The sum over left's last and right's first dimension, in the wider dtype of both; of a batch of left matrices, each with its own."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(dtype), right.to(dtype)
    if left.ndim == right.ndim == 2:  # torch.tensordot is many calls
        return left.mm(right)
    if left.ndim == right.ndim == 3:
        return left.bmm(right)
    return torch.tensordot(left, right, 1)


def labelled(name: str, given: Any) -> list[tuple[str, Any]]:
    """The arrays of a factor, one or two, each with its name in errors.

    Raises:
        TypeError: a list or tuple of another length, or None.
    """
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise type_error(name, _EXPECTED, f"{len(given)} of them")
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(given)]
    else:
        parts = [(name, given)]
    for label, part in parts:
        if part is None:  # which would stand for a factor that is no pair
            raise type_error(label, ACCEPTED, "None")
    return parts


def check_factor(name: str, factor: Factor, x: Tensor) -> None:
    """Matrices on x's device that chain, of x's dtype, or float32 beside an x of a half dtype.

    Raises:
        TypeError: no dense floating-point tensor, or another dtype.
        ValueError: another device, no matrix, or a pair that does not chain.
    """
    labels = (name,) if factor.right is None else (f"{name}[0]", f"{name}[1]")
    for label, t in zip(labels, (factor.left, factor.right), strict=False):
        check_tensor(label, t, x, "x", or_float32=True)
        if t is not None and t.ndim not in (2, 3):
            raise value_error(label, _MATRIX, f"shape {tuple(t.shape)}")
    if factor.right is None:
        return
    left, right = tuple(factor.left.shape), tuple(factor.right.shape)
    if left[-1] != right[-2] or left[:-2] != right[:-2]:
        raise value_error(name, "a pair [out, rank] and [rank, in] of one rank", f"shapes {left} and {right}")
