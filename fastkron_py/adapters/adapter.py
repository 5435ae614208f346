"""A LoKr adapter as layers have it, ours, PEFT's and LyCORIS's: its factors, its product with an operand, its place in the result."""

from __future__ import annotations

from collections.abc import Callable
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

    @classmethod
    def of(cls, get: Callable[[str], Any], scale: float, window: Window | None = None, sizes: tuple[int, ...] = ()) -> Adapter:
        """The adapter of tensors that get gives, or None, for LyCORIS's and PEFT's names, such as ``lokr_w2_a``; sizes: of a window."""
        whole1, whole2 = get("lokr_w1"), get("lokr_w2")
        w1 = Factor(get("lokr_w1_a"), get("lokr_w1_b")) if whole1 is None else Factor(whole1)
        if whole2 is not None:
            return cls(w1, Kernel(whole2), scale, window)
        left, right, core = get("lokr_w2_a"), get("lokr_w2_b"), get("lokr_t2")
        if core is not None:  # PEFT's of a Conv1d has a second window size of 1
            return cls(w1, Kernel(core.view(*core.shape[:2], *sizes), left.mT, right), scale, window)
        return cls(w1, Kernel(right.unflatten(1, (-1, *sizes)) if sizes else right, left), scale, window)

    def fitting(self, x: Tensor) -> Adapter:
        """The adapter on x's device, in a dtype that `lokr_linear` takes beside x's."""

        def fit(t: Tensor) -> Tensor:
            fits = t.dtype == x.dtype or (x.dtype in HALF_DTYPES and t.dtype == torch.float32)
            return t.to(device=x.device, dtype=t.dtype if fits else x.dtype)

        w1 = Factor(fit(self.w1.left), None if self.w1.right is None else fit(self.w1.right))
        return self._replace(w1=w1, w2=self.w2.map(fit))

    def product(self, x: Tensor, base: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The adapter's result, in x's dtype (under autocast, in autocast's), plus base; in out, of a linear layer, if that is given."""
        if self.window is not None:
            return lokr_conv(x, self.w1, self.w2, self.window, base=base, scale=self.scale)
        w2 = Factor(self.w2.core) if self.w2.left is None else Factor(self.w2.left, self.w2.core)
        return adapted_linear(Operands(x, self.w1, w2, base), self.scale, out=out)

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

    Rate is the probability of 0; the others are 1, or, scaled, 1 over the mean.
    """
    kept = (torch.rand(outputs) > rate).to(dtype)
    return (kept / kept.mean() if is_scaled else kept).to(device)
