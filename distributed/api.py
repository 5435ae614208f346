"""`kron_matmul` and `kron_matmul_left` on blocks that are spread over a grid of ranks, and on DTensors; and their checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fastkron_py.distributed.agreement import agree, refused_by_all
from fastkron_py.distributed.grid import ProcessGrid, as_operand, grid_of_call, own_block
from fastkron_py.distributed.layout import by_stages, chunk_offsets, widths
from fastkron_py.distributed.pipeline import Pipeline, fitting, free_memory
from fastkron_py.distributed.plan import DIRECT, FALLBACK, Plan, Problem
from fastkron_py.distributed.plan import plan as make_plan
from fastkron_py.distributed.replicated import REDUCTIONS, Reduction, replicate, tied
from fastkron_py.distributed.transport.packed import RowGroup
from fastkron_py.distributed.transport.peer_memory import open_slots
from fastkron_py.functional import kron_matmul as local_kron_matmul
from fastkron_py.functional import kron_matmul_left as local_kron_matmul_left
from fastkron_py.kron.checks import check_factor_shapes, check_tensors, factors_and_identities, is_identity, shape_of
from fastkron_py.kron.into import in_blocks
from fastkron_py.kron.modes import filled, merged
from fastkron_py.kron.operators.algebra import matrices
from fastkron_py.kron.planner import IN_WHOLE, InBlocks
from fastkron_py.runtime.checks import check_choice, check_precision, check_scalar, check_type
from fastkron_py.runtime.eager import transforms_active
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.precision import autocasted

PLANS: Final = 1024  # that are kept


def kron_matmul(
    x: Tensor,
    factors: Sequence[Tensor | int],
    *,
    grid: ProcessGrid | None = None,
    alpha: Any = 1.0,
    beta: Any = 0.0,
    z: Tensor | None = None,
    precision: str | None = None,
    plan: Plan | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """Multiply with a Kronecker product over many ranks: ``alpha * x @ (F1 (x) ... (x) FN) + beta * z``.

    Rank (r, c) of a grid holds block r of the rows and block c of the columns of x ``[M, K]``, of z and of the result
    ``[M, N]``, cut as torch.chunk cuts: into blocks of ``ceil(K / GK)`` columns, the last ones smaller or empty. Rows may be cut
    in any way. All ranks of the grid make the same call; one that cannot makes all of them raise its error.

    Gradients reach x, z, the factors, alpha and beta, in every order. Those of factors, alpha and beta are summed over all ranks,
    once; the loss is taken to be the sum of the ranks' losses on their blocks. In a module that DistributedDataParallel or fully_shard
    wraps, which average gradients over ranks, it is their mean: take ``reduction="mean"``, or factors learn faster than all else.

    Args:
        x: this rank's block ``[m, k]``, or a DTensor ``[M, K]`` placed ``[Shard(0), Shard(1)]`` on a mesh of two dimensions.
        factors: matrices ``[P_i, Q_i]``, the same on every rank (or DTensors, replicated), of x's dtype and device. A positive
            integer n is the identity I_n, which takes no work and has no gradient. If it comes first, and each rank's block has all
            fibers of the other factors, it takes no exchange either.
        grid: the ranks; needed for blocks, and taken from the mesh of a DTensor.
        alpha: scales the product: a number, or a 0-dimensional tensor, the same on every rank.
        beta: scales z, as alpha scales the product; other than 0 it needs z.
        z: added to the product: a block, or a DTensor, of the result's shape.
        precision: of float32 products, as in `fastkron_py.kron_matmul`.
        plan: stages and chunks; None chooses by `plan`.
        reduction: over the grid's ranks, of gradients of factors, alpha and beta: "sum", or "mean".

    Returns:
        This rank's block of the result, or a DTensor placed as x is.

    Raises:
        TypeError: an argument of the wrong type or dtype, on every rank.
        ValueError: shapes that do not fit each other or the grid, arguments that differ from rank to rank, or a plan for
            another problem; on every rank.
        CollectiveError: an exchange failed, since a rank has died or left; names the stage.

    Example:
        >>> grid = ProcessGrid()  # a row of blocks for each rank
        >>> f1, f2 = torch.ones(64, 64, device=grid.device), torch.ones(64, 64, device=grid.device)
        >>> x = torch.randn(16, 4096, device=grid.device)  # this rank's block
        >>> kron_matmul(x, [f1, f2], grid=grid).shape
        torch.Size([16, 4096])
    """
    return multiply(Call(x, factors, alpha, beta, z, precision, plan, reduction), grid)


def kron_matmul_left(
    factors: Sequence[Tensor | int],
    x: Tensor,
    *,
    grid: ProcessGrid | None = None,
    alpha: Any = 1.0,
    beta: Any = 0.0,
    z: Tensor | None = None,
    precision: str | None = None,
    plan: Plan | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """Multiply with a Kronecker product from the left over many ranks: ``alpha * (F1 (x) ... (x) FN) @ x + beta * z``.

    As `kron_matmul`, with rows and columns changing roles: blocks of rows are exchanged, among the ranks of a column of the grid,
    and columns may be cut in any way.

    Args:
        factors: matrices ``[P_i, Q_i]``, the same on every rank, or positive integers n for identities I_n.
        x: this rank's block of ``[prod(Q_i), M]``, or a DTensor placed ``[Shard(0), Shard(1)]``.
        grid: as in `kron_matmul`.
        alpha: scales the product.
        beta: scales z; other than 0 it needs z.
        z: added to the product; of the result's shape.
        precision: as in `fastkron_py.kron_matmul`.
        plan: of a Problem with left.
        reduction: as in `kron_matmul`.

    Returns:
        This rank's block of the result ``[prod(P_i), M]``, or a DTensor placed as x is.

    Raises:
        Exception: as in `kron_matmul`.

    Example:
        >>> grid = ProcessGrid()
        >>> rows, columns = grid.block((4096, 16))
        >>> x = torch.randn(rows.stop - rows.start, columns.stop - columns.start, device=grid.device)
        >>> y = kron_matmul_left([torch.ones(64, 64, device=grid.device) for _ in range(2)], x, grid=grid)
    """
    return multiply(Call(x, factors, alpha, beta, z, precision, plan, reduction, left=True), grid)


def multiply(given: Call, grid: Any) -> Tensor:
    """`kron_matmul` and `kron_matmul_left`, of arguments that have not been checked."""
    where = grid_of_call(given.x, grid)
    x, left = given.x, given.left
    with refused_by_all(where):
        call = checked(given, where)
        able = _in_blocks(call)
    # Free memory goes along: a rank that ran out of it later would leave the others waiting in an exchange.
    # So does whether its launches read and write blocks: peers find parts accordingly.
    found = agree(where, call.description(), local=(*call.x.shape, free_memory(call.x), able.reads + 2 * able.writes))
    m = _whole_rows([sizes[1 - call.axis] for sizes in found], call)
    factors = merged(call.factors)
    own = _own_factors(call, factors)
    if own is not None:
        y = _multiply(call, own, None)
    else:
        chosen = call.plan or fitting(_planned(call.problem(m), where.shape, where.device.type), [sizes[2] for sizes in found])
        common = [found[rank][3] for rank in _row_groups(call)[where.col if left else where.row]]
        y = _multiply(call, factors, chosen, InBlocks(all(c & 1 for c in common), all(c & 2 for c in common)))
    ps, qs = call.sizes
    return as_operand(y, x, (math.prod(ps), x.shape[1]) if left else (x.shape[0], math.prod(qs)))


def _in_blocks(call: Call) -> InBlocks:
    """How this rank's products of whole rows can read and write columns, where peer memory may carry them."""
    may_be = call.x.is_cuda if call.plan is None else call.plan.transport == DIRECT
    if not may_be or call.x.is_complex() or len(call.matrices) < len(call.factors):
        return IN_WHOLE
    ps, qs = call.sizes
    return in_blocks(*((qs, ps) if call.left else (ps, qs)), call.parts, call.x)


def _own_factors(call: Call, factors: list[Any]) -> list[Any] | None:
    """The factors that multiply this rank's block, where no rank needs another's; an identity that comes first is cut as blocks are."""
    if call.parts == 1:
        return factors
    if not is_identity(factors[0]) or not (call.plan is None or call.plan.is_local):
        return None
    problem = call.problem(0)
    steps = by_stages(*problem.sizes, (len(factors),), call.parts, True)
    if any(step.leg is not None for step in steps):
        return None
    return [widths(steps[0].offsets)[call.place] // steps[0].p, *factors[1:]]


def _multiply(call: Call, factors: list[Any], chosen: Plan | None, blocks: InBlocks = IN_WHOLE) -> Tensor:
    """This rank's block of the result of some factors; without a plan one rank has all that it takes."""
    grid, left, alpha, beta = call.grid, call.left, call.alpha, call.beta
    tensors = matrices(factors)
    shared = [*tensors, *[s for s in (alpha, beta) if isinstance(s, Tensor)]]
    if torch.is_grad_enabled() and any([s.requires_grad for s in shared]):
        shared = replicate(shared, grid.group, grid.device, call.reduction)
    factors, scalars = filled(factors, shared), iter(shared[len(tensors) :])
    alpha, beta = (next(scalars) if isinstance(s, Tensor) else s for s in (alpha, beta))
    x, z = call.x, call.z
    if chosen is None:
        x, alpha, beta, z, *factors = tied((x, alpha, beta, z, *factors))
        options = {"alpha": alpha, "beta": beta, "z": z, "precision": call.precision}
        return local_kron_matmul_left(factors, x, **options) if left else local_kron_matmul(x, factors, **options)
    group, size = grid.col_group if left else grid.row_group, chosen.most_elements * x.element_size()
    slots = open_slots(grid, group, _row_groups(call), size) if chosen.is_direct else None
    factors = [f.mT if left and isinstance(f, Tensor) else f for f in factors]
    row_group = RowGroup(group, call.parts, call.place, blocks)
    y = Pipeline(chosen, row_group, factors, alpha, call.precision, call.name, slots).run(x.mT if left else x)
    y = y.mT.contiguous() if left else y
    return y if z is None else y + beta * z if isinstance(beta, Tensor) else torch.add(y, z, alpha=beta)


@lru_cache(maxsize=PLANS)
def _planned(problem: Problem, shape: tuple[int, int], device: str) -> Plan:
    """The plan for ranks on devices of this type. The same on every rank: the rules know of nothing else."""
    if device == "cpu":  # multiplies and exchanges share the cores: chunks would only make them smaller
        return make_plan(problem, shape, chunks=1, transport=FALLBACK)
    return make_plan(problem, shape)


# ---- the arguments --------------------------------------------------------------------------------


@dataclass
class Call:
    """The arguments of a call; once they are checked, this rank's plain tensors, with left still in the caller's orientation."""

    x: Tensor
    factors: Sequence[Tensor | int]
    alpha: Any = 1.0
    beta: Any = 0.0
    z: Tensor | None = None
    precision: str | None = None
    plan: Plan | None = None
    reduction: Reduction = "sum"
    left: bool = False
    grid: ProcessGrid = field(init=False)

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows and columns of the factors."""
        shapes = [shape_of(f) for f in self.factors]
        return tuple([p for p, _ in shapes]), tuple([q for _, q in shapes])

    @property
    def matrices(self) -> dict[int, Tensor]:
        """The factors that are no identities, by index."""
        return {i: f for i, f in enumerate(self.factors) if isinstance(f, Tensor)}

    @property
    def axis(self) -> int:
        """The dimension of x that factors multiply."""
        return 0 if self.left else 1

    @property
    def parts(self) -> int:
        """Over how many ranks that dimension is spread."""
        return self.grid.shape[self.axis]

    @property
    def place(self) -> int:
        """Which block of it this rank has."""
        return self.grid.row if self.left else self.grid.col

    @property
    def name(self) -> str:
        """The name of the public function."""
        return "kron_matmul_left" if self.left else "kron_matmul"

    def problem(self, m: int) -> Problem:
        """The product to plan, of a number of rows of x; with left of columns."""
        (ps, qs), matrices = self.sizes, self.matrices
        gradients = torch.is_grad_enabled() and (self.x.requires_grad or any([f.requires_grad for f in matrices.values()]))
        identities = tuple([i for i in range(len(ps)) if i not in matrices])
        return Problem(m, ps, qs, self.x.dtype, self.left, gradients, identities)

    def description(self) -> dict[str, Any]:
        """The arguments that must be the same on every rank."""
        shared = [*[(f"factors[{i}]", f) for i, f in enumerate(self.factors)], ("alpha", self.alpha), ("beta", self.beta)]
        return {
            "call": self.name,
            "dtype of x": str(self.x.dtype),
            "shapes of factors": [shape_text(f) for f in self.factors],
            # Of a tensor only that it is one: its value may be on a GPU.
            **{name: "a tensor" if isinstance(s, Tensor) else str(s) for name, s in shared[-2:]},
            "z": "none" if self.z is None else "a tensor",
            "precision": self.precision,
            "plan": None if self.plan is None else [self.plan.cuts, self.plan.chunks, self.plan.transport],
            "reduction": self.reduction,
            "arguments that need gradients": in_need([("x", self.x), ("z", self.z), *shared]),
            "under a transform of torch.func": transforms_active(),
            **checksums(self.grid, shared),
        }


def in_need(named: Sequence[tuple[str, Any]]) -> list[str]:
    """The names of the tensors that need gradients, among arrays and numbers."""
    return [name for name, t in named if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()]


def shape_text(factor: Any) -> Any:
    """A factor's shape, as ranks compare it: a list, or the integer itself."""
    return factor if is_identity(factor) else list(factor.shape)


def checksums(grid: ProcessGrid, named: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """For ranks to compare, where the grid checks factors: checksums of the tensors among arrays and numbers."""
    return {f"values of {name}": _checksum(t) for name, t in named if isinstance(t, Tensor)} if grid.check_factors else {}


@torch.no_grad()
def _checksum(t: Tensor) -> str:
    """Of a tensor's values. Empty while a graph is captured, which cannot wait for a value."""
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return ""
    t = (t.detach() + 0).cpu().contiguous().view(-1)  # -0.0 is 0.0, and lazy conjugations are carried out
    return blake2b(t.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def checked(given: Call, grid: ProcessGrid) -> Call:
    """Make the checks that need one rank alone."""
    x, plan = given.x, given.plan
    listed = [_plain_factor(f, i, x) for i, f in enumerate(grid_factors(given.factors))]
    z, local = _plain_z(given.z, x), own_block("x", x)
    check_precision(given.precision)
    check_type("plan", plan, Plan | None, "a Plan or None")
    check_choice("reduction", given.reduction, REDUCTIONS)
    if isinstance(local, Tensor):
        local, listed, z = autocasted(local, listed, z)
    check_tensors(local, listed, z, ("x", "factors", "z"), identities=True)
    alpha, beta = (check_scalar(name, scalar, local) for name, scalar in (("alpha", given.alpha), ("beta", given.beta)))
    if local.device != grid.device:
        raise value_error("x", f"a tensor on the grid's device {grid.device}", local.device)
    if local.ndim != 2:
        raise value_error("x", "a matrix", f"shape {tuple(local.shape)}")
    check_factor_shapes([shape_of(f) for f in listed])
    for i, f in enumerate(listed):
        if isinstance(f, Tensor) and (f.ndim != 2 or 0 in f.shape):
            raise value_error(f"factors[{i}]", "a matrix with rows and columns, without batch dimensions", f"shape {tuple(f.shape)}")
    if z is None and (isinstance(beta, Tensor) or beta != 0):
        raise value_error("z", "this rank's block of the result's shape, since beta is not 0", None)
    if not isinstance(beta, Tensor) and beta == 0:
        z = None
    call: Call = replace(given, x=local, factors=listed, alpha=alpha, beta=beta, z=z)
    call.grid = grid
    _check_own_block(call, x)
    if plan is not None:
        wanted, p = call.problem(0), plan.problem
        if (p.ps, p.qs, p.identities, p.left, plan.grid) != (wanted.ps, wanted.qs, wanted.identities, given.left, grid.shape):
            raise value_error("plan", f"a plan for {_plan_text(wanted, grid.shape)}", f"one for {_plan_text(p, plan.grid)}")
    return call


def _plan_text(problem: Problem, shape: tuple[int, int]) -> str:
    identities = f" with identities {problem.identities}" if problem.identities else ""
    return f"factors {problem.ps} x {problem.qs}{identities}, left={problem.left}, on a {shape[0]} x {shape[1]} grid"


def grid_factors(factors: Any, name: str = "factors") -> list[Any]:
    """The factors as a list that may have positive integers in it, for identities; a TypeError or ValueError says what is wrong."""
    listed = factors_and_identities(factors, name)
    for i, f in enumerate(listed):
        if is_identity(f) and f == 0:
            raise value_error(f"{name}[{i}]", "a matrix with rows and columns, or a positive integer n for the identity I_n", f)
    return listed


def _check_own_block(call: Call, whole: Any) -> None:
    """The widths of this rank's blocks of x and z, and of the DTensor that x may be a block of."""
    axis, parts, place, shape = call.axis, call.parts, call.place, list(call.x.shape)
    inner, outer = (math.prod(sizes) for sizes in (reversed(call.sizes) if call.left else call.sizes))
    block, side = widths(chunk_offsets(inner, parts))[place], ("rows", "columns")[axis]
    if shape[axis] != block:
        hint = ". Did you pass the full tensor?" if parts > 1 and shape[axis] == inner else ""
        expected = f"this rank's block of {block} {side} (block {place} of {parts}; {inner} {side} in total)"
        raise value_error("x", expected, f"shape {tuple(shape)}{hint}")
    shape[axis] = widths(chunk_offsets(outer, parts))[place]
    if call.z is not None and list(call.z.shape) != shape:
        raise value_error("z", f"this rank's block of the result, {tuple(shape)}", f"shape {tuple(call.z.shape)}")
    if isinstance(whole, DTensor) and whole.shape[axis] != inner:
        raise value_error("x", f"dimension {axis} of size {inner}, the product of the factors' sizes", tuple(whole.shape))


def _whole_rows(sizes: Sequence[int], call: Call) -> int:
    """How many rows of x (with left: columns) all row groups have, whose ranks hold the same ones. The same on every rank."""
    groups, grid = _row_groups(call), call.grid
    for group in groups:
        if len({sizes[r] for r in group}) > 1:
            came = ", ".join(f"{sizes[r]} on rank {grid.ranks[r]}" for r in group)
            sides = "columns on all ranks of a column" if call.left else "rows on all ranks of a row"
            raise value_error("x", f"as many {sides} of the grid", came)
    return sum(sizes[group[0]] for group in groups)


def _row_groups(call: Call) -> list[list[int]]:
    """The grid's ranks that exchange with each other: its rows, or with left its columns."""
    gm, gk = call.grid.shape
    return [list(range(c, gm * gk, gk)) for c in range(gk)] if call.left else [list(range(r * gk, (r + 1) * gk)) for r in range(gm)]


def _plain_z(z: Any, x: Any) -> Any:
    """This rank's block of z."""
    if z is None or not (isinstance(z, DTensor) or isinstance(x, DTensor)):
        return z
    if not (isinstance(z, DTensor) and isinstance(x, DTensor)):
        raise type_error("z", "a DTensor where x is one, and a block where x is one", type_name(z))
    if z.device_mesh != x.device_mesh:
        raise value_error("z", f"a DTensor on x's mesh {x.device_mesh}", z.device_mesh)
    return own_block("z", z)


def _plain_factor(factor: Any, index: int, x: Any) -> Any:
    """A factor as this rank has it, all of it."""
    if not isinstance(factor, DTensor):
        return factor
    if isinstance(x, DTensor) and factor.device_mesh != x.device_mesh:
        raise value_error(f"factors[{index}]", f"a DTensor on x's mesh {x.device_mesh}", factor.device_mesh)
    if not all(p.is_replicate() for p in factor.placements):
        raise value_error(f"factors[{index}]", "a replicated DTensor, since every rank needs all of each factor", f"{factor.placements}")
    return factor.to_local(grad_placements=[Replicate()] * factor.device_mesh.ndim)
