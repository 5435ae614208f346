"""Programs of backward passes: gradients of a Kronecker multiply in canonical form, and multiplies that save an intermediate for them.

For each group of factors, in the order of least time (`plan.gradients`): its input u, which is x with the later groups applied, and its
incoming gradient g, which is dy with the earlier ones applied backwards, give the group's factor gradients and the next group's g. The
next g takes u's place in memory where u was made here. A family of kernels (`kron.families`) computes a group's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kron.canonical import PLAIN, Canonical, Scale
from fastkron_py.kron.families import missing
from fastkron_py.kron.forward import Part, add_multiply, mergeable, rows_of
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.kernels.gradients import _split_gradient_kernel
from fastkron_py.kron.matmul_step import add_gradient
from fastkron_py.kron.plan.gradients import Cut, best_order, bids, find_cut, gradient_plan, part_of
from fastkron_py.kron.plan.steps import GradientLaunch
from fastkron_py.kron.problem import Problem, contiguous_problem
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.program import Scalar
from fastkron_py.tiling.products import sum_launcher

# Intermediates that may be alive at once, besides x, the result and their gradients: as many elements as this number of the larger of x
# and the result.
_KEPT: Final = 2


# ---- the gradients of one group ------------------------------------------------------------------


class _Partials:
    """A step's partial sums ``[B, count, P, Q]`` (in these strides), and how they become gradients of its factors."""

    def __init__(self, problem: GroupProblem, start: int, stop: int, made: GradientLaunch) -> None:
        self.start, self.stop = start, stop  # within the group
        self.groups = problem.shape[0]
        self.shapes = problem.factor_shapes[start:stop]
        self.p, self.q = (math.prod(s[i] for s in self.shapes) for i in (0, 1))
        self.needs = problem.need_factors[start:stop]
        self.transposed = [s[1] == 1 and s[2] != 1 for s in problem.factor_strides[start:stop]]  # gradients lie in memory as factors do
        self.dtype = problem.gradient_dtype
        self.wide = torch.promote_types(problem.dtype.to_real(), torch.float32)
        self.parts = problem.parts
        size = self.p * self.q * self.parts
        self.count = made.sums
        self.shape: tuple[int, ...] = (self.count, self.groups, size) if made.splits_first else (self.groups, self.count, size)
        if self.count == 1:
            self.shape = (self.groups, self.p, self.q * self.parts)
        self.sum = sum_launcher(size, self.count, self.groups, made.splits_first, self.q if self._stores_transposed else 0)
        self.split = self._split(problem) if stop - start > 1 else None

    def _split(self, problem: GroupProblem) -> Launcher:
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
            "factor_strides": problem.factor_strides[self.start : self.stop],
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
        if self.count == 1 and dtype == self.wide and isinstance(alpha, int):
            return partial
        total = build.empty(shape, dtype)
        build.launch(self.sum, (partial, total), (alpha,))
        return total


def add_group(
    build: Builder, problem: GroupProblem, u: Tensor, g: Tensor, factors: Sequence[Tensor], dx: Tensor | None, alpha: Scalar | int
) -> list[Tensor | None]:
    """Gradients of a group's factors, which lie in memory as the factors do, by the best offer; dx, if there is one, is written."""
    if problem.is_transposed:
        (df,) = add_group(build, problem.swapped(), g, u, [f.mT for f in factors], None, alpha)
        return [None if df is None else df.mT]
    return add_gradients(build, problem, bids(problem)[0].launch(), u, g, factors, dx, alpha)


def add_gradients(
    build: Builder,
    problem: GroupProblem,
    made: GradientLaunch,
    u: Tensor,
    g: Tensor,
    factors: Sequence[Tensor],
    dx: Tensor | None,
    alpha: Scalar | int,
) -> list[Tensor | None]:
    """The same by a launch."""
    if not made.configs:
        batches, _, _, after = problem.shape
        u, g = (build.reshape(t, (batches, -1, size, after)) for t, size in zip((u, g), problem.sizes, strict=True))
        return [add_gradient(build, u, g, alpha, made.algorithm, problem.precision, problem.gradient_dtype)]
    steps = [_Partials(problem, *s, made) if any(problem.need_factors[slice(*s)]) else None for s in problem.steps]
    partials = [None if step is None else step.empty(build) for step in steps]
    unused = u  # where a kernel writes nothing
    targets = tuple([unused if t is None else t for t in partials])
    operands = made.operands(u, g, tuple(factors), unused if dx is None else dx, targets)
    build.launch(Launcher(made.configs), operands, (alpha,) if made.takes_alpha else ())
    found: list[Tensor | None] = [None] * len(factors)
    for step, partial in zip(steps, partials, strict=True):
        if step is not None and partial is not None:
            mine = slice(step.start, step.stop)
            found[mine] = step.add(build, partial, factors[mine], alpha)
    return found


# ---- the tensors of a pass -----------------------------------------------------------------------


class _Pass:
    """One backward pass, which takes factors in some order.

    Groups count factors in this order. The factors of a group are neighbours in x as well.
    """

    def __init__(
        self,
        build: Builder,
        dy: Tensor,
        x: Tensor,
        factors: Sequence[Tensor],
        precision: str,
        order: Sequence[int],
        gradient_dtype: torch.dtype,
    ) -> None:
        """Begin.

        Args:
            build: of the program.
            dy: ``[B, L, N, R]``, and `mergeable`.
            x: ``[B, L, K, R]``, and `mergeable`.
            factors: ``[B, P_i, Q_i]``.
            precision: as in `add_multiply`.
            order: the factors' numbers.
            gradient_dtype: of the factors' gradients.
        """
        self.build, self.x, self.factors, self.precision, self.order = build, x, factors, precision, order
        self.gradient_dtype = gradient_dtype
        self.adjoint = [f.mH for f in factors]
        self.ps, self.qs = tuple([factors[i].shape[1] for i in order]), tuple([factors[i].shape[2] for i in order])
        self.g = dy
        self.done = 0  # modes of g before this one have been multiplied back
        self.kept: dict[int, Tensor] = {len(factors): x}  # x with the factors from this one on applied

    def input_of(self, stop: int, later: Sequence[int]) -> tuple[Tensor, bool]:
        """Compute x with the factors from stop on applied; also returned is whether it was made here, and is not x itself.

        On the way the inputs of some groups that come later are kept, as many as memory is meant for.

        Args:
            stop: where the factors begin.
            later: the same of each later group whose input will be wanted, ascending.
        """
        ancestor = min(i for i in self.kept if i >= stop)
        used = [self._width(stop), *[self._width(i) for i in self.kept if i < len(self.factors)]]
        room = _KEPT * max(self._width(0), self._width(len(self.factors))) - sum(used)
        if self.done > 0:
            room -= math.prod(self.ps[: self.done] + self.qs[self.done :])
        stations = [stop]
        for i in later:
            if i < ancestor and self._width(i) <= room:
                stations.append(i)
                room -= self._width(i)
        u = self.kept[ancestor]
        for to, since in reversed(list(pairwise([*stations, ancestor]))):
            if to < since:
                u = self._multiply(u, self.factors, to, since, self.ps[:since] + self.qs[since:])
            if to != stop:
                self.kept[to] = u
        made = stop < len(self.factors)
        if made:
            self.kept.pop(stop, None)
        return u, made

    def _width(self, start: int) -> int:
        """Elements of a row of x with the factors from this one on applied."""
        return math.prod(self.ps[:start] + self.qs[start:])

    def _in_place(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of modes in this order, as they lie in memory."""
        return [size for _, size in sorted(zip(self.order, sizes, strict=True))]

    def _multiply(
        self,
        t: Tensor,
        factors: Sequence[Tensor],
        start: int,
        stop: int,
        sizes: Sequence[int],
        scale: Scale = PLAIN,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply modes start to stop, by runs of neighbours in memory, narrowing ones first; the last run scales, and writes to out."""
        widths = self._in_place(sizes)
        runs: list[list[int]] = []
        for i in sorted(self.order[start:stop]):
            if runs and runs[-1][-1] + 1 == i:
                runs[-1].append(i)
            else:
                runs.append([i])
        runs.sort(key=lambda run: math.prod(factors[i].shape[2] / factors[i].shape[1] for i in run))
        for run in runs:
            part, is_last = Part(run[0], run[-1] + 1, tuple(widths)), run is runs[-1]
            t = add_multiply(self.build, t, factors, self.precision, scale if is_last else PLAIN, out=out if is_last else None, part=part)
            widths[run[0] : run[-1] + 1] = [factors[i].shape[2] for i in run]
        return t

    def carry_back(self, to: int, scale: Scale = PLAIN, out: Tensor | None = None) -> None:
        """Multiply g's modes up to this one back, into out if it is given."""
        if to > self.done:
            self.g = self._multiply(self.g, self.adjoint, self.done, to, self.ps[: self.done] + self.qs[self.done :], scale, out)
            self.done = to

    def problem(self, group: Group, u: Tensor, need_x: bool, need_factors: Sequence[bool], scaled: bool) -> GroupProblem:
        """The group's problem."""
        groups, rows, _, columns = self.x.shape
        span = slice(group.start, group.stop)
        mine, widths = self.order[span], self._in_place(self.ps[: group.stop] + self.qs[group.stop :])
        strides = [self.factors[i].stride() for i in mine]
        return GroupProblem(
            u.dtype,
            self.precision,
            devices.gpu_of(self.build.device),
            (groups, rows, math.prod(widths[: mine[0]]), math.prod(widths[mine[-1] + 1 :]) * columns),
            group.split - group.start,
            group.fused,
            rows_of(u),
            rows_of(self.g),
            tuple(zip(self.ps[span], self.qs[span], strict=True)),
            tuple([(batch if groups > 1 else 0, *rest) for batch, *rest in strides]),  # of one batch torch has any
            need_x,
            tuple(need_factors[span]),
            scaled,
            self.gradient_dtype,
        )


# ---- the program ---------------------------------------------------------------------------------


def _problem(x: Tensor, factors: Sequence[Tensor], precision: str, device: torch.device) -> Problem:
    """The problem of the plan: x is ``[B, L, K, R]``, in memory or not, and taken as contiguous."""
    shapes, gpu, (groups, rows, _, columns) = [(f.shape[1], f.shape[2]) for f in factors], devices.gpu_of(device), x.shape
    return contiguous_problem(shapes, groups * rows, columns, x.dtype, gpu, precision, missing=missing(x.dtype, gpu))


def _groups(problem: Problem, need_factors: Sequence[bool]) -> tuple[list[Group], list[int]]:
    """The groups that hold a wanted factor, in the order in which they are taken, and the factors' numbers in that order.

    Factors outside of the first and the last wanted one are multiplied only.
    """
    wanted = [i for i, need in enumerate(need_factors) if need]
    first, stop, count = wanted[0], wanted[-1] + 1, len(need_factors)
    if len(wanted) == count:
        return best_order(gradient_plan(problem), problem)
    widths = [p if i < first else q for i, (p, q) in enumerate(problem.shapes)]
    plan = gradient_plan(part_of(problem, first, stop, widths))
    moved = [Group(g.start + first, g.split + first, g.stop + first, g.fused) for g in plan]
    return [g for g in moved if any(need_factors[g.start : g.stop])], list(range(count))


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
    taken: list[tuple[int, GroupProblem]] | None = None,
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
        taken: a list of groups to which these are added, each with its first factor, for plans that are printed.

    Returns:
        dx ``[B, L, K, R]`` or None, and each dF_i ``[B, P_i, Q_i]`` or None.
    """
    need_x, *need_factors = needs
    count = len(factors)
    gradients: list[Tensor | None] = [None] * count
    if not any(need_factors):
        return (add_multiply(build, dy, [f.mH for f in factors], precision, scale, out=out) if need_x else None), gradients
    groups, order = _groups(_problem(x, factors, precision, build.device), need_factors)
    state = _Pass(build, mergeable(build, dy), mergeable(build, x), factors, precision, order, dtype)
    needed = [need_factors[i] for i in order]
    for i, group in enumerate(groups):
        state.carry_back(group.start)
        u, made = state.input_of(group.stop, [later.stop for later in groups[i + 1 :]])
        numbers = order[group.start : group.stop]
        mine = slice(numbers[0], numbers[-1] + 1)
        go_on = need_x or i + 1 < len(groups)
        final = need_x and group.stop == count
        problem = state.problem(group, u, go_on and group.fused, needed, group.fused and final and not scale.is_one)
        if taken is not None:
            taken.append((numbers[0], problem))
        dx = None
        if problem.need_x:  # in the memory of an input that was made for it, unless this is the last one
            dx = out if final and out is not None else u if made else build.empty(u.shape, u.dtype)
        gradients[mine] = add_group(build, problem, u, state.g, factors[mine], dx, scale.alpha)
        if dx is not None:
            state.g, state.done = dx, group.stop
    if not need_x:
        return None, gradients
    if state.done < count:
        state.carry_back(count, scale, out)
    return state.g, gradients


# ---- a multiply as two, whose intermediate is saved ----------------------------------------------


def cut_of(problem: Canonical, device: torch.device) -> Cut | None:
    """How a multiply is cut if a gradient is wanted; None if it is not, or if cutting would copy x.

    The precision of float32 products makes no difference: torch's setting may be another one when the backward pass runs.

    Args:
        problem: of Triton's backend.
        device: of all tensors.
    """
    is_one = problem.x.shape[0] == 1 and len(problem.factors) > 1 and problem.x.is_contiguous()
    return find_cut(_problem(problem.x, problem.factors, "highest", device)) if is_one else None


def add_multiply_saving(
    build: Builder, problem: Canonical, cut: Cut, precision: str, scale: Scale, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(The result, the intermediate) as parts of a program; arguments are those of `add_multiply`."""
    first, second = (problem.factors[span] for span in cut.spans)
    between = add_multiply(build, build.reshape(problem.x, cut.first.shape), first, precision)
    between = build.reshape(between, cut.first.result_shape)
    operand, addend = build.reshape(between, cut.second.shape), None if z is None else build.reshape(z, cut.second.result_shape)
    return add_multiply(build, operand, second, precision, scale, addend), between


def add_backward_saved(
    build: Builder,
    problem: Canonical,
    cut: Cut,
    tensors: tuple[Tensor, Tensor],
    needs: Sequence[bool],
    precision: str,
    scale: Scale,
    dtype: torch.dtype,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of x and the factors.

    Args:
        build: of the program.
        problem: the multiply.
        cut: of it.
        tensors: the incoming gradient in canonical form, and the intermediate.
        needs: whether dx, and which factor gradients are needed.
        precision: of float32 products.
        scale: alpha.
        dtype: of the factor gradients.
    """
    dy, between = tensors
    factors, (need_x, *need_factors), (first, second) = problem.factors, needs, cut.spans
    need_between = need_x or any(need_factors[first])
    operands = build.reshape(dy, cut.second.result_shape), build.reshape(between, cut.second.shape)
    dbetween, dfs = add_backward(build, *operands, factors[second], (need_between, *need_factors[second]), precision, scale, dtype)
    found: list[Tensor | None] = [None] * len(factors)
    found[second] = dfs
    if dbetween is None:
        return None, found
    operands = build.reshape(dbetween, cut.first.result_shape), build.reshape(problem.x, cut.first.shape)
    dx, found[first] = add_backward(build, *operands, factors[first], (need_x, *need_factors[first]), precision, PLAIN, dtype)
    return None if dx is None else build.reshape(dx, problem.x.shape), found
