"""Launching the linear layers' main loop (`kernels/gemm.py`): descriptors where they are possible, pointers where not."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fastkron_py.kernels.gemm import _gemm_kernel, make_plain, value_plain
from fastkron_py.kernels.launcher import Launcher, Way
from fastkron_py.kernels.recipes import arithmetic
from fastkron_py.kernels.triton_backend import _multiprocessors, on_device
from fastkron_py.tuning import gemm as tuning
from fastkron_py.tuning.gemm import GemmSizes, GemmTile

_LONGEST: Final = 1 << 31  # sizes of a descriptor, and indices in tiles
_FARTHEST: Final = 1 << 40  # bytes from row to row


class Gemm(NamedTuple):
    """What an operator passes to the main loop: see `kernels/gemm.py`."""

    finish: Any
    make: Any = make_plain
    value: Any = value_plain
    slope: Any = value_plain
    params: tuple[Any, ...] = ()
    pairs: str = ""  # "stacked" or "interleaved": b's rows in twos


class _Operand(NamedTuple):
    """A matrix, as far as a launch depends on it."""

    stride: int  # of rows
    described: bool
    dtype: torch.dtype
    share: int = 1  # columns for each column of the result


class Kind(NamedTuple):
    """Everything that a launch depends on, as plain values."""

    rows: int
    columns: int
    depth: int
    a: _Operand
    b: _Operand
    half: int  # stride between the two of a pair of b's rows
    bias: tuple[int, int] | None  # strides of a column, and between the two of a pair
    others: tuple[_Operand | None, ...]  # out, pair, pair2, side
    gemm: Gemm
    precision: str
    device: torch.device
    tile: GemmTile | None

    def sizes(self) -> GemmSizes:
        """What the closed form chooses by."""
        passes = 3 if self.a.dtype == torch.float32 and self.precision == "highest" else 1
        paired = self.gemm.pairs != ""
        # Descriptors' stores go through shared memory, pointers' too, to be turned into runs.
        stored = sum(o.dtype.itemsize * o.share for o in self.others if o is not None)
        stored = -(-stored // 2) if paired else stored
        itemsize = self.a.dtype.itemsize
        return GemmSizes(
            self.rows,
            self.columns,
            self.depth,
            itemsize,
            passes,
            stored,
            paired,
            _multiprocessors(self.device),
            self.a.described and self.b.described,
        )


@lru_cache(maxsize=64)
def has_descriptors(device: torch.device) -> bool:
    """Whether a device's copy engine takes tensor descriptors; the interpreter plays one."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _layout(t: Tensor) -> tuple[int, bool]:
    """(stride of rows ``[..., R, C]``; of a single row, one that a descriptor can have; whether a descriptor is possible)."""
    shape, strides, size = t.shape, t.stride(), t.element_size()
    rows, columns = shape[-2:]
    stride = strides[-2] if rows > 1 else -(-columns // 8) * 8
    step = stride * size
    described = (
        has_descriptors(t.device)
        and t.data_ptr() % 16 == 0
        and columns * size >= 16
        and stride >= columns
        and 0 < step < _FARTHEST
        and step % 16 == 0
        and rows < _LONGEST
        and columns < _LONGEST
    )
    if described and len(shape) > 2:
        steps = [s * size for s, n in zip(strides[:-2], shape[:-2], strict=True) if n > 1]
        described = all([0 < s < _FARTHEST and s % 16 == 0 for s in steps]) and all([n < _LONGEST for n in shape[:-2]])
    return stride, described


def is_describable(t: Tensor) -> bool:
    """Whether a matrix, or a pair of them, can have a descriptor."""
    return _layout(t)[1]


def _operand(t: Tensor, share: int = 1) -> _Operand:
    return _Operand(*_layout(t), t.dtype, share)


def _targets(out: Tensor | None, pair: Tensor | None, pair2: Tensor | None, side: Tensor | None, width: int) -> tuple[_Operand | None, ...]:
    """What the finisher stores and reads, by columns of the result. Both of a pair of targets have descriptors, or neither has."""
    found = [None if t is None else _operand(t, t.shape[1] // width) for t in (out, pair, pair2, side)]
    _, first, second, _ = found
    if first is not None and second is not None and first.described != second.described:
        found[1], found[2] = (o._replace(described=False) for o in (first, second))
    return tuple(found)


class _Watched(threading.local):
    """Launches of this thread are written down here."""

    seen: list[Launched] | None = None


_WATCHED: Final = _Watched()
_generations = itertools.count(1)
_generation = 0  # of plans: another one when they are forgotten

_Template = dict[str, Any]
_new = object.__new__


def _template(t: Tensor | None, operand: _Operand | None, box: Sequence[int] | None) -> _Template | None:
    """What a matrix's descriptor of boxes holds besides the matrix, checked by Triton; None where the kernel gets the tensor."""
    if t is None or operand is None or box is None or not operand.described:
        return None
    strides = [*t.stride()[:-2], operand.stride, 1]
    held = vars(TensorDescriptor(t, list(t.shape), strides, list(box)))
    return {name: value for name, value in held.items() if name != "base"}


def _source(t: Any, template: _Template | None) -> Any:
    """What the kernel gets for a matrix: a descriptor, equal to one that is made and checked anew, or the tensor."""
    if template is None:
        return t
    made: Any = _new(TensorDescriptor)
    made.__dict__ = {**template, "base": t}
    return made


class Plan:
    """A launch, ready to be repeated."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._generation = _generation
        self._templates: tuple[_Template | None, ...] | None = None
        sizes = kind.sizes()
        self.tile = tile = kind.tile or tuning.gemm_tile(sizes)
        self.box_a = (tile.block_m, tile.block_k)
        stacked = kind.gemm.pairs == "stacked"
        self.box_b = (2, tile.block_n // 2, tile.block_k) if stacked else (tile.block_n, tile.block_k)
        width = tile.block_n // (2 if sizes.paired else 1) // tile.parts
        self.boxes = [None if o is None else (tile.block_m, width * o.share) for o in kind.others]
        compute, _, precision = arithmetic(kind.a.dtype, kind.precision, True)
        out, pair, _, side = kind.others
        arguments = {
            "M": kind.rows,
            "N": kind.columns,
            "K": kind.depth,
            "stride_a": kind.a.stride,
            "stride_b": kind.b.stride,
            "stride_half": kind.half,
            "bias_step": 1 if kind.bias is None else kind.bias[0],
            "bias_half": 1 if kind.bias is None else kind.bias[1],
            "strides": tuple([1 if o is None else o.stride for o in (out, pair, side)]),
            "MAKE": kind.gemm.make,
            "FINISH": kind.gemm.finish,
            "VALUE": kind.gemm.value,
            "SLOPE": kind.gemm.slope,
            "PARAMS": kind.gemm.params,
            "PAIRS": kind.gemm.pairs,
            "HAS_BIAS": kind.bias is not None,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP": tile.group,
            "PARTS": tile.parts,
            "COMPUTE": compute,
            # Operands stay in shared memory as they are: a tensor core cuts off what TF32 does not hold.
            "PRECISION": "cut" if precision == "tf32" else precision,
            "MADE": kind.gemm.make is not make_plain,
            "FLATTEN": not knobs.runtime.interpret,
            "num_warps": tile.warps,
        }
        grid = (min(tuning.tiles(tile, sizes), sizes.multiprocessors * tile.programs),)
        stages = range(tile.stages, 0, -1)
        self.launch = Launcher([Way(_gemm_kernel, grid, {**arguments, "num_stages": s}) for s in stages])

    def is_current(self) -> bool:
        """Whether launches have not been forgotten since it was made."""
        return self._generation == _generation

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        others: Sequence[Tensor | None],
        tensors: tuple[Tensor, ...],
    ) -> None:
        """Launch on operands of the plan's kind, on their device; others are out, pair, pair2 and side.

        After the first time only addresses are read of a, b, bias and out, which may then be any views of the same memory; what has a
        descriptor begins at a 16-byte boundary.
        """
        templates = self._templates
        if templates is None:
            operands = (self._kind.a, self._kind.b, *self._kind.others)
            boxes = (self.box_a, self.box_b, *self.boxes)
            found = [_template(t, o, box) for t, o, box in zip((a, b, *others), operands, boxes, strict=True)]
            templates = self._templates = tuple(found)
        # What is absent is never read; a pointer stands in, since None would make another kind of kernel.
        sources = [a if t is None else _source(t, template) for t, template in zip(others, templates[2:], strict=True)]
        self.launch(_source(a, templates[0]), _source(b, templates[1]), a if bias is None else bias, *sources, tensors or (a,))


class Launched(NamedTuple):
    """A launch that was made, and what it read: a, b, bias, and further tensors."""

    plan: Plan
    operands: tuple[Tensor | None, ...]


_plan = lru_cache(maxsize=512)(Plan)


@contextlib.contextmanager
def watching() -> Iterator[list[Launched]]:
    """A list of what is launched inside the ``with`` block, in this thread."""
    before = _WATCHED.seen
    seen: list[Launched] = []
    _WATCHED.seen = seen
    try:
        yield seen
    finally:
        _WATCHED.seen = before


def forget_launches() -> None:
    """Choose every launch anew when it is next needed."""
    global _generation
    _generation = next(_generations)
    _plan.cache_clear()


def rowwise(t: Tensor) -> Tensor:
    """A matrix, or a pair of them, whose rows are runs of memory."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def gemm(
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
    precision: str = "highest",
    tile: GemmTile | None = None,
) -> None:
    """Multiply ``a [M, K]`` with the transpose of ``b [N, K]`` and let ``call.finish`` store what becomes of the sums.

    Args:
        a: float32, float16 or bfloat16, of any strides, not empty.
        b: like a; ``[2, N / 2, K]`` for "stacked" pairs.
        bias: ``[N]``, or ``[2, N / 2]`` for "stacked" pairs; or None.
        call: what is passed in.
        out: ``[M, N]``, or ``[M, N / 2]`` for pairs, rows being runs of memory, as of the following; or None where the finisher needs none.
        pair: ``[M, N / 2]`` or ``[M, N]``.
        pair2: ``[M, N / 2]``.
        side: ``[M, N / 2]``, which the finisher reads; for no pairs ``[M, N]``.
        tensors: what maker and finisher read besides.
        precision: of float32 products, "highest" (three-pass TF32) or less (TF32).
        tile: blocks; None lets the closed form choose.
    """
    with on_device(a):
        a, b = rowwise(a), rowwise(b)
        paired = call.pairs != ""
        columns = b.shape[0] * b.shape[1] if b.ndim == 3 else b.shape[0]
        width = columns // 2 if paired else columns
        others = [out, pair, pair2, side]
        operands = _targets(out, pair, pair2, side, width)
        strides = None
        if bias is not None:
            strides = (bias.stride(-1), bias.stride(0) if bias.ndim == 2 else 0)
        half = b.stride(0) if b.ndim == 3 else 0
        kind = Kind(
            a.shape[0],
            columns,
            a.shape[1],
            _operand(a),
            _operand(b),
            half,
            strides,
            operands,
            call,
            precision,
            a.device,
            tile,
        )
        plan = _plan(kind)
        plan(a, b, bias, others, tensors)
        if _WATCHED.seen is not None:
            _WATCHED.seen.append(Launched(plan, (a, b, bias, *tensors)))
