"""Launching the linear layers' main loop (`tiling/gemm.py`), once or on spans of columns, and again at little cost."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fastkron_py.runtime.descriptors import Place, Template, remade, template_of
from fastkron_py.runtime.device import on_device
from fastkron_py.runtime.launch import RECORDING, LaunchConfig, Launcher
from fastkron_py.runtime.program import is_hooked, launcher_of
from fastkron_py.tiling import gemm_config as tuning
from fastkron_py.tiling.arithmetic import arithmetic
from fastkron_py.tiling.gemm import _gemm_kernel, prologue_plain, value_plain
from fastkron_py.tiling.gemm_config import GemmSpan, GemmTile
from fastkron_py.tiling.gemm_problem import Gemm, Kind, Operand, kind_of, rowwise


class _Watched(threading.local):
    """Launches of this thread are written down here."""

    seen: list[Launched] | None = None


_WATCHED: Final = _Watched()
_generations = itertools.count(1)
_generation = 0  # of plans: another one when they are forgotten

_UNSHIFTED: Final = (0,) * 7  # of b, b2, bias, out, pair, pair2 and side


def _template(t: Tensor | None, operand: Operand | None, box: Sequence[int] | None) -> Template | None:
    """What a matrix's descriptor of boxes holds besides the matrix, checked by Triton; None where the kernel gets the tensor."""
    if t is None or operand is None or box is None or not operand.described:
        return None
    return template_of(TensorDescriptor(t, list(t.shape), [operand.stride, 1], list(box)))


def _source(t: Any, template: Template | None) -> Any:
    """What the kernel gets for a matrix: a descriptor, equal to one that is made and checked anew, or the tensor."""
    return t if template is None else remade(TensorDescriptor, template, t)


class _Direct(NamedTuple):
    """A compiled kernel, launched past all that looks at arguments."""

    launch: Callable[..., None]
    grid: int
    stream: Callable[[int], int]
    device: int
    more: tuple[Any, ...]  # between the stream and the kernel's arguments
    rest: tuple[Any, ...]  # of the kernel's arguments


class Overlap(NamedTuple):
    """How one of several launches meets its neighbours, which need nothing of each other ("programmatic dependent launch").

    The first is an ordinary launch: when it begins, all that was launched ahead of it has ended, and can be read. It lets the next one
    begin as soon as all its own programs have begun, so the same holds for that one. The next one's programs, having stored their tiles,
    wait for the end of the launch ahead, and are only then over. So whatever is launched after the last one, or waits for it, comes after
    the end of all: it may read what they wrote, write what they read, and free it.
    """

    next: bool = False  # may begin before this one has ended
    last: bool = False  # may still run when this one begins


_ALONE: Final = Overlap()


class Plan:
    """A launch, ready to be repeated."""

    def __init__(self, kind: Kind, overlap: Overlap = _ALONE) -> None:
        self._kind = kind
        self._generation = _generation
        self._templates: list[Template | None] | None = None  # of each operand that has a descriptor of its own
        self._template_of_both: Template = {}
        self._direct: _Direct | None = None
        sizes = kind.sizes()
        self.tile = tile = kind.tile or tuning.gemm_tile(sizes)
        self.box_a = (tile.block_m, tile.block_k)
        stacked = kind.gemm.pairs == "stacked"
        self._both = stacked and kind.b.described  # b and b2 have one descriptor
        self.box_b = (2, tile.block_n // 2, tile.block_k) if stacked else (tile.block_n, tile.block_k)
        width = tile.block_n // kind.gemm.fan // tile.parts
        self.boxes = [None if o is None else (tile.block_m, width * o.share) for o in kind.others]
        compute, _, precision = arithmetic(kind.a.dtype, kind.precision, True)
        out, pair, _, side = kind.others
        arguments = {
            "M": kind.rows,
            "N": kind.columns,
            "K": kind.depth,
            "stride_a": kind.a.stride,
            "stride_b": kind.b.stride,
            "bias_step": 1 if kind.bias is None else kind.bias[0],
            "bias_half": 1 if kind.bias is None else kind.bias[1],
            "strides": tuple([1 if o is None else o.stride for o in (out, pair, side)]),
            "functions": kind.gemm.functions or (value_plain,),
            "PROLOGUE": kind.gemm.prologue,
            "EPILOGUE": kind.gemm.epilogue,
            "VALUE": kind.gemm.value,
            "SLOPE": kind.gemm.slope,
            "BEGIN": kind.gemm.begin,
            "PARAMS": kind.gemm.params,
            "PAIRS": kind.gemm.pairs,
            "SWAPPED": kind.swapped,
            "HAS_BIAS": kind.bias is not None,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP": tile.group,
            "PARTS": tile.parts,
            "COMPUTE": compute,
            # Operands stay in shared memory as they are: a tensor core cuts off what TF32 does not hold.
            "PRECISION": "cut" if precision == "tf32" else precision,
            "MADE": kind.gemm.prologue is not prologue_plain,
            "FLATTEN": not knobs.runtime.interpret,
            "NEXT_EARLY": overlap.next,
            "EARLY": overlap.last,
            "num_warps": tile.warps,
        }
        if overlap.last:
            arguments["launch_pdl"] = True
        grid = (min(tuning.tiles(tile, sizes), sizes.multiprocessors * tile.programs),)
        stages = range(tile.stages, 0, -1)
        self.launch = Launcher([LaunchConfig(_gemm_kernel, grid, {**arguments, "num_stages": s}) for s in stages])

    def is_current(self, b: Tensor, b2: Tensor | None) -> bool:
        """Whether it can be repeated on b and b2, elsewhere in memory: launches have not been forgotten since it was made."""
        return self._generation == _generation and self._kind.takes(b, b2)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        b2: Tensor | None,
        bias: Tensor | None,
        others: Sequence[Tensor | None],
        tensors: tuple[Tensor, ...],
        shifts: Sequence[int] = _UNSHIFTED,
    ) -> None:
        """Launch on operands of the plan's kind, on their device; others are out, pair, pair2 and side.

        After the first time only addresses are read of a, b, b2, bias and out, which may then be any views of the same memory; what has a
        descriptor begins at a 16-byte boundary. shifts are bytes from where b, b2, bias and others begin to what is meant.
        """
        operands = (a, b, b2, bias, *others)
        if self._direct is not None and self._again(self._direct, operands, tensors, shifts):
            return
        operands = (a, *[_shifted(t, n) for t, n in zip(operands[1:], shifts, strict=True)])
        if self._templates is None:
            self._templates = self._described(operands)
        # What is absent is never read; a pointer stands in, since None would make another kind of kernel.
        sources = [a if t is None else _source(t, template) for t, template in zip(operands, self._templates, strict=True)]
        if self._both:
            sources[1:3] = self._source_of_both(operands[1], operands[2]), a
        self.launch(*sources, tensors or (a,))
        ready = self.launch.ready()
        if self._direct is None and ready is not None:
            launch, more = launcher_of(ready)
            active = driver.active
            self._direct = _Direct(launch, ready.grid[0], active.get_current_stream, active.get_current_device(), more, ready.after)

    def _described(self, operands: Sequence[Tensor | None]) -> list[Template | None]:
        """What each operand's descriptor holds besides the matrix; that of b and b2 together is kept apart."""
        kinds = (self._kind.a, None if self._both else self._kind.b, None, None, *self._kind.others)
        boxes = (self.box_a, self.box_b, None, None, *self.boxes)
        found = [_template(t, o, box) for t, o, box in zip(operands, kinds, boxes, strict=True)]
        if self._both:
            _, b, b2, *_ = operands
            begin, strides = self._place_of_both(b, b2)
            shape = [2, *b.shape]  # type: ignore[union-attr]
            self._template_of_both = template_of(TensorDescriptor(begin, shape, strides, list(self.box_b)))
        return found

    def _place_of_both(self, b: Any, b2: Any) -> tuple[Any, list[int]]:
        """(the one of b and b2 that has the lower address, strides of both as ``[2, R, C]`` from there)."""
        distance = b2.data_ptr() - b.data_ptr()
        return (b2 if self._kind.swapped else b), [abs(distance) // self._kind.b.dtype.itemsize, self._kind.b.stride, 1]

    def _source_of_both(self, b: Any, b2: Any) -> Any:
        """One descriptor of both: how far apart they are differs from call to call."""
        begin, strides = self._place_of_both(b, b2)
        return remade(TensorDescriptor, {**self._template_of_both, "strides": strides}, begin)

    def _again(self, direct: _Direct, operands: Sequence[Tensor | None], tensors: tuple[Tensor, ...], shifts: Sequence[int]) -> bool:
        """Launch by addresses, of which Triton asks nothing more; False, and nothing done, if that is not possible now."""
        if RECORDING.recorder is not None or is_hooked():
            return False
        first = operands[0].data_ptr()  # type: ignore[union-attr]
        sources: list[Any] = []
        addresses = [t.data_ptr() for t in tensors] or [first]
        unaligned = 0
        for address in addresses:
            unaligned |= address
        for t, template, shift in zip(operands, self._templates or (), (0, *shifts), strict=True):
            if t is None or template is None:
                address = first if t is None else t.data_ptr() + shift
                unaligned |= address
                sources.append(address)
            else:
                sources.append(_source(Place(t.data_ptr() + shift) if shift else t, template))
        if self._both:
            _, b, b2, *_ = operands
            places = [Place(t.data_ptr() + n) for t, n in zip((b, b2), shifts, strict=False)]  # type: ignore[union-attr]
            sources[1:3] = self._source_of_both(*places), first
        if unaligned & 15:  # compiled for pointers on a 16-byte boundary
            return False
        direct.launch(direct.grid, 1, 1, direct.stream(direct.device), *direct.more, *sources, tuple(addresses), *direct.rest)
        return True


class DividedPlan:
    """Launches of some of the columns each, each of which may begin while the one ahead ends, to be repeated like one."""

    def __init__(self, kind: Kind, spans: Sequence[GemmSpan]) -> None:
        self._kind, self._spans = kind, spans
        self._generation = _generation
        self._parts: list[tuple[Plan, list[int]]] = []

    def is_current(self, b: Tensor, b2: Tensor | None) -> bool:
        """See `Plan`."""
        return self._generation == _generation and self._kind.takes(b, b2)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        b2: Tensor | None,
        bias: Tensor | None,
        others: Sequence[Tensor | None],
        tensors: tuple[Tensor, ...],
        shifts: Sequence[int] = _UNSHIFTED,
    ) -> None:
        """See `Plan`."""
        if not self._parts:
            # The first launch is `gemm`'s own, on operands that begin where they are meant to.
            last = len(self._spans) - 1 if self._kind.overlaps() else 0
            overlaps = [Overlap(i < last, 0 < i <= last) for i in range(len(self._spans))]
            pairs = zip(self._spans, overlaps, strict=True)
            self._parts = [self._launched(span, overlap, (a, b, b2, bias, *others), tensors) for span, overlap in pairs]
            return
        for plan, more in self._parts:
            plan(a, b, b2, bias, others, tensors, [n + m for n, m in zip(shifts, more, strict=True)])

    def _launched(
        self,
        span: GemmSpan,
        overlap: Overlap,
        operands: Sequence[Any],
        tensors: tuple[Tensor, ...],
    ) -> tuple[Plan, list[int]]:
        """Launch on a span for the first time: its plan, and how many bytes after b, b2, bias and others its operands begin."""
        kind = self._kind
        a, b, b2, bias, *others = operands
        each = 2 if kind.gemm.pairs else 1
        half = slice(span.start // each, span.stop // each)
        part_b, part_b2 = (b[span.start : span.stop], None) if b2 is None else (b[half], b2[half])
        part_bias = bias
        if bias is not None:
            part_bias = bias[:, half] if bias.ndim == 2 else bias[span.start : span.stop]
        shares = [1 if o is None else o.share for o in kind.others]
        parts = [None if t is None else t[:, half.start * n : half.stop * n] for t, n in zip(others, shares, strict=True)]
        plan = Plan(kind_of(a, part_b, part_bias, parts, kind.gemm, kind.precision, span.tile, part_b2), overlap)
        plan(a, part_b, part_b2, part_bias, parts, tensors)
        pairs = zip(operands[1:], (part_b, part_b2, part_bias, *parts), strict=True)
        return plan, [0 if t is None or part is None else part.data_ptr() - t.data_ptr() for t, part in pairs]


def _shifted(t: Tensor | None, shift: int) -> Tensor | None:
    """What begins so many bytes after t: of a plan's operands only addresses are read."""
    return t if t is None or not shift else t.as_strided((1,), (1,), t.storage_offset() + shift // t.element_size())


class Launched(NamedTuple):
    """Launches that were made, and what they read: a, b, b2, bias, and further tensors."""

    plan: Plan | DividedPlan
    operands: tuple[Tensor | None, ...]


@lru_cache(maxsize=512)
def _plan(kind: Kind) -> Plan | DividedPlan:
    spans = tuning.gemm_spans(kind.sizes()) if kind.gemm.divisible and kind.tile is None else ()
    return DividedPlan(kind, spans) if spans else Plan(kind)


@contextlib.contextmanager
def watching() -> Iterator[list[Launched]]:
    """A list of what is launched inside the ``with`` block, in this thread; what another one around it sees too, when this one ends."""
    before = _WATCHED.seen
    seen: list[Launched] = []
    _WATCHED.seen = seen
    try:
        yield seen
    finally:
        _WATCHED.seen = before
        if before is not None:
            before += seen


def forget_launches() -> None:
    """Choose every launch anew when it is next needed."""
    global _generation
    _generation = next(_generations)
    _plan.cache_clear()


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
    b2: Tensor | None = None,
) -> None:
    """Multiply ``a [M, K]`` with the transpose of ``b [N, K]`` and let ``call.epilogue`` store what becomes of the sums.

    Args:
        a: float32, float16 or bfloat16, of any strides, not empty.
        b: like a; ``[N / 2, K]`` for "stacked" pairs.
        bias: ``[N]``, or ``[2, N / 2]`` for "stacked" pairs; or None.
        call: what is passed in.
        out: ``[M, N]``, or ``[M, N / 2]`` for pairs, rows being runs of memory, as of the following; or None where the epilogue needs none.
        pair: ``[M, N / 2]`` or ``[M, N]``.
        pair2: ``[M, N / 2]``.
        side: ``[M, N / 2]``, which the epilogue reads; for no pairs ``[M, N]``.
        tensors: what prologue and epilogue read besides.
        precision: of float32 products, "highest" (three-pass TF32) or less (TF32).
        tile: blocks; None lets the closed form choose.
        b2: ``[N / 2, K]`` for "stacked" pairs, in memory of b's or of its own.
    """
    with on_device(a):
        a, b = rowwise(a), rowwise(b)
        if b2 is not None and b2.stride() != b.stride():
            b, b2 = b.contiguous(), b2.contiguous()
        others = [out, pair, pair2, side]
        plan = _plan(kind_of(a, b, bias, others, call, precision, tile, b2))
        plan(a, b, b2, bias, others, tensors)
        if _WATCHED.seen is not None:
            _WATCHED.seen.append(Launched(plan, (a, b, b2, bias, *tensors)))
