"""Launches of the polynomial KAN kernels: block sizes and splits of the reduction, by closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fastkron_py.runtime.gpu import GPU, next_power_of_two
from fastkron_py.tiling.figures import figures
from fastkron_py.tiling.gemm_config import NARROWEST, GemmTile


class Sizes(NamedTuple):
    """The sizes and dtypes that a layer's launches depend on."""

    rows: int
    num_in: int
    num_out: int
    terms: int  # degrees in the sum
    itemsize: int  # bytes of an operand of the products
    passes: int  # over the tensor cores: 3 for float32-class
    gpu: GPU

    @property
    def products(self) -> int:
        """Multiplications of a pass."""
        return self.rows * self.num_in * self.num_out * self.terms

    def seconds(self) -> float:
        """At the GPU's peak."""
        return 2 * self.products * self.passes / self.gpu.rate(self.itemsize)


class Tile(NamedTuple):
    """Blocks of the result [block_m, block_n] and of the reduction, how they are run, and how the reduction is shared out.

    Split ``s`` takes blocks ``s * blocks`` and on; in the forward pass, for each group of degrees.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    degrees: int = 1  # side by side, in the gradients: in one product for dx, in one program for dC
    splits: int = 1
    blocks: int = 0  # of a split
    groups: int = 1  # of degrees, all of the same size

    def shared_out(self, splits: int, depth: int) -> Tile:
        """The tile with as many splits of a reduction of this depth, or fewer, none of which is empty."""
        blocks = -(-depth // self.block_k)
        each = -(-blocks // splits)
        return self._replace(splits=-(-blocks // each), blocks=each)


class Measured(NamedTuple):
    """Figures of the kernels, fitted to times on an H100 and an H200: `tiling/figures.json` has them."""

    large_products: int  # multiplications from which on preparing operands costs little beside the product
    large_rows: int  # of x; with fewer, coefficients are read about as often as they would be prepared
    most_splits: int  # of a reduction
    most_splits_of_large: int  # the same of a large product
    reached: float  # share of a GPU's rate
    fewest_steps: int  # of a split's loop
    warps_at_once: int  # on a multiprocessor, by the registers that a thread takes
    fewest_degrees: int  # of a group of them in the forward pass
    side_by_side: dict[str, float]  # share of the rate of dx with so many degrees in a product: a narrow one waits for shared memory
    # of the multiprocessors' work, below which other kernels' smaller tiles cost less than the linear layers' main loop
    least_filled: float
    narrow: float  # on Hopper GPUs, speed of a product half as wide (271 us beside 200 in TF32, for 65536 x 256 -> 256, degree 8)
    # by passes, share of `large_rows` from which on Hopper's kernels are taken: three, since plain Triton's split every operand in every
    # tile, from where a tile is three quarters full
    least_rows: dict[str, float]
    # share of `large_products` in the forward pass; of three passes half of that in the backward pass, which prepares operands for two
    least_products: dict[str, float]
    most_segments: int  # that share a tile's sum
    second_stage: float  # seconds of a launch that adds up partial sums, beside their traffic
    # speed of dC with as many degrees side by side: the fewer, the more often a value's input is read, and the degrees before it made (4096
    # x 200 -> 800, degree 5: 1.11, 1.25 and 1.75 us a step)
    remade: dict[str, float]
    summed_up: dict[str, float]  # the same of dx, which goes through the derivatives after each of them
    many_degrees: float  # what a degree more side by side is worth, since each group goes through the degrees before it once more
    group: int  # rows of tiles that are in flight together
    flush_terms: int  # of a float32-class sum that tensor cores, which cut sums off, may add up by themselves on Hopper GPUs
    ring: int  # bytes of a ring of operands there
    registers: tuple[int, int]  # there, of a thread that holds sums, and of one that makes values
    registers_of_dx: tuple[int, int]  # the same of dx: one has derivatives beside the sums, the other makes nothing
    # `Tile`s by cores, product, and bytes of an operand, or "3 passes" of a large product, whose sums of one step and of all steps are both
    # in registers. The largest come first; the last ones are for results of few elements, which wait for memory. Cores are those that read
    # operands from shared memory, those that read them from registers, and none of float64, for which a thread keeps whole rows and columns
    # of operands. "few" are of operands of four bytes where those leave multiprocessors idle: the first that is no larger than the result.
    # They and the shares of reductions are the best, or nearly so, of a hundred ways for each product of three small layers on an H100, in
    # three passes. "one step" is for dC in place of the last one, if rows are all in one block.
    tiles: dict[str, dict[str, dict[str, tuple[Tile, ...]]]]
    # by bytes of an operand, `GemmTile` of dx in one pass on Hopper GPUs: a tile of sums holds all degrees of some inputs. A degree's sums
    # of an input are in the thread that has its others where there are 8 inputs at least; with more than 64, x and dx would take the shared
    # memory of a stage.
    gemm_tiles: dict[str, tuple[int, ...]]


def _read(value: Any) -> Any:
    """A figure, several, or tiles by names."""
    if isinstance(value, dict):
        return {name: _read(each) for name, each in value.items()}
    if isinstance(value, list):
        return tuple([Tile(*each) if isinstance(each, list) else each for each in value])
    return value


MEASURED: Final = Measured(**_read(figures("kan")))


def is_large(sizes: Sizes) -> bool:
    """Whether degree 0 is taken out of the product, and operands are transposed and split before it."""
    return sizes.rows >= MEASURED.large_rows and sizes.products >= MEASURED.large_products


def _tiles(tile: Tile, height: int, width: int) -> int:
    return -(-height // tile.block_m) * -(-width // tile.block_n)


def _fitted(tile: Tile, height: int, width: int, depth: int) -> Tile:
    """No block much larger than its side of the product; a tensor core takes nothing narrower than 16."""

    def fit(block: int, size: int) -> int:
        return min(block, max(NARROWEST, next_power_of_two(size)))

    return tile._replace(block_m=fit(tile.block_m, height), block_n=fit(tile.block_n, width), block_k=fit(tile.block_k, depth))


def _chosen(tiles: Sequence[Tile], few: Sequence[Tile], shape: tuple[int, int, int], sizes: Sizes, degrees: int = 0) -> Tile:
    """The largest tile that a large product of this height, width and depth fills, whose reduction can be split; else a small one.

    Args:
        tiles: the largest first.
        few: for four-byte operands, where the last of those would be fewer than multiprocessors.
        shape: height, width, depth.
        sizes: of the layer.
        degrees: that a product has a result for each of; 0 if it sums over them.
    """
    height, width, _ = shape
    for tile in tiles[:-1] if is_large(sizes) else ():
        if tile.block_m <= height and tile.block_n <= width:
            return _fitted(tile, *shape)
    small = _fitted(tiles[-1], *shape)
    if _tiles(small, height, width) * _groups(small, degrees) >= sizes.gpu.multiprocessors:
        return small
    if sizes.itemsize != 4:
        return small._replace(block_n=min(small.block_n, 32), block_m=min(small.block_m, 32))
    return _fitted(next((tile for tile in few if tile.block_m <= height), few[-1]), *shape)


def _groups(tile: Tile, degrees: int) -> int:
    return -(-degrees // tile.degrees) if degrees else 1


def _split(tile: Tile, programs: int, depth: int, inner: int, sizes: Sizes, each: int, fewest: int = 1) -> Tile:
    """The tile with splits that fill the multiprocessors, each with some steps to do.

    Args:
        tile: blocks.
        programs: of one split.
        depth: of the reduction.
        inner: steps of one of its blocks.
        sizes: of the layer.
        each: programs on a multiprocessor to aim at.
        fewest: blocks of a split.
    """
    blocks = -(-depth // tile.block_k)
    wanted = each * sizes.gpu.multiprocessors // programs if programs < sizes.gpu.multiprocessors else 1
    return tile.shared_out(max(1, min(wanted, blocks // max(fewest, -(-MEASURED.fewest_steps // inner)), MEASURED.most_splits)), depth)


def _at_once(tile: Tile) -> int:
    """Programs on a multiprocessor."""
    return max(1, MEASURED.warps_at_once // tile.warps)


def _in_waves(tile: Tile, programs: int, depth: int, results: int, sizes: Sizes) -> Tile:
    """The tile with splits of a large product.

    Its programs come in waves, and the last may be nearly empty: its cost against the partial sums'.
    """
    blocks = -(-depth // tile.block_k)
    slots = sizes.gpu.multiprocessors * _at_once(tile)
    work = sizes.seconds() / MEASURED.reached

    def seconds(splits: int) -> float:
        waves = -(-programs * splits // slots)
        partial = 2 * splits * results * max(4, sizes.itemsize) / sizes.gpu.bandwidth if splits > 1 else 0.0
        return work * waves * slots / (programs * splits) + partial

    return tile.shared_out(min(range(1, 1 + min(MEASURED.most_splits_of_large, blocks)), key=seconds), depth)


def _tiles_of(product: str, sizes: Sizes) -> Sequence[Tile]:
    """Tiles of one of the products for operands of this size on this GPU, the largest first."""
    gpu, key = sizes.gpu, str(sizes.itemsize)
    if sizes.itemsize == 8 and not gpu.has_float64_cores:
        return MEASURED.tiles["without cores"][product][key]
    keyed = MEASURED.tiles["from shared memory" if gpu.has_shared_operands else "from registers"][product]
    found = keyed[key]
    if sizes.passes == 3:
        return *keyed["3 passes"], found[-1]
    if product == "input" and gpu.has_staged_sums:
        return found[-1:]  # sums of larger ones would fill shared memory
    if len(found) == 3 and not gpu.is_measured:
        return found[1:]  # the widest spills where it is not Hopper's wgmma that it is compiled to
    return found


def forward(sizes: Sizes) -> Tile:
    """Of y [rows, num_out], reduced over num_in and degrees."""
    tile = _chosen(_tiles_of("forward", sizes), MEASURED.tiles["few"]["forward"]["4"], (sizes.rows, sizes.num_out, sizes.num_in), sizes)
    programs = _tiles(tile, sizes.rows, sizes.num_out)
    if is_large(sizes):
        return _in_waves(tile, programs, sizes.num_in, sizes.rows * sizes.num_out, sizes)
    tile = _split(tile, programs, sizes.num_in, sizes.terms, sizes, _at_once(tile))
    most = min(_at_once(tile) * sizes.gpu.multiprocessors // programs, MEASURED.most_splits) // tile.splits
    groups = range(1, min(sizes.terms // MEASURED.fewest_degrees, most) + 1)
    return tile._replace(groups=max([g for g in groups if sizes.terms % g == 0], default=1))


def _with_degrees(tile: Tile, sizes: Sizes) -> Tile:
    """Fewer degrees side by side where the last group of them would be nearly empty; tiles are wider then."""

    def attained(degrees: int) -> float:
        return sizes.terms / (-(-sizes.terms // degrees) * degrees) * MEASURED.side_by_side[str(degrees)]

    degrees = max([d for d in map(int, MEASURED.side_by_side) if d <= tile.degrees], key=attained)
    return tile._replace(degrees=degrees, block_n=tile.block_n * (2 if degrees <= 2 else 1))


def input_gradient(sizes: Sizes) -> Tile:
    """Of dx [rows, num_in], reduced over num_out and degrees."""
    tiles, few = (
        [_with_degrees(tile, sizes) for tile in found] for found in (_tiles_of("input", sizes), MEASURED.tiles["few"]["input"]["4"])
    )
    tile = _chosen(tiles, few, (sizes.rows, sizes.num_in, sizes.num_out), sizes)
    programs = _tiles(tile, sizes.rows, sizes.num_in)
    if is_large(sizes):
        return _in_waves(tile, programs, sizes.num_out, sizes.rows * sizes.num_in, sizes)
    return _split(tile, programs, sizes.num_out, sizes.terms, sizes, each=1, fewest=2)


def input_gradient_gemm(sizes: Sizes) -> tuple[GemmTile, int] | None:
    """Of dx by the linear layers' main loop, and how many degrees a tile has side by side; None where too much would be empty."""
    degrees = next_power_of_two(sizes.terms)
    if sizes.itemsize == 8 or sizes.passes != 1 or not 4 <= degrees <= 32 or not is_large(sizes):
        return None
    tile = GemmTile(*MEASURED.gemm_tiles[str(sizes.itemsize)])
    tiles = -(-sizes.rows // tile.block_m) * -(-sizes.num_in * degrees // tile.block_n)
    done = -(-tiles // sizes.gpu.multiprocessors) * sizes.gpu.multiprocessors * tile.block_m * tile.block_n
    return (tile, degrees) if sizes.rows * sizes.num_in * sizes.terms >= MEASURED.least_filled * done else None


def coefficient_gradient(sizes: Sizes) -> Tile:
    """Of dC, a tile [num_in, num_out] for each few degrees, reduced over rows."""
    tiles = _tiles_of("coefficients", sizes)
    gpu = sizes.gpu
    # For 10.0 the compiler of Triton 3.7 fails at higher tiles that hold all degrees.
    one_step = MEASURED.tiles["one step"]["coefficients"]["4"]
    is_for_it = sizes.rows <= one_step[0].block_k if gpu.is_measured else gpu.has_shared_operands and sizes.terms <= tiles[-1].degrees
    if sizes.itemsize == 4 and is_for_it:
        tiles = (*tiles[:-1], *one_step)
    tile = _chosen(tiles, MEASURED.tiles["few"]["coefficients"]["4"], (sizes.num_in, sizes.num_out, sizes.rows), sizes, sizes.terms)
    programs = _tiles(tile, sizes.num_in, sizes.num_out) * _groups(tile, sizes.terms)
    if is_large(sizes):
        return _in_waves(tile, programs, sizes.rows, sizes.num_in * sizes.num_out * sizes.terms, sizes)
    return _split(tile, programs, sizes.rows, tile.degrees, sizes, _at_once(tile))


# ---- the kernels for Hopper GPUs: tiles, buffers, and how programs share sums ----------------------

BLOCK_M: Final = 128  # two warpgroups' rows
WIDEST: Final = 2 * BLOCK_M  # of a product; half of that where sums are kept twice, for three passes


class Pipelined(NamedTuple):
    """Blocks, buffers, and how the work is shared out."""

    block_n: int
    block_k: int
    stages: int  # copies under way, and the operands in use
    flush: int  # steps between two additions to the float32 sum; 0: one at the end
    degrees: int
    programs: int
    work_items: int  # tiles of all splits, or parts of the work, that programs take one after the other
    splits: int = 1  # of the forward reduction
    blocks: int = 0  # of each split
    registers: tuple[int, int] = MEASURED.registers  # of a thread that holds sums; of one that makes values


def takes_pipelined(sizes: Sizes, backward: bool) -> bool:
    """Whether products are large enough."""
    rows, products = (least[str(sizes.passes)] for least in (MEASURED.least_rows, MEASURED.least_products))
    if sizes.passes == 3 and backward:
        products /= 2
    return sizes.rows >= rows * MEASURED.large_rows and sizes.products >= products * MEASURED.large_products


def _pipelined_tiles(height: int, width: int, block_n: int) -> int:
    return -(-height // BLOCK_M) * -(-width // block_n)


def _widths(sizes: Sizes) -> tuple[int, ...]:
    return (WIDEST // 2,) if sizes.passes == 3 else (WIDEST, WIDEST // 2)


def _pipelined(block_n: int, block_k: int, degrees: int, work_items: int, sizes: Sizes, **others: Any) -> Pipelined:
    """The launch with as many steps' operands in the ring as it holds, and a program for each multiprocessor at most."""
    is_split = sizes.passes == 3
    stages = MEASURED.ring // ((BLOCK_M + degrees * block_n) * block_k * sizes.itemsize * (2 if is_split else 1))
    flush = MEASURED.flush_terms // block_k if is_split else 0
    return Pipelined(block_n, block_k, stages, flush, degrees, min(work_items, sizes.gpu.multiprocessors), work_items, **others)


def pipelined_forward(sizes: Sizes) -> Pipelined:
    """Of y [rows, num_out], reduced over num_in and degrees."""
    block_k = 32
    blocks = -(-sizes.num_in // block_k)

    def candidates() -> Iterator[tuple[float, int, int]]:
        for width in _widths(sizes):
            tiles = _pipelined_tiles(sizes.rows, sizes.num_out, width)
            filled = sizes.rows * sizes.num_out / (tiles * BLOCK_M * width) * (1.0 if width == WIDEST else MEASURED.narrow)
            for splits in range(1, min(MEASURED.most_segments, blocks) + 1):
                waves = -(-tiles * splits // sizes.gpu.multiprocessors) * sizes.gpu.multiprocessors / (tiles * splits)
                partial = (2 * splits + 1) * sizes.rows * sizes.num_out * 4 / sizes.gpu.bandwidth if splits > 1 else 0.0
                yield sizes.seconds() * waves / filled + partial, width, splits

    _, width, splits = min(candidates())
    each = -(-blocks // splits)
    splits = -(-blocks // each)
    work_items = _pipelined_tiles(sizes.rows, sizes.num_out, width) * splits
    return _pipelined(width, block_k, 1, work_items, sizes, splits=splits, blocks=each)


def _degrees(sizes: Sizes) -> tuple[int, ...]:
    """How many degrees may stand side by side in a gradient's tile."""
    if sizes.passes == 3:
        return 4, 2, 1
    # By twos, values would be made anew too often.
    counts = (8, 4) if sizes.terms > 2 else (8, 4, 2)
    return (max(counts, key=lambda count: sizes.terms / (-(-sizes.terms // count) * count) * (1 + MEASURED.many_degrees * count)),)


def segments_of(tiles: int, blocks: int, parts: int) -> int:
    """The most parts that share a tile, where tiles of this number of blocks are shared out in one row (stream-k)."""
    units = tiles * blocks

    def owner(unit: int) -> int:
        return ((unit + 1) * parts - 1) // units

    return max(owner((tile + 1) * blocks - 1) - owner(tile * blocks) + 1 for tile in range(tiles))


def _stream_k(
    degrees: int, tiles: int, units: int, block_k: int, results: int, speed: float, sizes: Sizes, **others: Any
) -> tuple[float, int, Pipelined]:
    """(seconds, degrees, the launch) of tiles whose sums are shared out to the parts that take least time (stream-k).

    That is their busiest multiprocessor's steps, and the traffic of partial sums.

    Args:
        degrees: side by side.
        tiles: number of them.
        units: steps of each tile's sum.
        block_k: of a step.
        results: elements.
        speed: of a step, beside the best one's.
        sizes: of the layer.
        **others: of the launch.
    """
    gpu = sizes.gpu
    width = _widths(sizes)[0]
    step = 2 * BLOCK_M * width * block_k * sizes.passes * gpu.multiprocessors / gpu.rate(sizes.itemsize) / speed

    def seconds(parts: int) -> float:
        busiest = -(-tiles * units // parts) * -(-parts // gpu.multiprocessors)
        segments = 1 if parts <= tiles and tiles % parts == 0 else 2 if parts < tiles else -(-parts // tiles) + (parts % tiles > 0)
        partial = (2 * segments + 1) * results * 4 / gpu.bandwidth + MEASURED.second_stage if segments > 1 else 0.0
        return step * busiest + partial

    # Whole tiles; tiles in equal parts, which run through the same operands together; or a share for each multiprocessor.
    choices = [tiles * splits for splits in range(1, min(MEASURED.most_segments, units) + 1)]
    if gpu.multiprocessors <= tiles * min(MEASURED.most_segments - 1, units):
        choices.append(gpu.multiprocessors)
    parts = min(choices, key=seconds)
    return seconds(parts), degrees, _pipelined(width // degrees, block_k, degrees, parts, sizes, **others)


def pipelined_input_gradient(sizes: Sizes) -> Pipelined | None:
    """Of dx [rows, num_in], reduced over num_out and degrees; None where other kernels are faster: in one pass."""
    if sizes.passes != 3:
        return None
    block_k = 32
    found = []
    for degrees in _degrees(sizes)[:-1]:
        tiles = _pipelined_tiles(sizes.rows, sizes.num_in, WIDEST // 2 // degrees)
        units = -(-sizes.terms // degrees) * -(-sizes.num_out // block_k)
        given = degrees, tiles, units, block_k, sizes.rows * sizes.num_in, MEASURED.summed_up[str(degrees)], sizes
        found.append(_stream_k(*given, registers=MEASURED.registers_of_dx))
    return min(found)[-1]


def pipelined_coefficient_gradient(sizes: Sizes) -> Pipelined:
    """Of dC, tiles [num_out, (degree, num_in)], reduced over rows."""
    block_k = 128 // sizes.itemsize
    units, results = -(-sizes.rows // block_k), sizes.terms * sizes.num_in * sizes.num_out
    found = []
    for degrees in _degrees(sizes):
        tiles = _pipelined_tiles(sizes.num_out, sizes.num_in, _widths(sizes)[0] // degrees) * -(-sizes.terms // degrees)
        found.append(_stream_k(degrees, tiles, units, block_k, results, MEASURED.remade[str(degrees)], sizes))
    return min(found)[-1]
