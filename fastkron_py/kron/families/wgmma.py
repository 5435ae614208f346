"""Hopper's pipelined product of one large factor, or of its gradient: its tiles, its seconds, and its launches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastkron_py.kron.families import tile
from fastkron_py.kron.plan.steps import SINGLE, GradientLaunch, Launch, Step, is_even
from fastkron_py.kron.problem import BLOCK_K, MICROSECOND, WORD, GradientOffer, LaunchProblem, Mode, Offer, Problem, Segment, ceil
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.gpu import GPU, VECTOR_BYTES
from fastkron_py.runtime.kernels import LaunchConfig, gluon_kernel

if TYPE_CHECKING:
    import torch

    from fastkron_py.kron.gradient_problem import GroupProblem

name: Final = "wgmma"
order: Final = 10
gradient_order: Final = 30
moves_to_front: Final = True
kernel: Final = partial(gluon_kernel, "kron.hopper.wide", "_wide_product_kernel")  # None where this Triton cannot compile it

# Of a thread that holds sums, and of those that bring the left and the right operand, or copy the left one.
_REGISTERS: Final = (160, 96, 96)
_REGISTERS_COPYING: Final = (184, 40, 104)
_UNUSED: Final = (0, 0, 0, 0, 0)

LEAST: Final = tile.CHAIN_WIDTH  # a factor is wider
BLOCK_M: Final = 128  # rows of two warpgroups
_BLOCKS_N: Final = (128, 64, 32)


class Figures(NamedTuple):
    """Of tiles, and of their seconds, by which they are chosen."""

    group: int  # rows of tiles that are in flight together
    flush: int  # steps between two additions to the float32 sum: tensor cores, which cut sums off, may add up 64 terms by themselves
    most_stages: int  # steps whose operands are in shared memory
    share: Mapping[int, float]  # of the tensor cores' rate, by bytes of an element
    block: Mapping[int, float]  # times that, by columns of a tile
    step: float  # seconds that a step takes at least
    unaligned: float  # times a step's time, of rows that do not begin on 16 bytes
    copied: float  # the same of a left operand that is copied as it lies
    few: float  # of short runs of slices
    scattered: float  # of slices that are no runs, in a gradient


def _figures(mode: Mode) -> Figures:
    return figures(Figures, name, mode.gpu)


class WideConfig(NamedTuple):
    """Tiles ``[BLOCK_M, block_n]`` of the kernel for Hopper; splits of the reduction, each of this number of steps."""

    block_n: int
    splits: int
    steps: int
    items: int
    programs: int


def _wgmma(mode: Mode, height: int, width: int, depth: int, most_splits: int, slowdown: float) -> WideConfig:
    """The tiles of ``[height, depth] @ [depth, width]``. Narrow ones load both operands for fewer products."""
    of = _figures(mode)
    rate = mode.gpu.rate(mode.itemsize) / mode.passes * of.share[mode.itemsize] / mode.gpu.multiprocessors
    found = []
    for block_n in _BLOCKS_N:
        if block_n > _BLOCKS_N[-1] and width <= block_n // 2:
            continue
        tiles = ceil(height, BLOCK_M) * ceil(width, block_n) * mode.batches
        all_steps = ceil(depth, BLOCK_K)
        step = slowdown * max(2 * BLOCK_M * BLOCK_K * block_n / (rate * of.block[block_n]), of.step)
        stored = BLOCK_M * block_n * 4 * mode.gpu.multiprocessors / mode.gpu.bandwidth
        counts = {1, *[min(ceil(mode.gpu.multiprocessors * k, tiles), most_splits, all_steps) for k in (1, 2, 3, 4)]}
        for wanted in counts:
            steps = ceil(all_steps, wanted)
            splits = ceil(all_steps, steps)
            waves = ceil(tiles * splits, mode.gpu.multiprocessors)
            partials = (2 * splits + 1) * mode.batches * height * width * 4 / mode.gpu.bandwidth if splits > 1 else 0.0
            programs = min(tiles * splits, mode.gpu.multiprocessors)
            config = WideConfig(block_n, splits, steps, tiles * splits, programs)
            found.append((waves * (steps * step + stored) + partials, config))
    return min(found)[1]


def ring_stages(mode: Mode, block_n: int, is_copied: bool) -> int:
    """Steps whose operands are in shared memory: those that are stored for three passes in two halves, a copied left one as it is."""
    most, halves = _figures(mode).most_stages, 2 if mode.passes == 3 else 1
    lines = BLOCK_M * (1 if is_copied else halves) + block_n * halves
    return min(most, most * (BLOCK_M + _BLOCKS_N[0]) * WORD // (lines * mode.itemsize))  # of the widest tile of float32


def multiply_config(mode: Mode) -> WideConfig:
    """The tiles of a multiply by the kernel for Hopper.

    Its steps depend on how x is loaded: as it lies, in rows that do not begin on 16 bytes, or in short runs of slices.
    """
    of, slowdown, run = _figures(mode), 1.0, mode.p if mode.after == 1 else mode.after
    if mode.passes == 3 and run % 4 == 0:
        slowdown = of.copied
    elif mode.itemsize == 4 and mode.after == 1 and mode.p % 4:
        slowdown = of.unaligned
    elif 1 < mode.after < BLOCK_K:
        slowdown = of.few
    return _wgmma(mode, mode.slices, mode.q, mode.p, 1, slowdown)


def gradient_config(mode: Mode) -> WideConfig:
    """The tiles and splits of a factor's gradient by the kernel for Hopper."""
    slowdown = _figures(mode).scattered if mode.is_scattered else 1.0
    return _wgmma(mode, mode.p, mode.q, mode.slices, mode.gpu.multiprocessors, slowdown)


def takes(dtype: torch.dtype, gpu: GPU) -> bool:
    """Whether the kernel multiplies this type on a GPU."""
    return gpu.has_wgmma and not dtype.is_complex and dtype.itemsize <= 4


def refusal(problem: Problem) -> str | None:
    """Why there is no launch at all."""
    return None if takes(problem.dtype, problem.gpu) else "takes a Hopper GPU, and float32 or half precision"


def offers(segment: Segment) -> list[Offer] | str:
    """One large factor."""
    if len(segment.ps) > 1 or max(segment.ps[0], segment.qs[0]) <= LEAST:
        return f"takes one factor that is wider than {LEAST}"
    launch = Launch((Step(0, 1, segment.ps[0], segment.qs[0]),), name)
    return [Offer.of(segment, name, quantities(segment.mode), launch)]


def quantities(mode: Mode) -> dict[str, float]:
    """Those of a multiply: of its tiles, of their steps, and of a result that is stored in rows, which takes longer than in columns."""
    config, depth, vector = multiply_config(mode), ceil(mode.p, BLOCK_K), VECTOR_BYTES // mode.itemsize
    turns, rounds = mode.rounds(config.items, 1)
    loaded = math.gcd(mode.p if mode.after == 1 else mode.after, vector)
    return mode.moves(
        BLOCK_M,
        rounds=turns * MICROSECOND,
        operations=mode.operating(2 * rounds * depth * BLOCK_K * BLOCK_M * config.block_n),
        tiles=mode.moving(rounds * BLOCK_M * (mode.p + config.block_n)),
        unaligned_steps=turns * depth * (vector / loaded - 1) * MICROSECOND,
        in_rows=mode.written if mode.after == 1 and not mode.to_front else 0.0,
    )


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """The launch of a step, which has no configurations to tune, and tile's, for a GPU without enough shared memory."""
    own = multiply_launch(problem.mode, problem.common, problem.factor_strides[0], problem.columns == 1)
    return (own, *tile.launch_configs(problem))


def multiply_launch(mode: Mode, common: Mapping[str, Any], factor_strides: tuple[int, int, int], is_fixed: bool) -> LaunchConfig:
    """The launch of a multiply, on (x, (factor,), z, y), alpha and beta.

    Args:
        mode: the multiply.
        common: arguments of every kernel of a multiply: see `LaunchProblem.common`.
        factor_strides: (B, P, Q).
        is_fixed: whether strides are a matter of the factors alone, so that the kernel may be compiled for them.
    """
    config = multiply_config(mode)
    batch, along_p, along_q = factor_strides
    strides = _in_use(mode, common["x_strides"], common)
    along_x, along_after = strides[3:]
    along_rows = _vector(along_after, (*strides[:4], mode.after), mode.itemsize)
    along_k = _vector(along_x, (*strides[:3], along_after), mode.itemsize)
    copied = (along_rows, 1) if along_rows > 1 else (1, math.gcd(along_k, mode.p))
    is_copied = _may_copy(mode, max(copied))
    return _launch(
        mode,
        config,
        (mode.slices, mode.q, mode.p),
        is_copied,
        {
            "left_strides": common["x_strides"],
            "right_strides": (batch, 0, 0, along_q, 0),
            "k_strides": (along_x, along_p),
            "z_strides": common["z_strides"],
            "out_strides": common["y_strides"],
            "IS_SLICES": (True, False, False, False),
            "ALONG_ROWS": (along_x != 1, along_p != 1),
            "VECTORS": (
                copied if is_copied else (1, along_k),
                (1, _vector(along_p, (batch, along_q), mode.itemsize)),
            ),
            "STRIDES": (along_x if is_fixed or along_x == 1 else -1, along_p),
            "DIVISOR": math.gcd(mode.p, BLOCK_K),
            "EPILOGUE": common["EPILOGUE"],
        },
        common,
    )


def gradient_offers(problem: GroupProblem) -> list[GradientOffer] | str:
    """The gradient of one factor."""
    if problem.is_fused:
        return SINGLE
    if not takes(problem.dtype, problem.gpu) or kernel() is None:
        return "takes a Hopper GPU, and float32 or half precision"
    return [GradientOffer(name, "wgmma_gradients", gradient_quantities(problem), problem, partial(gradient_launch, problem))]


def gradient_quantities(problem: GroupProblem) -> dict[str, float]:
    """Those of a factor's gradient: of its tiles, and of the steps of their splits."""
    mode = problem.mode
    config = gradient_config(mode)
    turns, rounds = mode.rounds(config.items, 1)
    products = mode.operating(2 * rounds * config.steps * BLOCK_K * BLOCK_M * config.block_n)
    return problem.moves(
        BLOCK_K,
        partial_sums=config.splits,
        rounds=turns * MICROSECOND,
        steps=turns * config.steps * MICROSECOND,
        scattered_steps=turns * config.steps * MICROSECOND if mode.is_scattered else 0.0,
        operations=products,
    )


def gradient_launch(problem: GroupProblem) -> GradientLaunch:
    """The launch of a factor's gradient, over splits of the slices."""
    from fastkron_py.kron.kernels.epilogues import epilogue_plain

    mode, addresses, (_, rows, before, after) = problem.mode, problem.addresses, problem.shape
    config = gradient_config(mode)
    size = mode.p * mode.q
    fastest = 4 if addresses["TAIL"] else 2 if addresses["HEAD"] else 1
    operands = (addresses["u_strides"], addresses["g_strides"])
    along = (operands[0][fastest], operands[1][fastest])
    runs = mode.after if mode.after % BLOCK_K == 0 else 1  # of slices, along which k goes
    used = [_in_use(mode, s, addresses) for s in operands]
    vectors = [_vector(s[fastest], (*s[:fastest], *s[fastest + 1 :], runs), mode.itemsize) for s in used]
    launch = _launch(
        mode,
        config,
        (mode.p, mode.q, mode.slices),
        addresses["TAIL"] and _may_copy(mode, vectors[0]),
        {
            "left_strides": operands[0],
            "right_strides": operands[1],
            "z_strides": _UNUSED,
            "out_strides": (size, mode.batches * size, 0, mode.q, 1),  # (B, splits, -, P, Q)
            "IS_SLICES": (False, True, False, True),
            "ALONG_ROWS": (mode.after == 1, mode.after == 1),
            "k_strides": along,
            "STRIDES": along,
            "VECTORS": tuple((1, v) for v in vectors),
            "DIVISOR": BLOCK_K if is_even(rows, before * after, BLOCK_K) else math.gcd(before * after, BLOCK_K),
            "EPILOGUE": epilogue_plain,
            "alpha": 0,
            "beta": 0,
        },
        addresses,
    )
    taken = (launch,), config.splits
    return GradientLaunch(*taken, lambda u, g, _, __, sums: (u, (g,), sums[1], sums[1]), takes_alpha=False, splits_first=True)


def _in_use(mode: Mode, strides: Sequence[int], slices: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Strides (B, L, before, mode, after), but 0 where there is one index: its stride, whatever it is, says nothing of alignment."""
    batch, row, before, along, after = strides
    return (batch if mode.batches > 1 else 0, row, before if slices["HEAD"] else 0, along, after if slices["TAIL"] else 0)


def _vector(along: int, others: Sequence[int], itemsize: int) -> int:
    """Neighbours that are one run at a multiple of their number, where they and all else have these strides."""
    return math.gcd(VECTOR_BYTES // itemsize, *others) if along == 1 else 1


def _may_copy(mode: Mode, run: int) -> bool:
    """Whether the left operand may be copied as it lies: in three passes, where neighbours are runs of 16 bytes."""
    return mode.passes == 3 and run * mode.itemsize == VECTOR_BYTES


def _launch(
    mode: Mode,
    config: WideConfig,
    sizes: tuple[int, int, int],
    is_copied: bool,
    arguments: dict[str, Any],
    slices: Mapping[str, Any],
) -> LaunchConfig:

    height, width, depth = sizes
    head, tail = slices["HEAD"], slices["TAIL"]
    fastest = slices["after"] if tail else slices["before"]
    three = mode.passes == 3
    arguments |= {
        "before": slices["before"],
        "after": slices["after"],
        "height": height,
        "width": width,
        "depth": depth,
        "steps_per_split": config.steps,
        "batches": mode.batches,
        "items": config.items,
        "WHERE": (head, tail, fastest % BLOCK_M == 0),
        "WHERE_K": (head, tail, fastest % BLOCK_K == 0),
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": config.block_n,
        "BLOCK_K": BLOCK_K,
        "GROUP": _figures(mode).group,
        "STAGES": ring_stages(mode, config.block_n, is_copied),
        "FLUSH": _figures(mode).flush if three else 0,
        "PRECISION": "half" if mode.itemsize == 2 else "split" if three else "cut",
        "IS_COPIED": is_copied,
        "REGISTERS": _REGISTERS_COPYING if is_copied else _REGISTERS,
        "num_warps": 4,
    }
    return LaunchConfig(kernel(), (config.programs,), arguments)
