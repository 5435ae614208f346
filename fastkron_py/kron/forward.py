"""The launches of a multiply on canonical operands: those of the plan, or those that were tuned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.canonical import PLAIN, Scale, lone_units, without_units
from fastkron_py.kron.families import torch_products, wgmma
from fastkron_py.kron.families.one_mode import WIDE, best_algorithm, has_choice, planned_seconds, takes_wgmma
from fastkron_py.kron.families.whole_row import takes_whole_rows
from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.kernels import epilogues
from fastkron_py.kron.kernels.epilogues import AXPBY, SCALE, StoreEpilogue
from fastkron_py.kron.launches import LaunchProblem, MultiplyProblem, Rows, launch_configs, mode_of, parts_of
from fastkron_py.kron.matmul_step import BY_TORCH, GemmStep, MatmulStep
from fastkron_py.kron.plan.plan import Place, places, plan, transposes
from fastkron_py.kron.plan.steps import HALF_VECTOR, Launch, PlanProblem
from fastkron_py.kron.tune.choice import Choice
from fastkron_py.kron.tune.table import tuned
from fastkron_py.runtime.backend import families_in_force
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import SECTOR_BYTES
from fastkron_py.runtime.launch import Launcher

MOST_ORDERED: Final = 4  # launches, whose orders are compared
WORTH_ORDERING: Final = 0.95  # of the modelled time of the plan's order,
WORTH_ORDERING_RUNS: Final = 0.85  # and where short runs are avoided, whose time is less certain


def is_mergeable(t: Tensor) -> bool:
    """Whether (n, R) of ``[B, L, n, R]`` is one run of memory."""
    _, _, n, columns = t.shape
    inner = columns == 1 or t.stride(3) == 1
    outer = n == 1 or t.stride(2) == columns
    return inner and outer


def mergeable(build: Builder, t: Tensor) -> Tensor:
    """Return t ``[B, L, n, R]`` itself if it is mergeable, else a copy."""
    return t if is_mergeable(t) else build.contiguous(t)


def rows_of(t: Tensor) -> Rows:
    """Strides of a tensor ``[B, L, n, R]`` whose dimensions (n, R) are contiguous."""
    return Rows(t.stride(0), t.stride(1), 1)


def _addend(build: Builder, z: Tensor, epilogue: StoreEpilogue) -> tuple[Tensor, Rows]:
    """Describe z, of any strides: broadcast rows and columns are read in place where (n, R) has a constant stride, or z scales."""
    _, _, n, columns = z.shape
    if columns == 1:
        return z, Rows(z.stride(0), z.stride(1), z.stride(2) if n > 1 else 0)
    if n == 1 or z.stride(2) == columns * z.stride(3):
        return z, Rows(z.stride(0), z.stride(1), z.stride(3))
    if epilogue.scales_by is not None:
        return z, Rows(z.stride(0), z.stride(1), z.stride(2), z.stride(3))
    z = build.contiguous(z)
    return z, rows_of(z)


class MultiplyLaunch(NamedTuple):
    """One launch of a multiply.

    Attributes:
        start: its factors are start to stop.
        stop: see start.
        shape: of its result.
        launcher: on x, its factors, z (the result where there is none) and the result, alpha and beta.
    """

    start: int
    stop: int
    shape: tuple[int, int, int, int]
    launcher: Launcher

    @property
    def fell_back(self) -> bool:
        """Whether the device has too little shared memory for the first configuration."""
        return self.launcher.fell_back

    def add(self, build: Builder, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, y: Tensor | None, scale: Scale) -> Tensor:
        """Add it to a program, from x to y, or to new memory; return the result."""
        y = build.empty(self.shape, x.dtype) if y is None else y
        build.launch(self.launcher, (x, tuple(factors[self.start : self.stop]), y if z is None else z, y), (scale.alpha, scale.beta))
        return y


Planned = MultiplyLaunch | MatmulStep | GemmStep


def plan_problem(problem: MultiplyProblem) -> PlanProblem:
    """The problem of a plan for this multiply."""
    groups, rows, _, columns = problem.shape
    before, after = math.prod(problem.sizes[: problem.start]), math.prod(problem.sizes[problem.stop :]) * columns
    return PlanProblem(
        problem.dtype.to_real().itemsize,
        groups * rows * before,
        after,
        kernels.has_chained(problem.device, problem.dtype),
        before,
        kernels.half_of(problem.device, problem.dtype),
        parts_of(problem.dtype),
        problem.whole_rows,
        kernels.has_small_factors(problem.device, problem.dtype, problem.precision),
        problem.families,
    )


def launch_problem(
    problem: MultiplyProblem,
    launch: Launch,
    shape: tuple[int, int, int, int],
    transposed: bool,
    mode_stride: int,
    x: Rows,
    y: Rows,
    final: bool,
) -> LaunchProblem:
    """The problem of one launch of a multiply, from x to y; the final one scales, and adds z.

    Shape and mode_stride are those of `LaunchProblem`; transposed holds for all launches.
    """
    z = problem.z if final else None
    groups, span = shape[0], slice(launch.start, launch.stop)
    return LaunchProblem(
        launch,
        problem.dtype,
        problem.precision,
        problem.epilogue if z is not None else SCALE if final and problem.scaled else epilogues.PLAIN,
        shape,
        transposed and mode_stride > 1,
        mode_stride,
        problem.shape[3] == 1,
        x,
        y,
        y if z is None else z,
        tuple([(s[-2], s[-1]) for s in problem.factor_shapes[span]]),
        tuple([(s[0] if groups > 1 else 0, s[1], s[2]) for s in problem.factor_strides[span]]),
        problem.device,
        problem.conj,
        problem.families,
    )


def _algorithm(problem: MultiplyProblem, launch: Launch, place: Place, final: bool) -> str:
    """The algorithm of a launch of the closed form: "kernels", "gemm", or one of `BY_TORCH`; the final one adds z."""
    if launch.stop - launch.start > 1:
        return "kernels"
    groups, rows, _, _ = problem.shape
    mode = mode_of((groups, rows, *place), launch.p, launch.q, problem.dtype, problem.precision, problem.device)
    mode = mode._replace(adds=final and problem.z is not None)
    is_alone = problem.stop - problem.start == 1
    if not has_choice(mode, is_alone, launch.family, problem.families):
        return "kernels"
    has_wgmma = kernels.has_wide(problem.device, problem.dtype) and (not problem.families or wgmma.name in problem.families)
    found = best_algorithm(mode, has_wgmma, launch.family, is_alone)
    if found == "gemm" and problem.epilogue is not AXPBY:  # that main loop adds z, and has no other epilogue
        found = best_algorithm(mode._replace(adds=False), has_wgmma, launch.family, is_alone)
    return found if found == "gemm" or found in BY_TORCH else "kernels"


def _in_order(problem: MultiplyProblem, launches: list[Launch]) -> list[Launch]:
    """The launches in the order of least time, where the plan's order may cost much; others as they are planned.

    The plan has those first that narrow most, which moves the fewest elements. Torch's products in float64 are bound by their
    operations, and some take longer where another mode stands. The kernel for Hopper, which takes float32, does not show it. With few
    columns, a launch of the last modes writes runs that are shorter than a sector, so that it should write few.
    """
    is_wide_alone = all([launch.stop - launch.start == 1 and min(launch.p, launch.q) > WIDE for launch in launches])
    (groups, rows, _, columns), itemsize = problem.shape, problem.dtype.itemsize
    has_short_runs = columns > 1 and columns * itemsize < SECTOR_BYTES
    is_double = problem.dtype in (torch.float64, torch.complex128) and is_wide_alone
    if not ((is_double or has_short_runs) and 2 <= len(launches) <= MOST_ORDERED and any([launch.p != launch.q for launch in launches])):
        return launches
    has_wide = kernels.has_wide(problem.device, problem.dtype)

    def seconds(order: Iterable[Launch]) -> float:
        total = 0.0
        for launch, place in zip(order, places(list(order), problem.sizes, columns, False), strict=True):
            mode = mode_of((groups, rows, *place), launch.p, launch.q, problem.dtype, problem.precision, problem.device)
            total += planned_seconds(launch, mode, has_wide)
        return total

    best = list(min(permutations(launches), key=seconds))
    worth = WORTH_ORDERING if is_double else WORTH_ORDERING_RUNS
    return best if seconds(best) < worth * seconds(launches) else launches


class ChosenLaunch(NamedTuple):
    """A launch of a multiply: its problem, its algorithm as of `_algorithm`, and a tuned configuration."""

    problem: LaunchProblem
    algorithm: str
    config: Any

    @property
    def family(self) -> str:
        """The family that multiplies: not always the one that planned it."""
        if self.algorithm != "kernels":
            return torch_products.name
        return wgmma.name if self.config is None and takes_wgmma(self.problem) else self.problem.launch.family


def choose_launches(problem: MultiplyProblem, choice: Choice | None) -> list[ChosenLaunch]:
    """The launches of a multiply, in the order in which they run, by a tuned choice or by the closed form.

    In a run over all modes from last to first each launch moves its modes to the front, which reads whole runs of
    memory and leaves them in order at the end; other runs multiply in place.
    """
    groups, rows, _, columns = problem.shape
    shapes = [(s[-2], s[-1]) for s in problem.factor_shapes]
    configs: Sequence[Any]
    if choice is None:
        mine = shapes[problem.start : problem.stop]
        planned = plan(tuple(p for p, _ in mine), tuple(q for _, q in mine), plan_problem(problem))
        launches = _in_order(problem, [launch.shifted(problem.start) for launch in planned])
        configs = [None] * len(launches)
    else:
        launches, configs = [one.as_launch(shapes) for one in choice.launches], [one.config for one in choice.launches]
    if problem.z is not None and problem.z.column is not None:  # the last modes last: see `Rows`
        pairs = sorted(zip(launches, configs, strict=True), key=lambda pair: pair[0].start)
        launches, configs = [launch for launch, _ in pairs], [config for _, config in pairs]
    in_place = places(launches, problem.sizes, columns, False)
    algorithms = [
        "kernels" if config is not None else _algorithm(problem, launch, place, launch is launches[-1])
        for launch, config, place in zip(launches, configs, in_place, strict=True)
    ]
    transposed = transposes(launches, len(shapes), columns) and set(algorithms) == {"kernels"}
    found, x = list[ChosenLaunch](), problem.x
    for i, (launch, (before, after)) in enumerate(zip(launches, places(launches, problem.sizes, columns, transposed), strict=True)):
        width = before * launch.q * after
        y = Rows(rows * width, width, 1)
        made = launch_problem(problem, launch, (groups, rows, before, after), transposed, before, x, y, i == len(launches) - 1)
        found.append(ChosenLaunch(made, algorithms[i], configs[i]))
        x = y
    return found


def launches_of(problem: MultiplyProblem, choice: Choice | None) -> list[Planned]:
    """The launches of a multiply as steps of a program."""
    columns, found = problem.shape[3], list[Planned]()
    chosen = choose_launches(problem, choice)
    for made, algorithm, config in chosen:
        launch, (groups, rows, before, after) = made.launch, made.shape
        shape = (groups, rows, before * launch.q * after // columns, columns)
        if algorithm == "gemm":
            found.append(GemmStep(launch.start, launch.stop, shape))
        elif algorithm == "kernels":
            found.append(MultiplyLaunch(launch.start, launch.stop, shape, Launcher(launch_configs(made, config))))
        else:
            epilogue = problem.epilogue if made is chosen[-1].problem else epilogues.PLAIN
            found.append(MatmulStep(launch.start, launch.stop, shape, after, algorithm, problem.precision, epilogue))
    return found


def multiply_problem(
    x: Tensor,
    factors: Sequence[Tensor],
    device: torch.device,
    precision: str,
    scaled: bool = False,
    z: Rows | None = None,
    part: Part | None = None,
    epilogue: StoreEpilogue = AXPBY,
) -> MultiplyProblem:
    """The problem of a multiply of x ``[B, L, K, R]``, contiguous in (K, R), by some of the factors, which may all be conjugate views."""
    shapes, strides = tuple([f.shape for f in factors]), tuple([f.stride() for f in factors])
    conj = factors[0].is_conj()
    start, stop, sizes = part or Part(0, len(factors), tuple([f.shape[1] for f in factors]))
    return MultiplyProblem(
        x.shape, rows_of(x), z, shapes, strides, start, stop, sizes, scaled, precision, x.dtype, device, conj, epilogue=epilogue
    )


def with_whole_rows(problem: MultiplyProblem, is_aligned: Callable[[], bool]) -> MultiplyProblem:
    """The problem of a program's x, whose rows may be copied whole; x's address is looked at only where that can matter."""
    if not kernels.has_whole_row(problem.device, problem.dtype) or problem.shape[3] > 1:
        return problem
    ps, qs = ([s[i] for s in problem.factor_shapes[problem.start :]] for i in (-2, -1))
    has_vectors = problem.x.batch % HALF_VECTOR == problem.x.row % HALF_VECTOR == 0
    return problem._replace(whole_rows=has_vectors and takes_whole_rows(ps, qs) and is_aligned())


class Part(NamedTuple):
    """Factors start to stop, where the modes of x have these sizes."""

    start: int
    stop: int
    sizes: tuple[int, ...]


def add_multiply(
    build: Builder,
    x: Tensor,
    factors: Sequence[Tensor],
    precision: str,
    scale: Scale = PLAIN,
    z: Tensor | None = None,
    out: Tensor | None = None,
    part: Part | None = None,
    epilogue: StoreEpilogue = AXPBY,
) -> Tensor:
    """``alpha * x (F1 (x) ... (x) FN) + beta * z`` by Triton, or, element by element, ``x (F1 (x) ... (x) FN)`` times or over z.

    Args:
        build: of the program.
        x: ``[B, L, K, R]``, not empty.
        factors: ``[B, P_i, Q_i]``, any strides; all of them conjugate views, or none.
        precision: "highest", "high" or "medium".
        scale: alpha and beta.
        z: ``[B, L, N, R]``, any strides, or None.
        out: where the result shall be, ``[B, L, N, R]``, contiguous; a new buffer if None.
        part: the factors to multiply with; all if None.
        epilogue: of the last launch, where there is a z: `epilogues.AXPBY`, `TIMES` or `OVER`.

    Returns:
        ``[B, L, N, R]``, contiguous.
    """
    x = mergeable(build, x)
    rows = None
    if z is not None:
        z, rows = _addend(build, z, epilogue)
    problem = multiply_problem(x, factors, build.device, precision, not scale.is_one, rows, part, epilogue)
    problem = problem._replace(families=families_in_force.get())
    problem = with_whole_rows(problem, lambda: build.is_aligned(x))
    launches = launches_of(problem, None if problem.families else tuned(problem, lambda: plan_problem(problem)))
    may_move = part is None and x.dtype != torch.float16  # where the product of two entries may overflow
    units = lone_units([(launch.start, launch.stop) for launch in launches], factors) if may_move else []
    others = without_units(build, factors, units, x.numel()) if units else None
    if others is not None:
        return add_multiply(build, x, others, precision, scale, z, out, epilogue=epilogue)
    for launch in launches:
        is_last = launch is launches[-1]
        x = launch.add(build, x, factors, z if is_last else None, out if is_last else None, scale)
    return x
