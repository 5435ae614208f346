"""What is multiplied, as plain values: the problem of a multiply, neighbouring factors of it, offers for them, one mode, and one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastkron_py.kron.plan.steps import GradientLaunch, Launch
from fastkron_py.kron.rates import figures, priced
from fastkron_py.runtime.gpu import GPU, SECTOR_BYTES, VECTOR_BYTES, WRITE_BYTES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fastkron_py.kron.canonical import Scale
    from fastkron_py.kron.gradient_problem import GroupProblem
    from fastkron_py.kron.kernels.epilogues import StoreEpilogue
    from fastkron_py.runtime.builder import Builder
    from fastkron_py.runtime.launch import Launcher

MICROSECOND: Final = 1e-6
WORD: Final = 4  # bytes
BLOCK_K: Final = 32  # terms of a step of the kernel for large factors: a producer's registers hold a tile, and the next one

_Strides = tuple[int, int, int, int, int]


def parts_of(dtype: torch.dtype) -> int:
    """Real numbers of an element."""
    return 2 if dtype.is_complex else 1


def in_words(strides: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Strides as kernels take them (`tiling.addresses`): an element is one word, or two of float64."""
    is_two_words = dtype.is_complex and dtype.to_real().itemsize == 8
    return tuple([2 * stride for stride in strides]) if is_two_words else tuple(strides)


def batch_stride(t: Tensor) -> int:
    """The stride of batches; 0 where there is one: a multiple of the rows, by whose divisibility a kernel would be compiled anew."""
    return t.stride(0) if t.shape[0] > 1 else 0


class Rows(NamedTuple):
    """Strides of an operand ``[B, L, n, R]`` whose last two dimensions are one run with a constant stride.

    Where R has a stride of its own, column, a launch can address the last modes only, which R alone comes after.
    """

    batch: int
    row: int
    unit: int
    column: int | None = None

    def in_place(self, mode: int, after: int, merged: bool) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, before, mode, after]``; merged: l counts rows and modes before."""
        inner, along = (self.unit, after * self.unit) if self.column is None else (self.column, self.unit)
        step = mode * along
        return (self.batch, step if merged else self.row, 0 if merged else step, along, inner)

    def is_merged(self, before: int, mode: int, after: int) -> bool:
        """Whether rows and modes before are one dimension."""
        return self.row == before * self.in_place(mode, after, False)[2]

    def transposed(self, others: int) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, mode, others]``, where j counts the others."""
        return (self.batch, self.row, self.unit, others * self.unit, 0)


@dataclass(frozen=True)
class Elements:
    """What all problems say of their elements.

    Attributes:
        dtype: of all tensors.
        precision: of float32 products.
        gpu: that they are multiplied on.
    """

    dtype: torch.dtype
    precision: str
    gpu: GPU

    @cached_property
    def parts(self) -> int:
        """Real numbers of an element."""
        return parts_of(self.dtype)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a real number."""
        return self.dtype.to_real().itemsize

    @cached_property
    def passes(self) -> int:
        """Products of tensor cores that a product takes: 3 of float32 as such, 1 of TF32 and other dtypes."""
        return 3 if self.itemsize == WORD and self.precision == "highest" else 1

    def mode_of(self, shape: tuple[int, int, int, int], p: int, q: int, adds: bool = False, to_front: int = 0) -> Mode:
        """The sizes of a multiply of one mode by a factor p x q, in an operand with this (B, L, before, after) around the mode.

        A complex factor is a real one of twice the sides (`tiling.addresses`). What z adds and where the mode goes are as in `Mode`.
        """
        groups, rows, before, after = shape
        return Mode(groups, rows * before, after, self.parts * p, self.parts * q, self.itemsize, self.passes, self.gpu, adds, to_front)


@dataclass(frozen=True)
class Problem(Elements):
    """A multiply of some factors: all that its plan and its launches depend on.

    Attributes:
        shape: of x, ``[B, L, K, R]``.
        x: its strides.
        z: those of the addend, or None.
        factor_shapes: of all factors, ``(.., P, Q)``.
        factor_strides: (B, P, Q) of all factors.
        start: factors start to stop are multiplied.
        stop: see start.
        sizes: of the modes of x.
        scaled: alpha is not 1.
        conj: whether the factors are conjugated.
        whole_rows: vectors of 16 bytes of x begin at multiples of 16 bytes, as the kernel for whole rows copies them.
        epilogue: of the last launch, if there is a z.
        families: that may multiply; none for all.
        missing: families whose kernels this Triton cannot compile.
        counts_host: the host's time counts: what a caller waits for, if it is longer than the device's.
    """

    shape: tuple[int, int, int, int]
    x: Rows
    z: Rows | None
    factor_shapes: tuple[tuple[int, ...], ...]
    factor_strides: tuple[tuple[int, ...], ...]
    start: int
    stop: int
    sizes: tuple[int, ...]
    scaled: bool = False
    conj: bool = False
    whole_rows: bool = False
    epilogue: StoreEpilogue | None = None
    families: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    counts_host: bool = False

    def allows(self, family: str) -> bool:
        """Whether a family may multiply."""
        return family not in self.missing and (not self.families or family in self.families)

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(P, Q) of the factors that are multiplied."""
        return tuple([(s[-2], s[-1]) for s in self.factor_shapes[self.start : self.stop]])

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        """The result's shape, if all factors are multiplied."""
        batches, rows, _, columns = self.shape
        return batches, rows, math.prod([q for _, q in self.shapes]), columns

    @cached_property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of the factors that are multiplied, and their columns."""
        return tuple([p for p, _ in self.shapes]), tuple([q for _, q in self.shapes])

    @cached_property
    def before(self) -> int:
        """Elements of a row before the modes that are multiplied."""
        return math.prod(self.sizes[: self.start])

    @cached_property
    def after(self) -> int:
        """Elements after them; above 1 no slice is one run of memory."""
        return math.prod(self.sizes[self.stop :]) * self.shape[3]

    @cached_property
    def rows(self) -> int:
        """Products that share the factors: rows of x times batches, times the modes before."""
        return self.shape[0] * self.shape[1] * self.before

    @cached_property
    def half(self) -> str:
        """The name of a half type that tensor cores take from shared memory, else ""."""
        return str(self.dtype).removeprefix("torch.") if self.gpu.has_wgmma and self.gpu.has_shared_operands and self.itemsize == 2 else ""

    @property
    def ends_with_last(self) -> bool:
        """Whether the last modes are multiplied last, because z has a stride of its own between columns (see `Rows`)."""
        return self.z is not None and self.z.column is not None


def contiguous_problem(
    shapes: Sequence[tuple[int, int]], rows: int, columns: int, dtype: torch.dtype, gpu: GPU, precision: str = "highest", **more: Any
) -> Problem:
    """The multiply of a contiguous x ``[rows, K, columns]`` by contiguous factors of these shapes; more as `Problem` has it."""
    sizes = tuple([p for p, _ in shapes])
    x = Rows(0, math.prod(sizes) * columns, 1)
    factor_shapes, strides = tuple([(1, *s) for s in shapes]), tuple([(0, q, 1) for _, q in shapes])
    shape = (1, rows, math.prod(sizes), columns)
    return Problem(dtype, precision, gpu, shape, x, None, factor_shapes, strides, 0, len(shapes), sizes, **more)


class Segment(NamedTuple):
    """Neighbouring factors where they stand, which one launch may multiply: families make offers for it.

    It does not know the numbers of its factors, and steps of offers count from its first one.

    Attributes:
        problem: the multiply.
        ps: rows of its factors.
        qs: their columns.
        before: elements of a row before its modes when they are multiplied.
        is_all: it has all modes.
        is_last: nothing comes after its modes, so that a slice is one run of memory.
        in_place: the launches leave modes in place; else each moves its own ahead of all others.
        mode: its factors as one mode, after which there is 1 element to the front: x is read in runs of memory.
    """

    problem: Problem
    ps: tuple[int, ...]
    qs: tuple[int, ...]
    before: int
    is_all: bool
    is_last: bool
    in_place: bool
    mode: Mode


class Host(NamedTuple):
    """Figures of the host, not measured at run time: hosts differ by a factor of two, and a CUDA graph's replay waits for none."""

    call: float  # seconds of a call of the library
    launch: float  # of a launch of a kernel
    product: float  # of a call of torch's products
    buffer: float  # of an allocation
    # of the time that a caller waits for the plan that is the fastest on the device, which a plan of less work for the host has to beat.
    worth_waiting: float

    @classmethod
    def of(cls, gpu: GPU) -> Host:
        """Those beside a GPU."""
        return figures(cls, "host", gpu)


class Memory(NamedTuple):
    """Figures of a GPU's memory."""

    cache: float  # bytes up to which what a launch reads and writes stays in the L2 cache; of more, the first is gone when it is read again
    wait: float  # seconds between two launches that wait for each other


class HostWork(NamedTuple):
    """What the host does for a launch: launches of kernels, calls of torch's products, and buffers that it allocates."""

    launches: int = 1
    products: int = 0
    buffers: int = 1

    def seconds(self, host: Host) -> float:
        """Seconds that it takes."""
        return self.launches * host.launch + self.products * host.product + self.buffers * host.buffer


class Offer(NamedTuple):
    """A family's bid for a segment.

    Attributes:
        seconds: modelled, on the device.
        launch: of all of the segment.
        host: the host's work for it.
        prices: the section of prices by which quantities are seconds.
        quantities: of the launch.
    """

    seconds: float
    launch: Launch
    host: HostWork = HostWork()
    prices: str = ""
    quantities: Mapping[str, float] = {}

    @classmethod
    def of(cls, segment: Segment, prices: str, quantities: Mapping[str, float], launch: Launch) -> Offer:
        """The bid of one launch of a kernel with these quantities."""
        problem = segment.problem
        return cls(priced(prices, problem.gpu, problem.itemsize, quantities), launch, HostWork(), prices, quantities)


@dataclass(frozen=True)
class GradientOffer:
    """A family's offer for a group.

    Attributes:
        family: its name.
        prices: the section of its prices.
        quantities: of the group's gradients and, of a fused group, of dx.
        problem: the group's.
        launch: makes the launch.
    """

    family: str
    prices: str
    quantities: dict[str, float]
    problem: GroupProblem
    launch: Callable[[], GradientLaunch]

    @cached_property
    def seconds(self) -> float:
        """Modelled seconds."""
        return priced(self.prices, self.problem.gpu, self.problem.itemsize, self.quantities)


@dataclass
class Mode:
    """A multiply of one mode ``[.., P, after]``, or the gradient of its factor, as models of seconds see it.

    All offers for a segment share one, and the numbers that it has worked out.

    Attributes:
        batches: of factors.
        runs: of the mode in one batch: rows times the modes before.
        after: elements after the mode.
        p: rows of the factor.
        q: columns of the factor.
        itemsize: bytes of an element.
        passes: over the tensor cores.
        gpu: that it runs on.
        adds: whether z is added to the result.
        to_front: elements of a row beside the mode, if the result has it ahead of them; 0 if it stays in place.
        slices: slices of one batch.
        at_once: multiprocessors that share the work, as models of time see them.
        rate: operations a second of the tensor cores.
        read: seconds to read the operand.
        written: seconds to write the result.
        moved: both.
        streamed: both, at the least; 0 if all may stay in the cache.
    """

    batches: int
    runs: int
    after: int
    p: int
    q: int
    itemsize: int
    passes: int
    gpu: GPU
    adds: bool = False
    to_front: int = 0

    def __post_init__(self) -> None:
        """Work out what all offers for a segment need."""
        gpu, self.slices = self.gpu, self.runs * self.after
        self.at_once, self.rate = gpu.modelled_multiprocessors, gpu.rate(self.itemsize)
        nbytes = self.batches * self.slices * self.itemsize  # of one of P
        self.read, self.written = nbytes * self.p / gpu.bandwidth, nbytes * self.q / gpu.bandwidth
        self.moved, nbytes = self.read + self.written, nbytes * (self.p + self.q)
        self.streamed = nbytes / gpu.bandwidth if nbytes > figures(Memory, "memory", gpu).cache else 0.0

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.batches * self.slices * self.p * self.q

    @property
    def is_scattered(self) -> bool:
        """Whether blocks of neighbouring slices are not one run of memory."""
        return self.after > 1 and self.after % BLOCK_K != 0

    def traffic(self, passes: float = 1.0) -> float:
        """Seconds to read the operand and write the result this many times, with the factors."""
        moved = passes * self.slices * (self.p + self.q) + self.p * self.q
        return self.batches * moved * self.itemsize / self.gpu.bandwidth

    def rounds(self, tiles: int, programs_per_sm: int) -> tuple[int, float]:
        """Tiles that a program takes one after the other, and those that a multiprocessor takes, of all tiles."""
        programs = min(tiles, self.at_once * programs_per_sm)
        turns = ceil(tiles, programs)
        return turns, turns * max(1.0, programs / self.at_once)

    def operating(self, operations: float) -> float:
        """Seconds of this number of operations of a multiprocessor's tensor cores."""
        return operations * self.passes * self.at_once / self.rate

    def moving(self, elements: float) -> float:
        """Seconds in which a multiprocessor moves this number of elements, if all do."""
        return elements * self.itemsize * self.at_once / self.gpu.bandwidth

    @property
    def is_aligned(self) -> bool:
        """Whether runs of x are whole vectors."""
        return (self.p if self.after == 1 else self.after) * self.itemsize % VECTOR_BYTES == 0

    def moves(self, block_s: int, run: int = 0, **found: float) -> dict[str, float]:
        """The quantities that a launch of tiles has in common with all others, in seconds: what it reads of x and writes of the result.

        Args:
            block_s: slices of a tile.
            run: slices of it that are one run of memory wherever it begins, if something comes after the mode; 0 for all that are.
            found: the launch's other quantities.

        Returns:
            these, and "start" and "bytes"; "streamed", "bytes" if they exceed the cache; "elements" of 16 bits, which need as many
            instructions as others;
            "addresses", by which loads and stores of less than 16 bytes are more; "sectors", of runs that share these with others;
            "partial_writes", to memory, of runs that are shorter than what memory writes at a time;
            "in_place" and "crossing", bytes and elements that are moved where something comes after the mode, and where tiles cross runs.
        """
        itemsize, after, to_front = self.itemsize, self.after, self.to_front
        addresses, sectors, crosses, length = 0.0, 0.0, False, after if after > 1 else to_front
        if length:
            run = math.gcd(length, block_s) if after == 1 or not run else run
            addresses, sectors, crosses = self._runs(block_s, run, length)
        in_runs = self.moved if after > 1 else self.written
        found["start"], found["bytes"], found["streamed"] = MICROSECOND, self.moved, self.streamed
        found["elements"] = WORD * self.moved / itemsize if itemsize < WORD else 0.0
        found["sectors"], found["crossing"] = in_runs * sectors, WORD * in_runs / itemsize if crosses else 0.0
        if after > 1:
            found["addresses"], found["in_place"], found["partial_writes"] = self.moved * addresses, self.moved, 0.0
            return found
        loads, stores = [VECTOR_BYTES / math.gcd(side * itemsize, VECTOR_BYTES) - 1 for side in (self.p, self.q)]
        missing = WRITE_BYTES / max(run * itemsize, SECTOR_BYTES) - 1 if to_front and self.streamed else 0.0
        found["addresses"], found["in_place"] = self.read * loads + self.written * (addresses if to_front else stores), 0.0
        found["partial_writes"] = self.written * max(0.0, missing)
        return found

    def _runs(self, block_s: int, run: int, length: int) -> tuple[float, float, bool]:
        """Loads and sectors, as shares, that tiles of runs take more than whole vectors and whole sectors; whether they cross runs."""
        nbytes, crosses = run * self.itemsize, run < block_s
        vector = min(VECTOR_BYTES, nbytes) if crosses else VECTOR_BYTES
        is_whole = nbytes % SECTOR_BYTES == 0 and length * self.itemsize % SECTOR_BYTES == 0
        return VECTOR_BYTES / vector - 1, 0.0 if is_whole else SECTOR_BYTES / nbytes, crosses


def ceil(n: int, block: int) -> int:
    """Blocks that cover n."""
    return -(-n // block)


def filled(size: int, block: int) -> float:
    """The share of whole blocks that a size fills."""
    return size / (ceil(size, block) * block)


@dataclass(frozen=True)
class OnSlices(Elements):
    """What a launch's problem and that of its gradients say of their slices.

    Attributes:
        shape: (B, L, before, after) around the modes.
    """

    shape: tuple[int, int, int, int]

    @property
    def num_slices(self) -> int:
        """Slices of one batch."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class LaunchProblem(OnSlices):
    """One launch of a multiply, without its tensors.

    Attributes:
        launch: its steps and its family.
        epilogue: of the sums.
        mode_stride: if the modes, which are the last ones of x, are the first ones of y, their stride there: ``before``, or more where y is
            a block of a tensor; 0 if they stay in place.
        columns: R of x and of the result.
        x: strides of the operand.
        y: strides of the result.
        z: strides of the addend; those of y where there is none.
        factor_shapes: (P, Q) of each factor.
        factor_strides: (B, P, Q) of each factor.
        conj: whether the factors are conjugated.
    """

    launch: Launch
    epilogue: StoreEpilogue
    mode_stride: int
    columns: int
    x: Rows
    y: Rows
    z: Rows
    factor_shapes: tuple[tuple[int, int], ...]
    factor_strides: tuple[tuple[int, int, int], ...]
    conj: bool = False

    @cached_property
    def mode(self) -> Mode:
        """The sizes of a launch of one step."""
        return self.mode_of(self.shape, self.launch.p, self.launch.q)

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        """The result's shape ``[B, L, n, R]``."""
        groups, rows, before, after = self.shape
        return (groups, rows, before * self.launch.q * after // self.columns, self.columns)

    @cached_property
    def common(self) -> dict[str, Any]:
        """The arguments that every kernel of a multiply has: strides, sizes and the epilogue."""
        (_, rows, before, after), launch = self.shape, self.launch
        merged = False
        if self.mode_stride:
            x, y, z = self.x.in_place(launch.p, 1, False), *[r.transposed(self.mode_stride) for r in (self.y, self.z)]
        else:
            pairs = ((self.x, launch.p), (self.y, launch.q), (self.z, launch.q))
            merged = before > 1 and (rows == 1 or all(r.is_merged(before, size, after) for r, size in pairs))
            x, y, z = (r.in_place(size, after, merged) for r, size in pairs)
        return {
            "x_strides": in_words(x, self.dtype),
            "y_strides": in_words(y, self.dtype),
            "z_strides": in_words(z, self.dtype),
            "factor_strides": self.factor_strides,
            "num_slices": self.num_slices,
            "before": before,
            "after": after,
            "SHAPES": self.factor_shapes,
            "HEAD": not merged and before != 1,
            "TAIL": after != 1,
            "EPILOGUE": self.epilogue.function(self.dtype),
        }

    @property
    def fell_back(self) -> bool:
        """Whether the device has too little shared memory for the first configuration of its kernel, if it has one."""
        return "launcher" in vars(self) and self.launcher.fell_back

    @cached_property
    def launcher(self) -> Launcher:
        """The launch of the family's kernel, which is compiled once however often it is added to programs."""
        from fastkron_py.kron.families import family_of
        from fastkron_py.runtime.launch import Launcher

        return Launcher(family_of(self.launch).launch_configs(self))


def add_launch(
    build: Builder, problem: LaunchProblem, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, y: Tensor | None, scale: Scale
) -> Tensor:
    """Add a launch of a family's kernel to a program, or what the family adds in its place.

    Args:
        build: of the program.
        problem: the launch.
        x: its operand.
        factors: all factors of the multiply.
        z: the addend, or None.
        y: where the result shall be; new memory if None.
        scale: alpha and beta.

    Returns:
        The result.
    """
    from fastkron_py.kron.families import family_of

    add = getattr(family_of(problem.launch), "add", None)
    if add is not None:
        made: Tensor = add(build, problem, x, factors, z, y, scale)
        return made
    y = build.empty(problem.result_shape, x.dtype) if y is None else y
    mine = tuple(factors[problem.launch.start : problem.launch.stop])
    build.launch(problem.launcher, (x, mine, y if z is None else z, y), (scale.alpha, scale.beta))
    return y
