"""`ProcessGrid`: ranks in rows and columns, and the groups that they communicate in."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fastkron_py.distributed.agreement import Control, agree, refuse, refused_by_all
from fastkron_py.distributed.failures import group_timeout, rank_text, stage
from fastkron_py.distributed.layout import chunk_offsets, widths
from fastkron_py.distributed.plan import integers
from fastkron_py.runtime.checks import check_type
from fastkron_py.runtime.errors import value_error

DIMENSIONS: Final = ("rows", "cols")
PLACEMENTS: Final = (Shard(0), Shard(1))
"""Of the DTensors that are blocks over a grid."""


class ProcessGrid:
    """GM x GK ranks; rank (r, c) holds block r of the rows and block c of the columns of a distributed matrix.

    Ranks are numbered along the rows of the grid: rank ``r * GK + c``. Collectives of a product with a Kronecker
    product run inside rows, among the GK ranks of `row_group`. Constructing a grid is a collective operation: all of its
    ranks do so, in the same order and with the same arguments; other ranks do not take part. Grids of the same ranks share their
    groups, so one thread at a time can make calls over them.

    Args:
        shape: ``(GM, GK)``, or a `DeviceMesh` of two dimensions, whose groups are used. None: ``(number of ranks, 1)``,
            which needs no exchange and is best if a product has at least as many rows as there are ranks.
        ranks: the ranks of the default group that make up the grid, ascending; None takes all. Not with a mesh.
        device: where tensors of this rank lie; None takes the current GPU if the default group has NCCL, else the CPU.
        check_factors: have ranks compare checksums of factors, mass matrices and scalars that are tensors before each call, which waits for
            the GPU. For debugging: ranks whose factors differ get wrong results. None does so where ``FASTKRON_CHECK=1`` is set.

    Attributes:
        shape: ``(GM, GK)``: how many blocks there are of rows, and of columns.
        ranks: the grid's ranks in the default group, along its rows; `world_size` is their number.
        rank: this rank's number in the grid: ``row * GK + col``.
        row: which block of rows this rank holds; `col`: which block of columns.
        device: where this rank's tensors lie.
        mesh: the grid as a mesh of two dimensions, called "rows" and "cols" unless it was given.
        group: all ranks of the grid; `row_group`: the GK ranks of this rank's row, by column, who hold the columns of the same rows and
            exchange them; `col_group`: the GM ranks of this rank's column, by row.
        layout: which ranks are in which row and column, and whose groups they use. Ranks compare this before each call.

    Raises:
        TypeError: an argument of another type.
        ValueError: a shape that does not fit the number of ranks; ranks that do not exist or do not ascend; other arguments or another
            version of this package on some ranks; a mesh without this rank, or with rows or columns that do not ascend.
        RuntimeError: torch's default process group does not exist; call `init_process_group` first.
        CollectiveError: a rank did not join in time.

    Example:
        >>> info = init_process_group()
        >>> grid = ProcessGrid((1, info.world_size))
        >>> grid.row, grid.col
        (0, 0)
        >>> with ProcessGrid((1, info.world_size)) as grid:  # closed at the end
        ...     y = kron_matmul(torch.ones(2, 4, device=grid.device), [torch.eye(2, device=grid.device)] * 2, grid=grid)
    """

    _closed = False

    def __init__(
        self,
        shape: tuple[int, int] | DeviceMesh | None = None,
        *,
        ranks: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        check_factors: bool | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ProcessGrid: no process group exists; call fastkron_py.distributed.init_process_group() first")
        mesh = shape if isinstance(shape, DeviceMesh) else None
        self.ranks, self.layout = _member_ranks(mesh, ranks), ""  # while ranks agree on one
        self.rank, self.world_size = self.ranks.index(dist.get_rank()), len(self.ranks)
        ascending = tuple(sorted(self.ranks))
        self._control: Control = kept(ascending, lambda: Control(ascending))
        with refused_by_all(self):
            self.shape, self.device = _grid_shape(shape, ranks, self.ranks), _grid_device(device, shape)
            check_type("check_factors", check_factors, bool | None, "True, False or None")
        self.row, self.col = divmod(self.rank, self.shape[1])
        self._check_factors = check_factors
        description = {"call": "ProcessGrid", "shape": list(self.shape), "device": self.device.type, "check_factors": self.check_factors}
        description["version of fastkron_py"] = sys.modules["fastkron_py"].__version__  # not imported: the package imports this
        agree(self, description)
        order = "" if self.ranks == ascending else f" of ranks {', '.join(map(str, self.ranks))}"
        self.layout = f"{self.shape[0]} x {self.shape[1]}{order}{'' if mesh is None else ' of a mesh'}"
        if mesh is None:
            self.group, row_group, col_group = _groups(self, self.shape)
            table = torch.tensor(self.ranks, dtype=torch.int).view(self.shape)
            mesh = DeviceMesh.from_group([col_group, row_group], self.device.type, mesh=table, mesh_dim_names=DIMENSIONS)
        else:
            (self.group,) = _groups(self, None)
        self.mesh, self.col_group, self.row_group = mesh, mesh.get_group(0), mesh.get_group(1)

    @property
    def check_factors(self) -> bool:
        """Whether ranks compare the values of factors before each call."""
        return os.environ.get("FASTKRON_CHECK", "") not in ("", "0") if self._check_factors is None else self._check_factors

    @property
    def control(self) -> Control:
        """The channel on the host by which all ranks of the grid exchange messages apart from their data; of an open grid."""
        if self._closed:
            raise value_error("grid", "an open ProcessGrid", "one that has been closed")
        return self._control

    def block(self, shape: Sequence[int]) -> tuple[slice, slice]:
        """Which rows and columns of a matrix this rank holds: those that torch.chunk, and a DTensor's Shard, would give it.

        Args:
            shape: ``(rows, columns)`` of the whole matrix.

        Example:
            >>> whole = torch.randn(1000, 512)
            >>> rows, columns = ProcessGrid().block((1000, 512))
            >>> x = whole[rows, columns]
        """
        cuts = zip(shape, self.shape, (self.row, self.col), strict=True)
        rows, columns = (slice(*chunk_offsets(size, parts)[place : place + 2]) for size, parts, place in cuts)
        return rows, columns

    def rows_of(self, size: int) -> int:
        """How many of this number of rows this rank holds."""
        return widths(chunk_offsets(size, self.shape[0]))[self.row]

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's block of a matrix that the grid's first rank has. Collective, and without derivatives.

        Args:
            whole: ``[rows, columns]`` on the grid's device, of the same shape and dtype on every rank; the others' values are not read.

        Example:
            >>> grid = ProcessGrid()
            >>> x = grid.scatter(torch.arange(6.0, device=grid.device).view(3, 2))
            >>> whole = grid.gather(x)
        """
        self._agree_on_matrix("scatter", "whole", whole, True)
        with stage("ProcessGrid.scatter", self.group), torch.no_grad():
            return distribute_tensor(whole.detach(), self.mesh, PLACEMENTS).to_local()

    def gather(self, block: Tensor) -> Tensor:
        """The whole matrix of all ranks' blocks, on every rank. Collective, and without derivatives.

        Args:
            block: this rank's, as `block` cuts, of the same dtype on every rank.
        """
        sizes = self._agree_on_matrix("gather", "block", block, False)
        cols = self.shape[1]
        shape = sum([rows for rows, *_ in sizes[::cols]]), sum([columns for _, columns, *_ in sizes[:cols]])
        cuts = [widths(chunk_offsets(size, parts)) for size, parts in zip(shape, self.shape, strict=True)]
        if [size[:2] for size in sizes] != [(rows, columns) for rows in cuts[0] for columns in cuts[1]]:
            raise value_error("block", f"blocks of a matrix {shape} as torch.chunk cuts it", [size[:2] for size in sizes])
        with stage("ProcessGrid.gather", self.group), torch.no_grad():
            return _spread(block.detach().contiguous(), self.mesh, shape).full_tensor()

    def _agree_on_matrix(self, call: str, name: str, matrix: Any, same_shape: bool) -> list[tuple[int, ...]]:
        """Every rank's sizes of a matrix, once all have one of the same dtype."""
        with refused_by_all(self):
            check_type(name, matrix, Tensor, "a torch tensor")
            if matrix.ndim != 2 or matrix.device != self.device:
                raise value_error(name, f"a matrix on the grid's device {self.device}", f"{tuple(matrix.shape)} on {matrix.device}")
        description = {"call": f"ProcessGrid.{call}", f"dtype of {name}": str(matrix.dtype)}
        return agree(self, description | ({f"shape of {name}": list(matrix.shape)} if same_shape else {}), local=tuple(matrix.shape))

    def barrier(self) -> None:
        """Wait, on the host, until every rank of the grid is here; one that makes another call instead is an error on all."""
        agree(self, {"call": "ProcessGrid.barrier"})

    def close(self) -> None:
        """Give back peer memory; later calls over the grid raise an error. Collective.

        Process groups last until the default group is destroyed: grids of the same ranks and shape share them, and peer memory too, which
        the next product of another one makes anew. A second close does nothing. ``with grid:`` closes it at the end of the block; after an
        exception without waiting for other ranks, which may be gone.
        """
        if not self._closed:
            _release(self, "ProcessGrid.close")
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        self._closed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGrid:
        """Itself: a copy of a module that holds a grid has the same ranks, and communicators are not copied."""
        return self

    def __repr__(self) -> str:
        rows, cols = self.shape
        return f"ProcessGrid({rows} x {cols}, {rank_text(self.ranks)}, this is ({self.row}, {self.col}) on {self.device})"


# Grids of the same ranks and shape share their groups: communicators are slow to make and hold memory.
_made: dict[Any, Any] = {}
"""Controls by ranks, groups by ranks and shape, grids by mesh, slots, and as "in" the default group that all of these are of."""


def forget_groups() -> None:
    """Let go of the groups that are kept for later grids."""
    _made.clear()


def kept(key: Any, make: Callable[[], Any], is_good: Callable[[Any], bool] = lambda _: True) -> Any:
    """What is made once for a default group, or again where it is not good any more; forgotten with the group."""
    if _made.get("in") is not dist.group.WORLD:
        _made.clear()
        _made["in"] = dist.group.WORLD
    if key not in _made or not is_good(_made[key]):
        _made[key] = make()
    return _made[key]


def known_slots() -> Any:
    """Slots of peer memory of this process group, by group and device; None where there can be none."""
    return kept("slots", dict)


def release_peer_memory(grid: ProcessGrid) -> None:
    """Give back the memory that products over a grid keep for exchanges through peer memory. Collective: every rank of the grid calls it.

    Slots stay allocated after a product, since the next one of its size uses them again; those of a grid of 1 x 4 GPUs take up to six
    times a chunk's block. Without slots nothing happens. The next product that needs slots makes new ones. Slots that a CUDA graph uses
    stay, since it may be replayed.

    Example:
        >>> release_peer_memory(ProcessGrid((1, 1)))
    """
    _release(grid, "release_peer_memory")


def _release(grid: ProcessGrid, call: str) -> None:
    if grid.device.type == "cuda":
        torch.cuda.synchronize(grid.device)
    agree(grid, {"call": call})  # nobody writes to a peer any more
    for group in (grid.row_group, grid.col_group):
        known_slots().pop((group.group_name, grid.device), None)


def _groups(grid: ProcessGrid, shape: tuple[int, int] | None) -> tuple[dist.ProcessGroup, ...]:
    """The groups of all ranks of a grid, of this rank's row and of its column; without a shape the first."""

    def make() -> tuple[dist.ProcessGroup, ...]:
        members = [grid.ranks]
        if shape is not None:
            members += [grid.ranks[grid.row * shape[1] : (grid.row + 1) * shape[1]], grid.ranks[grid.col :: shape[1]]]
        with stage(f"ProcessGrid: making groups of a {shape} grid", grid.ranks):
            _level(grid)
            return tuple(_new_group(m) for m in members)

    return kept((grid.ranks, shape), make)


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group made by its members alone.

    Its kernels go before others that wait: an exchange that is begun beside a multiply of many programs would else begin after it.
    """
    options, timeout = None, group_timeout()
    if "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, pg_options=options)


def _level(grid: ProcessGrid) -> None:
    """Let all ranks of the grid know of equally many groups, by groups of one rank alone.

    torch derives the name by which members find each other from the number of groups that each of them knows.
    """
    known = len(dist.distributed_c10d._world.pg_names)
    most = max(counts[0] for counts in agree(grid, {"call": "ProcessGrid, before its groups"}, local=(known,)))
    for _ in range(most - known):
        _new_group([dist.get_rank()])


def _member_ranks(mesh: DeviceMesh | None, ranks: Any) -> tuple[int, ...]:
    """Whom to agree with; a wrong argument is refused later, by all of them, where that can be."""
    if mesh is not None:
        members = mesh.mesh.flatten().tolist()
        if dist.get_rank() not in members:
            raise value_error("shape", f"a mesh that contains this rank, {dist.get_rank()}", f"ranks {members}")
        return tuple(members) if len(set(members)) == len(members) else tuple(range(dist.get_world_size()))
    if ranks is None:
        return tuple(range(dist.get_world_size()))
    listed, size = list(integers("ranks", ranks)), dist.get_world_size()
    if not listed or listed != sorted(set(listed)) or listed[0] < 0 or listed[-1] >= size:
        raise value_error("ranks", f"ascending ranks from 0 to {size - 1}", listed)
    if dist.get_rank() not in listed:
        raise value_error("ranks", f"the calling rank, {dist.get_rank()}, among them: other ranks do not make this grid", listed)
    return tuple(listed)


def _grid_shape(shape: Any, ranks: Any, members: tuple[int, ...]) -> tuple[int, int]:
    if isinstance(shape, DeviceMesh):
        if ranks is not None:
            raise value_error("ranks", "None, since a mesh names its ranks", ranks)
        table = shape.mesh
        if table.ndim != 2:
            raise value_error("shape", "a mesh of two dimensions, rows and columns", f"one of shape {tuple(table.shape)}")
        if (table.diff(dim=0) <= 0).any() or (table.diff(dim=1) <= 0).any():
            raise value_error("shape", "a mesh whose ranks ascend along rows and columns, as they do in its groups", table.tolist())
        return int(table.shape[0]), int(table.shape[1])
    if shape is None:
        return len(members), 1
    sizes = integers("shape", shape, "(GM, GK), a DeviceMesh or None")
    if len(sizes) != 2 or min(sizes) < 1:
        raise value_error("shape", "two positive numbers, GM and GK", sizes)
    if math.prod(sizes) != len(members):
        raise value_error("shape", f"GM * GK = {len(members)}, the number of ranks", f"{sizes[0]} * {sizes[1]} = {math.prod(sizes)}")
    return sizes[0], sizes[1]


def _grid_device(device: Any, shape: Any) -> torch.device:
    check_type("device", device, str | torch.device | None, "a torch device, its name or None")
    try:
        place = None if device is None else torch.device(device)
    except RuntimeError:
        raise value_error("device", "a torch device", repr(device)) from None
    nccl = "nccl" in dist.get_backend_config()
    if isinstance(shape, DeviceMesh) and place is not None and place.type != shape.device_type:
        raise value_error("device", f"the mesh's, {shape.device_type}", place)
    place = place or torch.device(shape.device_type if isinstance(shape, DeviceMesh) else "cuda" if nccl else "cpu")
    if place.type == "cuda" and not nccl:
        raise value_error("device", "cpu, since the default group has no NCCL", place)
    if place.type not in ("cuda", "cpu"):
        raise value_error("device", "cuda or cpu", place)
    if str(place) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if place.type == "cpu" else place  # tensors are on cpu, not cpu:0


def own_block(name: str, operand: Any) -> Any:
    """This rank's block of an operand, a DTensor placed `PLACEMENTS`; anything else is taken for a block."""
    if not isinstance(operand, DTensor):
        return operand
    if operand.ndim != 2 or tuple(operand.placements) != PLACEMENTS:
        expected = f"a matrix placed [Shard(0), Shard(1)]; {name}.redistribute(placements=...) can bring it there"
        raise value_error(name, expected, f"{operand.placements}")
    return operand.to_local()


def as_operand(block: Tensor, operand: Any, shape: Sequence[int]) -> Tensor:
    """This rank's block of a matrix of this shape as an operand is: a block, or a DTensor placed in the same way."""
    return _spread(block, operand.device_mesh, shape) if isinstance(operand, DTensor) else block


def _spread(block: Tensor, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    return DTensor.from_local(block, mesh, PLACEMENTS, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def grid_of_call(x: Any, grid: Any) -> ProcessGrid:
    """The grid that a call is made over: the one that it is given, or that of a DTensor's mesh, which has to be of the same ranks."""
    check_type("grid", grid, ProcessGrid | None, "a ProcessGrid")
    if not isinstance(x, DTensor):
        if grid is None:
            raise value_error("grid", "a ProcessGrid, unless x is a DTensor", None)
        return grid
    mesh = x.device_mesh
    if grid is None or mesh == grid.mesh:
        return grid or grid_of(mesh)
    if not torch.equal(mesh.mesh, grid.mesh.mesh):
        refuse(grid, value_error("x", f"a DTensor on a mesh of ranks {grid.mesh.mesh.tolist()}", mesh.mesh.tolist()))
    return grid_of(mesh)


def grid_of(mesh: DeviceMesh) -> ProcessGrid:
    """The grid of a mesh, made when one like it is first seen: a slice of a mesh is another object each time."""
    return kept(mesh, lambda: ProcessGrid(mesh), lambda grid: not grid._closed)
