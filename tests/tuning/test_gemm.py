"""The closed form of the GEMM main loop: everything that it chooses is valid, and large products get large tiles."""

from __future__ import annotations

import itertools

import pytest

from fastkron_py.tuning.gemm import GemmSizes, GemmTile, gemm_tile, is_valid, tiles

SIZES = [
    GemmSizes(rows, columns, depth, itemsize, passes, stored, paired, 132, described)
    for rows, columns, depth, itemsize, passes, stored, paired, described in itertools.product(
        (1, 17, 100, 512, 5000, 1 << 20), (2, 246, 4096, 106496), (1, 40, 16384), (2, 4), (1, 3), (1, 3, 5), (False, True), (False, True)
    )
    if (passes == 1 or itemsize == 4) and not (paired and columns % 2)
]


def test_every_choice_is_valid() -> None:
    for sizes in SIZES:
        stored = sizes._replace(stored=sizes.stored * sizes.itemsize // 2)
        tile = gemm_tile(stored)
        assert is_valid(tile, stored), (tile, stored)


@pytest.mark.parametrize("rows", [512, 4096, 16384])
@pytest.mark.parametrize(("depth", "hidden"), [(4096, 14336), (8192, 28672), (16384, 53248)])
def test_llama(rows: int, depth: int, hidden: int) -> None:
    tile = gemm_tile(GemmSizes(rows, 2 * hidden, depth, 2, 1, 1, True, 132, True))
    # 3.4 waves of the large tiles would take as long as 4; seven of the small ones are full.
    large = (rows, depth) != (512, 4096)
    assert tile == (GemmTile(128, 256, 64, 8, 3, 2, 16) if large else GemmTile(128, 128, 64, 8, 4))


def test_few_tiles_become_smaller() -> None:
    """A product that large tiles would leave most multiprocessors without."""
    sizes = GemmSizes(1000, 1024, 1024, 2, 1, 1, True, 132, True)
    assert tiles(gemm_tile(sizes), sizes) >= 100


@pytest.mark.parametrize(
    "tile",
    [
        GemmTile(8, 64, 16, 4, 2),  # narrower than a tensor core takes
        GemmTile(48, 64, 16, 4, 2),  # no power of two
        GemmTile(512, 64, 16, 8, 2),  # more than a box has
        GemmTile(128, 256, 64, 4, 3),  # more sums than registers
        GemmTile(128, 256, 64, 8, 5),  # more than shared memory
        GemmTile(128, 64, 64, 8, 3, parts=4),  # parts too narrow
        GemmTile(128, 256, 64, 8, 3, programs=2),
    ],
    ids=str,
)
def test_what_is_not_valid(tile: GemmTile) -> None:
    assert not is_valid(tile, GemmSizes(4096, 4096, 4096, 2, 1, 1, True, 132, True))
