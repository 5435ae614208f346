"""Learn an unknown separable blur from a photograph and its blurred copy, by gradients through `kron_matmul`.

Both factors are parameters; the blur that made the copy is never shown to the model. Usage:
python examples/learn_blur.py (needs the extra "demo").
"""

from __future__ import annotations

import torch

from fastkron_py import kron_matmul
from fastkron_py.cli.demo import blur_matrix, photograph

SIDE, STEPS = 32, 100


def main() -> None:
    """Fit the factors with L-BFGS and compare their product's effect on a picture that was not trained on."""
    picture = torch.from_numpy(photograph("chelsea.png").copy())
    patches = picture.unfold(0, SIDE, 32).unfold(1, SIDE, 32).reshape(-1, SIDE * SIDE)  # [patches * 3, SIDE * SIDE]
    blur = [torch.from_numpy(blur_matrix(SIDE, sigma).T.copy()) for sigma in (3.0, 1.5)]
    blurred = kron_matmul(patches, blur)
    train, held = slice(0, -30), slice(-30, None)

    factors = [torch.nn.Parameter(torch.eye(SIDE, dtype=torch.float64)) for _ in blur]
    optimizer = torch.optim.LBFGS(factors, lr=1.0, max_iter=STEPS, line_search_fn="strong_wolfe")

    def error(part: slice) -> torch.Tensor:
        return (kron_matmul(patches[part], factors) - blurred[part]).norm() / blurred[part].norm()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = error(train).square()
        loss.backward()
        return loss

    print(f"before: relative error {error(held):.4f} on patches held out")
    optimizer.step(closure)
    print(f"after:  relative error {error(held):.4f} on patches held out")


if __name__ == "__main__":
    main()
