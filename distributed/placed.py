"""DTensors as arguments: the grid of their mesh, and this rank's blocks of them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastkron_py.distributed.check import refuse
from fastkron_py.distributed.grid import ProcessGrid, refuse_without_grid
from fastkron_py.runtime.errors import type_error, type_name, value_error

PLACEMENTS: Final = (Shard(0), Shard(1))

_grids: dict[int, ProcessGrid] = {}


def grid_of_call(x: Any, grid: Any) -> ProcessGrid:
    """The grid that a call is made over: the one it is given, or that of a DTensor's mesh.

    Raises:
        TypeError: grid is no ProcessGrid.
        ValueError: there is none, or it is not the DTensor's. Raised on every rank, as far as the others can be told.
    """
    if grid is not None and not isinstance(grid, ProcessGrid):
        refuse_without_grid(type_error("grid", "a ProcessGrid", type_name(grid)))
    if not isinstance(x, DTensor):
        if grid is None:
            refuse_without_grid(value_error("grid", "a ProcessGrid, since x is a block", None))
        return grid
    mesh = x.device_mesh
    if grid is None:
        return grid_of(mesh)
    if grid.mesh != mesh:
        refuse(grid, value_error("grid", f"None, or the grid of x's mesh {mesh}", grid))
    return grid


def grid_for(operand: Any, grid: ProcessGrid) -> ProcessGrid:
    """The grid for an operator's operand: its own for a block; a DTensor brings one, which has to be of the same ranks.

    Raises:
        ValueError: it is of others. Raised on every rank.
    """
    if not isinstance(operand, DTensor):
        return grid
    mesh = grid.mesh
    if not torch.equal(operand.device_mesh.mesh, mesh.mesh):
        refuse(grid, value_error("x", f"a DTensor on a mesh of ranks {mesh.mesh.tolist()}", operand.device_mesh.mesh.tolist()))
    return grid_of(operand.device_mesh)


def grid_of(mesh: DeviceMesh) -> ProcessGrid:
    """The grid of a mesh, made when it is first seen. It keeps the mesh, so that no other gets its id."""
    found = _grids.get(id(mesh))
    if found is None or found.mesh is not mesh:
        found = _grids[id(mesh)] = ProcessGrid(mesh)
    return found


def plain_x(x: Any) -> Any:
    """This rank's block of x; what is no tensor is refused later."""
    if not isinstance(x, DTensor):
        return x
    if x.ndim != 2 or tuple(x.placements) != PLACEMENTS:
        raise value_error("x", "a matrix placed [Shard(0), Shard(1)]; x.redistribute(placements=...) can bring it there", f"{x.placements}")
    return x.to_local()


def plain_z(z: Any, x: Any) -> Any:
    """This rank's block of z."""
    if z is None or not (isinstance(z, DTensor) or isinstance(x, DTensor)):
        return z
    if not (isinstance(z, DTensor) and isinstance(x, DTensor)):
        raise type_error("z", "a DTensor where x is one, and a block where x is one", type_name(z))
    if z.device_mesh != x.device_mesh or tuple(z.placements) != PLACEMENTS:
        raise value_error("z", f"a matrix placed [Shard(0), Shard(1)] on {x.device_mesh}", f"{z.placements} on {z.device_mesh}")
    return z.to_local()


def plain_factor(factor: Any, index: int, x: Any) -> Any:
    """A factor as this rank has it, all of it."""
    if not isinstance(factor, DTensor):
        return factor
    if isinstance(x, DTensor) and factor.device_mesh != x.device_mesh:
        raise value_error(f"factors[{index}]", f"a DTensor on x's mesh {x.device_mesh}", factor.device_mesh)
    if not all(p.is_replicate() for p in factor.placements):
        raise value_error(f"factors[{index}]", "a replicated DTensor, since every rank needs all of each factor", f"{factor.placements}")
    return factor.to_local(grad_placements=[Replicate()] * factor.device_mesh.ndim)
