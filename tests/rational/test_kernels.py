"""The rational kernels' ways to walk, on rows, flat, over rows' ends, in runs; and what a compiler is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from rational_cases import Problem, assert_right, problem
from torch import Tensor

from fastkron_py.rational import launches, program, torch_backend
from fastkron_py.rational import plan as tuning
from fastkron_py.rational.plan import LANES, LaunchShape, Preference, Runs, find_runs, walk
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
    return by(program.gradients, (p.dy, p.x, p.a, p.b), need_x, need_coefficients, need_coefficients, "B", p.dy.dtype)


@pytest.fixture(params=[pytest.param(name, marks=() if about[-1] else pytest.mark.full) for name, about in WALKS.items()])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Problem, dict[str, object]]:
    """A problem whose walk is that of the name, for both passes."""
    shape, groups, warps, vectors, iterations, mode, masked = WALKS[request.param]
    phases = 0 if request.param == "wrap" else tuning.MEASURED.phases_most
    monkeypatch.setattr(tuning, "MEASURED", tuning.MEASURED._replace(phases_most=phases, programs=1))
    p = problem(shape, groups)
    preference = Preference(vectors, warps, iterations, tapers=True)
    monkeypatch.setattr(launches, "preference", lambda backward, itemsize, terms: preference)
    runs = tuning.find_runs(p.x.shape, [p.x.stride()], groups)
    assert runs is not None
    return p, {"mode": mode, "masked": masked, "walk": tuning.walk(runs, 4, 2, preference)}


def test_walks(way: tuple[Problem, dict[str, object]], device: torch.device) -> None:
    p, about = way
    walk = about["walk"]
    assert isinstance(walk, tuning.LaunchShape)
    assert (walk.mode, walk.masked) == (about["mode"], about["masked"])
    p = Problem(*(t.to(device) for t in p))
    y = by(program.forward, p[:3], "B", torch.float32)
    assert_right([*y, *gradients(p)], p)


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

    def by_torch(*tensors: Tensor) -> tuple[Tensor, ...]:
        dy, x, a, b = tensors
        a, b = (c.requires_grad_() for c in (a.clone(), b.clone()))
        return torch.autograd.grad(torch_backend.evaluate(x, a, b, "B", x.dtype), (a, b), dy)

    plain, wide = by_torch(p.dy, p.x, p.a, p.b), by_torch(*(t.double() for t in (p.dy, p.x, p.a, p.b)))
    for found, other, want in zip((da, db), plain, wide, strict=True):
        assert float((found - want).abs().mean()) <= 2 * float((other - want).abs().mean()) + 1e-7 * float(want.abs().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gpu", [HOPPER, AMD], ids=lambda gpu: gpu.name)
def test_only_nvidia_s_compiler_is_given_a_limit_of_registers(
    gpu: GPU, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other compilers of Triton raise a KeyError, of None as well."""
    monkeypatch.setattr(devices, "gpu_of", lambda _device: gpu)
    p = problem((64, 768), 8, dtype=dtype, device=device)
    options = "B", dtype, "triton"
    of_both = program.forward(p[:3], options)._steps + program.gradients((p.dy, p.x, p.a, p.b), (True, True, True, *options))._steps
    arguments = [step.run.configs[0].arguments for step in of_both]
    limits = [given["maxnreg"] for given in arguments if "maxnreg" in given]
    assert limits == ([40] if gpu is HOPPER else [])


# ---- how they walk over memory --------------------------------------------------------------------


def runs_of(t: Tensor, groups: int) -> Runs | None:
    return find_runs(t.shape, [t.stride()], groups)


IMAGE = torch.empty(3, 8, 5, 7)  # channels first


def test_runs() -> None:
    rows = torch.empty(4, 6, 8)
    assert runs_of(rows, 4) == (24, 4, 2, (8,))
    assert runs_of(rows, 1) == (1, 1, 192, (192,))
    assert runs_of(IMAGE.movedim(1, -1), 4) == (3, 4, 70, (280,))
    assert runs_of(IMAGE.movedim(1, -1), 1) == (1, 1, 840, (840,))
    assert runs_of(rows.movedim(0, -1), 2) == (1, 2, 96, (192,))
    assert runs_of(rows[..., :4], 2) == (24, 2, 2, (8,))
    assert runs_of(rows[:, :1], 2) == (4, 2, 4, (48,))
    assert runs_of(torch.empty(8), 2) == (1, 2, 4, (8,))


def test_no_runs() -> None:
    rows = torch.empty(4, 6, 8)
    assert runs_of(rows[..., ::2], 2) is None
    assert runs_of(rows[:, :3, :4], 2) is None
    assert runs_of(rows[:1].expand(4, 6, 8), 2) is None
    assert runs_of(torch.empty(1).expand(4, 8), 2) is None
    assert runs_of(torch.empty(1).expand(4, 8), 1) is None
    assert runs_of(rows.as_strided((4, 8), (4, 1)), 2) is None  # rows that overlap


def periods_of(w: LaunchShape, chunk: int) -> range:
    """The periods of a chunk; some may lie beyond the last one."""
    first = min(chunk, w.long_chunks) * w.iterations + max(0, chunk - w.long_chunks) * w.short
    return range(first, first + (w.iterations if chunk < w.long_chunks else w.short))


def taken(w: LaunchShape) -> list[int]:
    """Vectors of one group that its programs take, as the kernel's loops do."""
    found = []
    for chunk in range(w.chunks):
        for phase in range(w.phases):
            for period in range(periods_of(w, chunk).start, min(periods_of(w, chunk).stop, w.periods - (phase >= w.last_phases))):
                start = (period * w.phases + phase) * w.block
                found += range(start, min(start + w.block, w.total))
    return found


def is_valid(walk: LaunchShape, runs: Runs) -> bool:
    """Whether the kernels take a walk, whose programs then together take each vector of a group once."""
    tiles = math.ceil(walk.total / walk.block)
    steady = walk.mode != "rows" or walk.phases * walk.block % walk.per_run == 0
    return (
        walk.vector * walk.per_run == runs.length
        and walk.total == walk.per_run * runs.outer
        and all(stride % walk.vector == 0 for stride in runs.row_strides if runs.outer > 1)
        and walk.block >= LANES
        and walk.block & (walk.block - 1) == 0
        and walk.vector & (walk.vector - 1) == 0
        and (walk.mode != "flat" or runs.outer == 1)
        and (walk.mode == "rows" or walk.phases == 1)
        and steady
        and 0 <= walk.long_chunks <= walk.chunks
        and periods_of(walk, walk.chunks - 1).stop * walk.phases >= tiles
    )


PREFERENCES = [Preference(1, 4, 48, True), Preference(2, 4, 4), Preference(1, 1, 3, True), Preference(4, 8, 1)]


@pytest.mark.parametrize(
    ("outer", "groups", "length"),
    [
        (1, 1, 1),
        (1, 1, 100_000),
        (197 * 8, 8, 96),
        (591, 8, 24),
        (7, 3, 5),
        (64, 8, 384),
        (3, 4, 7 * 1024),
        (5000, 2, 24),
        (300, 2, 3 * 128),
    ],
)
def test_every_vector_once(outer: int, groups: int, length: int) -> None:
    for itemsize, preference in product([2, 4, 8], PREFERENCES):
        runs = Runs(outer, groups, length, (groups * length,))
        for multiprocessors in (2, 132):
            w = walk(runs, itemsize, multiprocessors, preference)
            assert is_valid(w, runs)
            assert sorted(taken(w)) == list(range(w.total))
            assert w.iterations <= preference.iterations
            if w.mode == "rows" and w.phases > 1:  # a thread stays on its columns
                assert w.phases * w.block % w.per_run == 0
