"""Epilogues of a multiply: what a launch does with its sums before it stores them, and how the same is done after a product by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kron.kernels.sliced_multiply import (
    epilogue_axpby,
    epilogue_axpby_complex,
    epilogue_over,
    epilogue_over_complex,
    epilogue_plain,
    epilogue_scale,
    epilogue_times,
    epilogue_times_complex,
)


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
