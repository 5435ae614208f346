"""Solving with ``K + shift * I`` on blocks: eigenvectors factor by factor, conjugate gradients, and derivatives of both.

For symmetric factors ``F_i = Q_i L_i Q_i^T`` the product is ``K = Q L Q^T`` with Kronecker products Q and L, so that
``(K + shift I)^-1 = Q (L + shift)^-1 Q^T``: two distributed multiplies and a scaling between them. Where some rows are
missing (a mask), this is no inverse any more, but a preconditioner for conjugate gradients.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastkron_py.distributed.api import kron_matmul_left
from fastkron_py.distributed.call import PLACEMENTS, checksums
from fastkron_py.distributed.group.agreement import agree, refuse
from fastkron_py.distributed.group.failures import REFUSALS, CollectiveError
from fastkron_py.distributed.group.grid import ProcessGrid
from fastkron_py.distributed.local import (
    Basis,
    LocalKroneckerProduct,
    Share,
    are_hermitian,
    check_square,
    eigenbasis,
    filled,
    kron_range,
    matrices,
    shape_of,
)
from fastkron_py.distributed.plan.layout import chunk_offsets
from fastkron_py.distributed.replicated import Reduction, all_reduce, from_first, replicate, total
from fastkron_py.runtime.checks import check_integer, check_scalar
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error

Eigen = tuple[Tensor, list[Tensor | int]]


class Solution(NamedTuple):
    """The result of conjugate gradients.

    Attributes:
        x: this rank's block of the solution, or a DTensor as b was.
        iterations: how many there were.
        residual: the largest over all columns of ``|b - A x| / |b|``, as the iteration has it.
    """

    x: Any
    iterations: int
    residual: float


@dataclass
class System:
    """``A = K + shift * I``, or with a mask ``M (K + shift I) M + (I - M)``, on this rank's block of rows.

    Attributes:
        grid: the ranks; rows are spread over its rows, columns of right-hand sides over its columns.
        factors: symmetric, ``[P_i, P_i]``, or integers for identities.
        shift: number or 0-dimensional tensor.
        mask: ``[rows, 1]`` of this rank's rows, 1 where there is an equation and 0 where there is none; None for all.
        tolerance: of conjugate gradients, relative.
        max_iter: of conjugate gradients.
        direct: without a mask, use eigenvectors alone.
        preconditioner: of conjugate gradients, a function of this rank's block in place of eigenvectors.
        eigen: this rank's eigenvalues of K ``[rows, 1]``, and the factors of the eigenvectors; None where nothing uses them.
        reduction: over the ranks, of gradients of factors and shift.
    """

    grid: ProcessGrid
    factors: list[Tensor | int]
    shift: Tensor | float
    mask: Tensor | None = None
    tolerance: float = 0.0
    max_iter: int = 0
    direct: bool = False
    preconditioner: Callable[[Tensor], Tensor] | None = None
    eigen: Eigen | None = None
    reduction: Reduction = "sum"
    iterations: int = 0
    residual: float = 0.0

    @property
    def matrices(self) -> list[Tensor]:
        """The factors that are no identities."""
        return matrices(self.factors)

    def apply(self, x: Tensor, matrices: Sequence[Tensor], shift: Tensor | float) -> Tensor:
        """``A x``, of other matrices in place of the factors that are no identities."""
        inside = x if self.mask is None else x * self.mask
        y = kron_matmul_left(filled(self.factors, matrices), inside, grid=self.grid, reduction=self.reduction) + shift * inside
        return y if self.mask is None else y * self.mask + x * (1 - self.mask)

    def precondition(self, r: Tensor) -> Tensor:
        """An approximation of ``A^-1 r``: without a mask the inverse itself."""
        if self.preconditioner is not None:
            return self._preconditioned(self.preconditioner, r)
        if self.eigen is None:
            return r
        inside = r if self.mask is None else r * self.mask
        values, vectors = self.eigen
        z = kron_matmul_left([q.mT if isinstance(q, Tensor) else q for q in vectors], inside, grid=self.grid)
        z = kron_matmul_left(vectors, z / (values + self.shift), grid=self.grid)
        return z if self.mask is None else z * self.mask + r * (1 - self.mask)

    def _preconditioned(self, function: Callable[[Tensor], Tensor], r: Tensor) -> Tensor:
        """A function of the caller's, whose errors on one rank all ranks raise."""
        try:
            z: Any = function(r)
            if not isinstance(z, Tensor) or (z.shape, z.dtype, z.device) != (r.shape, r.dtype, r.device):
                shown = f"{z.dtype} of shape {tuple(z.shape)} on {z.device}" if isinstance(z, Tensor) else type_name(z)
                raise value_error("preconditioner", f"a function to {r.dtype} of shape {tuple(r.shape)} on {r.device}, as its block", shown)
        except CollectiveError:
            raise
        except Exception as error:
            refuse(self.grid, error)
        agree(self.grid, {"call": "preconditioner"})
        return z

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b``, without derivatives. Notes iterations and the residual."""
        with torch.no_grad(), without_autocast(b.device):
            return self.precondition(b) if self.direct else self._conjugate_gradients(b)

    def _conjugate_gradients(self, b: Tensor) -> Tensor:
        x, r = torch.zeros_like(b), b.clone()
        z = self.precondition(r)
        p = z.clone()
        rz, start = self._dots((r, z), (r, r))
        ratio = _relative(start, start)
        self.iterations, self.residual = 0, self._worst(ratio)
        if not math.isfinite(self.residual):
            raise value_error("b", "finite numbers", "NaN or an infinity")
        while self.residual > self.tolerance and self.iterations < self.max_iter:
            ap = self.apply(p, self.matrices, self.shift)
            (curvature,) = self._dots((p, ap))
            active = (rz > 0) & (curvature > 0)
            broken = (ratio > self.tolerance) & ~active
            step = torch.where(active, rz / curvature, 0.0)
            x += step.to(b.dtype) * p
            r -= step.to(b.dtype) * ap
            z = self.precondition(r)
            before = rz
            rz, rr = self._dots((r, z), (r, r))
            p = z + torch.where(before > 0, rz / before, 0.0).to(b.dtype) * p
            self.iterations += 1
            ratio = _relative(rr, start)
            self.residual = self._worst(torch.where(broken, math.inf, ratio))
            if not math.isfinite(self.residual):
                shown = f"a direction of no positive curvature, or no number, in iteration {self.iterations}"
                raise value_error("factors, shift", "a positive definite K + shift I, and a positive definite preconditioner", shown)
        return x

    def _dots(self, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """Products of columns, ``[pairs, columns]`` in float64, summed over the ranks that hold rows of these columns."""
        sums = torch.stack([(a.double() * c.double()).sum(0) for a, c in pairs])
        all_reduce("conjugate gradients: dot products", sums, self.grid.col_group)
        return sums

    def _worst(self, residuals: Tensor) -> float:
        """The largest of all columns on all ranks, so that all stop together; not a number counts as infinite."""
        largest = residuals.nan_to_num(nan=math.inf, posinf=math.inf).amax() if residuals.numel() else residuals.new_zeros(())
        if self.grid.shape[1] > 1:
            all_reduce("conjugate gradients: largest residual", largest, self.grid.row_group, dist.ReduceOp.MAX)
        return float(largest)


def _relative(squares: Tensor, start: Tensor) -> Tensor:
    """Relative residuals; columns of b that are 0 have none, and those that are not finite NaN."""
    return torch.where(start == 0, 0.0, (squares / start).sqrt())


def eigen(factors: Sequence[Tensor | int], basis: Basis, grid: ProcessGrid) -> Eigen:
    """This rank's eigenvalues of K ``[rows, 1]``, and the factors of the eigenvectors, of the basis of the matrices among its factors."""
    offsets = chunk_offsets(math.prod([shape_of(f)[0] for f in factors]), grid.shape[0])
    values = kron_range(filled(factors, basis.values), offsets[grid.row], offsets[grid.row + 1])
    return values[:, None], filled(factors, basis.vectors)


def _check_symmetric(factors: Sequence[Tensor | int]) -> None:
    check_square(factors, "a solve with K + shift I")
    found = {i: f for i, f in enumerate(factors) if isinstance(f, Tensor)}
    for i, symmetric in zip(found, are_hermitian(list(found.values())), strict=True):
        if not symmetric:
            raise value_error(f"factors[{i}]", "a symmetric matrix", "one that differs from its transpose")


@dataclass(frozen=True)
class GridShare(Share):
    """The eigenvalues of one rank of a group: a block of torch.chunk.

    Attributes:
        group: whose ranks have all of them together.
        device: of this rank.
        position: of this rank in the group.
        parts: how many ranks.
    """

    group: dist.ProcessGroup
    device: torch.device
    position: int
    parts: int

    def bounds(self, size: int) -> tuple[int, int]:
        """The offsets of this rank's block."""
        offsets = chunk_offsets(size, self.parts)
        return offsets[self.position], offsets[self.position + 1]

    def replicated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As `replicated.replicate`."""
        return replicate(tensors, self.group, self.device)

    def total(self, part: Tensor) -> Tensor:
        """As `replicated.total`."""
        return total([part], self.group, self.device)[0]

    def product(self, part: Tensor) -> Tensor:
        """Every rank's, multiplied."""
        found = part.clone()
        all_reduce("sign of the determinant", found, self.group, dist.ReduceOp.PRODUCT)
        return found

    def extremes(self, values: Tensor) -> Tensor:
        """Of all ranks."""
        size = values.abs()
        ends = (-size.amin(), size.amax()) if size.numel() else (size.new_full((), -math.inf), size.new_zeros(()))
        found = torch.stack(ends)
        all_reduce("least and largest eigenvalues", found, self.group, dist.ReduceOp.MAX)
        return found.abs()


class _Solve(torch.autograd.Function):
    """``A^-1 b``, by implicit differentiation: the backward pass solves with A again, and keeps no iterate."""

    @staticmethod
    def forward(ctx: Any, system: System, b: Tensor, shift: Tensor, *factors: Tensor) -> Tensor:
        x = system.solve(b)
        ctx.system = system
        ctx.save_for_backward(x, shift, *factors)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        system, again = ctx.system, torch.is_grad_enabled()
        x, shift, *factors = ctx.saved_tensors
        adjoint = _Solve.apply(system, gradient.contiguous(), shift, *factors)  # type: ignore[no-untyped-call]
        wanted = ctx.needs_input_grad[2:]
        if not any(wanted):
            return None, adjoint, *[None for _ in wanted]
        with torch.enable_grad(), without_autocast(x.device):
            # Views of their own: x's dependence on factors and shift belongs to its own derivative.
            own = [t.view_as(t) if need else t.detach() for t, need in zip((shift, *factors), wanted, strict=True)]
            grid = system.grid
            (spread,) = replicate([own[0]], grid.group, grid.device, system.reduction) if wanted[0] else (own[0],)
            image = system.apply(x, own[1:], spread)
            chosen = [t for t, need in zip(own, wanted, strict=True) if need]
            found = iter(torch.autograd.grad(image, chosen, -adjoint, create_graph=again))
        return None, adjoint, *[next(found) if need else None for need in wanted]


def solve(system: System, b: Tensor) -> Tensor:
    """``A^-1 b`` with derivatives of every order to b, shift and factors."""
    shift = torch.as_tensor(system.shift, dtype=b.dtype, device=b.device)
    x: Tensor = _Solve.apply(system, b, shift, *system.matrices)  # type: ignore[no-untyped-call]
    return x


def agree_on_solve(
    product: LocalKroneckerProduct,
    grid: ProcessGrid,
    b: Any,
    *,
    shift: Any,
    call: str,
    scalars: str,
    eigenvectors: bool = True,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """All ranks go on with the same options, or raise the same error. Collective over the grid.

    Args:
        product: the operator, the same on every rank.
        grid: the ranks.
        b: right-hand side, this rank's block or a DTensor; None without.
        shift: number or 0-dimensional tensor.
        call: the method's name.
        scalars: those that the operator was made with.
        eigenvectors: whether they are needed.
        mask: of the equations, this rank's rows.
        options: of conjugate gradients.

    Returns:
        This rank's block of b, and the first rank's `Basis` of the factors that are no identities, or None.

    Raises:
        TypeError: an argument of another type or dtype, on any rank.
        ValueError: something does not fit, or differs from rank to rank.
        torch.linalg.LinAlgError: eigenvectors were not found.
    """
    index, first = next((i, f) for i, f in enumerate(product.factors) if isinstance(f, Tensor))
    try:
        shift = check_scalar("shift", shift, first, f"factors[{index}]")
        if first.dtype not in (torch.float32, torch.float64):
            raise type_error("factors", "float32 or float64 for a solve with a shift", first.dtype)
        if product.shape[0] != product.shape[1]:
            raise value_error("factors", "square matrices for a solve with a shift", f"shape {product.shape}")
        if mask is not None:
            _check_mask(mask, grid, product.shape[0])
        block = None if b is None else right_hand_block(b, grid, product.shape[0], first.dtype)
        needs = torch.is_grad_enabled() and (product.requires_grad or any([getattr(t, "requires_grad", False) for t in (block, shift)]))
        shown = "a tensor" if isinstance(shift, Tensor) else shift
        description = {"call": call, "shift": shown, "mask": mask is not None, "gradients": needs, "scalars of the operator": scalars}
        description |= _option_texts(**options) | checksums(factors=product.factors, shift=shift)
        if eigenvectors:
            _check_symmetric(product.factors)
    except REFUSALS as error:
        refuse(grid, error)
    if eigenvectors:
        return block, Basis(*from_first(grid, description, lambda: tuple(eigenbasis(matrices(product.factors)))))
    agree(grid, description)
    return block, None


def right_hand_block(b: Any, grid: ProcessGrid, size: int, dtype: torch.dtype) -> Tensor:
    """This rank's block of a right-hand side ``[size, M]``.

    Raises:
        TypeError: another array type or dtype.
        ValueError: another shape, device or placement.
    """
    if isinstance(b, DTensor) and tuple(b.placements) != PLACEMENTS:
        raise value_error("b", "a matrix placed [Shard(0), Shard(1)]", f"{b.placements}")
    local = b.to_local() if isinstance(b, DTensor) else b
    if not isinstance(local, Tensor):
        raise type_error("b", "a torch tensor", type_name(local))
    if local.dtype != dtype:
        raise type_error("b", f"the factors' dtype {dtype}", local.dtype)
    if local.device != grid.device:
        raise value_error("b", f"a tensor on the grid's device {grid.device}", local.device)
    rows = _rows(grid, size)
    if local.ndim != 2 or local.shape[0] != rows:
        raise value_error("b", f"a matrix with {rows} rows, block {grid.row} of {grid.shape[0]}", f"shape {tuple(local.shape)}")
    return local


def as_given(x: Tensor, b: Any) -> Any:
    """This rank's block of a solution as the right-hand side is, a block or a DTensor."""
    if not isinstance(b, DTensor):
        return x
    return DTensor.from_local(x, b.device_mesh, b.placements, run_check=False, shape=b.shape, stride=(b.shape[1], 1))


def _check_mask(mask: Any, grid: ProcessGrid, size: int) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise type_error("mask", "a tensor of bool", mask.dtype if isinstance(mask, Tensor) else type_name(mask))
    rows = _rows(grid, size)
    if tuple(mask.shape) != (rows,) or mask.device != grid.device:
        raise value_error("mask", f"shape ({rows},), this rank's rows, on {grid.device}", f"{tuple(mask.shape)} on {mask.device}")


def _rows(grid: ProcessGrid, size: int) -> int:
    """The number of rows that this rank has."""
    rows = grid.block((size, 1))[0]
    return len(range(rows.start, rows.stop))


def _option_texts(**options: Any) -> dict[str, Any]:
    """Options of conjugate gradients, checked, as they are compared between ranks."""
    if not options:
        return {}
    tolerance, max_iter, preconditioner = (options[name] for name in ("tolerance", "max_iter", "preconditioner"))
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real):
        raise type_error("tolerance", "a number", type_name(tolerance))
    if not 0 <= float(tolerance) < math.inf:
        raise value_error("tolerance", "a finite number, 0 or more", tolerance)
    if check_integer("max_iter", max_iter) < 0:
        raise value_error("max_iter", "a number of iterations", max_iter)
    if not callable(preconditioner) and not isinstance(preconditioner, bool):
        raise type_error("preconditioner", "True, False or a function", type_name(preconditioner))
    kind = "a function" if callable(preconditioner) else preconditioner
    return {"tolerance": float(tolerance), "max_iter": int(max_iter), "preconditioner": kind}
