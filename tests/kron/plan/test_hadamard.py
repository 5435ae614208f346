"""The plan of a Hadamard transform by additions: which thread has which element, and which bits it transforms."""

from __future__ import annotations

import pytest

from fastkron_py.kron.families.butterfly import LANES, MOST_BITS, SINGLE, WIDEST, Phase, Transform, takes_transform, transform
from fastkron_py.runtime.gpu import HOPPER

VECTOR_BYTES = 16
SECTOR_BYTES = 32
CASES = [
    (m, bits, itemsize)
    for m in (1, 12, 20, 28)
    for itemsize in (2, 4, 8)
    for bits in range(16)
    if takes_transform(m, bits, itemsize, HOPPER.shared_memory)
]


def _all_phases(found: Transform) -> tuple[Phase, ...]:
    return (found.loaded, *found.phases)


@pytest.mark.parametrize(("m", "bits", "itemsize"), CASES)
def test_phases(m: int, bits: int, itemsize: int) -> None:
    found = transform(m, bits, itemsize)
    assert found.row == 1 << bits + found.order_bits
    assert found.row <= 1 << found.tile
    for phase in _all_phases(found):
        assert sorted([*phase.registers, *phase.lanes, *phase.warps]) == list(range(found.tile))
        assert len(phase.lanes) == LANES
        assert 1 << len(phase.warps) == found.num_warps
        assert set(phase.modes) <= set(phase.registers)
    # Each bit of a row's length once.
    assert sorted([bit for phase in found.phases for bit in phase.modes]) == list(range(bits))
    if m == 1:
        assert found.loaded == found.phases[0]
        assert found.order == ()
    else:
        assert sorted(found.order) == list(range(found.tile))


@pytest.mark.parametrize(("m", "bits", "itemsize"), CASES)
def test_loads_and_stores_are_whole_sectors(m: int, bits: int, itemsize: int) -> None:
    """A thread has 16 bytes side by side, and a warp whole sectors of memory."""
    found = transform(m, bits, itemsize)
    vector = (VECTOR_BYTES // itemsize).bit_length() - 1
    near = min(bits, vector)
    for phase in (found.loaded, found.phases[-1]):
        assert set(range(near)) <= set(phase.registers)
        if bits > near:
            assert near in phase.lanes
    assert SECTOR_BYTES == 2 * VECTOR_BYTES


@pytest.mark.parametrize("bits", [8, 9, 10])
@pytest.mark.parametrize("m", [12, 28])
def test_a_matrix_has_its_operands_bits(m: int, bits: int) -> None:
    """Bits of registers and lanes as mma.m16n8k16 has them: (k0, k3), (k1, k2, n0, n1, n2), and of sums (n0, m3), (n1, n2, m0, m1, m2)."""
    found = transform(m, bits, SINGLE)
    dimensions = [found.tile - 1 - d for d in found.order]
    k, n = dimensions[: found.order_bits][::-1], dimensions[found.order_bits :][::-1]
    assert found.loaded.lanes == (k[1], k[2], n[0], n[1], n[2])
    assert {k[0], k[3]} <= set(found.loaded.registers)
    summed = found.phases[0]
    assert summed.lanes == (n[1], n[2], k[0], k[1], k[2])
    assert {n[0], k[3]} <= set(summed.registers)
    warps = len(summed.warps)
    assert tuple(n[3 : 3 + warps]) == summed.warps == found.loaded.warps


def test_refusals() -> None:
    assert not takes_transform(WIDEST + 4, 6, 4, HOPPER.shared_memory)
    assert not takes_transform(12, 6, 2, HOPPER.shared_memory)
    assert not takes_transform(12, 1, 4, HOPPER.shared_memory)  # no 16 bytes side by side
    assert all(not takes_transform(1, most + 1, itemsize, HOPPER.shared_memory) for itemsize, most in MOST_BITS.items())
    assert not takes_transform(1, 14, 8, 100_000)  # shared memory of a smaller GPU
    assert takes_transform(1, 13, 8, 100_000)
