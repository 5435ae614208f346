"""The types that a kernel computes in, and the precision of its products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton import knobs


class Arithmetic(NamedTuple):
    """The types and the product's precision inside a kernel."""

    compute: Any  # operands of the products
    acc: Any  # sums, also in the epilogue
    precision: str  # tl.dot's name, or "emulated"


_HALF = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def arithmetic(dtype: torch.dtype, precision: str, given: bool) -> Arithmetic:
    """Arithmetic for tensors of dtype; of the parts of complex numbers.

    Args:
        dtype: of the tensors.
        precision: of float32 products, "highest" or less.
        given: both operands of every product are given numbers, not results of earlier products.
    """
    dtype = dtype.to_real()
    if dtype == torch.float64:
        return Arithmetic(tl.float64, tl.float64, "ieee")
    # Triton splits float32 into TF32 parts, and this library rounds to them, on NVIDIA GPUs only.
    has_tf32 = torch.version.hip is None and not knobs.runtime.interpret
    if dtype == torch.float32:
        return Arithmetic(tl.float32, tl.float32, ("tf32x3" if precision == "highest" else "tf32") if has_tf32 else "ieee")
    if dtype == torch.float16 and not given:
        # TF32 has float16's mantissa and float32's range: nothing between two steps overflows.
        return Arithmetic(tl.float32, tl.float32, "tf32" if has_tf32 else "ieee")
    emulated = dtype == torch.bfloat16 and knobs.runtime.interpret
    return Arithmetic(_HALF[dtype], tl.float32, "emulated" if emulated else "ieee")


def half_precision() -> str:
    """Return the name of the precision of products of given numbers in any half type."""
    return arithmetic(torch.bfloat16, "highest", given=True).precision
