"""The rational kernels' ways to walk: on rows, flat, over rows' ends; full and masked tiles; one and many iterations."""

from __future__ import annotations

import pytest
import torch
from rational_cases import Problem, assert_right, problem
from torch import Tensor

from fastkron_py.rational import config as tuning
from fastkron_py.rational import launches as triton_rational
from fastkron_py.rational import torch_backend as torch_rational
from fastkron_py.rational.config import Preference

# name: (shape, groups, warps, vectors, iterations, mode, masked)
WALKS = {
    "rows": ((192, 48), 2, 1, 1, 4, "rows", False),
    "rows, masked": ((197, 48), 2, 1, 1, 3, "rows", True),
    "rows, several vectors a thread": ((512, 24), 2, 1, 2, 2, "rows", False),
    "flat": ((8, 32, 16), 1, 1, 1, 4, "flat", False),
    "flat, masked": ((7, 31, 12), 1, 1, 1, 3, "flat", True),
    "wrap": ((64, 4 * 36), 4, 1, 1, 5, "wrap", False),
    "wrap, longer than a tile": ((5, 2 * 660), 2, 1, 1, 3, "wrap", True),
    "one element at a time": ((9, 21), 3, 1, 1, 2, "wrap", True),
}


@pytest.fixture(params=WALKS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Problem, dict[str, object]]:
    """A problem whose walk is that of the name, for both passes."""
    shape, groups, warps, vectors, iterations, mode, masked = WALKS[request.param]
    if request.param == "wrap":
        monkeypatch.setattr(tuning, "PHASES_MOST", 0)
    p = problem(shape, groups)
    preference = Preference(vectors, warps, iterations, tapers=True)
    monkeypatch.setattr(tuning, "PROGRAMS_PER_MULTIPROCESSOR", 1)
    for name, launches in (("_forward", triton_rational._Forward), ("_backward", triton_rational._Backward)):
        monkeypatch.setattr(triton_rational, name, lambda kind, launches=launches: launches(kind, preference))
    runs = tuning.find_runs(p.x.shape, [p.x.stride()], groups)
    assert runs is not None
    return p, {"mode": mode, "masked": masked, "walk": tuning.walk(runs, 4, 2, preference)}


def test_walks(way: tuple[Problem, dict[str, object]], device: torch.device) -> None:
    p, about = way
    walk = about["walk"]
    assert isinstance(walk, tuning.Walk)
    assert (walk.mode, walk.masked) == (about["mode"], about["masked"])
    p = Problem(*(t.to(device) for t in p))
    y = triton_rational.forward(p.x, p.a, p.b, "B", torch.float32)
    dx, da, db = triton_rational.backward(p.dy, p.x, p.a, p.b, "B", True, True)
    found = [t for t in (y, dx, da, db) if t is not None]
    assert_right(found, p)


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=str)
def test_only_what_is_needed(needs: tuple[bool, bool], device: torch.device) -> None:
    """The same bits as where everything is, and nothing written into x."""
    p = problem((40, 48), 2, device=device)
    every = triton_rational.backward(p.dy, p.x, p.a, p.b, "B", True, True)
    before = p.x.clone()
    dx, da, db = triton_rational.backward(p.dy, p.x, p.a, p.b, "B", *needs)
    assert torch.equal(p.x, before)
    assert [t is not None for t in (dx, da, db)] == [needs[0], needs[1], needs[1]]
    for found, want in zip((dx, da, db), every, strict=True):
        assert found is None or (want is not None and torch.equal(found, want))


def test_sums_of_many_programs_are_float64_s(device: torch.device) -> None:
    """Coefficients' gradients over 30 000 elements: as good as float32 sums in pairs, or better."""
    p = problem((640, 48), 1, device=device)
    _, da, db = triton_rational.backward(p.dy, p.x, p.a, p.b, "B", False, True)

    def wide() -> tuple[Tensor, ...]:
        return torch_rational.backward(p.dy.double(), p.x.double(), p.a.double(), p.b.double(), "B")[1:]

    plain = torch_rational.backward(p.dy, p.x, p.a, p.b, "B")[1:]
    for found, other, want in zip((da, db), plain, wide(), strict=True):
        assert found is not None
        assert float((found - want).abs().mean()) <= 2 * float((other - want).abs().mean()) + 1e-7 * float(want.abs().mean())
