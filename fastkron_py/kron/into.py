"""Kronecker products written into given tensors, of operands and results in blocks of columns, each somewhere else in memory.

These are the local products of a distributed one.

Columns count (p1, ..., pN) with p1 slowest, so that a block is a range of p1. A launch that leaves the first factor alone does the same to
every block, and may read or write one after the other from where they are. So nothing is copied into one operand, or out of one result.

For both, the first factor goes between others, which takes three launches in place. In 16-bit types the cost model has these where two
steps share a slice (`slice_pair`). Its other launches transpose their modes to the front, and launches in place would be slower than
these, by 13 to 57% on an H200 (float32: up to 6%). The first factor is their last one: blocks are read, not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.canonical import Scale
from fastkron_py.kron.families import fragments, narrow, slice_pair, tile, wgmma
from fastkron_py.kron.multiply import Multiply, fitted, scale_of
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.planner import IN_WHOLE, InBlocks, places, plan, transposes
from fastkron_py.kron.problem import LaunchProblem, Problem, Rows, add_launch, contiguous_problem
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE, about
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import Program

_PLANNED_ROWS: Final = 1 << 20  # launches are those of many rows, so that ranks with different numbers of rows find the same
_IN_PLACE_BYTES: Final = 4  # least bytes of an element for launches in place
_LEAST_IN_PLACE: Final = 3  # least number of launches
_FAMILIES: Final = (narrow.name, tile.name, slice_pair.name, fragments.name, wgmma.name)  # whose launches may leave the first factor alone


def in_blocks(ps: tuple[int, ...], qs: tuple[int, ...], parts: int, x: Tensor) -> InBlocks:
    """Whether `multiply_into` reads and writes columns in this number of equal blocks.

    Args:
        ps: rows of the factors.
        qs: columns of the factors.
        parts: number of blocks.
        x: of the dtype and on the device.
    """
    if parts == 1 or 0 in ps or 0 in qs or choose_backend("", x) != "triton":
        return IN_WHOLE
    return planned_in_blocks(ps, qs, parts, x.dtype, x.device)


def multiply_into(blocks: Sequence[Tensor], factors: Sequence[Tensor], outs: Sequence[Tensor], alpha: float, precision: str | None) -> None:
    """Write ``alpha * x @ K`` into `outs`; autograd does not follow it.

    Args:
        blocks: of x ``[rows, K]``, contiguous: all of it, or blocks of columns where `in_blocks` allows it.
        factors: ``[P_i, Q_i]``.
        outs: of the result ``[rows, N]``: all of it, or blocks, contiguous.
        alpha: scales the product.
        precision: of float32 products.
    """
    # The program reads memory, which torch's dispatcher makes right elsewhere.
    blocks, factors = ([t.resolve_conj().resolve_neg() for t in given] for given in (blocks, factors))
    tensors, sides = (*blocks, *factors, *outs), (len(blocks), len(outs))
    key = "multiply_into", *sides, alpha == 1, precision, *about(tensors), tensors[0].device
    with torch.no_grad():
        CACHE.program(key, lambda: _program(tensors, sides, alpha, precision))(tensors, (alpha,))


def gradients_into(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], dx: Tensor | None, needs: Sequence[bool], alpha: float, precision: str | None
) -> list[Tensor]:
    """Write x's gradient, ``alpha * dy @ K^H``, into `dx`, and return the factors' gradients; autograd does not follow it.

    Args:
        dy: gradient of the result ``[rows, N]``.
        x: ``[rows, K]``.
        factors: ``[P_i, Q_i]``.
        dx: ``[rows, K]``, contiguous; None where it is not needed.
        needs: which factors' gradients are needed.
        alpha: scales the product.
        precision: of float32 products.

    Returns:
        The gradients of these factors, those of 16-bit floats in float32.
    """
    dy, x, *factors = [t.resolve_conj().resolve_neg() for t in (dy, x, *factors)]
    tensors = dy, x, *factors, *(() if dx is None else (dx,))
    key = "gradients_into", *needs, alpha == 1, precision, *about(tensors), tensors[0].device
    with torch.no_grad():
        return list(CACHE.program(key, lambda: _gradients(tensors, needs, alpha, precision))(tensors, (alpha,)))


def _gradients(tensors: Sequence[Tensor], needs: Sequence[bool], alpha: float, precision: str | None) -> Program:
    """The program of `gradients_into` on dy, x, the factors, and dx if it is needed."""
    build = Builder(tensors)
    dy, x, *given = build.inputs
    factors, out = given[: len(needs)], (given[len(needs) :] or [None])[0]
    call = Multiply(factors, choose_backend("", tensors[0]), precision, scale=scale_of(alpha, False))
    dtype = torch.float32 if x.dtype in HALF_DTYPES else x.dtype
    made = call.add_gradients(build, dy, x, (out is not None, *needs), dtype, out=out)
    made = made if out is None else made[1:]
    results = [describe(f.shape, dtype) for f, need in zip(factors, needs, strict=True) if need]
    found = [fitted(build, gradient, r) for gradient, r in zip(made, results, strict=True)]
    return build.program(found, [r.shape for r in results])


def _program(tensors: Sequence[Tensor], sides: tuple[int, int], alpha: float, precision: str | None) -> Program:
    """The program of ``alpha * x @ K`` on the blocks of x, the factors, and the blocks of the result that it writes.

    Args:
        tensors: blocks of x ``[rows, K]``, factors ``[P_i, Q_i]``, blocks of the result ``[rows, N]``.
        sides: number of blocks of x and of the result.
        alpha: scales the product.
        precision: of float32 products.
    """
    parts, outs = sides
    build = Builder(tensors)
    blocks, factors = build.inputs[:parts], build.inputs[parts : len(tensors) - outs]
    targets = build.inputs[len(tensors) - outs :]
    scale = scale_of(alpha, False)
    if parts > 1 or outs > 1:
        add_multiply_blocks(build, blocks, factors, targets, resolved(precision), scale)
    else:
        Multiply(factors, choose_backend("", tensors[0]), precision, scale=scale).add(build, blocks[0], None, out=targets[0])
    return build.program([])


# ---- products in blocks ----------------------------------------------------------------------------


class _Order(NamedTuple):
    launches: tuple[Launch, ...]
    transposed: bool  # they move modes to the front
    able: InBlocks


def _order(problem: Problem, parts: int) -> _Order:
    """The cost model's launches, or, if launches in place suffice and there are two others, with the first factor's between them."""
    shapes = problem.factor_shapes
    groups, _, width, columns = problem.shape
    found = tuple(plan(replace(problem, shape=(groups, _PLANNED_ROWS, width, columns))).launches)
    in_place = problem.dtype.itemsize >= _IN_PLACE_BYTES and len(found) >= _LEAST_IN_PLACE
    transposed = transposes(found, len(shapes), 1) and not in_place
    if not transposed:
        first = next(launch for launch in found if launch.start == 0)
        others = [launch for launch in found if launch.start > 0]
        found = (*others[:1], first, *others[1:])
    reads = found[0].start > 0 and shapes[0][-2] % parts == 0
    return _Order(found, transposed, InBlocks(reads, found[-1].start > 0 and shapes[0][-1] % parts == 0))


def _problem(shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """The problem of a multiply of x ``[rows, K]`` by factors of these shapes."""
    return contiguous_problem(shapes, rows, 1, dtype, devices.gpu_of(device), families=_FAMILIES)


@lru_cache(maxsize=256)
def planned_in_blocks(ps: tuple[int, ...], qs: tuple[int, ...], parts: int, dtype: torch.dtype, device: torch.device) -> InBlocks:
    """Whether a product by factors ``[P_i, Q_i]`` reads and writes this number of equal blocks on a device, for any rows."""
    return _order(_problem(list(zip(ps, qs, strict=True)), 1, dtype, device), parts).able


class _Step(NamedTuple):
    """A launch, made once for all columns, or for each block of them."""

    launch: LaunchProblem
    times: int
    reads: bool  # given blocks, else parts of one operand's columns
    writes: bool
    inner: int  # elements from one time's operand to the next one's
    outer: int  # and of the results
    size: int  # of a row of the result


def _steps(problem: Problem, blocks: int, outs: int) -> list[_Step]:
    """The launches for these numbers of blocks of the operand and the result; each is 1 or equal to the other."""
    from fastkron_py.kron.forward import launch_problem

    rows, parts = problem.shape[1], max(blocks, outs)
    launches, transposed, able = _order(problem, parts)
    if (blocks > 1 and not able.reads) or (outs > 1 and not able.writes):
        raise value_error("blocks, outs", f"numbers that `in_blocks` allows, {able}", (blocks, outs))
    last = len(launches) - 1
    found = []
    for i, (launch, (before, after)) in enumerate(zip(launches, places(launches, problem.sizes, 1, transposed), strict=True)):
        reads, writes = blocks > 1 and i == 0, outs > 1 and i == last
        times = parts if reads or writes else 1
        inner, outer = before * launch.p * after, before * launch.q * after
        x, y = (Rows(0, width // parts if apart else width, 1) for width, apart in ((inner, reads), (outer, writes)))
        made = launch_problem(problem, launch, (1, rows, before // times, after), transposed * before, x, y, i == last)
        shift = (before if transposed else outer) // times
        found.append(_Step(made, times, reads, writes, inner // times, shift, outer))
    return found


def add_multiply_blocks(
    build: Builder, blocks: Sequence[Tensor], factors: Sequence[Tensor], outs: Sequence[Tensor], precision: str, scale: Scale
) -> None:
    """``alpha * x (F1 (x) ... (x) FN)`` by Triton, of x in blocks of columns, to blocks of columns.

    Args:
        build: of the program.
        blocks: of x ``[rows, K]``: the parts given to `in_blocks`, if its result says that they are read; else all of it.
            Contiguous, none empty.
        factors: ``[P_i, Q_i]``, any strides.
        outs: of the result ``[rows, N]``: the parts, if it says that they are written; else all. Contiguous.
        precision: of float32 products, as in `add_multiply`.
        scale: alpha.

    Raises:
        ValueError: blocks where `in_blocks` does not allow them.
    """
    x, rows = blocks[0], blocks[0].shape[0]
    factors = [f.unsqueeze(0) for f in factors]
    problem = _problem([(f.shape[1], f.shape[2]) for f in factors], rows, x.dtype, build.device)
    problem = replace(problem, factor_strides=tuple([f.stride() for f in factors]), scaled=not scale.is_one, precision=precision)
    steps = _steps(problem, len(blocks), len(outs))
    sources: Sequence[Tensor] = blocks
    for i, step in enumerate(steps):
        targets: Sequence[Tensor] = outs if i == len(steps) - 1 else [build.empty((rows * step.size,), x.dtype)]
        for k in range(step.times):
            source = sources[k] if step.reads else sources[0].view(-1)[k * step.inner :]
            target = targets[k] if step.writes else targets[0].view(-1)[k * step.outer :]
            add_launch(build, step.launch, source, factors, None, target, scale)
        sources = targets
