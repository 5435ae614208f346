"""What the distributed `KroneckerProduct` is given: factors, right-hand sides, masks and options, checked and agreed on."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastkron_py.distributed.check import agree, refuse
from fastkron_py.distributed.failures import REFUSALS
from fastkron_py.distributed.grid import ProcessGrid
from fastkron_py.distributed.placed import PLACEMENTS
from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.kron.checks import factor_list
from fastkron_py.runtime.checks import check_integer, check_scalar, check_scalar_fits
from fastkron_py.runtime.errors import type_error, type_name, value_error

Prepared = TypeVar("Prepared")


def checked_factors(factors: Any, grid: ProcessGrid) -> LocalKroneckerProduct:
    """The operator of one rank, of factors that are plain matrices on the grid's device.

    Raises:
        TypeError: not a sequence, or factors that are no plain torch tensors or of different dtypes.
        ValueError: no factors, batch dimensions, or another device.
    """
    listed = factor_list(factors)
    for i, f in enumerate(listed):
        if not isinstance(f, Tensor):
            raise type_error(f"factors[{i}]", "a torch tensor", type_name(f))
        if isinstance(f, DTensor):
            raise type_error(f"factors[{i}]", "a plain tensor that is the same on every rank", "a DTensor")
    made = LocalKroneckerProduct(listed)
    if made.ndim != 2:
        raise value_error("factors", "matrices without batch dimensions", f"shape {made.shape}")
    if made.device != grid.device:
        raise value_error("factors", f"tensors on the grid's device {grid.device}", made.device)
    return made


def agree_on_solve(
    product: LocalKroneckerProduct,
    grid: ProcessGrid,
    b: Any,
    prepare: Callable[[], Prepared],
    *,
    shift: Any,
    call: str,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[Any, Prepared]:
    """All ranks go on with the same options, or raise the same error. Collective over the grid.

    Args:
        product: the operator, the same on every rank.
        grid: the ranks.
        b: right-hand side, this rank's block or a DTensor; None without.
        prepare: what a rank makes of its factors, once arguments fit; it may refuse them.
        shift: number or 0-dimensional tensor.
        call: the method's name.
        mask: of the equations, this rank's rows.
        options: of conjugate gradients.

    Returns:
        This rank's block of b, and what was prepared.

    Raises:
        TypeError: an argument of another type or dtype, on any rank.
        ValueError: something does not fit, or differs from rank to rank.
        torch.linalg.LinAlgError: what was prepared could not be, on any rank.
    """
    first = product.factors[0]
    try:
        shift = check_scalar("shift", shift)
        check_scalar_fits("shift", shift, first, "factors[0]")
        if first.dtype not in (torch.float32, torch.float64):
            raise type_error("factors", "float32 or float64 for a solve with a shift", first.dtype)
        if product.shape[0] != product.shape[1]:
            raise value_error("factors", "square matrices for a solve with a shift", f"shape {product.shape}")
        if mask is not None:
            _check_mask(mask, grid, product.shape[0])
        block = None if b is None else _block(b, grid, product.shape[0], first.dtype)
        needs = torch.is_grad_enabled() and (product.requires_grad or any([getattr(t, "requires_grad", False) for t in (block, shift)]))
        shown = "a tensor" if isinstance(shift, Tensor) else shift
        description = {"call": call, "shift": shown, "mask": mask is not None, "gradients": needs} | _option_texts(**options)
        prepared = prepare()
    except REFUSALS as error:
        refuse(grid, error)
    agree(grid, description)
    return block, prepared


def _block(b: Any, grid: ProcessGrid, size: int, dtype: torch.dtype) -> Tensor:
    """This rank's block of a right-hand side ``[size, M]``."""
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


def _check_mask(mask: Any, grid: ProcessGrid, size: int) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise type_error("mask", "a tensor of bool", mask.dtype if isinstance(mask, Tensor) else type_name(mask))
    rows = _rows(grid, size)
    if tuple(mask.shape) != (rows,) or mask.device != grid.device:
        raise value_error("mask", f"shape ({rows},), this rank's rows, on {grid.device}", f"{tuple(mask.shape)} on {mask.device}")


def _rows(grid: ProcessGrid, size: int) -> int:
    """How many of so many rows this rank has."""
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
