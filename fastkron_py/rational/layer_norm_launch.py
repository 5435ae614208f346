"""Launchers of the kernels that normalise rows and apply a rational function."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.rational.config_layer_norm import RowWalk, walk
from fastkron_py.rational.kernels.layer_norm import _columns_kernel, _layer_norm_rational_bwd_kernel, _layer_norm_rational_fwd_kernel
from fastkron_py.rational.launches import Coefficients, coefficients
from fastkron_py.runtime.device import multiprocessor_count, on_device
from fastkron_py.runtime.launch import LaunchConfig, Launcher

COLUMN_BLOCK: Final = 64
PROGRAM_BLOCK: Final = 32
GROUP_BLOCK: Final = 1024


class _Kind(NamedTuple):
    """All that a launch depends on, but for the addresses."""

    rows: int
    channels: int
    function: Coefficients
    eps: float
    dtypes: tuple[torch.dtype, ...]


def _kind(x: Tensor, others: tuple[Tensor, ...], a: Tensor, b: Tensor, eps: float, version: str) -> _Kind:
    dtypes = tuple(t.dtype for t in (x, *others, a, b))
    c = x.shape[-1]
    return _Kind(x.numel() // c, c, coefficients(a, b, version, dtypes), eps, dtypes)


def _arguments(kind: _Kind, chosen: RowWalk) -> dict[str, Any]:
    return {
        **kind.function.arguments(),
        "rows": kind.rows,
        "CHANNELS": kind.channels,
        "WIDTH": kind.channels // max(kind.function.a_shape[0], kind.function.b_shape[0]),
        "ROWS": chosen.rows,
        "BLOCK": chosen.block,
        "STAGES": chosen.stages,
        "num_warps": chosen.num_warps,
    }


class _Forward:
    """The launch of one kind of forward pass."""

    def __init__(self, kind: _Kind) -> None:
        chosen = walk(kind.rows, kind.channels, multiprocessor_count(kind.function.device), backward=False)
        arguments = {"EPS": kind.eps, **_arguments(kind, chosen)}
        self.launch = Launcher([LaunchConfig(_layer_norm_rational_fwd_kernel, (chosen.programs,), arguments)])


class _Backward:
    """The launches of one kind of backward pass."""

    def __init__(self, kind: _Kind) -> None:
        chosen = walk(kind.rows, kind.channels, multiprocessor_count(kind.function.device), backward=True)
        self.launch = Launcher([LaunchConfig(_layer_norm_rational_bwd_kernel, (chosen.programs,), _arguments(kind, chosen))])
        self.dtype = kind.function.dtype
        self.coefficients = kind.function.terms
        self.programs = chosen.programs
        sizes = {"programs": chosen.programs, "CHANNELS": kind.channels, "BLOCK_P": PROGRAM_BLOCK, "BLOCK_C": COLUMN_BLOCK}
        blocks = -(-kind.channels // COLUMN_BLOCK)
        self.columns = Launcher([LaunchConfig(_columns_kernel, ((2 + self.coefficients) * blocks,), {**sizes, "num_warps": 4})])
        self.sum = kind.function.sums(kind.channels, GROUP_BLOCK, 4)


_forward = lru_cache(maxsize=256)(_Forward)
_backward = lru_cache(maxsize=256)(_Backward)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor, eps: float, version: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y in dtype, mean, reciprocal deviation) of ``R(layer_norm(x))``.

    Args:
        x: ``[..., C]``, not empty.
        weight: ``[C]`` contiguous.
        bias: ``[C]`` contiguous.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        eps: added to the variance.
        version: "A", "B", "C" or "N".
        dtype: of y.
    """
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (torch.empty(x.numel() // x.shape[-1], dtype=compute, device=x.device) for _ in range(2))
    with on_device(x):
        _forward(_kind(x, (weight, bias, y), a, b, eps, version)).launch(x, weight, bias, a, b, y, mean, rstd)
    return y, mean, rstd


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor, eps: float, version: str
) -> list[Tensor]:
    """[dx, dweight, dbias, da, db] from one pass over x and dy; arguments as in `forward`, mean and rstd as it gave them."""
    x, dy = x.contiguous(), dy.contiguous()
    dx, dweight, dbias, da, db = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight, bias, a, b))
    with on_device(x):
        launches = _backward(_kind(x, (dy, weight, bias), a, b, eps, version))
        c = x.shape[-1]
        partial = torch.empty(2 + launches.coefficients, launches.programs, c, dtype=launches.dtype, device=x.device)
        sums = torch.empty(launches.coefficients, c, dtype=torch.float64, device=x.device)
        launches.launch(x, dy, mean, rstd, weight, bias, a, b, dx, partial)
        launches.columns(partial, dweight, dbias, sums)
        launches.sum(sums, b, da, db)
    return [dx, dweight, dbias, da, db]
