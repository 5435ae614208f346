"""Times of torch's matrix products on a GPU: of one mode, or of its factor's gradient, in place or by way of copies. Closed-form.

Measured on an H200, for modes of 1 to 3,000 rows and columns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.kron.problem import MICROSECOND, WORD, HostWork, LaunchProblem, Mode, Offer, Problem, Segment, ceil, filled
from fastkron_py.kron.rates import figure, priced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fastkron_py.kron.canonical import Scale
    from fastkron_py.kron.gradient_problem import GradientLaunch, GroupProblem
    from fastkron_py.runtime.builder import Builder
    from fastkron_py.runtime.launch import LaunchConfig

name: Final = "torch_products"
order: Final = 20
gradient_order: Final = 40
moves_to_front: Final = False

_TILE: Final = {2: 128, 4: 64, 8: 32}  # rows and columns of tiles of torch's products, by bytes of an element
_MANY_TERMS: Final = 256
_SMALL: Final = 64  # widths that copies pad by less,
_HALF_UNITS: Final = (8, 16)  # to multiples of the first number in half types, and of the second one beyond,
_BYTES: Final = 16  # that wider rows of other types are multiples of
_SHORT: Final = 8  # rows of the last mode that torch multiplies slowly
_FEW: Final = 16
_TERM: Final = 1e-8  # seconds
_MOST_TERMS: Final = 800  # of one product, whose sum torch splits beyond them
_SPLITS: Final = 8
_GEMM_TILE: Final = 128  # rows and columns of tiles of linear layers' main loop


def _of(mode: Mode, key: str, *keys: object) -> float:
    """A figure of a mode's GPU."""
    return figure(name, mode.gpu, key, *keys)


def _rate(mode: Mode) -> float:
    """Operations a second of a GPU, by the units that torch's products use."""
    return mode.gpu.float32_rate if mode.itemsize == WORD and mode.passes == 3 else mode.gpu.rate(mode.itemsize)


def _matmul_rate(mode: Mode) -> float:
    """Operations a second that torch's products reach."""
    return _of(mode, "share") * _rate(mode)


def _slowdown_of(mode: Mode, widths: tuple[int, int]) -> float:
    """Times that torch's products take by the alignment of rows of these widths, on which those of half types depend most."""
    if mode.itemsize > 2 or all(width % 8 == 0 for width in widths):
        return 1.0
    return _of(mode, "odd" if any(width % 2 for width in widths) else "unaligned")


def _slowdown(mode: Mode) -> float:
    """The same of a multiply."""
    # A factor is copied to rows that are aligned, over P or Q.
    return _slowdown_of(mode, (mode.p, mode.q) if mode.after == 1 else (mode.after, mode.p if mode.p % 8 == 0 else mode.q))


def _gradient_slowdown(mode: Mode) -> float:
    """The same of a gradient, whose sum runs along both operands' rows where something comes after the mode."""
    if mode.after == 1:
        return _slowdown(mode)
    return _slowdown_of(mode, (mode.after, mode.q))


def _batch_seconds(mode: Mode, count: int, height: int, width: int, terms: int, least: float) -> float:
    """Seconds of a batch of torch's products: of matrices [height, terms] and [terms, width].

    least: rounds of tiles on all multiprocessors that it takes at least.
    """
    if count == 1:
        return 0.0  # one product, whose sum torch splits
    tiles = count * ceil(height, 128) * ceil(width, 128)
    # Two tiles share a multiprocessor, which gains nothing where rows do not begin on 16 bytes.
    is_aligned = _slowdown(mode) == 1
    shared, term = (2, _of(mode, "batch_term", mode.itemsize)) if is_aligned else (1, _of(mode, "batch_term_unaligned"))
    return max(least, tiles / (shared * mode.gpu.multiprocessors)) * (_of(mode, "batch", mode.itemsize) + terms * term)


def _placed(mode: Mode, terms: int) -> float:
    """Seconds that a gradient's products take more in place, for sums of this number of terms."""
    return _of(mode, "placed") + _of(mode, "placed_terms") * min(1.0, terms / _MANY_TERMS) if mode.after > 1 else 0.0


def _tiled(mode: Mode, count: int, height: int) -> float:
    """Seconds of the operations of a number of products ``[height, P] @ [P, Q]``, of which each takes whole tiles.

    All tiles take whole rounds of the multiprocessors. Of few tiles of one product, sums are split.
    """
    side = _TILE[mode.itemsize]
    tiles = count * ceil(height, side) * ceil(mode.q, side)
    rounds = ceil(tiles, mode.at_once) * (1.0 if count > 1 else min(1.0, _SPLITS * tiles / mode.at_once))
    return 2 * rounds * mode.at_once * side**2 * mode.p / _rate(mode)


def _terms(mode: Mode) -> float:
    """The time that a product's sums take, however few tiles it has."""
    return _TERM * min(mode.p, _MOST_TERMS)


def matmul_quantities(mode: Mode) -> dict[str, float]:
    """Those of a product of a mode in place: one matrix product, or one for each run where something comes after the mode."""
    count, height = (mode.batches, mode.slices) if mode.after == 1 else (mode.batches * mode.runs, mode.after)
    unit, is_many = _BYTES // mode.itemsize, count > 1
    is_aligned = (mode.p % unit == mode.q % unit == 0) if mode.after == 1 else mode.after % unit == 0
    is_odd = mode.itemsize == 2 and bool((mode.p % 2 or mode.q % 2) if mode.after == 1 else mode.after % 2)
    moved, tiles, terms = mode.traffic(), _tiled(mode, count, height), 0.0 if is_many else _terms(mode)
    rounds = ceil(count * ceil(height, _TILE[WORD]) * ceil(mode.q, _TILE[WORD]), mode.at_once) * MICROSECOND if is_many else 0.0
    return {
        "start": MICROSECOND,
        "bytes": moved,
        "streamed": mode.streamed,
        "unaligned_bytes": 0.0 if is_aligned else moved,
        "short_rows": moved * WORD / mode.itemsize if mode.after == 1 and mode.p <= _SHORT else 0.0,
        "operations": mode.operations / _rate(mode),
        "tiles": tiles,
        "odd_tiles": tiles if is_odd else 0.0,
        "terms": terms,
        "unaligned_terms": 0.0 if is_aligned else terms,
        "rounds": rounds,
        "partial_rounds": rounds * mode.p / _MOST_TERMS if height % _TILE[2] else 0.0,
    }


def takes_copies(mode: Mode) -> bool:
    """Whether copies may be worth their time: one product of all slices for many, or rows that begin on 16 bytes."""
    return mode.after > 1 or _slowdown(mode) > 1


def copied_width(width: int, itemsize: int) -> int:
    """Rows or columns of a copy, with those that are added: cuBLAS asks for 16 bytes of half types, copies are fast with 32."""
    is_wide = width > _SMALL
    unit = _HALF_UNITS[is_wide] if itemsize == 2 else _BYTES // itemsize if is_wide else 1
    return ceil(width, unit) * unit


def _aligned(mode: Mode) -> Mode:
    """The multiply of copies, with the mode last."""
    p, q = (copied_width(width, mode.itemsize) for width in (mode.p, mode.q))
    return mode._replace(runs=mode.slices, after=1, p=p, q=q, adds=False)


def copying_quantities(mode: Mode) -> dict[str, float]:
    """Those of a copy of the operand with the mode last, of the factor, of one product, and of the result's copy.

    Copies take a time for each element, more with few elements after the mode, and more of short rows.
    """
    aligned, elements = _aligned(mode), mode.traffic() * WORD / mode.itemsize
    return {
        "start": MICROSECOND,
        "streamed": mode.streamed,
        "elements": elements,
        "few_after": elements if 1 < mode.after < _FEW else 0.0,
        "short_rows": mode.batches * mode.slices * WORD * _FEW / mode.gpu.bandwidth,
        "operations": aligned.operations / _rate(mode),
        "tiles": _tiled(aligned, aligned.batches, aligned.slices),
        "terms": _terms(aligned),
    }


def gradient_product_seconds(mode: Mode) -> float:
    """Seconds of torch's products for a factor's gradient: one of all slices, or one for each run and their sum."""
    gpu = mode.gpu
    work = mode.operations / _matmul_rate(mode) * _gradient_slowdown(mode) / filled(mode.p, 32) / filled(mode.q, 32)
    if mode.after == 1 or mode.runs == 1:
        has_few_tiles = ceil(mode.p, 64) * ceil(mode.q, 64) < gpu.multiprocessors
        least = mode.slices * _of(mode, "gradient_term") if mode.itemsize == 8 and has_few_tiles else 0.0
        return max(work, mode.traffic(), least) + _placed(mode, mode.after) + 2 * mode.wait
    sums = 2.0 * mode.batches * mode.runs * mode.p * mode.q * mode.itemsize / gpu.bandwidth
    least = _batch_seconds(mode, mode.batches * mode.runs, mode.p, mode.q, mode.after, 1.0)
    return max(work / filled(mode.after, 16), least, mode.traffic()) + sums + _placed(mode, mode.after) + 3 * mode.wait


def gradient_copying_seconds(mode: Mode) -> float:
    """Seconds of copies of both operands with the mode last, and of one product."""
    aligned = _aligned(mode)
    product = _of(mode, "gradient_product") * aligned.operations / _matmul_rate(mode) / filled(aligned.p, 32) / filled(aligned.q, 32)
    return max(product, mode.traffic()) + max(mode.traffic(_of(mode, "gradient_copies")), 2 * mode.wait) + 2 * mode.wait


def gradient_product_times(mode: Mode) -> dict[str, float]:
    """Seconds of a factor's gradient by products in place, "matmul", and of copies where these may be worth their time, "copying"."""
    times = {"matmul": gradient_product_seconds(mode)}
    return times | {"copying": gradient_copying_seconds(mode)} if takes_copies(mode) else times


def takes_gemm(mode: Mode) -> bool:
    """Whether the main loop of linear layers takes the mode: the last one, of half types, in rows that begin on 16 bytes."""
    is_aligned = mode.p % 8 == 0 and mode.q % 8 == 0
    return mode.itemsize == 2 and mode.batches == 1 and mode.after == 1 and is_aligned and mode.gpu.has_descriptors


def gemm_seconds(mode: Mode) -> float:
    """Seconds of the main loop of linear layers, which adds z as it stores the result."""
    tiles = ceil(mode.slices, _GEMM_TILE) * ceil(mode.q, _GEMM_TILE)
    waves = ceil(tiles, mode.gpu.multiprocessors) * mode.gpu.multiprocessors / tiles
    work = waves * mode.operations / filled(mode.q, _GEMM_TILE) / (_of(mode, "gemm") * mode.gpu.rate(mode.itemsize))
    return max(work, mode.traffic(_of(mode, "gemm_traffic")) + mode.result_seconds(1)) + mode.wait


def multiply_times(mode: Mode) -> dict[str, float]:
    """Seconds of the algorithms that multiply a mode.

    "matmul" is one product in place, or a batch, "copying" one of copies that it is fast on, and "gemm" the main loop of linear layers.
    Where z is added, the first copies it.
    """
    of, times = partial(priced, gpu=mode.gpu, itemsize=mode.itemsize), dict[str, float]()
    if mode.batches == 1 or mode.after == 1:
        times["matmul"] = of("matmul", quantities=matmul_quantities(mode)) + (mode.result_seconds(2) if mode.adds else 0.0)
    if mode.adds and takes_gemm(mode):
        times["gemm"] = gemm_seconds(mode)
    if takes_copies(mode):
        times["copying"] = of("copying", quantities=copying_quantities(mode))
    return times


def multiply_algorithm(mode: Mode) -> str:
    """The fastest of `multiply_times`."""
    times = multiply_times(mode)
    return min(times, key=times.__getitem__)


def refusal(problem: Problem) -> str | None:
    """Nothing is in the way."""
    return None


def offers(segment: Segment) -> list[Offer] | str:
    """One factor where it stands."""
    if len(segment.ps) > 1 or not segment.in_place:
        return "takes one factor, and leaves its mode in place"
    steps, problem = (Step(0, 1, segment.ps[0], segment.qs[0], segment.problem.parts),), segment.problem
    makes_memory = problem.itemsize == WORD or segment.mode.adds  # else torch does, in the call of its product
    work = {"matmul": HostWork(0, 1, int(makes_memory)), "copying": HostWork(3, 1, 3), "gemm": HostWork(1, 0, 1)}
    may_add = problem.epilogue is None or problem.epilogue.scales_by is None
    times = multiply_times(segment.mode if may_add else segment.mode._replace(adds=False))
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
    found = problem.launch.config or multiply_algorithm(problem.mode._replace(adds=may_add))
    if found == "gemm" and may_add:
        return add_gemm_step(build, problem, x, factors, z, y, scale)
    return add_products(build, problem, x, factors, z, y, scale, "matmul" if found == "gemm" else found)


def gradient_seconds(problem: GroupProblem) -> float | str:
    """The gradient of one factor."""
    return "takes one factor that no kernel takes with dx" if problem.is_fused else min(gradient_product_times(problem.mode).values())


def gradient_algorithm(mode: Mode) -> str:
    """The fastest of `gradient_product_times`."""
    times = gradient_product_times(mode)
    return min(times, key=times.__getitem__)


def gradient_launch(problem: GroupProblem) -> GradientLaunch:
    """No launch, but how torch multiplies (`kron.matmul_step`)."""
    from fastkron_py.kron.gradient_problem import GradientLaunch

    return GradientLaunch((), 1, algorithm=gradient_algorithm(problem.mode))
