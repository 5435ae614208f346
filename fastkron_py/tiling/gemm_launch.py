"""Adding launches of the linear layers' main loop (`tiling/gemm.py`) to a program: one, or one for each span of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fastkron_py.runtime.builder import Builder, Spanning, describe
from fastkron_py.runtime.device import gpu_of
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.program import Scalar
from fastkron_py.tiling import gemm_config as tuning
from fastkron_py.tiling.arithmetic import arithmetic
from fastkron_py.tiling.gemm import _gemm_kernel, prologue_plain, value_plain
from fastkron_py.tiling.gemm_config import GemmSpan, GemmTile
from fastkron_py.tiling.gemm_problem import Gemm, Operand, Problem, problem_of


class Overlap(NamedTuple):
    """How one of several launches meets its neighbours, which need nothing of each other ("programmatic dependent launch").

    The first is a plain launch: when it begins, all that was launched ahead of it has ended, and can be read. It lets the next one
    begin as soon as all its own programs have begun, so the same holds for that one. The next one's programs, having stored their tiles,
    wait for the end of the launch ahead, and are only then over. So whatever is launched after the last one, or waits for it, comes after
    the end of all: it may read their results, write to their operands, and free both.
    """

    next: bool = False  # may begin before this one has ended
    last: bool = False  # may still run when this one begins


_ALONE: Final = Overlap()


Scalars = tuple[Scalar | int, Scalar | int]  # float64 patterns


class _Boxes(NamedTuple):
    """The boxes of descriptors."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    others: Sequence[tuple[int, ...] | None]


def _boxes(problem: Problem, tile: GemmTile) -> _Boxes:
    of_b = (2, tile.block_n // 2, tile.block_k) if problem.gemm.pairs == "stacked" else (tile.block_n, tile.block_k)
    width = tile.block_n // problem.gemm.fan // tile.parts
    others = [None if o is None else (tile.block_m, width * o.share) for o in problem.others]
    return _Boxes((tile.block_m, tile.block_k), of_b, others)


def _launcher(problem: Problem, tile: GemmTile, overlap: Overlap) -> Launcher:
    """The launch on (a, b, b2, bias, out, pair, pair2, side, tensors)."""
    compute, _, precision = arithmetic(problem.a.dtype, problem.precision, True)
    out, pair, _, side = problem.others
    arguments = {
        "M": problem.rows,
        "N": problem.columns,
        "K": problem.depth,
        "stride_a": problem.a.stride,
        "stride_b": problem.b.stride,
        "bias_step": 1 if problem.bias is None else problem.bias[0],
        "bias_half": 1 if problem.bias is None else problem.bias[1],
        "strides": tuple([1 if o is None else o.stride for o in (out, pair, side)]),
        "functions": problem.gemm.functions or (value_plain,),
        "PROLOGUE": problem.gemm.prologue,
        "EPILOGUE": problem.gemm.epilogue,
        "VALUE": problem.gemm.value,
        "SLOPE": problem.gemm.slope,
        "BEGIN": problem.gemm.begin,
        "PARAMS": problem.gemm.params,
        "PAIRS": problem.gemm.pairs,
        "SWAPPED": problem.swapped,
        "HAS_BIAS": problem.bias is not None,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": tile.group,
        "PARTS": tile.parts,
        "COMPUTE": compute,
        # Operands stay in shared memory as they are: a tensor core cuts off the bits that TF32 does not hold.
        "PRECISION": "cut" if precision == "tf32" else precision,
        "MADE": problem.gemm.prologue is not prologue_plain,
        "FLATTEN": not knobs.runtime.interpret,
        "NEXT_EARLY": overlap.next,
        "EARLY": overlap.last,
        "num_warps": tile.warps,
    }
    if overlap.last:
        arguments["launch_pdl"] = True
    grid = (min(tuning.tiles(tile, problem.rows, problem.columns), gpu_of(problem.device).multiprocessors * tile.programs),)
    stages = range(tile.stages, 0, -1)
    return Launcher([LaunchConfig(_gemm_kernel, grid, {**arguments, "num_stages": s}) for s in stages])


class _Operands(NamedTuple):
    """The matrices of a launch, as of `add_gemm`."""

    a: Tensor
    b: Tensor
    b2: Tensor | None
    bias: Tensor | None
    out: Tensor | None
    pair: Tensor | None
    pair2: Tensor | None
    side: Tensor | None

    @property
    def others(self) -> list[Tensor | None]:
        """The tensors that the epilogue writes or reads."""
        return [self.out, self.pair, self.pair2, self.side]

    def part(self, span: GemmSpan, problem: Problem) -> _Operands:
        """Views of the operands for a launch on some of the columns."""
        each = 2 if problem.gemm.pairs else 1
        half = slice(span.start // each, span.stop // each)
        rows = slice(span.start, span.stop) if self.b2 is None else half
        bias = self.bias
        if bias is not None:
            bias = bias[:, half] if bias.ndim == 2 else bias[span.start : span.stop]
        shares = [1 if o is None else o.share for o in problem.others]
        others = [None if t is None else t[:, half.start * n : half.stop * n] for t, n in zip(self.others, shares, strict=True)]
        return _Operands(self.a, self.b[rows], None if self.b2 is None else self.b2[rows], bias, *others)


def add_rowwise(build: Builder, t: Tensor) -> Tensor:
    """A matrix whose rows are runs of memory: the one given, or a copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else build.contiguous(t)


def add_gemm(
    build: Builder,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    call: Gemm,
    out: Tensor | None,
    *,
    pair: Tensor | None = None,
    pair2: Tensor | None = None,
    side: Tensor | None = None,
    tensors: tuple[Tensor, ...] = (),
    scalars: Scalars = (0, 0),
    precision: str = "highest",
    tile: GemmTile | None = None,
    b2: Tensor | None = None,
) -> None:
    """Multiply ``a [M, K]`` with the transpose of ``b [N, K]`` and let ``call.epilogue`` store the results.

    Args:
        build: of the program.
        a: float32, float16 or bfloat16, of any strides, not empty.
        b: like a; ``[N / 2, K]`` for "stacked" pairs.
        bias: ``[N]``, or ``[2, N / 2]`` for "stacked" pairs; or None.
        call: the operator's jit functions and their parameters.
        out: ``[M, N]``, or ``[M, N / 2]`` for pairs, rows being runs of memory, as of the following; or None where the epilogue needs none.
        pair: ``[M, N / 2]`` or ``[M, N]``.
        pair2: ``[M, N / 2]``.
        side: ``[M, N / 2]``, which the epilogue reads; for no pairs ``[M, N]``.
        tensors: further ones that prologue and epilogue read.
        scalars: alpha and beta of the epilogue.
        precision: of float32 products, "highest" (three-pass TF32) or less (TF32).
        tile: blocks; None lets the closed form choose.
        b2: ``[N / 2, K]`` for "stacked" pairs, in memory of b's or of its own: of two inputs an operator's `places` tell the order.
    """
    a = add_rowwise(build, a)
    if b2 is None:
        b = add_rowwise(build, b)
    elif b2.stride() != b.stride() or add_rowwise(build, b) is not b:
        b, b2 = build.call(_stacked, (b, b2), describe((2, *b.shape), b.dtype))
    operands = _Operands(a, b, b2, bias, out, pair, pair2, side)

    def problem(given: _Operands) -> Problem:
        return problem_of(build, given.a, given.b, given.bias, given.others, call, precision, given.b2)

    whole = problem(operands)
    sizes = whole.sizes()
    spans = tuning.gemm_spans(sizes) if call.divisible and tile is None else ()
    if not spans:
        _add_launch(build, whole, tile or tuning.gemm_tile(sizes), operands, (tensors, scalars), _ALONE)
        return
    last = len(spans) - 1 if whole.overlaps() else 0
    for i, span in enumerate(spans):
        part = operands.part(span, whole)
        _add_launch(build, problem(part), span.tile, part, (tensors, scalars), Overlap(i < last, 0 < i <= last))


def _stacked(b: Tensor, b2: Tensor) -> Tensor:
    return torch.stack([b, b2])


def _add_launch(
    build: Builder,
    problem: Problem,
    tile: GemmTile,
    operands: _Operands,
    given: tuple[tuple[Tensor, ...], Scalars],
    overlap: Overlap,
) -> None:
    """Add one launch; descriptors are made where the kernel is to have them."""
    boxes = _boxes(problem, tile)
    a, b, b2, bias, *others = operands

    def source(t: Tensor | None, operand: Operand | None, box: Sequence[int] | None) -> Any:
        if t is None:  # never read; a pointer stands in, since None would make another kernel
            return a
        if operand is None or box is None or not operand.has_descriptor:
            return t
        return TensorDescriptor(t, list(t.shape), [operand.stride, 1], list(box))

    if b2 is not None and problem.b.has_descriptor:
        of_b = _descriptor_of_both(*((b2, b) if problem.swapped else (b, b2)), problem.b.stride, boxes.b), a
    else:
        of_b = source(b, problem.b, boxes.b), source(b2, None, None)
    of_others = [source(*each) for each in zip(others, problem.others, boxes.others, strict=True)]
    tensors, scalars = given
    sources = (source(a, problem.a, boxes.a), *of_b, source(bias, None, None), *of_others, tensors or (a,))
    build.launch(_launcher(problem, tile, overlap), sources, scalars)


def _descriptor_of_both(first: Tensor, second: Tensor, stride: int, box: Sequence[int]) -> Spanning:
    """One descriptor of two matrices of the same strides, the second behind the first in memory."""
    return Spanning(TensorDescriptor(first, [2, *first.shape], [len(first) * stride, stride, 1], list(box)), second)
