"""Sharpen a blurred photograph: ridge regression with a Kronecker product of 135,300 unknowns, in closed form.

The blur is ``K = B_h (x) B_w``. With the factors' singular value decompositions ``B = U S V^T`` those of K
are their Kronecker products, so ``(K^T K + r I)^-1 K^T y = V diag(s / (s^2 + r)) U^T y`` takes two
products with small factors and one scaling. Usage: python examples/deblur.py (needs the extra "demo").
"""

from __future__ import annotations

import torch

from fastkron_py import kron_matmul_left
from fastkron_py.cli.demo import blur_matrix, photograph

SIGMA, NOISE, RIDGE = 2.0, 1e-3, 2e-4


def psnr(picture: torch.Tensor, truth: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in decibels."""
    return float(-10 * torch.log10((picture - truth).square().mean()))


def main() -> None:
    """Blur, add noise, sharpen, and say how close each is to the original."""
    image = torch.from_numpy(photograph("chelsea.png").copy())
    height, width, _ = image.shape
    truth = image.reshape(height * width, 3)
    blur = [torch.from_numpy(blur_matrix(n, SIGMA)) for n in (height, width)]

    seen = kron_matmul_left(blur, truth)
    seen = seen + NOISE * torch.randn(seen.shape, generator=torch.Generator().manual_seed(0), dtype=seen.dtype)

    u, s, vh = zip(*(torch.linalg.svd(b) for b in blur), strict=True)
    values = torch.kron(*s)[:, None]  # [height * width, 1]
    coefficients = kron_matmul_left([m.mT for m in u], seen)
    sharp = kron_matmul_left([m.mT for m in vh], coefficients * values / (values**2 + RIDGE))

    print(f"{height} x {width} pixels, blurred by sigma = {SIGMA} with noise of {NOISE}")
    print(f"blurred:   {psnr(seen, truth):.1f} dB")
    print(f"sharpened: {psnr(sharp, truth):.1f} dB")


if __name__ == "__main__":
    main()
