"""Whether a linear layer and the rational function after it are one kernel, and in which blocks."""

from __future__ import annotations

from fastkron_py.rational.config_linear import fuses, linear_tile
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.tiling.gemm_config import GemmSizes


def test_choice() -> None:
    """Large products hide no more than they did, and what takes less time than the fused call's Python gains nothing."""
    kat_t, kat_b, wide = (512 * 197, 768, 192), (128 * 197, 3072, 768), (16384, 16384, 4096)
    assert not fuses(*kat_t, 2, True, HOPPER)
    assert fuses(*kat_b, 2, False, HOPPER)
    assert not fuses(*wide, 2, False, HOPPER)
    tile = linear_tile(GemmSizes(*kat_b, 2, 1, 2, False, HOPPER, True), True)
    assert tile.programs == 2
    assert 768 // 8 % (tile.block_n // tile.parts) == 0  # pieces of KAT-T's tiles lie within a group
    assert linear_tile(GemmSizes(64, 32, 768, 2, 1, 2, False, HOPPER, True), True).block_n <= 64
    assert linear_tile(GemmSizes(*kat_b, 2, 1, 2, False, HOPPER, False), False).programs == 1  # by pointers
