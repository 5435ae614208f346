"""How rational's kernels walk over memory, in plain Python: runs found, and every vector taken once."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from fastkron_py.rational.config import LANES, Preference, Runs, Walk, find_runs, vector_width, walk
from fastkron_py.rational.config_linear import fuses, linear_tile
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.tiling.gemm_config import GemmSizes


def runs_of(t: Tensor, groups: int) -> Runs | None:
    return find_runs(t.shape, [t.stride()], groups)


IMAGE = torch.empty(3, 8, 5, 7)  # channels first


def test_runs() -> None:
    rows = torch.empty(4, 6, 8)
    assert runs_of(rows, 4) == (24, 4, 2, (8,))
    assert runs_of(rows, 1) == (1, 1, 192, (192,))
    assert runs_of(IMAGE.movedim(1, -1), 4) == (3, 4, 70, (280,))
    assert runs_of(IMAGE.movedim(1, -1), 1) == (1, 1, 840, (840,))
    assert runs_of(rows.movedim(0, -1), 2) == (1, 2, 96, (192,))
    assert runs_of(rows[..., :4], 2) == (24, 2, 2, (8,))
    assert runs_of(rows[:, :1], 2) == (4, 2, 4, (48,))
    assert runs_of(torch.empty(8), 2) == (1, 2, 4, (8,))


def test_no_runs() -> None:
    rows = torch.empty(4, 6, 8)
    assert runs_of(rows[..., ::2], 2) is None
    assert runs_of(rows[:, :3, :4], 2) is None
    assert runs_of(rows[:1].expand(4, 6, 8), 2) is None
    assert runs_of(torch.empty(1).expand(4, 8), 2) is None
    assert runs_of(torch.empty(1).expand(4, 8), 1) is None
    assert runs_of(rows.as_strided((4, 8), (4, 1)), 2) is None  # rows that overlap


def test_tensors_have_to_agree() -> None:
    a, b = torch.empty(4, 6, 8), torch.empty(6, 4, 8).transpose(0, 1)
    assert find_runs(a.shape, [a.stride(), b.stride()], 2) is None
    wide = torch.empty(4, 6, 12)[..., :8]
    assert find_runs(a.shape, [a.stride(), wide.stride()], 2) == (24, 2, 4, (8, 12))


def taken(w: Walk) -> list[int]:
    """Vectors of one group that its programs take, as the kernel's loops do."""
    found = []
    for chunk in range(w.chunks):
        for phase in range(w.phases):
            for period in range(w.chunk(chunk).start, min(w.chunk(chunk).stop, w.periods - (phase >= w.last_phases))):
                start = (period * w.phases + phase) * w.block
                found += range(start, min(start + w.block, w.total))
    return found


def is_valid(walk: Walk, runs: Runs) -> bool:
    """Whether the kernels take a walk, whose programs then together take each vector of a group once."""
    tiles = math.ceil(walk.total / walk.block)
    steady = walk.mode != "rows" or walk.phases * walk.block % walk.per_run == 0
    return (
        walk.vector * walk.per_run == runs.length
        and walk.total == walk.per_run * runs.outer
        and all(stride % walk.vector == 0 for stride in runs.row_strides if runs.outer > 1)
        and walk.block >= LANES
        and walk.block & (walk.block - 1) == 0
        and walk.vector & (walk.vector - 1) == 0
        and (walk.mode != "flat" or runs.outer == 1)
        and (walk.mode == "rows" or walk.phases == 1)
        and steady
        and 0 <= walk.long_chunks <= walk.chunks
        and walk.chunk(walk.chunks - 1).stop * walk.phases >= tiles
    )


PREFERENCES = [Preference(1, 4, 48, True), Preference(2, 4, 4), Preference(1, 1, 3, True), Preference(4, 8, 1)]


@pytest.mark.parametrize(
    ("outer", "groups", "length"),
    [
        (1, 1, 1),
        (1, 1, 100_000),
        (197 * 8, 8, 96),
        (591, 8, 24),
        (7, 3, 5),
        (64, 8, 384),
        (3, 4, 7 * 1024),
        (5000, 2, 24),
        (300, 2, 3 * 128),
    ],
)
def test_every_vector_once(outer: int, groups: int, length: int) -> None:
    for itemsize, preference in product([2, 4, 8], PREFERENCES):
        runs = Runs(outer, groups, length, (groups * length,))
        for multiprocessors in (2, 132):
            w = walk(runs, itemsize, multiprocessors, preference)
            assert is_valid(w, runs)
            assert sorted(taken(w)) == list(range(w.total))
            assert w.iterations <= preference.iterations
            if w.mode == "rows" and w.phases > 1:  # a thread stays on its columns
                assert w.phases * w.block % w.per_run == 0


def test_the_kat_s_layers_have_whole_vectors_and_full_tiles() -> None:
    """Group widths 24 to 384 at 16-byte vectors, on threads that stay on their columns."""
    for length in (24, 48, 96, 192, 384):
        runs = Runs(1024 * 197, 8, length, (8 * length,))
        for itemsize in (2, 4):
            assert vector_width(runs, itemsize) == 16 // itemsize
            w = walk(runs, itemsize, 132, Preference(1, 4, 48))
            assert (w.mode, w.masked) == ("rows", False)
            assert w.phases == 3
            assert w.programs * 8 >= 16 * 132
            assert math.prod((w.chunks, w.phases, w.iterations, w.block)) >= w.total


def test_the_last_programs_are_short() -> None:
    """About a quarter of the work, in programs of a quarter of the length."""
    w = walk(Runs(1024 * 197, 8, 96, (768,)), 2, 132, Preference(1, 4, 48, True))
    lengths = [len(w.chunk(c)) for c in range(w.chunks)]
    assert lengths == sorted(lengths, reverse=True)
    assert set(lengths) == {48, 12}
    assert 0.7 < sum(n for n in lengths if n == 48) / sum(lengths) < 0.8


def test_which_linear_layers_are_fused() -> None:
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
