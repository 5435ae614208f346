"""Precision: torch's settings for float32 products, read for Triton and set for torch's own; half types widened; autocast's dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime import torch_internals

LOWER: Final = ("tf32", "bf16")  # settings by which products of float32 have fewer bits
_AS_IT_IS: Final = contextlib.nullcontext()


def _matmul_settings(is_cuda: bool) -> Any:
    """Where torch keeps the precision of float32 matrix products on GPUs or CPUs (torch 2.9 and later)."""
    return torch.backends.cuda.matmul if is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def getter() -> Callable[[str, str], Any]:
    """The function behind torch's settings of ("cuda" or "mkldnn", "matmul"), at a fifth of their cost; or one that asks these."""
    if torch_internals.works("precision"):
        return torch_internals.precision_getter()
    return lambda backend, operation: _matmul_settings(backend == "cuda").fp32_precision


def resolved(precision: str | None) -> str:
    """The precision asked for, or torch's setting for CUDA: "highest", or "high" where less is allowed.

    The newer setting is read, since `torch.get_float32_matmul_precision`, whose setter writes it too, raises where
    a program uses the newer one alone.
    """
    if precision is not None:
        return precision
    return "high" if getter()("cuda", "matmul") in LOWER else "highest"


def wide(t: Tensor) -> Tensor:
    """The tensor in float32, or as it is in float64: the dtype in which functions of half types are computed."""
    return t if t.dtype == torch.float64 else t.float()


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which functions, sums and tables of operands of these dtypes are computed: float64 if one of them is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def has_precisions(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype in a precision that is set."""
    return dtype in (torch.float32, torch.complex64)


def to_be_set(precision: str | None, device: torch.device) -> str | None:
    """The precision for `torch_products` in a program that is built now; None on a GPU where it is in force whenever the program runs."""
    return None if device.type == "cuda" and precision == resolved(None) == "highest" else precision


def torch_products(x: Tensor, precision: str | None) -> contextlib.AbstractContextManager[None]:
    """Let torch multiply tensors like x in this precision; None leaves its setting, which is the process's."""
    if precision is None or not has_precisions(x.dtype):
        return _AS_IT_IS
    # Setting a precision that is in force takes longer than launching a small product.
    in_force = getter()("cuda" if x.is_cuda else "mkldnn", "matmul")
    if in_force == "tf32" if precision != "highest" else in_force not in LOWER:
        return _AS_IT_IS
    return _with_setting(_matmul_settings(x.is_cuda), precision)


@contextlib.contextmanager
def _with_setting(settings: Any, precision: str) -> Iterator[None]:
    before = settings.fp32_precision
    settings.fp32_precision = "ieee" if precision == "highest" else "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


# ---- autocast, by its rule for matmul, before a verb checks its tensors' dtypes -----------------------


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's dtype on x's device, where it is on."""
    device_type = x.device.type
    # Torch 2.11 cannot trace `is_autocast_available`, so the devices of most calls are named.
    has_autocast = device_type in ("cpu", "cuda") or (device_type != "meta" and torch.amp.is_autocast_available(device_type))
    return torch.get_autocast_dtype(device_type) if has_autocast and torch.is_autocast_enabled(device_type) else None


def cast(t: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor but float64 in autocast's dtype; anything else as it is."""
    eligible = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
    return t.to(dtype) if eligible else t


def autocasted(x: Tensor, factors: list[Tensor], z: Tensor | None) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """The operands, under autocast in its dtype."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, factors, z
    return cast(x, dtype), [cast(f, dtype) for f in factors], cast(z, dtype)
