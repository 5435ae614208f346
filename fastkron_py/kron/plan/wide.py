"""Wide factors: the algorithms that multiply one mode, their times, and the tiles of the kernel for Hopper. Closed-form."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.plan.steps import padded
from fastkron_py.runtime.gpu import GPU
from fastkron_py.runtime.sizes import SECTOR_BYTES, next_power_of_two

# Factors wider than this, on either side, choose among the algorithms below. A factor that is the only one does from the second width
# on, in half types and float64, where torch's products are faster.
WIDE: Final = 64
ALONE: Final = 32
# Up to this width the plain kernel keeps the whole factor on chip, but for float64.
RESIDENT: Final = 128

BLOCK_M: Final = 128  # rows of two warpgroups
BLOCK_K: Final = 32  # as a producer's registers hold a tile, and the next one
_BLOCKS_N: Final = (128, 64, 32)
_RING: Final = 196_608  # bytes of operands in shared memory
_MOST_STAGES: Final = 6
_SPEED: Final = {128: 1.0, 64: 0.72, 32: 0.45}  # of a tile, by its width: both operands are loaded for fewer products
_MOST_SPLITS: Final = 132

# Shares of a GPU's rate that the algorithms reach, measured on an H200.
_WGMMA: Final = {2: 0.2, 4: 0.85, 8: 0.85}  # by bytes of an element: those of two bytes wait for the warps that load them
_WGMMA_STEP: Final = 1.3e-6  # seconds that a step takes at least,
_WGMMA_UNALIGNED: Final = 1.4  # times that a step takes where rows of the last mode do not begin on 16 bytes,
_WGMMA_COPIED: Final = 0.85  # where x is copied as it lies,
_WGMMA_SCATTERED: Final = 2.2  # and times that it takes where k runs over slices that are not one run
_MATMUL: Final = 0.95
_GEMM: Final = 0.75  # the same of the main loop of linear layers, where it is not the memory's,
_GEMM_PASSES: Final = 1.15  # and times that it takes of the traffic
_TORCH_TILE: Final = {2: 128, 4: 64, 8: 128}  # rows and columns of tiles of torch's products, by bytes of an element
_LOOPED: Final = {2: 0.26, 4: 0.36, 8: 0.67}  # by bytes of an element
_LOOPED_UNEVEN: Final = {2: 0.1, 4: 0.14, 8: 0.17}  # where blocks reach beyond the factor
_GRADIENT_UNEVEN: Final = {2: 0.1, 4: 0.14, 8: 0.36}  # the same of a gradient,
_GRADIENT_SCATTERED: Final = {2: 0.045, 4: 0.05, 8: 0.36}  # and where blocks of slices are not one run
_GRADIENT_START: Final = 3e-6  # seconds that its programs take at least
_PROGRAMS: Final = 2  # of the plain kernel on a multiprocessor
_PARTIAL_SECTORS: Final = 3.5  # passes' time to write a result in runs shorter than a sector
_LOOP_STEP: Final = 2e-6  # seconds that a step of the plain kernel takes at least
_RESIDENT: Final = {2: 2.0, 4: 4.0, 8: 4.0}  # passes' time of the plain kernel with the whole factor on chip,
_CHAINED: Final = {2: 2.1, 4: 1.3}  # and of the register-chained kernel
_WORTH: Final = 0.75  # of its time, which another algorithm has to beat: where all launches are kernels, they read whole runs of memory
_MOST_IDLE: Final = 5.0  # times that torch's products of few tiles take: it splits their sums
# Times that torch's products of half types take where rows do not begin on 16 bytes, and where their elements are odd in number.
_UNALIGNED: Final = 4.5
_ODD: Final = 7.0
_SMALL: Final = 64  # widths that copies pad by less,
_HALF_UNITS: Final = (8, 16)  # to multiples of the first number in half types, and of the second one beyond,
_UNITS: Final = (1, 4)  # and in other types
_COPIES: Final = 2.2  # passes' time that copies of the operand and of the result take,
_GRADIENT_COPIES: Final = 2.4  # and those of both operands of a gradient,
_GRADIENT_PRODUCT: Final = 1.5  # whose product takes this many times its operations' time
# Of a batch of torch's products, each tile takes this many seconds, and more for each term of its sum. Two share a multiprocessor, which
# gains nothing where rows do not begin on 16 bytes.
_TILE: Final = {2: 1.3e-6, 4: 1.3e-6, 8: 2.2e-6}
_TILE_TERM: Final = {2: 5e-9, 4: 2e-8, 8: 5e-8}
_TILE_TERM_UNALIGNED: Final = 3.2e-8  # of half types
_DOUBLE_TERM: Final = 7.5e-9  # seconds that each term of a tile's sum in float64 takes torch in a gradient,
_DOUBLE_PRODUCT_TERM: Final = 1.2e-8  # and in other products
_LAUNCH: Final = 3e-6  # seconds between two launches that wait for each other
# Seconds that the plain kernel takes at least for a factor of more than ALONE rows or columns, by bytes of an element: it waits for its
# first tile, and in three-pass TF32 for its instructions. A multiply of less traffic chooses among the algorithms as well.
_LEAST: Final = {4: 12e-6, 8: 5e-6}


class Mode(NamedTuple):
    """A multiply of one mode ``[.., P, after]``, or the gradient of its factor.

    Attributes:
        batches: of factors.
        runs: of the mode in one batch: rows times the modes before.
        after: elements after the mode.
        p: rows of the factor.
        q: columns of the factor.
        itemsize: bytes of an element.
        passes: over the tensor cores; 3 for float32 as such, 1 for TF32 and other dtypes.
        gpu: that it runs on.
        adds: whether z is added to the result.
    """

    batches: int
    runs: int
    after: int
    p: int
    q: int
    itemsize: int
    passes: int
    gpu: GPU
    adds: bool = False

    @property
    def slices(self) -> int:
        """Slices of one batch."""
        return self.runs * self.after

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.batches * self.slices * self.p * self.q

    @property
    def is_scattered(self) -> bool:
        """Whether blocks of neighbouring slices are not one run of memory."""
        return self.after > 1 and self.after % BLOCK_K != 0

    def traffic(self, passes: float = 1.0) -> float:
        """Seconds to read the operand and write the result this many times, with the factors."""
        moved = passes * self.slices * (self.p + self.q) + self.p * self.q
        return self.batches * moved * self.itemsize / self.gpu.bandwidth

    def result_seconds(self, passes: float) -> float:
        """Seconds to read or write the result this many times."""
        return passes * self.batches * self.slices * self.q * self.itemsize / self.gpu.bandwidth


class WideConfig(NamedTuple):
    """Tiles ``[BLOCK_M, block_n]`` of the kernel for Hopper; splits of the reduction, each of this number of steps."""

    block_n: int
    splits: int
    steps: int
    items: int
    programs: int


def is_wide(p: int, q: int) -> bool:
    """Whether a factor is wide."""
    return max(p, q) > WIDE


def has_choice(mode: Mode, is_alone: bool, is_chained: bool = False) -> bool:
    """Whether a multiply chooses among the algorithms.

    Args:
        mode: the multiply.
        is_alone: it is of one factor.
        is_chained: whether the plan takes the register-chained kernel.
    """
    widest = max(mode.p, mode.q)
    if widest > WIDE or widest <= ALONE:
        return widest > WIDE
    if not is_chained and mode.traffic() < _LEAST.get(mode.itemsize, 0.0):
        return True
    return is_alone and (mode.itemsize == 8 or (mode.itemsize == 2 and mode.after == 1))


def _ceil(n: int, block: int) -> int:
    return -(-n // block)


def _wgmma(mode: Mode, height: int, width: int, depth: int, most_splits: int, slowdown: float) -> tuple[float, WideConfig]:
    """The seconds of ``[height, depth] @ [depth, width]``, and its tiles."""
    rate = mode.gpu.rate(mode.itemsize) / mode.passes * _WGMMA[mode.itemsize] / mode.gpu.multiprocessors
    found = []
    for block_n in _BLOCKS_N:
        if block_n > _BLOCKS_N[-1] and width <= block_n // 2:
            continue
        tiles = _ceil(height, BLOCK_M) * _ceil(width, block_n) * mode.batches
        all_steps = _ceil(depth, BLOCK_K)
        step = slowdown * max(2 * BLOCK_M * BLOCK_K * block_n / (rate * _SPEED[block_n]), _WGMMA_STEP)
        finish = BLOCK_M * block_n * 4 * mode.gpu.multiprocessors / mode.gpu.bandwidth
        counts = {1, *[min(_ceil(mode.gpu.multiprocessors * k, tiles), most_splits, all_steps) for k in (1, 2, 3, 4)]}
        for wanted in counts:
            steps = _ceil(all_steps, wanted)
            splits = _ceil(all_steps, steps)
            waves = _ceil(tiles * splits, mode.gpu.multiprocessors)
            partial = (2 * splits + 1) * mode.batches * height * width * 4 / mode.gpu.bandwidth if splits > 1 else 0.0
            programs = min(tiles * splits, mode.gpu.multiprocessors)
            config = WideConfig(block_n, splits, steps, tiles * splits, programs)
            found.append((waves * (steps * step + finish) + partial, config))
    return min(found)


def ring_stages(mode: Mode, block_n: int, is_copied: bool) -> int:
    """Steps whose operands are in shared memory: those that are stored for three passes in two halves, a copied left one as it is."""
    halves = 2 if mode.passes == 3 else 1
    lines = BLOCK_M * (1 if is_copied else halves) + block_n * halves
    return min(_MOST_STAGES, _RING // (lines * BLOCK_K * mode.itemsize))


@lru_cache(maxsize=1024)
def multiply_config(mode: Mode) -> tuple[float, WideConfig]:
    """The seconds of a multiply by the kernel for Hopper, and its tiles."""
    slowdown, run = 1.0, mode.p if mode.after == 1 else mode.after
    if mode.passes == 3 and run % 4 == 0:
        slowdown = _WGMMA_COPIED
    elif mode.itemsize == 4 and mode.after == 1 and mode.p % 4:
        slowdown = _WGMMA_UNALIGNED
    seconds, config = _wgmma(mode, mode.slices, mode.q, mode.p, 1, slowdown)
    return max(seconds, mode.traffic()) + _LAUNCH, config


@lru_cache(maxsize=1024)
def gradient_config(mode: Mode) -> tuple[float, WideConfig]:
    """The seconds of a factor's gradient by the kernel for Hopper, and its tiles and splits."""
    scattered = _WGMMA_SCATTERED if mode.is_scattered else 1.0
    seconds, config = _wgmma(mode, mode.p, mode.q, mode.slices, _MOST_SPLITS, scattered)
    return max(seconds, mode.traffic()) + 2 * _LAUNCH, config


def _matmul_rate(mode: Mode) -> float:
    """Operations a second of torch's products."""
    gpu = mode.gpu
    return _MATMUL * (gpu.float32_rate if mode.itemsize == 4 and mode.passes == 3 else gpu.rate(mode.itemsize))


def _filled(size: int, block: int) -> float:
    """The share of whole blocks that a size fills."""
    return size / (_ceil(size, block) * block)


def _slowdown(mode: Mode) -> float:
    """Times that torch's products take by the alignment of rows, on which those of half types depend most."""
    # A factor is copied to rows that are aligned, over P or Q.
    widths = (mode.p, mode.q) if mode.after == 1 else (mode.after, mode.p if mode.p % 8 == 0 else mode.q)
    if mode.itemsize > 2 or all(width % 8 == 0 for width in widths):
        return 1.0
    return _ODD if any(width % 2 for width in widths) else _UNALIGNED


def _batch_seconds(mode: Mode, count: int, height: int, width: int, terms: int) -> float:
    """Seconds that a batch of torch's products takes at least: of matrices [height, terms] and [terms, width]."""
    if count == 1:
        return 0.0  # one product, whose sum torch splits
    tiles = count * _ceil(height, 128) * _ceil(width, 128)
    shared, term = (2, _TILE_TERM[mode.itemsize]) if _slowdown(mode) == 1 else (1, _TILE_TERM_UNALIGNED)
    return max(1.0, tiles / (shared * mode.gpu.multiprocessors)) * (_TILE[mode.itemsize] + terms * term)


def matmul_seconds(mode: Mode) -> float:
    """Seconds of torch's product of a mode in place: one matrix product, or one for each run where something comes after the mode."""
    work = mode.operations / _filled(mode.q, 32) * _slowdown(mode) / _matmul_rate(mode)
    if mode.after == 1:
        tile = _TORCH_TILE[mode.itemsize]
        tiles = _ceil(mode.slices, tile) * _ceil(mode.q, tile) * mode.batches
        work *= min(_MOST_IDLE, _ceil(tiles, mode.gpu.multiprocessors) * mode.gpu.multiprocessors / tiles)
        if mode.itemsize == 8:
            work = max(work, mode.p * _DOUBLE_PRODUCT_TERM)
    else:
        work = max(work / _filled(mode.after, 32), _batch_seconds(mode, mode.batches * mode.runs, mode.q, mode.after, mode.p))
    return max(work, mode.traffic()) + _LAUNCH + (mode.result_seconds(2) if mode.adds else 0.0)  # a copy of z


def takes_gemm(mode: Mode) -> bool:
    """Whether the main loop of linear layers takes the mode: the last one, of half types, in rows that begin on 16 bytes."""
    is_aligned = mode.p % 8 == 0 and mode.q % 8 == 0
    return mode.itemsize == 2 and mode.batches == 1 and mode.after == 1 and is_aligned and mode.gpu.has_descriptors


def gemm_seconds(mode: Mode) -> float:
    """Seconds of the main loop of linear layers, which adds z as it stores the result."""
    tiles = _ceil(mode.slices, BLOCK_M) * _ceil(mode.q, BLOCK_M)
    waves = _ceil(tiles, mode.gpu.multiprocessors) * mode.gpu.multiprocessors / tiles
    work = waves * mode.operations / _filled(mode.q, BLOCK_M) / (_GEMM * mode.gpu.rate(mode.itemsize))
    return max(work, mode.traffic(_GEMM_PASSES) + mode.result_seconds(1)) + _LAUNCH


def takes_copies(mode: Mode) -> bool:
    """Whether copies may be worth their time: one product of all slices for many, or rows that begin on 16 bytes."""
    return mode.after > 1 or _slowdown(mode) > 1


def copied_width(width: int, itemsize: int) -> int:
    """Rows or columns of a copy, with those that are added: cuBLAS asks for 16 bytes of half types, copies are fast with 32."""
    unit = (_HALF_UNITS if itemsize == 2 else _UNITS)[width > _SMALL]
    return _ceil(width, unit) * unit


def _aligned(mode: Mode) -> Mode:
    """The multiply of copies, with the mode last."""
    p, q = (copied_width(width, mode.itemsize) for width in (mode.p, mode.q))
    return mode._replace(runs=mode.slices, after=1, p=p, q=q, adds=False)


def copying_seconds(mode: Mode) -> float:
    """Seconds of a copy of the operand with the mode last, of the factor, of one product, and of the result's copy."""
    return matmul_seconds(_aligned(mode)) + max(mode.traffic(_COPIES), 2 * _LAUNCH) + _LAUNCH


def looped_seconds(mode: Mode) -> float:
    """Seconds of the plain Triton kernel, which loops over blocks of the factor where that is too wide to stay on chip."""
    gpu, is_double = mode.gpu, mode.itemsize == 8
    uneven = mode.p % 64 or mode.q % 64
    if max(mode.p, mode.q) <= RESIDENT and not is_double:
        least = _LEAST.get(mode.itemsize, 0.0) if max(mode.p, mode.q) <= WIDE else 0.0
        return max(mode.traffic(_RESIDENT[mode.itemsize] * (1.5 if uneven else 1.0)), least) + _LAUNCH
    block_s = min(64 if is_double else 128, max(16, next_power_of_two(mode.slices)))
    block_p, block_q = 32 if is_double else 64, min(64, max(16, next_power_of_two(mode.q)))
    tiles = _ceil(mode.slices, block_s) * _ceil(mode.q, block_q) * mode.batches
    waves = _ceil(tiles, _PROGRAMS * gpu.multiprocessors)
    share = (_LOOPED_UNEVEN if uneven else _LOOPED)[mode.itemsize]
    rate = gpu.rate(mode.itemsize) / mode.passes * share / gpu.multiprocessors / _PROGRAMS
    step = max(2 * block_s * block_p * block_q / rate, _LOOP_STEP)
    has_partial_sectors = mode.after > 1 and mode.after * mode.itemsize < SECTOR_BYTES
    passes = 1.3 + (_PARTIAL_SECTORS * mode.q / (mode.p + mode.q) if has_partial_sectors else 0.0)
    return max(waves * _ceil(mode.p, block_p) * step, mode.traffic(passes)) + _LAUNCH


def chained_seconds(mode: Mode) -> float:
    """Seconds of the register-chained kernel, which keeps a factor of up to 128 rows and columns on chip."""
    return mode.traffic(_CHAINED[mode.itemsize]) + 2 * _LAUNCH


def best_algorithm(mode: Mode, has_wgmma: bool, is_chained: bool = False) -> str:
    """The fastest of `multiply_times`, whose arguments are the same."""
    times = multiply_times(mode, has_wgmma, is_chained)
    return min(times, key=times.__getitem__)


@lru_cache(maxsize=4096)
def multiply_seconds(mode: Mode, has_wgmma: bool) -> float:
    """The least of `multiply_times`."""
    return min(multiply_times(mode, has_wgmma).values())


def multiply_times(mode: Mode, has_wgmma: bool, is_chained: bool = False) -> dict[str, float]:
    """Seconds of each algorithm that multiplies a mode: "chained", "wgmma", "matmul", "gemm", "copying" or "looped".

    Args:
        mode: the multiply.
        has_wgmma: whether the kernel for Hopper may be used.
        is_chained: whether the plan takes the register-chained kernel, in place of it and of the plain one.
    """
    times = {"chained": _WORTH * chained_seconds(mode)} if is_chained else {"looped": looped_seconds(mode)}
    if has_wgmma and not is_chained:
        times["wgmma"], _ = multiply_config(mode)
    if mode.batches == 1 or mode.after == 1:
        times["matmul"] = matmul_seconds(mode)
    if mode.adds and takes_gemm(mode):
        times["gemm"] = gemm_seconds(mode)
    if takes_copies(mode):
        times["copying"] = copying_seconds(mode)
    return times


def best_gradient_algorithm(mode: Mode, has_wgmma: bool) -> str:
    """The fastest of `gradient_times`."""
    times = gradient_times(mode, has_wgmma)
    return min(times, key=times.__getitem__)


def gradient_times(mode: Mode, has_wgmma: bool) -> dict[str, float]:
    """Seconds of each algorithm for a factor's gradient: "wgmma", "matmul" (of runs, then their sum), "copying" and "looped".

    Args:
        mode: the multiply that is differentiated.
        has_wgmma: whether the kernel for Hopper may be used.
    """
    gpu = mode.gpu
    operations = mode.operations / _matmul_rate(mode)
    filled = _filled(mode.p, 32) * _filled(mode.q, 32) / _slowdown(mode)
    share = (_GRADIENT_SCATTERED if mode.is_scattered else _GRADIENT_UNEVEN if mode.p % 64 or mode.q % 64 else _LOOPED)[mode.itemsize]
    blocks = [_filled(size, min(64, padded(size))) for size in (mode.p, mode.q)]
    looped = mode.operations / (math.prod(blocks) * gpu.rate(mode.itemsize) / mode.passes * share)
    times = {"looped": max(looped, mode.traffic(2.0)) + _GRADIENT_START + 2 * _LAUNCH}
    if has_wgmma:
        times["wgmma"], _ = gradient_config(mode)
    is_one = mode.after == 1 or mode.runs == 1  # product of all slices
    if is_one:
        # Of float64 torch's products do not split the sum.
        alone = mode.slices * _DOUBLE_TERM if mode.itemsize == 8 and _ceil(mode.p, 64) * _ceil(mode.q, 64) < gpu.multiprocessors else 0.0
        times["matmul"] = max(operations / filled, mode.traffic(), alone) + 2 * _LAUNCH
    else:
        sums = 2.0 * mode.batches * mode.runs * mode.p * mode.q * mode.itemsize / gpu.bandwidth
        least = _batch_seconds(mode, mode.batches * mode.runs, mode.p, mode.q, mode.after)
        times["matmul"] = max(operations / filled / _filled(mode.after, 16), least, mode.traffic()) + sums + 3 * _LAUNCH
    if takes_copies(mode):
        aligned = _aligned(mode)
        product = _GRADIENT_PRODUCT * aligned.operations / _matmul_rate(mode) / _filled(aligned.p, 32) / _filled(aligned.q, 32)
        times["copying"] = max(product, mode.traffic()) + max(mode.traffic(_GRADIENT_COPIES), 2 * _LAUNCH) + 2 * _LAUNCH
    return times
