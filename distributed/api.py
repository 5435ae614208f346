"""`kron_matmul` and `kron_matmul_left` on blocks that are spread over a grid of ranks, and on DTensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fastkron_py.distributed.agreement import Agreement, refuse
from fastkron_py.distributed.call import Call, check_blocks, checked, row_groups
from fastkron_py.distributed.failures import REFUSALS
from fastkron_py.distributed.grid import ProcessGrid, grid_of_call
from fastkron_py.distributed.layout import way, widths
from fastkron_py.distributed.pipeline import Pipeline, explained, fit, free_memory
from fastkron_py.distributed.plan import FALLBACK, Plan, Problem
from fastkron_py.distributed.plan import plan as make_plan
from fastkron_py.distributed.replicated import Reduction, replicate, tied
from fastkron_py.distributed.transport.transfer import RowGroup, transport_of
from fastkron_py.functional import kron_matmul as local_kron_matmul
from fastkron_py.functional import kron_matmul_left as local_kron_matmul_left
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.into import in_blocks
from fastkron_py.kron.modes import filled, merged
from fastkron_py.kron.operators.algebra import matrices
from fastkron_py.kron.planner import IN_WHOLE, InBlocks

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
    recompute: bool = False,
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
            integer n stands for the identity I_n, which takes no multiply and has no gradient. One that comes first takes no exchange
            either, where each rank's block is made of whole slices of the other factors.
        grid: the ranks; needed for blocks, and taken from the mesh of a DTensor.
        alpha: scales the product: a number, or a 0-dimensional tensor, the same on every rank.
        beta: scales z, as alpha scales the product; other than 0 it needs z.
        z: added to the product: a block, or a DTensor, of the result's shape.
        precision: of float32 products, as in `fastkron_py.kron_matmul`.
        plan: stages and chunks; None chooses by `plan`.
        recompute: do without the stages' operands between forward and backward pass, and exchange again in the backward pass.
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
    return multiply(Call(x, factors, alpha, beta, z, precision, plan, recompute, reduction), grid)


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
    recompute: bool = False,
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
        recompute: as in `kron_matmul`.
        reduction: as in `kron_matmul`.

    Returns:
        This rank's block of the result ``[prod(P_i), M]``, or a DTensor placed as x is.

    Raises:
        TypeError: as in `kron_matmul`.
        ValueError: as in `kron_matmul`.
        CollectiveError: as in `kron_matmul`.

    Example:
        >>> grid = ProcessGrid()
        >>> rows, columns = grid.block((4096, 16))
        >>> x = torch.randn(rows.stop - rows.start, columns.stop - columns.start, device=grid.device)
        >>> y = kron_matmul_left([torch.ones(64, 64, device=grid.device) for _ in range(2)], x, grid=grid)
    """
    return multiply(Call(x, factors, alpha, beta, z, precision, plan, recompute, reduction, left=True), grid)


def multiply(given: Call, grid: Any) -> Tensor:
    """`kron_matmul` and `kron_matmul_left`, of arguments that have not been checked."""
    where = grid_of_call(given.x, grid)
    with where.control.alone(given.name):
        return _multiplied(given, where)


def _multiplied(given: Call, where: ProcessGrid) -> Tensor:
    x, left = given.x, given.left
    try:
        call = checked(given, where)
        able = _in_blocks(call)
    except REFUSALS as error:
        refuse(where, error)
    # Free memory goes along: a rank that ran out of it later would leave the others waiting in an exchange.
    # So does whether its launches read and write blocks: peers find parts accordingly.
    agreement = Agreement(where, call.description(), local=(*call.x.shape, free_memory(call.x), able.reads + 2 * able.writes))
    # Work without an exchange begins while the ranks hear of each other.
    factors = merged(call.factors)
    own = _own_factors(call, factors)
    y = None if own is None else _multiply(call, own, None)
    found = agreement.settle()
    m = check_blocks([sizes[:2] for sizes in found], where, call)
    if y is None:
        planned = call.plan or _planned(call.problem(m), where.shape, where.device.type)
        chosen = fit(planned, [sizes[2] for sizes in found], where.ranks)
        common = [found[rank][3] for rank in row_groups(where, left)[where.col if left else where.row]]
        y = _multiply(call, factors, chosen, InBlocks(all(c & 1 for c in common), all(c & 2 for c in common)))
    if not isinstance(x, DTensor):
        return y
    ps, qs = call.sizes
    size = (math.prod(ps), x.shape[1]) if left else (x.shape[0], math.prod(qs))
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=torch.Size(size), stride=(size[1], 1))


def _in_blocks(call: Call) -> InBlocks:
    """How this rank's products of whole rows can read and write columns, where a transport may take them over."""
    may_be = call.x.is_cuda if call.plan is None else call.plan.transport_model.multiplies
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
    details = way(problem.inner, problem.outer, (len(factors),), call.parts, True)
    if details.exchanges:
        return None
    stage = details.stages[0]
    return [widths(stage.offsets)[call.grid.row if call.left else call.grid.col] // stage.p, *factors[1:]]


def _multiply(call: Call, factors: list[Any], chosen: Plan | None, blocks: InBlocks = IN_WHOLE) -> Tensor:
    """This rank's block of the result of some factors; without a plan one rank has all that it takes."""
    grid, alpha, beta = call.grid, call.alpha, call.beta
    tensors = matrices(factors)
    shared = [*tensors, *[s for s in (alpha, beta) if isinstance(s, Tensor)]]
    if torch.is_grad_enabled() and any([s.requires_grad for s in shared]):
        shared = replicate(shared, grid.group, grid.device, call.reduction)
    factors, scalars = filled(factors, shared), iter(shared[len(tensors) :])
    alpha, beta = (next(scalars) if isinstance(s, Tensor) else s for s in (alpha, beta))
    x, z = call.x, call.z
    if chosen is None:
        x, alpha, beta, z, *factors = tied((x, alpha, beta, z, *factors))
    if chosen is None and call.left:
        own: Tensor = local_kron_matmul_left(factors, x, alpha=alpha, beta=beta, z=z, precision=call.precision)
        return own
    if call.left:
        x, z, factors = x.mT, None if z is None else z.mT, [f if is_identity(f) else f.mT for f in factors]
    y: Tensor
    if chosen is None:
        y = local_kron_matmul(x, factors, alpha=alpha, beta=beta, z=z, precision=call.precision)
    else:
        group = grid.col_group if call.left else grid.row_group
        transport, most = transport_of(chosen.transport), chosen.most_elements * x.element_size()
        channel = transport.open(grid, group, row_groups(grid, call.left), most)
        row_group = RowGroup(group, call.parts, grid.row if call.left else grid.col, channel, blocks)
        try:
            y = _run(Pipeline(chosen, row_group, factors, alpha, call.precision, call.name), x, call.recompute)
        except torch.OutOfMemoryError as error:
            raise explained(error, chosen) from error
        if z is not None:
            y = y + beta * z if isinstance(beta, Tensor) else torch.add(y, z, alpha=beta)
    return y.mT.contiguous() if call.left else y


def _run(pipeline: Pipeline, x: Tensor, recompute: bool) -> Tensor:
    if not (recompute and pipeline.is_recorded(x)):
        return pipeline.run(x)
    # Without early stop, which would leave exchanges half done.
    with set_checkpoint_early_stop(False):
        y: Tensor = checkpoint(pipeline.run, x, use_reentrant=False, preserve_rng_state=False)
    return y


@lru_cache(maxsize=PLANS)
def _planned(problem: Problem, shape: tuple[int, int], device: str) -> Plan:
    """The plan for ranks on devices of this type. The same on every rank: the rules know of nothing else."""
    if device == "cpu":  # multiplies and exchanges share the cores: chunks would only make them smaller
        return make_plan(problem, shape, chunks=1, transport=FALLBACK)
    return make_plan(problem, shape)
