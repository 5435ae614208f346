"""The closed form of the GEMM main loop: everything that it chooses is valid, and large products get large tiles."""

from __future__ import annotations

import itertools

import pytest

from fastkron_py.runtime.gpu import ADA, AMD, AMPERE, BLACKWELL, BLACKWELL_RTX, HOPPER
from fastkron_py.tiling.gemm_config import (
    GemmSizes,
    GemmSpan,
    GemmTile,
    gemm_spans,
    gemm_tile,
    is_valid,
    shared_memory,
    tiles,
)

SIZES = [
    GemmSizes(rows, columns, depth, itemsize, passes, stored, paired, HOPPER, has_descriptors)
    for rows, columns, depth, itemsize, passes, stored, paired, has_descriptors in itertools.product(
        (1, 17, 100, 512, 5000, 1 << 20), (2, 246, 4096, 106496), (1, 40, 16384), (2, 4), (1, 3), (1, 3, 5), (False, True), (False, True)
    )
    if (passes == 1 or itemsize == 4) and not (paired and columns % 2)
]
LLAMAS = {"8B": (4096, 14336), "70B": (8192, 28672), "405B": (16384, 53248)}
LARGE, SMALL, BESIDE = GemmTile(128, 256, 64, 8, 3, 2, 16), GemmTile(128, 128, 64, 8, 4), GemmTile(64, 128, 32, 4, 4)


def llama(model: str, rows: int, beside: bool = False) -> GemmSizes:
    depth, hidden = LLAMAS[model]
    return GemmSizes(rows, 2 * hidden, depth, 2, 1, 1, True, HOPPER, True, beside)


def test_every_choice_is_valid() -> None:
    for gpu, sizes in itertools.product((AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_RTX, AMD), SIZES):
        described = sizes.has_descriptors and gpu is not AMD  # which takes none
        stored = sizes._replace(stored=sizes.stored * sizes.itemsize // 2, gpu=gpu, has_descriptors=described)
        tile = gemm_tile(stored)
        assert is_valid(tile, stored), (tile, stored)


@pytest.mark.parametrize("beside", [False, True])
def test_spans_are_all_columns(beside: bool) -> None:
    """Two launches are valid each, meet at a border of the first one's tiles, and leave the first one's last wave almost full."""
    divided = 0
    for sizes in SIZES:
        stored = sizes._replace(stored=sizes.stored * sizes.itemsize // 2, beside=beside)
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
        waves = tiles(first.tile, sizes.rows, first.stop) / 132
        assert -(-waves // 1) - waves < -(-sizes.rows // first.tile.block_m) / 132
    assert divided >= 5


def test_llama_in_two_launches() -> None:
    """3.4 waves are three full ones, and one of half the length; 6.8 and 12.6 waves stay."""
    llamas = [llama(model, 512) for model in LLAMAS]
    assert [gemm_spans(sizes) for sizes in llamas] == [(GemmSpan(0, 25344, LARGE), GemmSpan(25344, 28672, SMALL)), (), ()]
    shallow = llamas[0]._replace(depth=256)  # a second launch would take longer than the wave that it saves
    assert gemm_spans(shallow) == ()


# Where the first launch's columns end with programs beside them; of other sizes nothing changes.
CUTS = {("8B", 256): 16896, ("8B", 384): 22528, ("8B", 512): 25344, ("8B", 640): 26880, ("8B", 4096): 28416}


def test_the_second_launch_beside_the_first() -> None:
    for model, rows in itertools.chain(CUTS, [("8B", 1024)], itertools.product(LLAMAS, (64, 512, 4096, 16384))):
        cut, sizes = CUTS.get((model, rows)), llama(model, rows, beside=True)
        apart = gemm_spans(llama(model, rows))
        if cut is None:
            assert gemm_spans(sizes) == apart, (model, rows)
        else:
            assert gemm_spans(sizes) == (GemmSpan(0, cut, LARGE), GemmSpan(cut, sizes.columns, BESIDE)), (model, rows)
            assert all(span.tile != BESIDE for span in apart)
            assert shared_memory(LARGE, sizes) + shared_memory(BESIDE, sizes) <= HOPPER.shared_memory


def test_no_launch_beside_the_first() -> None:
    for other in (
        {"stored": 3},  # with both of each pair: no room in shared memory
        {"itemsize": 4, "stored": 2},
        {"itemsize": 4, "stored": 2, "passes": 3},
        {"has_descriptors": False},
        {"depth": 256},  # what is between launches is longer
    ):
        sizes = llama("8B", 512, beside=True)._replace(**other)
        assert gemm_spans(sizes) == gemm_spans(sizes._replace(beside=False)), other


def test_llama() -> None:
    # 3.4 waves of the large tiles would take as long as 4; seven of the small ones are full.
    for model, rows in itertools.product(LLAMAS, (512, 4096, 16384)):
        assert gemm_tile(llama(model, rows)) == (SMALL if (model, rows) == ("8B", 512) else LARGE), (model, rows)


def test_few_tiles_become_smaller() -> None:
    """A product that large tiles would leave most multiprocessors without."""
    sizes = GemmSizes(1000, 1024, 1024, 2, 1, 1, True, HOPPER, True)
    assert tiles(gemm_tile(sizes), sizes.rows, sizes.columns) >= 100


def test_what_is_not_valid() -> None:
    for tile in (
        GemmTile(8, 64, 16, 4, 2),  # narrower than a tensor core takes
        GemmTile(48, 64, 16, 4, 2),  # no power of two
        GemmTile(512, 64, 16, 8, 2),  # more than a box has
        GemmTile(128, 256, 64, 4, 3),  # more sums than registers
        GemmTile(128, 256, 64, 8, 5),  # more than shared memory
        GemmTile(128, 64, 64, 8, 3, parts=4),  # parts too narrow
        GemmTile(128, 256, 64, 8, 3, programs=2),
    ):
        assert not is_valid(tile, GemmSizes(4096, 4096, 4096, 2, 1, 1, True, HOPPER, True)), tile
