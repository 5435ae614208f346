"""The closed form of the polynomial KAN launches: every reduction is covered, blocks are what kernels take."""

from __future__ import annotations

import itertools

import pytest

from fastkron_py.kan import config as tuning
from fastkron_py.kan import config_hopper as hopper
from fastkron_py.kan.config import Sizes
from fastkron_py.runtime.gpu import ADA, AMD, AMPERE, BLACKWELL, HOPPER, INTERPRETER

SHAPES = [
    (1, 1, 1, 1),
    (128, 40, 256, 8),
    (32, 512, 1024, 24),
    (8192, 768, 768, 8),
    (65536, 256, 256, 8),
    (100000, 7, 300, 64),
    (5, 5000, 3, 2),
]
PASSES = ((2, 1), (4, 3), (4, 1), (8, 1))
CASES = [
    Sizes(*shape, itemsize, passes, gpu)
    for shape in SHAPES
    for itemsize, passes in PASSES
    for gpu in (INTERPRETER, HOPPER, AMPERE, ADA, BLACKWELL, AMD)
]
PRODUCTS = {
    "forward": (tuning.forward, lambda s: s.num_in),
    "input_gradient": (tuning.input_gradient, lambda s: s.num_out),
    "coefficient_gradient": (tuning.coefficient_gradient, lambda s: s.rows),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_splits_cover_the_reduction(name: str) -> None:
    choose, depth_of = PRODUCTS[name]
    for sizes in CASES:
        tile, split = choose(sizes)
        blocks = -(-depth_of(sizes) // tile.block_k)
        assert (split.splits - 1) * split.blocks < blocks <= split.splits * split.blocks
        for block in tile[:3]:
            assert block >= 16
            assert block & (block - 1) == 0
        assert tile.degrees in (1, 2, 4, 8)
        assert sizes.terms % split.groups == 0
        assert split.splits * split.groups <= tuning.MOST_SPLITS
        assert split.groups == 1 or name == "forward"


def test_tiles_of_all_degrees_that_compile_for_10_0() -> None:
    """With Triton 3.7, whose compiler fails there where a loop without a choice of degrees has tiles of 64 rows of four bytes."""
    of_few = [s._replace(terms=terms, gpu=BLACKWELL) for s in CASES for terms in (1, 2, 4) if s.itemsize == 4]
    tiles = [tuning.coefficient_gradient(s)[0] for s in of_few if not tuning.is_large(s)]
    assert len(tiles) > 20
    assert [tile for tile in tiles if tile.block_m > 32] == []


def test_registers_hold_the_sums() -> None:
    """Accumulators take 128 registers of a thread at most."""
    few = (*tuning._FEW_FORWARD, *tuning._FEW_INPUT, *tuning._FEW_COEFFICIENTS, tuning._ONE_STEP)
    tables = [table for tiles in (tuning._TILES, tuning._FROM_REGISTERS) for table in tiles.values()]
    for table in (*tables, tuning._WITHOUT_CORES, {4: few}):
        for tile in itertools.chain(*table.values()):
            assert tile.block_m * tile.block_n * tile.degrees <= 128 * 32 * tile.warps


def test_small_results_fill_the_device() -> None:
    for choose, _ in PRODUCTS.values():
        tile, split = choose(Sizes(32, 512, 1024, 24, 4, 3, HOPPER))
        assert split.splits > 1 or tile.block_m <= 64


def test_both_gradients_in_one_launch() -> None:
    """Of every small layer: their programs have as many warps."""
    for sizes in CASES:
        if not tuning.is_large(sizes):
            assert tuning.input_gradient(sizes)[0].warps == tuning.coefficient_gradient(sizes)[0].warps


def test_large_products_are_told_from_small_ones() -> None:
    assert tuning.is_large(Sizes(8192, 768, 768, 8, 4, 1, HOPPER))
    assert not tuning.is_large(Sizes(32, 512, 1024, 24, 4, 1, HOPPER))
    assert not tuning.is_large(Sizes(512, 4096, 4096, 8, 4, 1, HOPPER))


@pytest.mark.parametrize(
    ("shape", "passes", "forward", "backward"),
    [
        ((1024, 784, 256, 5), 3, True, True),
        ((1023, 785, 257, 5), 3, True, True),
        ((1024, 784, 256, 5), 1, False, False),
        ((100, 1000, 1000, 4), 3, False, True),  # plain Triton's forward pass prepares nothing
        ((64, 1024, 1024, 9), 3, False, False),  # half of each tile would be empty
    ],
    ids=str,
)
def test_where_these_kernels_are_taken(shape: tuple[int, int, int, int], passes: int, forward: bool, backward: bool) -> None:
    sizes = Sizes(*shape, 4, passes, HOPPER)
    assert hopper.takes(sizes, False) == forward
    assert hopper.takes(sizes, True) == backward
