"""Steps of programs by which the torch backend computes rational functions and gradients, on runs of memory as the kernels do."""

from __future__ import annotations

from torch import Tensor

from fastkron_py.rational import torch_backend
from fastkron_py.rational.config import Runs
from fastkron_py.runtime.builder import Builder, describe


def _view(t: Tensor, runs: Runs, index: int) -> Tensor:
    """A tensor that lies as the runs' tensor of this index, as ``[M, G, R]``."""
    return t.as_strided((runs.outer, runs.groups, runs.length), (runs.row_strides[index], runs.length, 1))


def add_forward(build: Builder, runs: Runs, x: Tensor, a: Tensor, b: Tensor, version: str, like: Tensor) -> Tensor:
    """``P(x) / Q(x)``.

    Args:
        build: of the program.
        runs: of x and the result.
        x: ``[..., C]``.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        version: of the denominator.
        like: without memory, as the result is to be.
    """
    shape, strides, dtype = tuple(like.shape), like.stride(), like.dtype

    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = x.new_empty_strided(shape, strides, dtype=dtype)
        torch_backend.forward(x, a, b, version, _view(y, runs, 1))
        return y

    made: Tensor = build.call(call, (_view(x, runs, 0), a, b), like)
    return made


def add_gradients(
    build: Builder, runs: Runs, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool], version: str, like: Tensor
) -> list[Tensor]:
    """[dx] + [da, db], those that are needed; arguments as of `add_forward`, with runs of x, dy and dx, and dx's likeness."""
    need_x, need_coefficients = needs
    shape, strides = tuple(like.shape), like.stride()

    def call(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        dx = [x.new_empty_strided(shape, strides)] if need_x else []
        of_x = _view(dx[0], runs, 2) if need_x else None
        return dx + torch_backend.backward(dy, x, a, b, version, of_x, need_coefficients)

    results = [like] * need_x + [describe(c.shape, c.dtype) for c in (a, b)] * need_coefficients
    made = build.call(call, (_view(dy, runs, 1), _view(x, runs, 0), a, b), *results)
    return [made] if isinstance(made, Tensor) else list(made)
