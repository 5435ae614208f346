"""The closed form of the polynomial KAN launches: every reduction is covered, blocks are what kernels take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fastkron_py.kan import plan
from fastkron_py.kan.layer_config import DeviceBasis
from fastkron_py.kan.plan import Sizes
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
    "forward": (plan.forward, lambda s: s.num_in),
    "input_gradient": (plan.input_gradient, lambda s: s.num_out),
    "coefficient_gradient": (plan.coefficient_gradient, lambda s: s.rows),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_splits_cover_the_reduction(name: str) -> None:
    choose, depth_of = PRODUCTS[name]
    for sizes in CASES:
        tile = choose(sizes)
        blocks = -(-depth_of(sizes) // tile.block_k)
        assert (tile.splits - 1) * tile.blocks < blocks <= tile.splits * tile.blocks
        for block in tile[:3]:
            assert block >= 16
            assert block & (block - 1) == 0
        assert tile.degrees in (1, 2, 4, 8)
        assert sizes.terms % tile.groups == 0
        assert tile.splits * tile.groups <= plan.MEASURED.most_splits
        assert tile.groups == 1 or name == "forward"


def test_tiles_of_all_degrees_that_compile_for_10_0() -> None:
    """With Triton 3.7, whose compiler fails there where a loop without a choice of degrees has tiles of 64 rows of four bytes."""
    of_few = [s._replace(terms=terms, gpu=BLACKWELL) for s in CASES for terms in (1, 2, 4) if s.itemsize == 4]
    tiles = [plan.coefficient_gradient(s) for s in of_few if not plan.is_large(s)]
    assert len(tiles) > 20
    assert [tile for tile in tiles if tile.block_m > 32] == []


def test_compiled_kernels_are_found_by_a_basis_code() -> None:
    """Triton's text of a tuple of functions has their names alone, so that a basis that was edited would run as before."""
    keys = {DeviceBasis(3, 1, (), *[SimpleNamespace(cache_key=code)] * 5).cache_key for code in ("old", "new")}
    assert len(keys) == 2
