"""The torch backend goes block by block: each block is there, once, whatever the layout; and it needs no memory that grows with x."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from rational_cases import HALF_TOLERANCES, VERSIONS, WITHOUT_NOISE, Problem, assert_right, ours, problem
from torch import Tensor

import fastkron_py
from fastkron_py import rational
from fastkron_py.rational import torch_backend
from fastkron_py.rational.denominators import host
from fastkron_py.rational.denominators.registry import find_denominator
from fastkron_py.tiling import torch_products

BLOCK = 100  # elements: fewer than a row of the larger cases has


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of few elements."""
    for constant in ("SLICE_ELEMENTS", "GPU_SLICE_ELEMENTS"):
        monkeypatch.setattr(torch_products, constant, BLOCK * torch_backend.INTERMEDIATES)
    with fastkron_py.backend("torch"):
        yield


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_and_dtypes(version: str) -> None:
    for dtype in [torch.float32, torch.float64, *HALF_TOLERANCES]:
        p = problem((13, 7, 24), 3, version=version, dtype=dtype)
        assert_right(ours(p, version), p, version)


LAYOUTS: dict[str, Callable[[Problem], Problem]] = {
    "rows cut out": lambda p: p._replace(x=torch.cat([p.x, p.x], -1)[..., : p.x.shape[-1]]),
    "every other channel": lambda p: p._replace(x=p.x.repeat_interleave(2, -1)[..., ::2]),
    "channels first": lambda p: p._replace(x=p.x.movedim(-1, 1).contiguous().movedim(1, -1)),
    "channels first, dy last": lambda p: p._replace(x=p.x.movedim(-1, 0).contiguous().movedim(0, -1)),
    "both channels first": lambda p: p._replace(x=p.x.mT.contiguous().mT, dy=p.dy.mT.contiguous().mT),
    "expanded dy": lambda p: p._replace(dy=p.dy[:1].expand(p.dy.shape)),
    "one number for dy": lambda p: p._replace(dy=p.dy[0, 0, 0].expand(p.dy.shape)),
    "expanded x": lambda p: p._replace(x=p.x[:, :1].expand(p.x.shape)),
    "transposed coefficients": lambda p: p._replace(a=p.a.mT.contiguous().mT, b=p.b.mT.contiguous().mT),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Blocks of rows, of some groups, and of parts of a run."""
    for shape, groups in [((5, 3, 8), 2), ((3, 11, 42), 7), ((2, 3, 360), 3), ((3, 40, 12), 1)]:
        p = LAYOUTS[layout](problem(shape, groups))
        found = ours(p)
        assert_right(found, p)
        assert found[1].stride() == torch.empty_like(p.x).stride()


def test_groups_and_degrees() -> None:
    for groups, degrees in product([(1, 6), (6, 1), (1, 1), (24, 24), (24, 1)], [(0, 1), (1, 2), (2, 3), (7, 6)]):
        p = problem((37, 24), groups, degrees)
        assert_right(ours(p), p)


def test_infinities_and_poles() -> None:
    """They are where they were without blocks."""
    for version in WITHOUT_NOISE:
        x = torch.linspace(-3, 3, 240).view(20, 12)
        x[3, 4], x[7, 1], x[12, 9] = torch.nan, torch.inf, -torch.inf
        a, b = torch.randn(2, 4), torch.tensor([[1.0, 0.0], [-0.5, 0.0]])
        x[5, 2], x[6, 8] = -1.0, 2.0  # zeros of 1 + b_1 x
        for c in (a, torch.tensor([[0.0, 1.0, 0.0, 0.0]])):
            t = x.view(20, 2, 6)
            q = find_denominator(version).host_value([bj.unsqueeze(-1) for bj in b.unbind(1)], t)
            want = host.host_polynomial([ci.unsqueeze(-1) for ci in c.expand(2, 4).unbind(1)], t) / q
            torch.testing.assert_close(rational(x, c, b, version=version), want.view(20, 12), equal_nan=True)


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of all results of operations that make memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, Tensor) and not function.is_view:
                self.sizes.append(t.untyped_storage().nbytes() // t.element_size())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_does_not_grow_with_x(dtype: torch.dtype) -> None:
    """But for results, no operation's result is larger than a block."""
    for rows in (40, 400):
        p = problem((rows, 24), 3, dtype=dtype)
        x, dy, y, dx = (t.view(rows, 3, 8) for t in (p.x, p.dy, torch.empty_like(p.x), torch.empty_like(p.x)))
        with _Largest() as forward:
            torch_backend.forward(x, p.a, p.b, "B", y)
        with _Largest() as backward:
            torch_backend.backward(dy, x, p.a, p.b, "B", dx, True)
        for seen in (forward, backward):
            others = [size for size in seen.sizes if size != rows * 24]
            assert max(others) <= max(BLOCK, 10 * 24)  # the sums of ten coefficients are kept for each channel
        assert forward.sizes.count(rows * 24) == -(-rows // 4)  # a division into y, for each block
