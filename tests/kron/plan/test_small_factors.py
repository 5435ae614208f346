"""The plan of products with small factors in registers: which thread has which element, and which problems take it."""

from __future__ import annotations

import itertools

import pytest
from planning import DTYPES, planned

from fastkron_py.kron.families.butterfly import DOUBLE, LANES, SINGLE, SIZES, small_factors, takes_small_factors

# (sizes, bytes, rows), as measured on an H200
FASTER = [
    *[((4,) * 6, SINGLE, 1024), ((4,) * 7, SINGLE, 64), ((2,) * 12, SINGLE, 256), ((8,) * 4, SINGLE, 16384), ((8,) * 3, SINGLE, 131072)],
    *[((4,) * 4, DOUBLE, 4096), ((8,) * 3, DOUBLE, 8192), ((8,) * 4, DOUBLE, 1024), ((8, 4, 8, 4), DOUBLE, 1024)],
]
SLOWER = [
    *[
        ((8, 8), SINGLE, 65536),
        ((8,) * 4, SINGLE, 256),
        ((8,) * 3, SINGLE, 2048),
        ((8, 8, 8, 8, 2), SINGLE, 8192),
        ((16, 16), SINGLE, 4096),
    ],
    *[((8, 8), DOUBLE, 524288), ((8,) * 3, DOUBLE, 128), ((4, 6, 4), SINGLE, 65536)],
]


@pytest.mark.parametrize("itemsize", [SINGLE, DOUBLE])
def test_phases(itemsize: int) -> None:
    """Of all products of two to seven such factors: every bit of an index in one place in each phase, every factor multiplied once."""
    vector, count = {SINGLE: 2, DOUBLE: 1}[itemsize], 0
    for ps in itertools.chain.from_iterable(itertools.product(SIZES, repeat=n) for n in range(2, 8)):
        if not takes_small_factors(ps, ps, itemsize):
            continue
        found, count = small_factors(ps, itemsize), count + 1
        for phase in found.phases:
            assert sorted([*phase.registers, *phase.lanes, *phase.warps]) == list(range(found.tile)), ps
            assert len(phase.lanes) == LANES, ps
            assert 1 << len(phase.warps) == found.num_warps, ps
            for group in phase.modes:
                assert set(range(group.low, group.low + group.width)) <= set(phase.registers), ps
                assert 1 << group.width == ps[group.factor], ps
        assert sorted([group.factor for phase in found.phases for group in phase.modes]) == list(range(len(ps))), ps
        for phase in (found.phases[0], found.phases[-1]):  # 16 bytes of a thread, and whole sectors of a warp
            assert set(range(vector)) <= set(phase.registers), ps
            assert phase.lanes[0] <= vector + 1, ps
    assert count > 1000


def _kernels(ps: tuple[int, ...], itemsize: int, rows: int, has_kernel: bool = True, columns: int = 1) -> set[str]:
    missing = () if has_kernel else ("small_factors",)
    return {launch.family for launch in planned(ps, None, rows, columns, DTYPES[itemsize, 1], missing=missing)}


@pytest.mark.parametrize(("ps", "itemsize", "rows"), FASTER, ids=str)
def test_problems_that_take_it(ps: tuple[int, ...], itemsize: int, rows: int) -> None:
    """Those that it was measured to be faster at."""
    assert _kernels(ps, itemsize, rows) == {"small_factors"}
    assert "small_factors" not in _kernels(ps, itemsize, rows, has_kernel=False)
    assert "small_factors" not in _kernels(ps, itemsize, rows, columns=4)


@pytest.mark.parametrize(("ps", "itemsize", "rows"), SLOWER, ids=str)
def test_problems_that_do_not(ps: tuple[int, ...], itemsize: int, rows: int) -> None:
    """Those that other kernels are faster at, or that it cannot multiply."""
    assert "small_factors" not in _kernels(ps, itemsize, rows)


def test_refusals() -> None:
    assert not takes_small_factors((4,), (4,), SINGLE)  # one factor
    assert not takes_small_factors((4, 4), (4, 8), SINGLE)  # not square
    assert not takes_small_factors((4, 3), (4, 3), SINGLE)
    assert not takes_small_factors((8,) * 5, (8,) * 5, SINGLE)  # a row does not fit in registers
    assert not takes_small_factors((4,) * 7, (4,) * 7, DOUBLE)
    assert not takes_small_factors((4, 4), (4, 4), 2)
