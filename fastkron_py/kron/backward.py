"""The launches of the backward pass: gradients of a Kronecker multiply in canonical form.

For each group of factors (`plan.gradient`), in the order of least time (`plan.gradient_order`): its input u, which is x with the later
groups applied, and its incoming gradient g, which is dy with the earlier ones applied backwards, give the group's factor gradients and
the next group's g. The next g takes u's place in memory where u was made here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron.backward_pass import Pass
from fastkron_py.kron.backward_problem import GradientProblem, numbers_of, shared_strides
from fastkron_py.kron.canonical import Scale
from fastkron_py.kron.families import wgmma
from fastkron_py.kron.families.wgmma import gradient_launch
from fastkron_py.kron.forward import add_multiply, mergeable
from fastkron_py.kron.fused_launches import fused_launch
from fastkron_py.kron.hopper.launch_config import ChainedLaunch, chained_launch
from fastkron_py.kron.kernels.factor_gradient import _factor_gradient_kernel, _split_gradient_kernel
from fastkron_py.kron.matmul_step import BY_TORCH, add_gradient
from fastkron_py.kron.plan.gradient import GradientConfig, Group, Numbers, gradient_config, gradient_plan
from fastkron_py.kron.plan.gradient_order import Whole, best_gradient_algorithm, best_order
from fastkron_py.kron.plan.steps import run_of
from fastkron_py.kron.problem import parts_of, passes_of
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import GPU, next_power_of_two
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.program import Scalar
from fastkron_py.tiling.products import arithmetic, sum_launcher


class _Partials:
    """A step's partial sums ``[B, programs, P, Q]`` (in these strides), and how they become gradients of its factors."""

    def __init__(self, problem: GradientProblem, start: int, stop: int, programs: int, programs_first: bool) -> None:
        self.start, self.stop = start, stop  # within the group
        self.groups = problem.around[0]
        self.shapes = problem.factor_shapes[start:stop]
        self.p, self.q = (math.prod(s[i] for s in self.shapes) for i in (0, 1))
        self.needs = problem.need_factors[start:stop]
        self.transposed = [s[1] == 1 and s[2] != 1 for s in problem.factor_strides[start:stop]]  # gradients lie in memory as factors do
        self.dtype = problem.gradient_dtype
        self.wide = torch.promote_types(problem.dtype.to_real(), torch.float32)
        self.parts = parts_of(problem.dtype)
        size = self.p * self.q * self.parts
        self.programs = programs
        self.shape: tuple[int, ...] = (programs, self.groups, size) if programs_first else (self.groups, programs, size)
        if programs == 1:
            self.shape = (self.groups, self.p, self.q * self.parts)
        self.sum = sum_launcher(size, programs, self.groups, programs_first, self.q if self._stores_transposed else 0)
        self.split = self._split(problem) if stop - start > 1 else None

    def _split(self, problem: GradientProblem) -> Launcher:
        """The launch that takes the factors' gradients from that of the step's product."""
        wanted = []
        for i, (p, q) in enumerate(self.shapes):
            inner = [math.prod(s[j] for s in self.shapes[i + 1 :]) for j in (0, 1)]
            outer = (self.p // p, self.q // q)
            if self.needs[i]:
                wanted.append(
                    (i, p, q, *inner, *outer, next_power_of_two(p * q), next_power_of_two(outer[0] * outer[1]), self.transposed[i])
                )
        arguments = {
            "factor_strides": tuple(shared_strides(s, self.groups) for s in problem.factor_strides[self.start : self.stop]),
            "SHAPES": self.shapes,
            "WANTED": tuple(wanted),
            "PARTS": self.parts,
            "num_warps": 8,
        }
        return Launcher([LaunchConfig(_split_gradient_kernel, (self.groups * len(wanted),), arguments)])

    @property
    def _stores_transposed(self) -> bool:
        """Whether the sums, of one factor, are stored transposed."""
        return len(self.shapes) == 1 and self.transposed[0] and self.parts == 1

    def empty(self, build: Builder) -> Tensor:
        """Room for the partial sums."""
        return build.empty(self.shape, self.wide)

    def add(self, build: Builder, partial: Tensor, factors: Sequence[Tensor], alpha: Scalar | int) -> list[Tensor | None]:
        """Each factor's gradient ``[B, P_i, Q_i]``, or None."""
        if self.split is None:
            df = self._added_up(build, partial, (self.groups, self.p, self.q), self.dtype, alpha)
            return [df.view(self.groups, self.q, self.p).mT if self._stores_transposed and df is not partial else df]
        total = self._added_up(build, partial, (self.groups, self.p, self.q * self.parts), self.wide, alpha)
        pairs = zip(self.needs, self.shapes, strict=True)
        found = [build.empty((self.groups, *shape), self.dtype) if need else None for need, shape in pairs]
        build.launch(self.split, (total, tuple(factors), tuple([t for t in found if t is not None])))
        stored = zip(found, self.shapes, self.transposed, strict=True)
        return [t.view(self.groups, q, p).mT if t is not None and is_transposed else t for t, (p, q), is_transposed in stored]

    def _added_up(self, build: Builder, partial: Tensor, shape: tuple[int, ...], dtype: torch.dtype, alpha: Scalar | int) -> Tensor:
        """The sum of the partial sums times alpha; a lone one is that sum."""
        if self.programs == 1 and dtype == self.wide and isinstance(alpha, int):
            return partial
        total = build.empty(shape, dtype)
        build.launch(self.sum, (partial, total), (alpha,))
        return total


class _Fused:
    """A group in one launch, and its second stage."""

    def __init__(self, problem: GradientProblem) -> None:
        split, stop = problem.group.split - problem.group.start, problem.group.stop - problem.group.start
        programs, launch_configs = fused_launch(problem)
        steps = ((0, split), (split, stop))
        self.steps = [_Partials(problem, *s, programs, False) if any(problem.need_factors[slice(*s)]) else None for s in steps]
        self.launch = Launcher(launch_configs)

    def add(
        self, build: Builder, u: Tensor, g: Tensor, factors: Sequence[Tensor], dx: Tensor | None, alpha: Scalar | int
    ) -> list[Tensor | None]:
        """Gradients of the group's factors; dx, if there is one, is written."""
        partials = tuple([None if step is None else step.empty(build) for step in self.steps])
        unused = u  # where a kernel writes nothing
        targets = tuple([unused if t is None else t for t in partials])
        build.launch(self.launch, (u, g, tuple(factors), unused if dx is None else dx, targets), (alpha,))
        found: list[Tensor | None] = []
        for step, partial in zip(self.steps, partials, strict=True):
            if step is not None and partial is not None:
                found += [None] * (step.start - len(found)) + step.add(build, partial, factors[step.start : step.stop], alpha)
        return found + [None] * (len(factors) - len(found))


class _Matmul:
    """The gradient of a wide factor by torch's matrix products."""

    def __init__(self, problem: GradientProblem, algorithm: str) -> None:
        ((self.p, self.q),), (self.batches, _, _, self.after) = problem.factor_shapes, problem.around
        self.precision, self.algorithm, self.dtype = problem.precision, algorithm, problem.gradient_dtype

    def add(self, build: Builder, u: Tensor, g: Tensor, factors: Sequence[Tensor], alpha: Scalar | int) -> list[Tensor | None]:
        """``[dF]``."""
        u, g = (build.reshape(t, (self.batches, -1, size, self.after)) for t, size in ((u, self.p), (g, self.q)))
        return [add_gradient(build, u, g, alpha, self.algorithm, self.precision, self.dtype)]


class _Wide:
    """The gradient of one factor too wide for a fused kernel."""

    def __init__(self, problem: GradientProblem, algorithm: str, chained: ChainedLaunch | None) -> None:
        groups = problem.around[0]
        ((p, q),) = problem.factor_shapes
        self.algorithm = algorithm
        if chained is not None:
            self.partials = _Partials(problem, 0, 1, chained.partials, False)
            self.launch = Launcher([chained.config])
            return
        addresses = problem.addresses
        if algorithm == "wgmma":
            launch_config, splits = gradient_launch(problem.mode, addresses)
            self.partials = _Partials(problem, 0, 1, splits, True)
            self.launch = Launcher([launch_config])
            return
        gpu = devices.gpu_of(problem.device)
        itemsize, parts = numbers_of(problem.dtype)
        config = gradient_config(parts * p, parts * q, itemsize, addresses["num_slices"], groups, gpu)
        self.partials = _Partials(problem, 0, 1, config.splits, True)
        compute, acc, precision = arithmetic(problem.dtype, problem.precision, True)
        common = {**addresses, "P": p, "Q": q, "COMPUTE": compute, "ACC": acc, "PRECISION": precision, "PARTS": parts}
        blocks = math.ceil(parts * p / config.block_p) * math.ceil(parts * q / config.block_q)
        grid = (blocks * groups * config.splits,)
        self.launch = Launcher([self._launch_config(config, common, grid, groups, stages) for stages in (config.num_stages, 1)])

    @staticmethod
    def _launch_config(config: GradientConfig, common: dict[str, Any], grid: tuple[int], groups: int, num_stages: int) -> LaunchConfig:
        arguments = {
            **common,
            "slices_per_split": config.slices_per_split,
            "num_batches": groups,
            "BLOCK_S": config.block_s,
            "BLOCK_P": config.block_p // common["PARTS"],
            "BLOCK_Q": config.block_q // common["PARTS"],
            "RUN": run_of(common["before"], common["after"], config.block_s),
            "EVEN": common["num_slices"] % config.slices_per_split == 0,
            "num_warps": config.num_warps,
            "num_stages": num_stages,
        }
        return LaunchConfig(_factor_gradient_kernel, grid, arguments)

    def add(self, build: Builder, u: Tensor, g: Tensor, factors: Sequence[Tensor], alpha: Scalar | int) -> list[Tensor | None]:
        """``[dF]``."""
        partial = self.partials.empty(build)
        if self.algorithm == "chained":
            build.launch(self.launch, (u, g, tuple(factors), u, (partial, partial)), (alpha,))
        elif self.algorithm == "wgmma":
            build.launch(self.launch, (u, (g,), partial, partial))
        else:
            build.launch(self.launch, (u, g, partial))
        return self.partials.add(build, partial, factors, alpha)


def _add_single(
    build: Builder, problem: GradientProblem, u: Tensor, g: Tensor, factors: Sequence[Tensor], alpha: Scalar | int
) -> list[Tensor | None]:
    """``[dF]`` of one factor too wide for a fused kernel, the fastest algorithm; it lies in memory as the factor does."""
    if problem.is_transposed:
        (df,) = _add_single(build, problem.swapped(), g, u, [f.mT for f in factors], alpha)
        return [None if df is None else df.mT]
    chained = chained_launch(problem)
    has_wgmma = wgmma.takes(problem.dtype, devices.gpu_of(problem.device)) and wgmma.kernel() is not None
    algorithm = "chained" if chained is not None else best_gradient_algorithm(problem.mode, has_wgmma)
    single = _Matmul(problem, algorithm) if algorithm in BY_TORCH else _Wide(problem, algorithm, chained)
    return single.add(build, u, g, factors, alpha)


def _groups(
    ps: tuple[int, ...], qs: tuple[int, ...], need_factors: Sequence[bool], numbers: Numbers, rows: int, columns: int, gpu: GPU
) -> list[Group]:
    """The groups that hold a wanted factor; factors outside of the first and the last one are multiplied only."""
    wanted = [i for i, need in enumerate(need_factors) if need]
    first, stop = wanted[0], wanted[-1] + 1
    shapes = tuple(zip(ps[first:stop], qs[first:stop], strict=True))
    plan = gradient_plan(shapes, numbers, rows * math.prod(ps[:first]), math.prod(qs[stop:]) * columns, gpu)
    moved = [Group(g.start + first, g.split + first, g.stop + first, g.fused) for g in plan]
    return [g for g in moved if any(need_factors[g.start : g.stop])]


def add_backward(
    build: Builder,
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    needs: Sequence[bool],
    precision: str,
    scale: Scale,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of ``alpha * x (F1 (x) ... (x) FN)`` by Triton, in torch's convention: dx is dy by the adjoint factors.

    Args:
        build: of the program.
        dy: ``[B, L, N, R]``.
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``.
        needs: whether dx, and which factor gradients are needed.
        precision: as in `add_multiply`.
        scale: alpha.
        dtype: of the factor gradients: x's, or float32 beside a half dtype.
        out: where dx shall be, ``[B, L, K, R]``, contiguous; a new buffer if None.

    Returns:
        dx ``[B, L, K, R]`` or None, and each dF_i ``[B, P_i, Q_i]`` or None.
    """
    need_x, *need_factors = needs
    count = len(factors)
    gradients: list[Tensor | None] = [None] * count
    if not any(need_factors):
        return (add_multiply(build, dy, [f.mH for f in factors], precision, scale, out=out) if need_x else None), gradients
    shapes = [(f.shape[1], f.shape[2]) for f in factors]
    ps, qs = (tuple([s[i] for s in shapes]) for i in (0, 1))
    gpu = devices.gpu_of(build.device)
    groups = _groups(ps, qs, need_factors, numbers_of(x.dtype), x.shape[0] * x.shape[1], x.shape[3], gpu)
    order = list(range(count))
    if all(need_factors):
        whole = Whole(tuple(shapes), x.shape[0] * x.shape[1], x.shape[3], numbers_of(x.dtype), passes_of(x.dtype, precision))
        groups, order = best_order(groups, whole, gpu)
    state = Pass(build, mergeable(build, dy), mergeable(build, x), factors, precision, order, dtype)
    needed = [need_factors[i] for i in order]
    for i, group in enumerate(groups):
        state.carry_back(group.start)
        u, made = state.input_of(group.stop, [later.stop for later in groups[i + 1 :]])
        numbers = order[group.start : group.stop]
        mine = slice(numbers[0], numbers[-1] + 1)
        go_on = need_x or i + 1 < len(groups)
        if not group.fused:
            gradients[mine] = _add_single(build, state.problem(group, u, False, needed, False), u, state.g, factors[mine], scale.alpha)
            continue
        final = need_x and group.stop == count
        fused = _Fused(state.problem(group, u, go_on, needed, final and not scale.is_one))
        dx = _place_of_dx(build, u, made, out if final else None) if go_on else None
        gradients[mine] = fused.add(build, u, state.g, factors[mine], dx, scale.alpha)
        if dx is not None:
            state.g, state.done = dx, group.stop
    if not need_x:
        return None, gradients
    if state.done < count:
        state.carry_back(count, scale, out)
    return state.g, gradients


def _place_of_dx(build: Builder, u: Tensor, made: bool, out: Tensor | None) -> Tensor:
    """Where a launch writes its product: out; the memory of an input that was made for it; or a new buffer."""
    if out is not None:
        return out
    return u if made else build.empty(u.shape, u.dtype)
