"""The closed form of the GEMM main loop: everything that it chooses is valid, and large products get large tiles."""

from __future__ import annotations

import itertools

import pytest

from fastkron_py.tuning.gemm import GemmSizes, GemmSpan, GemmTile, gemm_spans, gemm_tile, is_valid, tiles

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


def test_spans_are_all_columns() -> None:
    """Two launches are valid each, meet at a border of the first one's tiles, and leave the first one's last wave almost full."""
    divided = 0
    for sizes in SIZES:
        stored = sizes._replace(stored=sizes.stored * sizes.itemsize // 2)
        spans = gemm_spans(stored)
        if not spans:
            continue
        first, last = spans
        divided += 1
        assert (first.start, first.stop, last.stop) == (0, last.start, sizes.columns)
        assert first.stop % first.tile.block_n == 0
        assert first.stop // 2 * sizes.itemsize % 16 == 0  # where descriptors can begin
        parts = [stored._replace(columns=span.stop - span.start) for span in spans]
        assert all(is_valid(span.tile, part) for span, part in zip(spans, parts, strict=True))
        waves = tiles(first.tile, parts[0]) / 132
        assert -(-waves // 1) - waves < -(-sizes.rows // first.tile.block_m) / 132
    assert divided >= 5


def test_llama_in_two_launches() -> None:
    """3.4 waves are three full ones, and one of half the length; 6.8 and 12.6 waves stay."""
    llamas = [
        GemmSizes(512, 2 * hidden, depth, 2, 1, 1, True, 132, True) for depth, hidden in ((4096, 14336), (8192, 28672), (16384, 53248))
    ]
    large, small = GemmTile(128, 256, 64, 8, 3, 2, 16), GemmTile(128, 128, 64, 8, 4)
    assert [gemm_spans(sizes) for sizes in llamas] == [(GemmSpan(0, 25344, large), GemmSpan(25344, 28672, small)), (), ()]
    shallow = llamas[0]._replace(depth=256)  # a second launch would take longer than the wave that it saves
    assert gemm_spans(shallow) == ()


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
