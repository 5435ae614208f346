"""The rational kernels' ways to walk: on rows, flat, over rows' ends; full and masked tiles; one and many iterations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from rational_cases import Problem, assert_right, problem
from torch import Tensor

from fastkron_py.rational import config as tuning
from fastkron_py.rational import launches, program
from fastkron_py.rational import torch_backend as torch_rational
from fastkron_py.rational.config import Preference
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import AMD, GPU, HOPPER

# name: (shape, groups, warps, vectors, iterations, mode, masked). Those that are masked do all that the others of their mode do.
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


def by(build: Callable[..., program.Program], given: tuple[Tensor, ...], *options: object) -> list[Tensor]:
    """The results of the kernels' program, which is built anew."""
    return build(given, (*options, "triton"))(given)


def gradients(p: Problem, need_x: bool = True, need_coefficients: bool = True) -> list[Tensor]:
    return by(program.gradients, (p.dy, p.x, p.a, p.b), need_x, need_coefficients, "B")


@pytest.fixture(params=[pytest.param(name, marks=() if about[-1] else pytest.mark.full) for name, about in WALKS.items()])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Problem, dict[str, object]]:
    """A problem whose walk is that of the name, for both passes."""
    shape, groups, warps, vectors, iterations, mode, masked = WALKS[request.param]
    if request.param == "wrap":
        monkeypatch.setattr(tuning, "PHASES_MOST", 0)
    p = problem(shape, groups)
    preference = Preference(vectors, warps, iterations, tapers=True)
    monkeypatch.setattr(tuning, "PROGRAMS_PER_MULTIPROCESSOR", 1)
    for name in ("forward_launcher", "backward_launchers"):
        monkeypatch.setattr(launches, name, partial(getattr(launches, name), preference=preference))
    runs = tuning.find_runs(p.x.shape, [p.x.stride()], groups)
    assert runs is not None
    return p, {"mode": mode, "masked": masked, "walk": tuning.walk(runs, 4, 2, preference)}


def test_walks(way: tuple[Problem, dict[str, object]], device: torch.device) -> None:
    p, about = way
    walk = about["walk"]
    assert isinstance(walk, tuning.Walk)
    assert (walk.mode, walk.masked) == (about["mode"], about["masked"])
    p = Problem(*(t.to(device) for t in p))
    y = by(program.forward, p[:3], "B", torch.float32)
    assert_right(y + gradients(p), p)


def test_only_what_is_needed(device: torch.device) -> None:
    """The same bits as where everything is, and nothing written into x."""
    for needs in [(True, False), (False, True)]:
        p = problem((40, 48), 2, device=device)
        every = gradients(p)
        before = p.x.clone()
        found = gradients(p, *needs)
        assert torch.equal(p.x, before)
        wanted = every[:1] if needs[0] else every[1:]
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_sums_of_many_programs_are_float64_s(device: torch.device) -> None:
    """Coefficients' gradients over 30 000 elements: as good as float32 sums in pairs, or better."""
    p = problem((640, 48), 1, device=device)
    da, db = gradients(p, need_x=False)

    def wide() -> tuple[Tensor, ...]:
        return torch_rational.gradients(p.dy.double(), p.x.double(), p.a.double(), p.b.double(), "B")[1:]

    plain = torch_rational.gradients(p.dy, p.x, p.a, p.b, "B")[1:]
    for found, other, want in zip((da, db), plain, wide(), strict=True):
        assert float((found - want).abs().mean()) <= 2 * float((other - want).abs().mean()) + 1e-7 * float(want.abs().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gpu", [HOPPER, AMD], ids=lambda gpu: gpu.name)
def test_only_nvidia_s_compiler_is_given_a_limit_of_registers(gpu: GPU, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other compilers of Triton raise a KeyError, of None as well."""
    monkeypatch.setattr(devices, "gpu_of", lambda _device: gpu)
    p = problem((64, 768), 8, dtype=dtype)
    forward = launches.problem_of((p.x, p.x), p.a, p.b, "B", p.x.device)
    backward = launches.problem_of((p.x, p.dy, p.x), p.a, p.b, "B", p.x.device)
    assert forward is not None
    assert backward is not None
    of_both = launches.forward_launcher(forward).configs + launches.backward_launchers(backward).first.configs
    limits = [config.arguments["maxnreg"] for config in of_both if "maxnreg" in config.arguments]
    assert limits == ([40] if gpu is HOPPER else [])
