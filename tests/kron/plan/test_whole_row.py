"""Whole rows in one launch: which problems take it, what it needs, and where each bit of an index lies in shared memory."""

from __future__ import annotations

import itertools

import pytest

from fastkron_py.kron.plan.plan import PlanProblem, plan
from fastkron_py.kron.plan.steps import Step
from fastkron_py.kron.plan.whole_row import Layouts, layouts, shared_memory, sizes_of, whole_row_config
from fastkron_py.runtime.gpu import HOPPER

PAIRS = [(p, q) for p in (16, 32) for q in (16, 32)]
THREE = list(itertools.product(PAIRS, repeat=3))
ROWS = [*THREE, ((16, 16),) * 4, ((16, 32), (16, 16), (16, 16), (16, 16))]
BANKS = 8  # vectors of 16 bytes that are read at once
HALF = 2


def _steps(shapes: tuple[tuple[int, int], ...]) -> list[Step]:
    return [Step(i, i + 1, p, q) for i, (p, q) in enumerate(shapes)]


def _layouts(shapes: tuple[tuple[int, int], ...]) -> Layouts:
    steps = _steps(shapes)
    return layouts(sizes_of(steps), whole_row_config(steps))


def _places(bases: tuple) -> dict[tuple[int, int], int]:
    """The offset of each (row, column)."""
    found = {}
    for offset in range(1 << len(bases)):
        row = column = 0
        for bit, (r, c) in enumerate(bases):
            if offset >> bit & 1:
                row, column = row ^ r, column ^ c
        found[row, column] = offset
    return found


def _has_conflicts(places: dict[tuple[int, int], int]) -> bool:
    """Whether eight rows of eight columns, whose vectors are read or stored at once, share a bank."""
    rows, columns = (1 + max(place[i] for place in places) for i in (0, 1))
    for row, column in itertools.product(range(0, rows, 8), range(0, columns, 8)):
        vectors = [places[row + i, column] // 8 for i in range(8)]
        assert all(places[row + i, column + j] == 8 * vectors[i] + j for i in range(8) for j in range(8))
        if len({vector % BANKS for vector in vectors}) < BANKS:
            return True
    return False


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_each_operand_is_read_without_conflicts(shapes: tuple[tuple[int, int], ...]) -> None:
    """Every view covers its memory, eight columns are one vector, and eight rows are in different banks."""
    found = _layouts(shapes)
    for bases in (found.x, found.t_for_a, found.t_for_b):
        places = _places(bases) if bases else {}
        assert len(places) == (1 << len(bases) if bases else 0)
        assert not places or not _has_conflicts(places)


def test_without_swaps_there_would_be_conflicts() -> None:
    """The control."""
    found = _layouts(((32, 32),) * 3)
    plain = tuple([base if base[0] == 0 or base[1] == 0 else (base[0], 0) for base in found.t_for_a])
    assert plain != found.t_for_a
    assert _has_conflicts(_places(plain))


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_views_of_t_are_of_the_same_elements(shapes: tuple[tuple[int, int], ...]) -> None:
    """Each view finds an element (a, b, m, c) where it was stored."""
    steps = _steps(shapes)
    pa, _, pb, _, qm, _, qc = sizes_of(steps)
    config, found = whole_row_config(steps), _layouts(shapes)
    stored, read = _places(found.t_by_rows), _places(found.t_for_a)
    low = pb > 1
    for i in range(0, pa * pb * qm * qc, 97):
        c, m, b, a = i % qc, i // qc % qm, i // (qc * qm) % pb, i // (qc * qm * pb)
        matrix = b % 8 + 8 * (a % 8) + 64 * (b // 8 + pb // 8 * (a // 8)) if low else a
        w = config.num_warps.bit_length() - 1
        others = m % 8 + 8 * (b % 8)  # six bits of them, or three without b
        count = 6 if low else 3
        column = c % 8 + 8 * (others % (1 << w))
        column += (c // 8) << (3 + w)
        column += (others >> w) << (qc.bit_length() - 1 + w)
        column += (m // 8 + qm // 8 * (b // 8)) << (qc.bit_length() - 1 + count)
        assert stored[matrix, c + qc * m] == read[a, column]


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_parts_and_slices_swap_nothing(shapes: tuple[tuple[int, int], ...]) -> None:
    """Bits that tell them apart add a constant to each offset, as Triton asks of a part of a layout."""
    steps = _steps(shapes)
    found, config = _layouts(shapes), whole_row_config(steps)
    pa, _, pb, *_ = sizes_of(steps)
    parts = pa * pb // config.matrices
    for bases, count, dim in ((found.t_by_rows, parts, 0), (found.t_for_b, found.slices_b, 1), (found.t_for_a, found.slices, 1)):
        size = 1 << max((base[dim].bit_length() for base in bases), default=0)
        for base in bases:
            assert base[dim] < size // count or base == tuple([base[dim] if i == dim else 0 for i in (0, 1)])


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_a_result_covers_its_slice(shapes: tuple[tuple[int, int], ...]) -> None:
    """Registers, lanes and warps have one element each, and a lane's first registers are neighbours of one vector."""
    _, qa, pb, _, qm, _, qc = sizes_of(_steps(shapes))
    found = _layouts(shapes)
    registers, lanes, warps = found.result
    columns = pb * qm * qc // found.slices
    assert len(_places((*registers, *lanes, *warps))) == qa * columns
    assert registers[: (qc // 4).bit_length() - 1] == tuple([(0, 1 << i) for i in range((qc // 4).bit_length() - 1)])
    assert sorted(found.order[1:]) == list(range(1, columns.bit_length()))


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_shared_memory_suffices(shapes: tuple[tuple[int, int], ...]) -> None:
    steps = _steps(shapes)
    config = whole_row_config(steps)
    assert config.programs_per_sm * (shared_memory(steps, config) + 1024) <= HOPPER.shared_memory + 1024


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("ps", "launches"),
    [((32,) * 3, 1), ((16,) * 4, 1), ((4,) * 8, 1), ((3, 32, 32, 32), 2), ((16,) * 5, 2), ((32,) * 4, 2), ((32, 16, 16), 1)],
    ids=str,
)
def test_the_plan_takes_it(ps: tuple[int, ...], launches: int, half: str) -> None:
    found = plan(ps, ps, PlanProblem(HALF, 1024, 1, True, 1, half, whole_rows=True))
    assert len(found) == launches
    assert "whole_row" in [launch.kernel for launch in found]


@pytest.mark.parametrize("ps", [(64, 64), (8,) * 5, (31, 32, 32), (300, 16, 16), (32, 32), (64,) * 3], ids=str)
def test_what_it_does_not_take(ps: tuple[int, ...]) -> None:
    found = plan(ps, ps, PlanProblem(HALF, 1024, 1, True, 1, "bfloat16", whole_rows=True))
    assert "whole_row" not in [launch.kernel for launch in found]


@pytest.mark.parametrize(("columns", "whole_rows"), [(1, False), (3, True)])
def test_rows_that_are_not_copied_whole(columns: int, whole_rows: bool) -> None:
    """Unaligned ones, and those of the left form."""
    found = plan((32,) * 3, (32,) * 3, PlanProblem(HALF, 1024, columns, True, 1, "bfloat16", whole_rows=whole_rows))
    assert "whole_row" not in [launch.kernel for launch in found]
