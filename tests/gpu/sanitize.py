"""Run every kernel once on small odd shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Without the caching allocator each tensor is an allocation of its own, so that an access past its end is seen.
Results are compared too, so that a kernel which did not run would be noticed. Needs a minute for compiling; racecheck takes three
and more, so a number may follow, of the case to begin with.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from shapes_list import REAL, Case, assert_near, call, expected, power, problem

import fastkron_py
from fastkron_py import reference

# One of each path: a chain of equal steps, neighbours multiplied out, tiles of 4, 8 and 16 warps, a single wide factor with a loop over P
# and Q, unequal and rectangular ones, widths of 1, one factor batch per row block, remainders everywhere.
CASES = [
    power(3, 8, 8, 3),
    power(5, 2, 2, 7),
    power(3, 13, 13, 2),
    power(17, 32, 32, 2),
    power(1, 32, 32, 3),
    power(2, 4, 4, 7),
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
# What float32 alone has: tiles of half the registers, and tiles fetched ahead, more of them than programs.
FLOAT32 = [power(1, 16, 16, 5), power(140, 128, 128, 2)]
# What half types alone have: rows that are copied whole, more of them than programs.
HALVES = [power(300, 32, 32, 3), power(140, 16, 16, 4)]


def main(first: int = 0) -> None:
    """Both forms of each case from `first` on; the dtypes and two memory layouts take turns, since every kernel is compiled first."""
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda")
    dtypes = itertools.cycle(REAL)
    turns = []
    for case in CASES:
        turns.append((case, (next(dtypes), next(dtypes))))
        next(dtypes)  # four dtypes, two forms: another pair for the next case
    turns += [(case, (torch.float32, torch.float32)) for case in FLOAT32]
    turns += [(case, (torch.bfloat16, torch.bfloat16)) for case in HALVES]
    with fastkron_py.backend("triton"):
        for i, (case, pair) in enumerate(turns[first:], start=first):
            for left, dtype in zip((False, True), pair, strict=True):
                x, factors = problem(case, dtype, device, generator, left=left)
                if i % 2:
                    x, factors = x.mT.contiguous().mT, [f.mT.contiguous().mT for f in factors]
                check(x, factors, left)
                print(case.name, str(dtype).removeprefix("torch."), "left" if left else "right", flush=True)
    torch.cuda.synchronize()


def check(x: torch.Tensor, factors: list[torch.Tensor], left: bool) -> None:
    """One problem forward (three ways of finishing) and backward, against float64."""
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
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.autograd.grad(reference.kron_matmul(wide[0], wide[1:], left=left), wide, y.detach().double())
    for got, want in zip(gradients, wanted, strict=True):
        assert_near(got, want, scale=3)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
