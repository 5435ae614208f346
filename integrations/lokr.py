"""The common parts of the integrations of PEFT and LyCORIS: an adapter's product with an operand, and its place in the result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.adapters.api import adapted_linear, result_dtype
from fastkron_py.adapters.conv import Kernel, Window, lokr_conv
from fastkron_py.adapters.factor import Factor, Operands
from fastkron_py.runtime.checks import HALF_DTYPES


class Adapter(NamedTuple):
    """``scale * kron(w1, w2)`` as the weight of a linear layer or a convolution.

    Attributes:
        w1: the first factor.
        w2: the second factor; that of a linear layer is a kernel without a window.
        scale: a number.
        window: of a convolution; None of a linear layer.
    """

    w1: Factor
    w2: Kernel
    scale: float
    window: Window | None

    def fitting(self, x: Tensor) -> Adapter:
        """The adapter on x's device, in a dtype that `lokr_linear` takes beside x's."""

        def fit(t: Tensor) -> Tensor:
            fits = t.dtype == x.dtype or (x.dtype in HALF_DTYPES and t.dtype == torch.float32)
            return t.to(device=x.device, dtype=t.dtype if fits else x.dtype)

        w1 = Factor(fit(self.w1.left), None if self.w1.right is None else fit(self.w1.right))
        return self._replace(w1=w1, w2=self.w2.map(fit))

    def product(self, x: Tensor, base: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The adapter's result, in x's dtype (under autocast, in autocast's), plus base; in out, of a linear layer, if that is given."""
        own = self.fitting(x)
        if own.window is not None:
            return lokr_conv(x, own.w1, own.w2, own.window, base=base, scale=own.scale)
        return adapted_linear(Operands(x, own.w1, own.w2.factor(), base), own.scale, out=out)

    def added(self, x: Tensor, base: Tensor, overwrites: bool = False) -> Tensor:
        """The adapter's result plus base, and written there if base may be; of other dtypes than the result's, as torch adds."""
        if base.dtype != result_dtype(x):
            return base + self.product(x)
        return self.product(x, base, base if overwrites and self.window is None else None)

    def per_channel(self, t: Tensor) -> Tensor:
        """A number for each output or input, as it multiplies a result or x."""
        return t if self.window is None else t.view(-1, *[1] * len(self.w2.window))


def kept_rows(outputs: int, rate: float, is_scaled: bool, dtype: torch.dtype, device: Any) -> Tensor:
    """Rank dropout's number for each output, drawn as PEFT and LyCORIS draw it: the same numbers from the same seed.

    Args:
        outputs: of the layer.
        rate: probability of 0.
        is_scaled: whether the others are 1 over the mean, else 1.
        dtype: of the result.
        device: of the result.
    """
    kept = (torch.rand(outputs) > rate).to(dtype)
    return (kept / kept.mean() if is_scaled else kept).to(device)
