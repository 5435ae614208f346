"""The closed form of the GEMM main loop: everything that it chooses is valid, and large products get large tiles."""

from __future__ import annotations

import itertools

import pytest

from fastkron_py.runtime.gpu import ADA, AMD, AMPERE, BLACKWELL, BLACKWELL_RTX, HOPPER
from fastkron_py.tiling.gemm_config import (
    GemmSizes,
    GemmTile,
    gemm_spans,
    gemm_tile,
    is_valid,
    tiles,
)

SIZES = [
    GemmSizes(rows, columns, depth, itemsize, passes, stored, paired, HOPPER, has_descriptors)
    for rows, columns, depth, itemsize, passes, stored, paired, has_descriptors in itertools.product(
        (1, 17, 100, 512, 5000, 1 << 20), (2, 246, 4096, 106496), (1, 40, 16384), (2, 4), (1, 3), (1, 3, 5), (False, True), (False, True)
    )
    if (passes == 1 or itemsize == 4) and not (paired and columns % 2)
]


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
