"""Torch's matrix products on a GPU: of one mode, or of its factor's gradient, in place or through copies, by an analytical cost model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from fastkron_py.kron.plan.steps import HALF_VECTOR, SINGLE, GradientLaunch, Launch, Step
from fastkron_py.kron.problem import MICROSECOND, WORD, GradientOffer, HostWork, LaunchProblem, Memory, Mode, Offer, Segment, ceil, filled
from fastkron_py.kron.rates import figures, priced
from fastkron_py.runtime.gpu import VECTOR_BYTES
from fastkron_py.runtime.kernels import LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fastkron_py.kron.canonical import Scale
    from fastkron_py.kron.gradient_problem import GroupProblem
    from fastkron_py.runtime.builder import Builder

name: Final = "torch_products"
order: Final = 20
gradient_order: Final = 40
moves_to_front: Final = False

_SMALL: Final = 64  # widths that copies pad by less


class Figures(NamedTuple):
    """Of torch's products."""

    tile: Mapping[int, int]  # rows and columns of their tiles, by bytes of an element
    short: int  # rows of the last mode that they take long for
    few: int  # elements after a mode, with which copies take long
    term: float  # seconds of a term of a sum
    most_terms: int  # of one product, whose sum is split beyond them
    splits: int  # times that sums of few tiles are split
    gemm: float  # share of the tensor cores' rate that the main loop of linear layers reaches
    gemm_traffic: float  # times the memory's time that it takes at least
    gemm_tile: int  # rows and columns of its tiles


def _figures(mode: Mode) -> Figures:
    return figures(Figures, name, mode.gpu)


def _rate(mode: Mode) -> float:
    """Operations a second of a GPU, by the units that torch's products use."""
    return mode.gpu.float32_rate if mode.itemsize == WORD and mode.passes == 3 else mode.gpu.rate(mode.itemsize)


def _tiled(mode: Mode, count: int, height: int, width: int, depth: int) -> float:
    """Seconds of the operations of a number of products ``[height, depth] @ [depth, width]``, each in whole tiles.

    All tiles take whole rounds of the multiprocessors. Of few tiles of one product, sums are split.
    """
    of = _figures(mode)
    side = of.tile[mode.itemsize]
    tiles = count * ceil(height, side) * ceil(width, side)
    rounds = ceil(tiles, mode.at_once) * (1.0 if count > 1 else min(1.0, of.splits * tiles / mode.at_once))
    return 2 * rounds * mode.at_once * side**2 * depth / _rate(mode)


def _terms(mode: Mode, terms: int) -> float:
    """The time that a product's sums take, however few tiles it has."""
    return _figures(mode).term * min(terms, _figures(mode).most_terms)


def _rounds(mode: Mode, count: int, height: int) -> float:
    """Rounds of the multiprocessors that the tiles of many products take, in seconds; 0 of one."""
    side = _figures(mode).tile[WORD]
    return ceil(count * ceil(height, side) * ceil(mode.q, side), mode.at_once) * MICROSECOND if count > 1 else 0.0


def _is_aligned(mode: Mode) -> bool:
    """Whether rows of both operands of a gradient begin on 16 bytes."""
    unit = VECTOR_BYTES // mode.itemsize
    return (mode.p % unit == mode.q % unit == 0) if mode.after == 1 else mode.after % unit == 0


def _in_place_quantities(mode: Mode, least: int, is_aligned: bool) -> dict[str, float]:
    """Those of a product and of a gradient in place, where the shorter one of the rows that torch may take long for has this length."""
    moved, is_short = mode.traffic(), mode.after == 1 and least <= _figures(mode).short
    return {
        "start": MICROSECOND,
        "bytes": moved,
        "streamed": mode.streamed,
        "unaligned_bytes": 0.0 if is_aligned else moved,
        "short_rows": moved * WORD / mode.itemsize if is_short else 0.0,
        "operations": mode.operations / _rate(mode),
    }


def matmul_quantities(mode: Mode) -> dict[str, float]:
    """Those of a product of a mode in place: one matrix product, or one for each run where something comes after the mode."""
    count, height = (mode.batches, mode.slices) if mode.after == 1 else (mode.batches * mode.runs, mode.after)
    of, rounds = _figures(mode), _rounds(mode, count, height)
    # A factor is copied where something comes after the mode, and its rows or columns may begin on 16 bytes (`add`).
    is_aligned = _is_aligned(mode) and (mode.after == 1 or mode.itemsize > 2 or mode.p % HALF_VECTOR == 0 or mode.q % HALF_VECTOR == 0)
    is_odd = mode.itemsize == 2 and not is_aligned and bool(mode.p % 2 or mode.q % 2 or (mode.after > 1 and mode.after % 2))
    tiles, terms = _tiled(mode, count, height, mode.q, mode.p), 0.0 if count > 1 else _terms(mode, mode.p)
    return _in_place_quantities(mode, mode.p, is_aligned) | {
        "tiles": tiles,
        "odd_tiles": tiles if is_odd else 0.0,
        "terms": terms,
        "unaligned_terms": 0.0 if is_aligned else terms,
        "rounds": rounds,
        "partial_rounds": rounds * mode.p / of.most_terms if height % of.tile[2] else 0.0,
    }


def takes_copies(mode: Mode) -> bool:
    """Whether copies may be worth their time: one product of all slices for many, or rows that begin on 16 bytes."""
    return mode.after > 1 or (mode.itemsize == 2 and (mode.p % HALF_VECTOR != 0 or mode.q % HALF_VECTOR != 0))


def copied_width(width: int, itemsize: int) -> int:
    """Rows or columns of a copy, with those that are added: cuBLAS asks for 16 bytes in half precision, copies are fast with 32."""
    is_wide = width > _SMALL
    unit = HALF_VECTOR * (1 + is_wide) if itemsize == 2 else VECTOR_BYTES // itemsize if is_wide else 1
    return ceil(width, unit) * unit


def _aligned(mode: Mode) -> Mode:
    """The multiply of copies, with the mode last."""
    p, q = (copied_width(width, mode.itemsize) for width in (mode.p, mode.q))
    return Mode(mode.batches, mode.slices, 1, p, q, mode.itemsize, mode.passes, mode.gpu)


def copying_quantities(mode: Mode) -> dict[str, float]:
    """Those of a copy of the operand with the mode last, of the factor, of one product, and of the result's copy.

    Copies take a time for each element, more with few elements after the mode, and more of short rows.
    """
    aligned, elements = _aligned(mode), mode.traffic() * WORD / mode.itemsize
    return {
        "start": MICROSECOND,
        "streamed": mode.streamed,
        "elements": elements,
        "few_after": elements if 1 < mode.after < _figures(mode).few else 0.0,
        "short_rows": mode.batches * mode.slices * WORD * _figures(mode).few / mode.gpu.bandwidth,
        "operations": aligned.operations / _rate(mode),
        "tiles": _tiled(aligned, aligned.batches, aligned.slices, aligned.q, aligned.p),
        "terms": _terms(mode, aligned.p),
    }


def matmul_gradient_quantities(mode: Mode) -> dict[str, float]:
    """Those of a factor's gradient in place: one product of all slices, or one for each run, and their sum.

    The least that it takes is also what its operations take at the full rate.
    """
    count, depth = (mode.batches, mode.slices) if mode.after == 1 or mode.runs == 1 else (mode.batches * mode.runs, mode.after)
    is_summed = count > mode.batches
    return _in_place_quantities(mode, min(mode.p, mode.q), _is_aligned(mode)) | {
        "streamed": max(mode.streamed, mode.operations / _rate(mode)),
        "in_place": mode.traffic() if mode.after > 1 else 0.0,
        "tiles": _tiled(mode, count, mode.p, mode.q, depth),
        "terms": 0.0 if count > 1 else _terms(mode, depth),
        "sums": mode.batches * mode.runs * mode.p * mode.q * mode.itemsize / mode.gpu.bandwidth if is_summed else 0.0,
        "summed": MICROSECOND if is_summed else 0.0,
        "rounds": _rounds(mode, count, mode.p),
    }


def copying_gradient_quantities(mode: Mode) -> dict[str, float]:
    """Those of copies of both operands with the mode last, and of one product."""
    copies, aligned = copying_quantities(mode), _aligned(mode)
    return copies | {
        "streamed": max(mode.streamed, aligned.operations / _rate(mode)),
        "tiles": _tiled(aligned, aligned.batches, aligned.p, aligned.q, aligned.slices),
        "terms": _terms(mode, aligned.slices),
    }


def takes_gemm(mode: Mode) -> bool:
    """Whether the main loop of linear layers takes the mode: the last one, in half precision, in rows that begin on 16 bytes."""
    is_aligned = mode.p % 8 == 0 and mode.q % 8 == 0
    return mode.itemsize == 2 and mode.batches == 1 and mode.after == 1 and is_aligned and mode.gpu.has_descriptors


def gemm_seconds(mode: Mode) -> float:
    """Seconds of the main loop of linear layers, which adds z as it stores the result."""
    of = _figures(mode)
    tiles = ceil(mode.slices, of.gemm_tile) * ceil(mode.q, of.gemm_tile)
    waves = ceil(tiles, mode.gpu.multiprocessors) * mode.gpu.multiprocessors / tiles
    work = waves * mode.operations / filled(mode.q, of.gemm_tile) / (of.gemm * mode.gpu.rate(mode.itemsize))
    return max(work, mode.traffic(of.gemm_traffic) + mode.written) + figures(Memory, "memory", mode.gpu).wait


def multiply_times(mode: Mode) -> dict[str, float]:
    """Seconds of the algorithms that multiply a mode.

    "matmul" is one product in place, or a batch, "copying" one of copies that it is fast on, and "gemm" the main loop of linear layers.
    Where z is added, the first copies it.
    """
    of, times = partial(priced, gpu=mode.gpu, itemsize=mode.itemsize), dict[str, float]()
    if mode.batches == 1 or mode.after == 1:
        times["matmul"] = of("matmul", quantities=matmul_quantities(mode)) + (2 * mode.written if mode.adds else 0.0)
    if mode.adds and takes_gemm(mode):
        times["gemm"] = gemm_seconds(mode)
    if takes_copies(mode):
        times["copying"] = of("copying", quantities=copying_quantities(mode))
    return times


def multiply_algorithm(mode: Mode) -> str:
    """The fastest of `multiply_times`."""
    times = multiply_times(mode)
    return min(times, key=times.__getitem__)


def offers(segment: Segment) -> list[Offer] | str:
    """One factor where it stands."""
    if len(segment.ps) > 1 or not segment.in_place:
        return "takes one factor, and leaves its mode in place"
    steps, problem = (Step(0, 1, segment.ps[0], segment.qs[0], segment.problem.parts),), segment.problem
    makes_memory = problem.itemsize == WORD or segment.mode.adds  # else torch does, in the call of its product
    work = {"matmul": HostWork(0, 1, int(makes_memory)), "copying": HostWork(3, 1, 3), "gemm": HostWork(1, 0, 1)}
    may_add = problem.epilogue is None or problem.epilogue.scales_by is None
    times = multiply_times(segment.mode if may_add else replace(segment.mode, adds=False))
    return [Offer(seconds, Launch(steps, name, algorithm), work[algorithm]) for algorithm, seconds in times.items()]


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """None: its steps are calls of torch."""
    return ()


def add(
    build: Builder, problem: LaunchProblem, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, y: Tensor | None, scale: Scale
) -> Tensor:
    """Add the plan's algorithm, of a tuned launch the fastest one where it stands; see `problem.add_launch`.

    That of linear layers adds z, and cannot scale by it.
    """
    from fastkron_py.kron.matmul_step import add_gemm_step, add_products

    may_add = z is not None and problem.epilogue.scales_by is None
    found = problem.launch.config or multiply_algorithm(replace(problem.mode, adds=may_add))
    if found == "gemm" and may_add:
        return add_gemm_step(build, problem, x, factors, z, y, scale)
    return add_products(build, problem, x, factors, z, y, scale, "matmul" if found == "gemm" else found)


def gradient_offers(problem: GroupProblem) -> list[GradientOffer] | str:
    """The gradient of one factor: by products in place, and by copies where these may be worth their time."""
    if problem.is_fused:
        return SINGLE
    quantities = {"matmul": matmul_gradient_quantities(problem.mode)}
    if takes_copies(problem.mode):
        quantities["copying"] = copying_gradient_quantities(problem.mode)
    return [GradientOffer(name, f"{of}_gradients", made, problem, partial(gradient_launch, of)) for of, made in quantities.items()]


def gradient_launch(algorithm: str) -> GradientLaunch:
    """No launch, but how torch multiplies (`kron.matmul_step`)."""
    return GradientLaunch((), 1, algorithm=algorithm)
