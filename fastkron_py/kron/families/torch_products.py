"""Times of torch's matrix products on a GPU: of one mode, or of its factor's gradient, in place or by way of copies. Closed-form.

Measured on an H200, for modes of 1 to 3,000 rows and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.kron.problem import LAUNCH, Candidate, LaunchProblem, Mode, Problem, Segment, ceil, filled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fastkron_py.kron.canonical import Scale
    from fastkron_py.kron.gradient_problem import GradientLaunch, GroupProblem
    from fastkron_py.runtime.builder import Builder
    from fastkron_py.runtime.launch import LaunchConfig

name: Final = "torch_products"
order: Final = 70
gradient_order: Final = 40
moves_to_front: Final = False
ALGORITHMS: Final = ("matmul", "copying", "gemm")

_MATMUL: Final = 0.95  # of a GPU's rate that they reach
_TORCH_TILE: Final = {2: 128, 4: 64, 8: 32}  # rows and columns of tiles of torch's products, by bytes of an element
_MOST_IDLE: Final = 1.75  # times that torch's products of few tiles take: it splits their sums
_COLD: Final = 2.5e-6  # seconds that a product of operands in memory takes more than one of operands in L2
# Seconds of a product's sums, however few tiles it has: of each term, by bytes of an element; of half types where rows do not begin on
# 16 bytes, and in one product of few tiles there; and at most, in one product, whose sum torch splits.
_TERM: Final = {2: 3.4e-9, 4: 3.4e-8, 8: 1e-8}
_TERM_UNALIGNED: Final = 2.2e-8
_TERM_UNALIGNED_FEW: Final = 1.1e-8
_MOST_TERMS: Final = 8e-6
_MOST_TERMS_FEW: Final = 4.5e-6
_PLACED: Final = 1.2e-6  # seconds that a gradient's products take more where something comes after the mode,
_PLACED_TERMS: Final = 4e-6  # and more where sums have this number of terms
_MANY_TERMS: Final = 256
# Times that torch's products of half types take where rows do not begin on 16 bytes, and where their elements are odd in number.
_UNALIGNED: Final = 4.7
_ODD: Final = 8.4
_SMALL: Final = 64  # widths that copies pad by less,
_HALF_UNITS: Final = (8, 16)  # to multiples of the first number in half types, and of the second one beyond,
_BYTES: Final = 16  # that wider rows of other types are multiples of
_COPIED_SUMS: Final = 0.5  # of a product's sums, where the operand was copied before: it is in L2
_COPIES: Final = 2.4  # passes' time that copies of the operand and of the result take,
_GRADIENT_COPIES: Final = 3.3  # and those of both operands of a gradient,
_GRADIENT_PRODUCT: Final = 1.1  # whose product takes this many times its operations' time
# Of a batch of torch's products, each tile takes this many seconds, and more for each term of its sum. Two share a multiprocessor, which
# gains nothing where rows do not begin on 16 bytes.
_TILE: Final = {2: 1.6e-6, 4: 1.3e-6, 8: 2.2e-6}
_TILE_TERM: Final = {2: 5.6e-9, 4: 2e-8, 8: 5e-8}
_TILE_TERM_UNALIGNED: Final = 2.5e-8  # of half types
_DOUBLE_TERM: Final = 1e-9  # seconds that each term of a sum in float64 takes torch at least, in a gradient of few tiles

_GEMM: Final = 0.75  # of a GPU's rate that the main loop of linear layers reaches, where it is not the memory's,
_GEMM_TILE: Final = 128  # rows and columns of its tiles
_GEMM_PASSES: Final = 1.15  # and times that it takes of the traffic


def _matmul_rate(mode: Mode) -> float:
    """Operations a second of torch's products."""
    gpu = mode.gpu
    return _MATMUL * (gpu.float32_rate if mode.itemsize == 4 and mode.passes == 3 else gpu.rate(mode.itemsize))


def _slowdown_of(mode: Mode, widths: tuple[int, int]) -> float:
    """Times that torch's products take by the alignment of rows of these widths, on which those of half types depend most."""
    if mode.itemsize > 2 or all(width % 8 == 0 for width in widths):
        return 1.0
    return _ODD if any(width % 2 for width in widths) else _UNALIGNED


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
    shared, term = (2, _TILE_TERM[mode.itemsize]) if _slowdown(mode) == 1 else (1, _TILE_TERM_UNALIGNED)
    return max(least, tiles / (shared * mode.gpu.multiprocessors)) * (_TILE[mode.itemsize] + terms * term)


def _placed(mode: Mode, terms: int) -> float:
    """Seconds that a gradient's products take more in place, for sums of this number of terms."""
    return _PLACED + _PLACED_TERMS * min(1.0, terms / _MANY_TERMS) if mode.after > 1 else 0.0


def _products(mode: Mode) -> tuple[int, int]:
    """The number of torch's products of a multiply, and the tiles of all."""
    tile, is_last = _TORCH_TILE[mode.itemsize], mode.after == 1
    count, height = mode.batches * (1 if is_last else mode.runs), mode.slices if is_last else mode.after
    return count, ceil(height, tile) * ceil(mode.q, tile) * count


def _sum_seconds(mode: Mode) -> float:
    """Seconds of the sums of torch's products of a multiply."""
    count, tiles = _products(mode)
    term, most = _TERM[mode.itemsize], _MOST_TERMS
    if _slowdown(mode) > 1:
        is_few = count == 1 and tiles <= mode.gpu.multiprocessors
        term, most = (_TERM_UNALIGNED_FEW, _MOST_TERMS_FEW) if is_few else (_TERM_UNALIGNED, _MOST_TERMS)
    return min(mode.p * term, most) if count == 1 else mode.p * term


def matmul_seconds(mode: Mode) -> float:
    """Seconds of torch's product of a mode in place: one matrix product, or one for each run where something comes after the mode."""
    copied = mode.result_seconds(2) if mode.adds else 0.0  # z
    return max(_product_seconds(mode), mode.traffic() + _sum_seconds(mode)) + _COLD + LAUNCH + copied


def _product_seconds(mode: Mode) -> float:
    """The same by operations, traffic and tiles alone."""
    gpu, (count, tiles) = mode.gpu, _products(mode)
    work = mode.operations / filled(mode.q, 32) * _slowdown(mode) / _matmul_rate(mode)
    work *= min(_MOST_IDLE, ceil(tiles, gpu.multiprocessors) * gpu.multiprocessors / tiles)
    if mode.after > 1:
        work = max(work / filled(mode.after, 32), _batch_seconds(mode, count, mode.q, mode.after, mode.p, 0.0))
    return max(work, mode.traffic())


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


def copying_seconds(mode: Mode) -> float:
    """Seconds of a copy of the operand with the mode last, of the factor, of one product, and of the result's copy."""
    aligned = _aligned(mode)
    product = _product_seconds(aligned) + _COPIED_SUMS * _sum_seconds(aligned) + LAUNCH
    return product + max(mode.traffic(_COPIES), 2 * LAUNCH) + LAUNCH


def gradient_product_seconds(mode: Mode) -> float:
    """Seconds of torch's products for a factor's gradient: one of all slices, or one for each run and their sum."""
    gpu = mode.gpu
    work = mode.operations / _matmul_rate(mode) * _gradient_slowdown(mode) / filled(mode.p, 32) / filled(mode.q, 32)
    if mode.after == 1 or mode.runs == 1:
        has_few_tiles = ceil(mode.p, 64) * ceil(mode.q, 64) < gpu.multiprocessors
        least = mode.slices * _DOUBLE_TERM if mode.itemsize == 8 and has_few_tiles else 0.0
        return max(work, mode.traffic(), least) + _placed(mode, mode.after) + 2 * LAUNCH
    sums = 2.0 * mode.batches * mode.runs * mode.p * mode.q * mode.itemsize / gpu.bandwidth
    least = _batch_seconds(mode, mode.batches * mode.runs, mode.p, mode.q, mode.after, 1.0)
    return max(work / filled(mode.after, 16), least, mode.traffic()) + sums + _placed(mode, mode.after) + 3 * LAUNCH


def gradient_copying_seconds(mode: Mode) -> float:
    """Seconds of copies of both operands with the mode last, and of one product."""
    aligned = _aligned(mode)
    product = _GRADIENT_PRODUCT * aligned.operations / _matmul_rate(mode) / filled(aligned.p, 32) / filled(aligned.q, 32)
    return max(product, mode.traffic()) + max(mode.traffic(_GRADIENT_COPIES), 2 * LAUNCH) + 2 * LAUNCH


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
    work = waves * mode.operations / filled(mode.q, _GEMM_TILE) / (_GEMM * mode.gpu.rate(mode.itemsize))
    return max(work, mode.traffic(_GEMM_PASSES) + mode.result_seconds(1)) + LAUNCH


def multiply_times(mode: Mode) -> dict[str, float]:
    """Seconds of the algorithms that multiply a mode.

    "matmul" is one product in place, or a batch, "copying" one of copies that it is fast on, and "gemm" the main loop of linear layers.
    """
    times = {"matmul": matmul_seconds(mode)} if mode.batches == 1 or mode.after == 1 else {}
    if mode.adds and takes_gemm(mode):
        times["gemm"] = gemm_seconds(mode)
    if takes_copies(mode):
        times["copying"] = copying_seconds(mode)
    return times


def refusal(problem: Problem) -> str | None:
    """What is in the way of any launch of its own: it has none if a family is asked whose launches pass to it (`planner.choose`)."""
    if not problem.families or {"tile", "fragments"} & {*problem.families}:
        return "takes over launches of one factor by tile and fragments"
    return None


def candidates(segment: Segment) -> list[Candidate] | str:
    """One factor."""
    if len(segment.ps) > 1:
        return "takes one factor"
    return [(float(segment.moved), Launch((Step(0, 1, segment.ps[0], segment.qs[0], segment.problem.parts),), name))]


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """None: its steps are calls of torch."""
    return ()


def add(
    build: Builder, problem: LaunchProblem, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, y: Tensor | None, scale: Scale
) -> Tensor:
    """Add the algorithm that the plan chose; see `problem.add_launch`."""
    from fastkron_py.kron.matmul_step import add_gemm_step, add_products

    add_step = add_gemm_step if problem.launch.config == "gemm" else add_products
    return add_step(build, problem, x, factors, z, y, scale)


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
