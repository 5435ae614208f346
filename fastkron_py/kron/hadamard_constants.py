"""The factors of a Hadamard transform as constants of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from fastkron_py.kron.hadamard_factors import factor_sizes
from fastkron_py.kron.hadamard_factors import matrices as made


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def sizes(n: int, dtype: torch.dtype) -> tuple[int, ...]:
    """`factor_sizes`."""
    return factor_sizes(n, dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def matrices(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """`hadamard_factors.matrices`."""
    return made(sizes, dtype)
