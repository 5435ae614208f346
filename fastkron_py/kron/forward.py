"""Programs of a multiply on canonical operands, from its plan or from launches that were tuned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.canonical import PLAIN, Scale, lone_units, without_units
from fastkron_py.kron.families import missing, whole_row
from fastkron_py.kron.kernels import epilogues
from fastkron_py.kron.kernels.epilogues import AXPBY, SCALE, StoreEpilogue
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.planner import choose
from fastkron_py.kron.problem import LaunchProblem, Problem, Rows, add_launch, batch_stride
from fastkron_py.kron.tune.table import Choice, tuned
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import counts_host, families_in_force
from fastkron_py.runtime.builder import Builder


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
    return Rows(batch_stride(t), t.stride(1), 1)


def _addend(build: Builder, z: Tensor, epilogue: StoreEpilogue) -> tuple[Tensor, Rows]:
    """The form of z, of any strides: broadcast rows and columns are read in place where (n, R) has a constant stride, or z scales."""
    _, _, n, columns = z.shape
    if columns == 1:
        return z, Rows(batch_stride(z), z.stride(1), z.stride(2) if n > 1 else 0)
    if n == 1 or z.stride(2) == columns * z.stride(3):
        return z, Rows(batch_stride(z), z.stride(1), z.stride(3))
    if epilogue.scales_by is not None:
        return z, Rows(batch_stride(z), z.stride(1), z.stride(2), z.stride(3))
    z = build.contiguous(z)
    return z, rows_of(z)


def launch_problem(
    problem: Problem, launch: Launch, shape: tuple[int, int, int, int], mode_stride: int, x: Rows, y: Rows, final: bool
) -> LaunchProblem:
    """One launch of a multiply, from x to y; the final one scales, and adds z.

    Shape and mode_stride are those of `LaunchProblem`.
    """
    z = problem.z if final else None
    span = slice(launch.start, launch.stop)
    return LaunchProblem(
        problem.dtype,
        problem.precision,
        problem.gpu,
        shape,
        launch,
        problem.epilogue if z is not None and problem.epilogue else SCALE if final and problem.scaled else epilogues.PLAIN,
        mode_stride if mode_stride > 1 else 0,
        problem.shape[3],
        x,
        y,
        y if z is None else z,
        tuple([(s[-2], s[-1]) for s in problem.factor_shapes[span]]),
        tuple([(s[0] if shape[0] > 1 else 0, s[1], s[2]) for s in problem.factor_strides[span]]),
        problem.conj,
    )


def launches_of(problem: Problem, choice: Choice | None) -> list[LaunchProblem]:
    """The launches of a multiply, in the order in which they run: those of a tuned choice, or of the plan."""
    launches, places, transposed, *_ = choose(problem, () if choice is None else choice.launches)
    (groups, rows, *_), found, x = problem.shape, list[LaunchProblem](), problem.x
    for launch, (before, after) in zip(launches, places, strict=True):
        width = before * launch.q * after
        y = Rows(rows * width if groups > 1 else 0, width, 1)
        found.append(launch_problem(problem, launch, (groups, rows, before, after), transposed * before, x, y, launch is launches[-1]))
        x = y
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
) -> Problem:
    """The problem of a multiply of x ``[B, L, K, R]``, contiguous in (K, R), by some of the factors, which may all be conjugate views."""
    shapes, strides = tuple([f.shape for f in factors]), tuple([f.stride() for f in factors])
    conj = factors[0].is_conj()
    start, stop, sizes = part or Part(0, len(factors), tuple([f.shape[1] for f in factors]))
    gpu, (batches, rows, width, columns) = devices.gpu_of(device), x.shape
    return Problem(
        x.dtype,
        precision,
        gpu,
        (batches, rows, width, columns),
        rows_of(x),
        z,
        shapes,
        strides,
        start,
        stop,
        sizes,
        scaled,
        conj,
        epilogue=epilogue,
        families=families_in_force.get(),
        missing=missing(x.dtype, gpu),
        counts_host=counts_host(),
    )


def with_whole_rows(problem: Problem, is_aligned: Callable[[], bool]) -> Problem:
    """The problem of a program's x, whose rows may be copied whole; x's address is looked at only where that can matter."""
    return replace(problem, whole_rows=True) if whole_row.may_take(problem) and is_aligned() else problem


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
    problem = with_whole_rows(problem, lambda: build.is_aligned(x))
    launches = launches_of(problem, None if problem.families else tuned(problem, build.device))
    may_move = part is None and x.dtype != torch.float16  # where the product of two entries may overflow
    units = lone_units([(made.launch.start, made.launch.stop) for made in launches], factors) if may_move else []
    others = without_units(build, factors, units, x.numel()) if units else None
    if others is not None:
        return add_multiply(build, x, others, precision, scale, z, out, epilogue=epilogue)
    for made in launches:
        is_last = made is launches[-1]
        x = add_launch(build, made, x, factors, z if is_last else None, out if is_last else None, scale)
    return x
