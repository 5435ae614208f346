"""Run every kernel once on small odd shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Without the caching allocator each tensor is an allocation of its own, so that an access past its end is seen.
Results are compared too, so that a kernel which did not run would be noticed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from shapes_list import REAL, Case, assert_near, call, expected, power, problem

import fastkron_py

# One of each path: a chain of equal steps, neighbours multiplied out, a single wide factor with a loop over P
# and Q, unequal and rectangular ones, widths of 1, one factor batch per row block, remainders everywhere.
CASES = [
    power(3, 8, 8, 3),
    power(5, 2, 2, 7),
    power(3, 13, 13, 2),
    power(17, 32, 32, 2),
    power(3, 67, 67, 1),
    power(2, 130, 130, 1),
    power(1, 255, 255, 1),
    Case(17, ((2, 2), (64, 64))),
    Case(3, ((64, 64), (3, 2))),
    Case(7, ((2, 3), (5, 2), (6, 4))),
    Case(5, ((1, 3), (11, 1), (1, 2), (4, 5))),
    Case(3, ((5, 3), (3, 5)), (2,), (2,)),
    Case(3, ((70, 3), (3, 70)), (2, 1), (3,)),
]


def main() -> None:
    """Forward with and without z, and backward, in every dtype, both forms."""
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda")
    runs = 0
    with fastkron_py.backend("triton"):
        for case in CASES:
            for dtype in REAL:
                for left in (False, True):
                    x, factors = problem(case, dtype, device, generator, left=left)
                    # Views into larger allocations: strides other than the contiguous ones.
                    for arguments in ((x, factors), (x.mT.contiguous().mT, [f.mT.contiguous().mT for f in factors])):
                        runs += check(arguments[0], arguments[1], left)
    torch.cuda.synchronize()
    print(f"{runs} problems right")


def check(x: torch.Tensor, factors: list[torch.Tensor], left: bool) -> int:
    """One problem forward (three ways of finishing) and backward."""
    multiply = call(left)
    plain = multiply(x, factors)
    assert_near(plain, expected(x, factors, left=left))
    z = torch.randn(plain.shape[-1], device=x.device).to(x.dtype)
    for options in ({"alpha": 0.5}, {"alpha": 0.5, "beta": 2.0, "z": z}):
        assert_near(multiply(x, factors, **options), expected(x, factors, left=left, **options))
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, *factors)]
        y = multiply(leaves[0], leaves[1:])
        gradients = torch.autograd.grad(y, leaves, y.detach())
    assert all(bool(g.isfinite().all()) for g in gradients)
    return 1


if __name__ == "__main__":
    main()
