"""Whole rows in one launch: which problems take it, what it needs, and where each bit of an index lies in shared memory."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import pytest
import torch

from fastkron_py.kron import forward
from fastkron_py.kron.families.whole_row import Layouts, layouts, shared_memory, sizes_of, whole_row_config
from fastkron_py.kron.plan.steps import Step
from fastkron_py.kron.problem import Problem
from fastkron_py.reference import kron_matmul
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.testing import assert_close

PAIRS = [(p, q) for p in (16, 32) for q in (16, 32)]
# `make test` has few of them: square ones, and each size beside each other one.
THREE = [
    pytest.param(shapes, id=str(shapes), marks=() if i % 9 == 0 or shapes[0] == shapes[1] == shapes[2] else pytest.mark.full)
    for i, shapes in enumerate(itertools.product(PAIRS, repeat=3))
]
# Square steps of other widths: a narrow M, which multiplies two matrices at once, and wide A and C.
SQUARE = [(32, 8, 32), (16, 8, 16), (64, 8, 32), (64, 8, 16), (32, 8, 64), (16, 8, 32), (64, 16, 16), (64, 32, 16)]
SQUARE += [(64, 16, 32), (64, 32, 32), (16, 16, 64), (32, 16, 64)]
ROWS = [*THREE, *[tuple((p, p) for p in ps) for ps in SQUARE], ((16, 16),) * 4, ((16, 32), (16, 16), (16, 16), (16, 16))]
BANKS = 8  # vectors of 16 bytes that are read at once


def _steps(shapes: tuple[tuple[int, int], ...]) -> list[Step]:
    return [Step(i, i + 1, p, q) for i, (p, q) in enumerate(shapes)]


def _layouts(shapes: tuple[tuple[int, int], ...]) -> Layouts:
    steps = _steps(shapes)
    return layouts(sizes_of(steps), whole_row_config(steps))


@lru_cache(64)
def _rows_and_columns(bases: tuple) -> torch.Tensor:
    """Of each offset."""
    offsets = torch.arange(1 << len(bases))
    found = torch.zeros(2, len(offsets), dtype=torch.long)
    for bit, base in enumerate(bases):
        found ^= (offsets >> bit & 1) * torch.tensor(base)[:, None]
    return found


@lru_cache(16)
def _places(bases: tuple) -> dict[tuple[int, int], int]:
    """The offset of each (row, column)."""
    return {(row, column): offset for offset, (row, column) in enumerate(_rows_and_columns(bases).T.tolist())}


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


def _matrix(memory: torch.Tensor, bases: tuple) -> torch.Tensor:
    """Shared memory as a matrix of this layout."""
    rows, columns = _rows_and_columns(bases)
    offsets = torch.empty(1 + int(rows.max()), 1 + int(columns.max()), dtype=torch.long)
    offsets[rows, columns] = torch.arange(len(rows))
    return memory[offsets]


def _put(matrix: torch.Tensor, bases: tuple) -> torch.Tensor:
    """Shared memory in which a matrix has this layout."""
    rows, columns = _rows_and_columns(bases)
    assert len(_places(bases)) == len(rows)  # each element has one place
    return matrix[rows, columns]


def _kernel(x: torch.Tensor, factors: list[torch.Tensor], steps: list[Step]) -> torch.Tensor:
    """One row by the kernel's algorithm and its layouts, step by step as it is in `hopper.whole_row`."""
    sizes, config = sizes_of(steps), whole_row_config(steps)
    pa, qa, pb, pm, qm, pc, qc = sizes
    found, warps, count = layouts(sizes, config), config.num_warps, config.matrices
    a, *middle, m, c = factors
    k = torch.arange(qc)
    c = c[:, (k & 1) + ((k >> 3) << 1) + ((k >> 1) & 3) * (qc // 4)]
    if pm < 16:
        row = torch.arange(16)
        m = torch.block_diag(m, m)[:, (row & 3) + ((row >> 3) << 2) + ((row >> 2) & 1) * 8]
    rows_m, columns_m = m.shape
    x, made = x.view(pa, pb, -1), []
    for part in range(pa * pb * pm // (rows_m * count)):
        if pb == 1:
            elements = x.reshape(-1)[part * count * rows_m * pc :][: count * rows_m * pc]
        else:
            run = x[part // (pb // 8) * 8 :][:8, part % (pb // 8) * 8 :][:, :8]
            elements = run.reshape(-1)
        lines = elements.view(-1, 8, 8)
        swapped = torch.stack([line[torch.arange(8) ^ (i % 8)] for i, line in enumerate(lines)])
        u = m.mT @ _matrix(swapped.reshape(-1), found.x)
        u = u.view(columns_m // 16, 16, count // warps, pc // 8, warps, 8).permute(2, 0, 4, 1, 3, 5).reshape(-1, pc)
        v = (u @ c).view(count // warps, columns_m // 16, warps, 16, qc).permute(0, 2, 1, 3, 4)
        made.append(v.reshape(count, -1))
    t = _put(torch.cat(made), found.t_by_rows)
    for b in middle:
        t = _put(b.mT @ _matrix(t, found.t_for_b), found.t_for_b)
    y = torch.full((qa, pb * qm * qc), float("nan"), dtype=x.dtype)
    runs, columns = qm * qc // found.run, pb * qm * qc // found.slices
    for k, part in enumerate((a.mT @ _matrix(t, found.t_for_a)).chunk(found.slices, 1)):
        part = part.reshape(qa, *[2] * (len(found.order) - 1)).permute(found.order).reshape(qa, columns)
        first = k % runs * found.run + k // runs * (8 * qm * qc)
        n = torch.arange(columns)
        y[:, n // found.run * (qm * qc) + n % found.run + first] = part
    return y.reshape(-1)


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_a_row_is_multiplied(shapes: tuple[tuple[int, int], ...]) -> None:
    """The kernel itself needs a GPU; its algorithm is run here with its layouts."""
    steps = _steps(shapes)
    factors = [torch.randn(p, q, dtype=torch.float64) for p, q in shapes]
    x = torch.randn(1, math.prod(p for p, _ in shapes), dtype=torch.float64)
    assert_close(_kernel(x[0], factors, steps), kron_matmul(x, factors)[0])


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_a_result_covers_its_slice(shapes: tuple[tuple[int, int], ...]) -> None:
    """Registers, lanes and warps have one element each, and a lane's first registers are neighbours of one vector."""
    _, qa, pb, _, qm, _, qc = sizes_of(_steps(shapes))
    found = _layouts(shapes)
    registers, lanes, warps = found.result
    columns = pb * qm * qc // found.slices
    own = min(3, (qc // 4).bit_length() - 1)  # at most 16 bytes
    assert len(_places((*registers, *lanes, *warps))) == qa * columns
    assert registers[:own] == tuple([(0, 1 << i) for i in range(own)])
    assert sorted(found.order[1:]) == list(range(1, columns.bit_length()))


@pytest.mark.parametrize("shapes", ROWS, ids=str)
def test_shared_memory_suffices(shapes: tuple[tuple[int, int], ...]) -> None:
    steps = _steps(shapes)
    config = whole_row_config(steps)
    assert config.programs_per_sm * (shared_memory(steps, config) + 1024) <= HOPPER.shared_memory + 1024


@pytest.mark.parametrize(("offset", "columns", "whole_rows"), [(0, 1, True), (8, 1, True), (1, 1, False), (0, 2, False)])
def test_rows_are_copied_whole_where_vectors_are_aligned(
    offset: int, columns: int, whole_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the right form alone; a program of other addresses is another one."""
    monkeypatch.setattr(Problem, "half", "bfloat16")
    memory = torch.empty(3 * 32**3 * columns + 8, dtype=torch.bfloat16)
    x = memory[offset : offset + 3 * 32**3 * columns].view(1, 3, 32**3, columns)
    build = Builder([x, *[torch.empty(1, 32, 32, dtype=torch.bfloat16)] * 3])
    x, *factors = build.inputs
    problem = forward.multiply_problem(x, factors, x.device, "highest")
    assert forward.with_whole_rows(problem, lambda: build.is_aligned(x)).whole_rows is whole_rows
