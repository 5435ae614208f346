"""The processes that compile for a search: what they find out, and what becomes of a choice that hangs or fails."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from tuning_cases import SINGLE, choice, problem, single

from fastkron_py.kron.forward import multiply_problem
from fastkron_py.kron.tune import compilers
from fastkron_py.kron.tune.candidates import neighbours, starting_points
from fastkron_py.kron.tune.compilers import Compilers

pytestmark = pytest.mark.xdist_group("compile_for_h100")
H100 = GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """So that everything is really compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def on_cpu(p):
    width = 1
    for size, _ in p.factors:
        width *= size
    x, factors = torch.empty(1, p.rows, width, 1), [torch.empty(1, a, b) for a, b in p.factors]
    return multiply_problem(x, factors, x.device, p.precision)


@pytest.mark.full
def test_compiles_in_two_processes(own_cache):
    p = problem([(16, 16)] * 4, rows=16)
    first = starting_points(p)[0]
    wanted = [first, *neighbours(first, p)[:2]]
    with Compilers(H100, 2) as pool:
        found = {done.choice: done for done in pool.compile(on_cpu(p), wanted, 200)}
    assert set(found) == set(wanted)
    assert {done.error for done in found.values()} == {None}
    assert all(0 < done.shared <= 232_448 for done in found.values())
    assert found[first].stack == 0
    assert list(own_cache.rglob("*.cubin"))


def test_a_choice_that_does_not_compile_and_the_next_one():
    p = problem([(16, 16)])
    odd, fine = choice(single(0, config=replace(SINGLE, block_s=24))), choice(single(0))
    with Compilers(H100, 1) as pool:
        found = {done.choice: done for done in pool.compile(on_cpu(p), [odd, fine], 200)}
    assert "power of 2" in found[odd].error
    assert found[fine].error is None


@pytest.mark.full
def test_a_choice_that_takes_too_long_is_ended_and_the_next_one_is_not():
    p = problem([(16, 16)])
    with Compilers(H100, 1, limit=0.001) as pool:
        (late,) = pool.compile(on_cpu(p), [choice(single(0))], 200)
        assert late.error == "compiling took longer than 0.001 s"
        pool._limit = 60
        (fine,) = pool.compile(on_cpu(p), [choice(single(0))], 200)
        assert fine.error is None


@pytest.mark.full
def test_a_process_that_dies_is_replaced():
    p = problem([(16, 16)])
    with Compilers(H100, 1) as pool:
        (fine,) = pool.compile(on_cpu(p), [choice(single(0))], 200)
        os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)  # it will not answer any more
        pool._limit = 0.2
        (late,) = pool.compile(on_cpu(p), [choice(single(0))], 200)
        pool._limit = 60
        (again,) = pool.compile(on_cpu(p), [choice(single(0))], 200)
    assert "longer than" in late.error
    assert fine.error is again.error is None


def test_processes_that_do_not_start(monkeypatch):
    monkeypatch.setattr(compilers.sys, "executable", "/bin/false")
    with Compilers(H100, 1) as pool:
        (done,) = pool.compile(on_cpu(problem([(16, 16)])), [choice(single(0))], 200)
    assert done.error == "the compiling process did not start"


def test_no_process_is_left():
    p = problem([(16, 16)])
    with Compilers(H100, 1) as pool:
        list(pool.compile(on_cpu(p), [choice(single(0))], 200))
        pid = pool._workers[0]._process.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_time_is_up_before_anything_is_compiled():
    with Compilers(H100, 1) as pool:
        assert list(pool.compile(on_cpu(problem([(16, 16)])), [choice(single(0))] * 3, 0.0)) == []
