"""Kronecker products of operands in blocks, written into given tensors: the local products of a distributed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron.multiply import Multiply, fitted, scale_of
from fastkron_py.kron.planner import IN_WHOLE, InBlocks
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import Program


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
    from fastkron_py.kron import blocks

    return blocks.in_blocks(ps, qs, parts, x.dtype, x.device)


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
    key = _key("multiply_into", tensors, (*sides, alpha == 1, precision))
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
        The gradients of these factors, of half types in float32.
    """
    dy, x, *factors = [t.resolve_conj().resolve_neg() for t in (dy, x, *factors)]
    tensors = dy, x, *factors, *(() if dx is None else (dx,))
    key = _key("gradients_into", tensors, (tuple(needs), alpha == 1, precision))
    with torch.no_grad():
        found: list[Tensor] = CACHE.program(key, lambda: _gradients(tensors, needs, alpha, precision))(tensors, (alpha,))
    return found


def _key(name: str, tensors: Sequence[Tensor], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a program of tensors on one device depends on."""
    unaligned = 0
    for t in tensors:
        unaligned |= t.data_ptr()
    return name, *options, *[(t.shape, t.stride(), t.dtype) for t in tensors], tensors[0].device, unaligned & 15 == 0


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
        from fastkron_py.kron.blocks import add_multiply_blocks

        add_multiply_blocks(build, blocks, factors, targets, resolved(precision), scale)
    else:
        Multiply(factors, choose_backend("", tensors[0]), precision, scale=scale).add(build, blocks[0], None, out=targets[0])
    return build.program([])
