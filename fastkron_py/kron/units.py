"""Factors of one element that no launch multiplies beside others: each would read and write all of x for a number.

The number goes into another factor: ``F (x) [u] = u * F``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fastkron_py.runtime.builder import Builder


def lone_units(spans: Sequence[tuple[int, int]], factors: Sequence[Tensor]) -> list[int]:
    """The numbers of factors of one element whose launch, by (start, stop) of its factors, has no others; none where all are."""
    units = [math.prod(f.shape[1:]) == 1 for f in factors]
    found = [i for start, stop in spans if all(units[start:stop]) for i in range(start, stop)]
    return found if len(found) < len(factors) else []


def without_units(build: Builder, factors: Sequence[Tensor], units: Sequence[int], most: int) -> list[Tensor] | None:
    """Add the product of the smallest other factor and these units to a program.

    Args:
        build: of the program.
        factors: ``[B, P_i, Q_i]``, all of them conjugate views, or none.
        units: numbers of factors of one element.
        most: elements that the product may have.

    Returns:
        The other factors, one of them replaced; None where its product is too large, since batches differ.
    """
    others = [i for i in range(len(factors)) if i not in units]
    target = min(others, key=lambda i: factors[i].numel())
    given = [factors[i].conj() if factors[i].is_conj() else factors[i] for i in (target, *units)]
    groups = len(given[0])
    if all([t.stride(0) == 0 for t in given]):  # one matrix for all batches
        given = [t[:1] for t in given]

    def multiplied(*given: Tensor) -> Tensor:
        return reduce(torch.mul, given)

    described = multiplied(*given)
    if described.numel() > most:
        return None
    made: Tensor = build.call(multiplied, given, described)
    made = made.expand(groups, *made.shape[1:])
    made = made.conj() if factors[target].is_conj() else made
    return [made if i == target else factors[i] for i in others]
