"""The constants of a Hadamard transform as constants of a compiled graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron import hadamard_factors
from fastkron_py.runtime import torch_internals


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def split(n: int) -> tuple[int, int]:
    """`hadamard_factors.split`."""
    return hadamard_factors.split(n)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_additions(m: int, bits: int, dtype: torch.dtype, device: torch.device, backend: str) -> bool:
    """`hadamard_factors.has_additions`."""
    return hadamard_factors.has_additions(m, bits, dtype, device, backend)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def padded_matrix(m: int) -> list[Tensor | None]:
    """`hadamard_factors.padded_matrix`."""
    return _static(hadamard_factors.padded_matrix(m))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def factor_sizes(n: int) -> tuple[int, ...]:
    """`hadamard_factors.factor_sizes`."""
    return hadamard_factors.factor_sizes(n)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def matrices(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """`hadamard_factors.matrices`."""
    return _static(hadamard_factors.matrices(sizes, dtype))


def _static(made: list[Any]) -> list[Any]:
    """With sizes that torch.compile(dynamic=True) takes as they are: a guard on a symbol needs an argument that it is a size of."""
    for t in made:
        if t is not None:
            torch_internals.mark_static(t)
    return made
