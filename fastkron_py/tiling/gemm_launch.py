"""Adding launches of the linear layers' main loop (`tiling/gemm.py`) to a program: one, or one for each span of columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder, Spanning, describe
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.program import FARTHEST, Scalar
from fastkron_py.tiling import gemm_config as tuning
from fastkron_py.tiling.gemm import _gemm_kernel, begin_nothing, prologue_plain, value_plain
from fastkron_py.tiling.gemm_config import GemmSizes, GemmSpan, GemmTile
from fastkron_py.tiling.products import arithmetic

_LONGEST: Final = 1 << 31  # sizes of a descriptor, and indices in tiles


class Gemm(NamedTuple):
    """The jit functions and constants that an operator passes to the main loop: see `tiling/gemm.py`."""

    epilogue: Any
    prologue: Any = prologue_plain
    value: Any = value_plain
    slope: Any = value_plain
    params: tuple[Any, ...] = ()
    pairs: str = ""  # "stacked": b's rows in twos
    divisible: bool = False  # nothing passed in asks for a column's number, or others' results: launches of some columns may overlap
    functions: tuple[Any, ...] = ()  # further jit functions for the epilogue
    begin: Any = begin_nothing
    sums: int = 1  # of the product, that the epilogue makes one column of the result of; pairs are two
    light: bool = False  # without a bias, programs of two launches fit a multiprocessor's registers together: see `tiling/gemm_config.py`

    @property
    def fan(self) -> int:
        """Columns of the product for each of the result."""
        return 2 if self.pairs else self.sums


class Operand(NamedTuple):
    """A matrix, as far as a launch depends on it."""

    stride: int  # of rows
    has_descriptor: bool
    dtype: torch.dtype
    share: int = 1  # columns for each column of the result


class Problem(NamedTuple):
    """Everything that a launch depends on, as plain values."""

    rows: int
    columns: int
    depth: int
    a: Operand
    b: Operand
    swapped: bool  # a descriptor of "stacked" pairs begins with b2, which has the lower address
    bias: tuple[int, int] | None  # strides of a column, or of a row, and between the two of a pair
    bias_rows: bool  # each row has a bias of its own
    others: tuple[Operand | None, ...]  # out, pair, pair2, side
    gemm: Gemm
    precision: str
    device: torch.device

    def overlaps(self) -> bool:
        """Whether one of several launches may begin while the one ahead ends."""
        return self.gemm.divisible and devices.gpu_of(self.device).has_overlap

    def sizes(self) -> GemmSizes:
        """The sizes that tiles are chosen by."""
        passes = 3 if self.a.dtype == torch.float32 and self.precision == "highest" else 1
        # Stores go through shared memory: those of descriptors by design, those by pointers to become runs.
        stored = sum(o.dtype.itemsize * o.share for o in self.others if o is not None)
        stored = -(-stored // self.gemm.fan)
        itemsize = self.a.dtype.itemsize
        has_descriptors = self.a.has_descriptor and self.b.has_descriptor
        stores_by_descriptors = all([o is None or o.has_descriptor for o in self.others])  # pointers take more registers
        beside = self.gemm.light and self.bias is None and has_descriptors and stores_by_descriptors and itemsize == 2 and self.overlaps()
        return GemmSizes(
            self.rows,
            self.columns,
            self.depth,
            itemsize,
            passes,
            stored,
            self.gemm.pairs != "",
            devices.gpu_of(self.device),
            has_descriptors,
            beside,
        )


def _operand(build: Builder, t: Tensor, share: int = 1) -> Operand:
    """A matrix ``[R, C]`` as an operand; a single row has a stride that a descriptor takes."""
    size = t.element_size()
    rows, columns = t.shape
    stride = t.stride(0) if rows > 1 else -(-columns // 8) * 8
    step = stride * size
    has_descriptor = (
        devices.gpu_of(build.device).has_descriptors
        and build.is_aligned(t)
        and columns * size % 16 == 0  # copies are of 16 bytes, also beyond a last column that ends elsewhere: seen on an H100
        and stride >= columns
        and 0 < step < FARTHEST
        and step % 16 == 0
        and rows < _LONGEST
        and columns < _LONGEST
    )
    return Operand(stride, has_descriptor, t.dtype, share)


def takes_descriptor(build: Builder, t: Tensor) -> bool:
    """Whether a matrix can have a descriptor."""
    return _operand(build, t).has_descriptor


def _pair(build: Builder, b: Tensor, b2: Tensor) -> tuple[Operand, bool]:
    """(both as one operand ``[2, R, C]``, whether b2 comes first there), of matrices of the same strides anywhere in memory."""
    operand = _operand(build, b)
    # The stride from one to the other is an ordinary one to TMA, which needs no common allocation.
    order = build.order(b, b2) if operand.has_descriptor and takes_descriptor(build, b2) else 0
    return operand._replace(has_descriptor=order != 0), order < 0


class Operands(NamedTuple):
    """The matrices of a launch, as of `add_gemm`."""

    a: Tensor
    b: Tensor
    b2: Tensor | None = None
    bias: Tensor | None = None
    out: Tensor | None = None
    pair: Tensor | None = None
    pair2: Tensor | None = None
    side: Tensor | None = None

    @property
    def others(self) -> list[Tensor | None]:
        """The tensors that the epilogue writes or reads."""
        return [self.out, self.pair, self.pair2, self.side]

    def part(self, span: GemmSpan, problem: Problem) -> Operands:
        """Views of the operands for a launch on some of the columns."""
        each = 2 if problem.gemm.pairs else 1
        half = slice(span.start // each, span.stop // each)
        rows = slice(span.start, span.stop) if self.b2 is None else half
        bias = self.bias
        if bias is not None:
            bias = bias[..., half] if bias.ndim > 1 else bias[span.start : span.stop]
        shares = [1 if o is None else o.share for o in problem.others]
        others = [None if t is None else t[:, half.start * n : half.stop * n] for t, n in zip(self.others, shares, strict=True)]
        return Operands(self.a, self.b[rows], None if self.b2 is None else self.b2[rows], bias, *others)


def problem_of(build: Builder, given: Operands, call: Gemm, precision: str) -> Problem:
    """The problem of a launch on these operands, rows of a, b and b2 being runs of memory; call and precision as of `add_gemm`."""
    b, b2, bias = given.b, given.b2, given.bias
    columns = b.shape[0] if b2 is None else 2 * b.shape[0]
    width = columns // call.fan
    operand_b, swapped = (_operand(build, b), False) if b2 is None else _pair(build, b, b2)
    strides = None
    if bias is not None:
        strides = (bias.stride(0 if bias.ndim == 3 else -1), 0 if bias.ndim == 1 else bias.stride(-2))
    return Problem(
        given.a.shape[0],
        columns,
        given.a.shape[1],
        _operand(build, given.a),
        operand_b,
        swapped,
        strides,
        bias is not None and bias.ndim == 3,
        tuple([None if t is None else _operand(build, t, -(-t.shape[1] // width)) for t in given.others]),
        call,
        precision,
        build.device,
    )


# ---- launches -------------------------------------------------------------------------------------


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
        **{name.upper(): getattr(problem.gemm, name) for name in ("prologue", "epilogue", "value", "slope", "begin", "params", "pairs")},
        "SWAPPED": problem.swapped,
        "HAS_BIAS": 2 if problem.bias_rows else problem.bias is not None,
        **{name.upper(): getattr(tile, name) for name in ("block_m", "block_n", "block_k", "group", "parts")},
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
    grid = (min(tuning.tiles(tile, problem.rows, problem.columns), devices.gpu_of(problem.device).multiprocessors * tile.programs),)
    stages = range(tile.stages, 0, -1)
    return Launcher([LaunchConfig(_gemm_kernel, grid, {**arguments, "num_stages": s}) for s in stages])


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
    choose: Callable[[GemmSizes], GemmTile] | None = None,
    b2: Tensor | None = None,
) -> None:
    """Multiply ``a [M, K]`` with the transpose of ``b [N, K]`` and let ``call.epilogue`` store the results.

    Args:
        build: of the program.
        a: float32, float16 or bfloat16, of any strides, not empty.
        b: like a; ``[N / 2, K]`` for "stacked" pairs.
        bias: ``[N]``, or ``[2, N / 2]`` for "stacked" pairs, or ``[M, 2, N / 2]``, whose last dimension is a run of memory; or None.
        call: the operator's jit functions and their parameters.
        out: ``[M, N]``, or ``[M, N / 2]`` for pairs, rows being runs of memory, as of the following; or None where the epilogue needs none.
        pair: ``[M, N / 2]`` or ``[M, N]``.
        pair2: ``[M, N / 2]``.
        side: ``[M, N / 2]``, which the epilogue reads; for no pairs ``[M, N]``.
        tensors: further ones that prologue and epilogue read.
        scalars: alpha and beta of the epilogue.
        precision: of float32 products, "highest" (three-pass TF32) or less (TF32).
        choose: from the sizes to blocks; None is the cost model's choice, which may divide the columns between two launches.
        b2: ``[N / 2, K]`` for "stacked" pairs, in memory of b's or of its own: of two inputs an operator's `places` tell the order.
    """
    a = add_rowwise(build, a)
    if b2 is None:
        b = add_rowwise(build, b)
    elif b2.stride() != b.stride() or add_rowwise(build, b) is not b:
        b, b2 = build.call(lambda *both: torch.stack(both), (b, b2), describe((2, *b.shape), b.dtype))
    operands = Operands(a, b, b2, bias, out, pair, pair2, side)
    whole = problem_of(build, operands, call, precision)
    sizes = whole.sizes()
    spans = tuning.gemm_spans(sizes) if call.divisible and choose is None else ()
    if not spans:
        tile = tuning.gemm_tile(sizes) if choose is None else choose(sizes)
        _add_launch(build, whole, tile, operands, (tensors, scalars), _ALONE)
        return
    last = len(spans) - 1 if whole.overlaps() else 0
    for i, span in enumerate(spans):
        part = operands.part(span, whole)
        problem = problem_of(build, part, call, precision)
        _add_launch(build, problem, span.tile, part, (tensors, scalars), Overlap(i < last, 0 < i <= last))


def _add_launch(
    build: Builder, problem: Problem, tile: GemmTile, operands: Operands, given: tuple[tuple[Tensor, ...], Scalars], overlap: Overlap
) -> None:
    """Add one launch; descriptors are made where the kernel is to have them."""
    a, b, b2, bias, *others = operands

    def source(t: Tensor | None, operand: Operand | None = None, *box: int) -> Any:
        if t is None:  # never read; a pointer stands in, since None would make another kernel
            return a
        return t if operand is None or not operand.has_descriptor else TensorDescriptor(t, list(t.shape), [operand.stride, 1], list(box))

    if b2 is not None and problem.b.has_descriptor:  # one descriptor of both, the second behind the first in memory
        (first, second), stride = (b2, b) if problem.swapped else (b, b2), problem.b.stride
        box = [2, tile.block_n // 2, tile.block_k]
        of_b: Sequence[Any] = (Spanning(TensorDescriptor(first, [2, *first.shape], [len(first) * stride, stride, 1], box), second), a)
    else:
        of_b = source(b, problem.b, tile.block_n, tile.block_k), source(b2)
    width = tile.block_n // problem.gemm.fan // tile.parts
    of_others = [source(t, o, tile.block_m, width * (o.share if o else 0)) for t, o in zip(others, problem.others, strict=True)]
    tensors, scalars = given
    sources = (source(a, problem.a, tile.block_m, tile.block_k), *of_b, source(bias), *of_others, tensors or (a,))
    build.launch(_launcher(problem, tile, overlap), sources, scalars)
