"""This project's kernel with the features of PolyKAN's at each of its steps."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from benchmarks.conditions import kernels_need_cuda
from benchmarks.kan.problems import Problem
from benchmarks.registry import Call, Contender
from fastkron_py.kan.plan import Sizes, Tile

TABLE_SIZE = 4096
TABLE_TOLERANCE = 1.5e-2


def _held(problem: Problem, tile: Tile, split: bool, table: bool, reordered: bool) -> Call:
    """A forward pass with this tile; not reordered: coefficients are given as [in, out, degree + 1] and are copied by every call."""
    from fastkron_py.kan import launches
    from fastkron_py.kan import plan as tuning
    from fastkron_py.runtime.builder import Builder

    def choose(sizes: Sizes) -> Tile:
        if not split:
            return tile.shared_out(1, sizes.num_in)
        programs = tuning._tiles(tile, sizes.rows, sizes.num_out)
        return tuning._split(tile, programs, sizes.num_in, sizes.terms, sizes, each=2)

    layer = problem.layer._replace(table_size=TABLE_SIZE if table else 0)
    x, c = problem.x.detach(), problem.coefficients.detach()
    chosen, measured = tuning.forward, tuning.MEASURED
    tuning.forward, tuning.MEASURED = choose, measured._replace(large_products=sys.maxsize)  # type: ignore[misc]
    try:
        build = Builder((x, c, None))
        program = build.program([launches.add_forward(build, tuple(build.inputs), layer, problem.precision)])
    finally:
        tuning.forward, tuning.MEASURED = chosen, measured  # type: ignore[misc]
    given: Any = c if reordered else c.permute(2, 1, 0).contiguous()

    def call() -> Tensor:
        laid_out = given if reordered else given.permute(2, 1, 0).contiguous()
        return program((x, laid_out))[0]

    return call


def _step(name: str, tile: Tile, split: bool, table: bool, reordered: bool) -> Contender:
    tolerance = TABLE_TOLERANCE if table else 0.0
    return Contender(name, lambda p: _held(p, tile, split, table, reordered), obstacle=kernels_need_cuda, tolerance=tolerance, is_ours=True)


ROWS_OF_X, BOTH_WAYS = Tile(16, 16, 16, 1, 2), Tile(32, 32, 32, 4, 3)

STEPS = (
    _step("fused, table", ROWS_OF_X, False, True, False),
    _step("+ 2D tiles", BOTH_WAYS, False, True, False),
    _step("+ two stages", BOTH_WAYS, True, True, False),
    _step("+ [d, o, j]", BOTH_WAYS, True, True, True),
    _step("+ recurrence", BOTH_WAYS, True, False, True),
)
