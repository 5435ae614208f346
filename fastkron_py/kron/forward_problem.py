"""The problem of a multiply, as plain values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastkron_py.kron.epilogues import AXPBY, StoreEpilogue
from fastkron_py.kron.launches import Rows


class MultiplyProblem(NamedTuple):
    """Everything that the launches of a multiply depend on."""

    shape: tuple[int, ...]  # of x, [B, L, K, R]
    x: Rows
    z: Rows | None
    factor_shapes: tuple[tuple[int, ...], ...]
    factor_strides: tuple[tuple[int, ...], ...]
    start: int  # factors start to stop are multiplied
    stop: int
    sizes: tuple[int, ...]  # current width of every mode
    scaled: bool  # alpha is not 1
    precision: str
    dtype: torch.dtype
    device: torch.device
    conj: bool = False  # the factors are conjugated
    whole_rows: bool = False  # vectors of 16 bytes of x begin at multiples of 16 bytes, as the kernel for whole rows copies them
    epilogue: StoreEpilogue = AXPBY  # of the last launch, where there is a z
    families: tuple[str, ...] = ()  # that may multiply; none for all
