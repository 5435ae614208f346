"""Products of large integer powers, which determinants of Kronecker products are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def monomial(xs: Sequence[Tensor], powers: Sequence[int], *, signs: bool = False) -> Tensor:
    """``prod_i xs[i] ** powers[i]``, by squares and products alone: derivatives of every order exist, also where an x is 0.

    All powers are made together, the highest bit first. On the way there are roots of the result, so that a power that would overflow does
    no harm beside one that would vanish.

    Args:
        xs: ``[*batch_i]`` each; the batches broadcast.
        powers: 0 or more.
        signs: whether the xs are -1, 0, 1 or complex numbers of modulus 0 or 1. Then so is the result, whose modulus would leave 1 by
            rounding. Powers of 1, -1, i and -i are exact.

    Returns:
        ``[*batch]``.
    """
    result = torch.ones_like(torch.broadcast_tensors(*xs)[0])
    powers = [int(power) for power in powers]  # under torch.jit.trace sizes are tensors
    for bit in reversed(range(max(powers).bit_length())):
        result = torch.sgn(result * result) if signs else result * result
        for x, power in zip(xs, powers, strict=True):
            if power >> bit & 1:
                result = result * x
    return torch.sgn(result) if signs else result
