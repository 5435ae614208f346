"""Products that tests multiply on ranks, their blocks, and the same products of one process."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fastkron_py
from fastkron_py.distributed import Problem, ProcessGrid, kron_matmul, kron_matmul_left, plan
from fastkron_py.distributed.plan.layout import chunk_offsets

# M, factors, stages. First what FastKron's own tests run on several GPUs, scaled down, then what it refuses.
PROBLEMS = {
    "20 x 8^4, 3 and 1": (20, ((8, 8),) * 4, (3, 1)),
    "18 x 8^4, 2 and 2": (18, ((8, 8),) * 4, (2, 2)),
    "12 x 16^3, 2 and 1": (12, ((16, 16),) * 3, (2, 1)),
    "8 x 4^4, 3 and 1": (8, ((4, 4),) * 4, (3, 1)),
    "128 x 4^4": (128, ((4, 4),) * 4, None),
    "4x8 and 8s": (10, ((4, 8), (8, 8), (8, 4)), (2, 1)),
    "8x4 five times": (6, ((8, 4),) * 3 + ((2, 4),) * 2, (2, 2, 1)),
    "primes": (9, ((7, 7),) * 3, (2, 1)),
    "primes, an exchange for each": (5, ((7, 5), (3, 11), (5, 2)), (1, 1, 1)),
    "twos": (4, ((2, 2),) * 7, (4, 3)),
    "twos, an exchange for each": (4, ((2, 2),) * 5, (1,) * 5),
    "fewer rows than ranks": (3, ((6, 6),) * 2, (1, 1)),
    "one row": (1, ((8, 8),) * 2, (1, 1)),
    "no rows": (0, ((4, 4),) * 2, (1, 1)),
    "one factor": (4, ((8, 6),), None),
    "fewer columns than ranks": (5, ((3, 2),), None),
    "ones": (5, ((1, 3), (5, 1), (1, 1)), (1, 1, 1)),
}


def whole_numbers(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=g).to(dtype)


def make(m, sizes, dtype=torch.float64, seed=0, left=False, random=False):
    """x, factors and z of a problem, the same on every rank; of a left product in its orientation."""
    g = torch.Generator().manual_seed(seed)
    ps, qs = zip(*sizes, strict=True)
    inner, outer = (math.prod(qs), math.prod(ps)) if left else (math.prod(ps), math.prod(qs))
    shapes = [(m, inner), *sizes, (m, outer)]
    if left:
        shapes[0], shapes[-1] = shapes[0][::-1], shapes[-1][::-1]
    tensors = [(torch.randn(s, generator=g) / s[0] ** 0.25).to(dtype) if random else whole_numbers(g, *s, dtype=dtype) for s in shapes]
    return tensors[0], tensors[1:-1], tensors[-1]


def block(t: torch.Tensor, grid: ProcessGrid) -> torch.Tensor:
    """This rank's block of a whole matrix, on its device."""
    rows, cols = chunk_offsets(t.shape[0], grid.shape[0]), chunk_offsets(t.shape[1], grid.shape[1])
    return t[rows[grid.row] : rows[grid.row + 1], cols[grid.col] : cols[grid.col + 1]].to(grid.device)


def grid_for(shape) -> ProcessGrid | None:
    """A grid of the first ranks; None on the others."""
    members = list(range(math.prod(shape)))
    return ProcessGrid(shape, ranks=members) if dist.get_rank() in members else None


def multiply(x, factors, left=False, **options):
    return kron_matmul_left(factors, x, **options) if left else kron_matmul(x, factors, **options)


def single(x, factors, left=False, **options):
    return fastkron_py.kron_matmul_left(factors, x, **options) if left else fastkron_py.kron_matmul(x, factors, **options)


def planned(m, sizes, shape, stages, chunks, left, dtype=torch.float64, messages=None):
    ps, qs = zip(*sizes, strict=True)
    return plan(Problem(m, ps, qs, dtype, left), shape, stages=stages, chunks=chunks, messages=messages)


COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class Copied(TorchDispatchMode):
    """Counts the bytes that are copied inside of it."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.bytes += args[0].nbytes if func in COPIES else 0
        return func(*args, **(kwargs or {}))
