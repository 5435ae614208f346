"""Norms of a weight plus a Kronecker product, by rows or columns, without the sum: for weight-decomposed adapters (DoRA)."""

from __future__ import annotations

import torch
from torch import Tensor


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
