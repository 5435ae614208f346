"""A LoKr adapter as layers have it, ours, PEFT's and LyCORIS's: its factors, its product, its place in the result, norms of its weight."""

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


# ---- weight-decomposed adapters (DoRA): norms of a weight plus a Kronecker product, without the sum -----


def magnitude_ratio(
    weight: Tensor, magnitudes: Tensor, w1: Tensor, w2: Tensor, *, by_row: bool = True, row_mask: Tensor | None = None
) -> Tensor:
    """What DoRA multiplies the outputs or inputs of ``weight + row_mask * kron(w1, w2)`` by: magnitudes over its norms.

    Args:
        weight: ``[out1 * out2, in1 * in2, *window]``; it gets no gradient.
        magnitudes: as many numbers as there are outputs or inputs.
        w1: ``[out1, in1]``, of float32 or float64.
        w2: ``[out2, in2, *window]``, like w1.
        by_row: of the outputs, else of the inputs.
        row_mask: ``[out1 * out2]`` or None; for outputs alone.

    Returns:
        ``[out]`` or ``[in]``, of w1's dtype.

    Example:
        >>> magnitude_ratio(torch.ones(12, 10, 3), torch.ones(12), torch.ones(3, 2), torch.ones(4, 5, 3)).shape
        torch.Size([12])
    """
    weight, w2 = (t.flatten(1) if by_row else t.movedim(1, -1).flatten(0, -2) for t in (weight, w2))
    norms = adapted_norms(weight, w1, w2, by_row=by_row, row_mask=row_mask)
    return magnitudes.flatten() / (norms + torch.finfo(norms.dtype).eps)  # as LyCORIS has it


def adapted_norms(weight: Tensor, w1: Tensor, w2: Tensor, *, by_row: bool = True, row_mask: Tensor | None = None) -> Tensor:
    """Euclidean norms of the rows or the columns of ``weight + row_mask * kron(w1, w2)``, of matrices; arguments as in `magnitude_ratio`.

    The square is ``|weight|^2 + 2 <weight, kron> + |kron|^2`` of each row. The last term is a product of the factors' norms. The middle
    one reads weight once, a slice of ``out / out1`` rows at a time. DoRA: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation",
    ICML 2024.

    Example:
        >>> weight, w1, w2 = torch.randn(12, 10), torch.randn(3, 2), torch.randn(4, 5)
        >>> torch.allclose(adapted_norms(weight, w1, w2), (weight + torch.kron(w1, w2)).norm(dim=1), atol=1e-5)
        True
    """
    slices = weight.detach().unflatten(1, (w1.shape[1], w2.shape[1])).unflatten(0, (w1.shape[0], w2.shape[0]))
    own, cross = [], []
    for w, row in zip(slices, w1, strict=True):  # w: [out2, in1, in2], row: [in1]
        w = w.to(w1.dtype)
        if by_row:
            own.append(w.square().sum((1, 2)))
            cross.append(torch.bmm(w, w2.unsqueeze(2)).squeeze(2) @ row)
        else:
            own.append(w.square().sum(0))
            cross.append((w * w2.unsqueeze(1)).sum(0) * row.unsqueeze(1))
    kron = torch.outer(*[w.square().sum(int(by_row)) for w in (w1, w2)]).flatten()
    squares, products = [torch.cat(parts) if by_row else torch.stack(parts).sum(0).flatten() for parts in (own, cross)]
    if by_row and row_mask is not None:
        products, kron = row_mask * products, row_mask.square() * kron
    squares = squares + 2 * products + kron
    # The gradient of a norm of 0 is 0, as torch has it; a square that rounding made negative is 0.
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
