"""Epilogues of a multiply: what a launch does with its sums before it stores them, and how the same is done after a product by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkron_py.tiling.addresses import joined, load_elements, load_parts, scalar, separated


@triton.jit
def epilogue_plain(acc, alpha, beta, z_ptr, offsets, mask):
    """The product as it is."""
    return acc


@triton.jit
def epilogue_scale(acc, alpha, beta, z_ptr, offsets, mask):
    """Scale by alpha."""
    return acc * scalar(alpha, acc.dtype)


@triton.jit
def epilogue_axpby(acc, alpha, beta, z_ptr, offsets, mask):
    """Scale by alpha and add beta * z."""
    z = tl.load(z_ptr + offsets, mask=mask, other=0.0).to(acc.dtype)
    return acc * scalar(alpha, acc.dtype) + z * scalar(beta, acc.dtype)


@triton.jit
def epilogue_axpby_complex(acc, alpha, beta, z_ptr, offsets, mask):
    """Scale by alpha and add beta * z, of complex elements."""
    z = load_elements(z_ptr + offsets, mask, 2, False)
    return acc * scalar(alpha, acc.dtype) + z * scalar(beta, acc.dtype)


@triton.jit
def epilogue_times(acc, alpha, beta, z_ptr, offsets, mask):
    """Multiply by z, element by element."""
    return acc * tl.load(z_ptr + offsets, mask=mask, other=0.0).to(acc.dtype)


@triton.jit
def epilogue_times_complex(acc, alpha, beta, z_ptr, offsets, mask):
    """Multiply by z, of complex elements."""
    real, imaginary = separated(acc)
    z_real, z_imaginary = load_parts(z_ptr + offsets, mask)
    return joined(real * z_real - imaginary * z_imaginary, real * z_imaginary + imaginary * z_real)


@triton.jit
def epilogue_over(acc, alpha, beta, z_ptr, offsets, mask):
    """Divide by z, element by element."""
    return acc / tl.load(z_ptr + offsets, mask=mask, other=1.0).to(acc.dtype)


@triton.jit
def epilogue_over_complex(acc, alpha, beta, z_ptr, offsets, mask):
    """Divide by z, of complex elements: the squares of z's parts do not overflow where z itself does not."""
    real, imaginary = separated(acc)
    z_real, z_imaginary = load_parts(z_ptr + offsets, mask)
    z_real = tl.where(mask, z_real, 1.0)
    size = tl.maximum(tl.abs(z_real), tl.abs(z_imaginary))
    c, d = z_real / size, z_imaginary / size
    square = (c * c + d * d) * size
    return joined((real * c + imaginary * d) / square, (imaginary * c - real * d) / square)


@dataclass(frozen=True, eq=False)
class StoreEpilogue:
    """An epilogue of the last launch of a multiply, or the plain one of the launches ahead of it.

    Attributes:
        name: for people.
        real: its device function.
        complex: the same for complex elements.
        needs_z: whether it reads z.
        scales_by: the method of torch's that does the same to a product in place, with z, where z scales the product.
        rounds_to: "float8" or "integers" where it stores small numbers, and the scale of each slice in z's place, which takes kernels
            that hold a whole slice; else "".
    """

    name: str
    real: Any
    complex: Any
    needs_z: bool = False
    scales_by: Callable[[Tensor, Tensor], Any] | None = None
    rounds_to: str = ""

    def function(self, dtype: torch.dtype) -> Any:
        """The device function for elements of this type."""
        return self.complex if dtype.is_complex else self.real


PLAIN: Final = StoreEpilogue("plain", epilogue_plain, epilogue_plain)
SCALE: Final = StoreEpilogue("scale", epilogue_scale, epilogue_scale)
AXPBY: Final = StoreEpilogue("axpby", epilogue_axpby, epilogue_axpby_complex, needs_z=True)
TIMES: Final = StoreEpilogue("times", epilogue_times, epilogue_times_complex, needs_z=True, scales_by=Tensor.mul_)
OVER: Final = StoreEpilogue("over", epilogue_over, epilogue_over_complex, needs_z=True, scales_by=Tensor.div_)
TO_FLOAT8: Final = StoreEpilogue("to float8", epilogue_plain, epilogue_plain, rounds_to="float8")
TO_INTEGERS: Final = StoreEpilogue("to integers", epilogue_plain, epilogue_plain, rounds_to="integers")
