"""Products that tests multiply on ranks, their blocks, and the same products of one process."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from functools import reduce
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fastkron_py
from fastkron_py.distributed import Problem, ProcessGrid, kron_matmul, kron_matmul_left, plan
from fastkron_py.distributed.layout import chunk_offsets
from fastkron_py.distributed.plan import of_stages

# M, factors, stages. First what FastKron's own tests run on several GPUs, scaled down, then what it refuses, then integers for identities.
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
} | (
    IDENTITIES := {
        "identities before and after": (5, (8, (3, 2), 4), (3,)),
        "identities before and after, exchanged": (5, (4, (3, 5), 4), (1, 1, 1)),
        "slices that blocks cut": (4, (6, (3, 5), (2, 2)), (3,)),
        "fewer slices than ranks": (3, (2, (3, 4)), (2,)),
        "more and fewer slices": (4, (5, (1, 3)), (2,)),
        "an identity after": (6, ((3, 5), 6), (1, 1)),
        "an identity between": (5, ((3, 2), 3, (2, 4)), (1, 2)),
        "neighbouring identities": (4, (2, 2, 1, (3, 3), 1, 3, 2), (2, 1)),
        "an identity alone": (3, (3, 4), (1,)),
        "identities of one": (3, (1, (4, 2), 1, (2, 3)), (1, 1)),
    }
)


def whole_numbers(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=g).to(dtype)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(factors) -> torch.Tensor:
    """The Kronecker product, by torch.kron of matrices."""
    return reduce(torch.kron, [torch.eye(f, dtype=torch.float64) if isinstance(f, int) else f for f in factors])


def rows_and_columns(sizes):
    """Sizes ``(P, Q)``, and n for identities, as two sequences."""
    return tuple(zip(*[(s, s) if isinstance(s, int) else s for s in sizes], strict=True))


def make(m, sizes, dtype=torch.float64, seed=0, left=False, random=False):
    """x, factors and z of a problem, the same on every rank; of a left product in its orientation. Identities stay integers."""
    g = torch.Generator().manual_seed(seed)
    ps, qs = rows_and_columns(sizes)
    inner, outer = (math.prod(qs), math.prod(ps)) if left else (math.prod(ps), math.prod(qs))
    shapes = [(m, inner), *[s for s in sizes if not isinstance(s, int)], (m, outer)]
    if left:
        shapes[0], shapes[-1] = shapes[0][::-1], shapes[-1][::-1]
    tensors = [(torch.randn(s, generator=g) / s[0] ** 0.25).to(dtype) if random else whole_numbers(g, *s, dtype=dtype) for s in shapes]
    return tensors[0], with_identities(sizes, tensors[1:-1]), tensors[-1]


def with_identities(sizes, matrices):
    """Factors of these sizes: matrices, and integers for identities."""
    left_over = iter(matrices)
    return [s if isinstance(s, int) else next(left_over) for s in sizes]


def placed(factors, grid):
    """Factors on the grid's device."""
    return [f if isinstance(f, int) else f.to(grid.device) for f in factors]


def matrices(factors):
    """The factors that are no identities."""
    return [f for f in factors if not isinstance(f, int)]


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


def problem(m, sizes, dtype=torch.float64, left=False):
    ps, qs = rows_and_columns(sizes)
    return Problem(m, ps, qs, dtype, left, identities=tuple([i for i, s in enumerate(sizes) if isinstance(s, int)]))


def staged(problem, shape, stages, chunks=None, transport=None):
    """The plan of these stages, or by "rows"; None takes the rules' stages."""
    if stages is None:
        return plan(problem, shape, chunks=chunks, transport=transport)
    return of_stages(problem, shape, () if stages == "rows" else tuple(stages), chunks, transport)


def planned(m, sizes, shape, stages, chunks, left, dtype=torch.float64, transport=None):
    return staged(problem(m, sizes, dtype, left), shape, stages, chunks, transport)


def place(how, rank):
    """A rank's (row group, position in it) by a plan: the ranks of a row group exchange with each other."""
    row, col = divmod(rank, how.grid[1])
    return (col, row) if how.problem.left else (row, col)


def bytes_between(how, exchange, sender, receiver):
    """Bytes that one rank sends another in an exchange of a plan, of the forward product."""
    (group, position), (other, peer) = place(how, sender), place(how, receiver)
    if group != other or sender == receiver:
        return 0
    return sum(leg.size(position, peer) for leg in how.legs(group)[exchange]) * how.problem.dtype.itemsize


def bytes_sent(how, exchange, rank):
    """Bytes that a rank sends to others in an exchange, as the plan counts them."""
    group, position = place(how, rank)
    return sum(leg.sent(position) for leg in how.legs(group)[exchange]) * how.problem.dtype.itemsize


def derive(loss, log, leaves, b, reduce, second, scale=1.0):
    """Gradients of leaves and of a block; second: of the squared norm of all of these. Reduce sums a number of each rank."""
    *first, at_b = torch.autograd.grad(reduce(loss) + log, [*leaves, b], create_graph=second)
    at_b = at_b * scale
    if not second:
        return *first, at_b
    size = sum((g * g).sum() for g in first) + reduce((at_b**2).sum())
    *again, at_b = torch.autograd.grad(size, [*leaves, b])
    return *again, at_b * scale


COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class Copied(TorchDispatchMode):
    """Counts the bytes that are copied inside of it."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.bytes += args[0].nbytes if func in COPIES else 0
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_bytes(counts: list[Counter]):
    """Bytes to each peer of every all-to-all, by the peer's rank in the default group."""
    plain = dist.all_to_all_single

    def count(output, input, output_split_sizes, input_split_sizes, group, async_op):
        ranks = dist.get_process_group_ranks(group)
        counts.append(Counter({r: n * input.element_size() for r, n in zip(ranks, input_split_sizes, strict=True)}))
        assert sum(input_split_sizes) == input.numel()
        return plain(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)

    with mock.patch.object(dist, "all_to_all_single", count):
        yield
