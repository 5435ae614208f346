"""The last mode of a multiply by the main loop of linear layers, where torch's product would copy z first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from torch import Tensor

from fastkron_py.kron.kernels.gemm_epilogue import epilogue_axpby
from fastkron_py.kron.scale import Scale
from fastkron_py.runtime.builder import Builder
from fastkron_py.tiling.gemm_launch import add_gemm
from fastkron_py.tiling.gemm_problem import Gemm

_CALL: Final = Gemm(epilogue_axpby, divisible=True)


class GemmStep(NamedTuple):
    """The last mode of x, with nothing after it, times a factor that all rows share, plus z.

    Attributes:
        start: its factor.
        stop: one past it.
        shape: of its result.
        fell_back: as of a `MultiplyLaunch`.
    """

    start: int
    stop: int
    shape: tuple[int, int, int, int]
    fell_back: bool = False

    def add(self, build: Builder, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, y: Tensor | None, scale: Scale) -> Tensor:
        """Add it to a program, from x to y, or to new memory; return the result."""
        y = build.empty(self.shape, x.dtype) if y is None else y
        factor = factors[self.start][0]
        p, q = factor.shape
        rows, side = build.reshape(x, (-1, p)), build.reshape(cast("Tensor", z), (-1, q))  # z is why this step was chosen
        add_gemm(build, rows, factor.mT, None, _CALL, y.view(-1, q), side=side, scalars=(scale.alpha, scale.beta))
        return y
