"""The gated benchmarks' problems and peers: each computes the same layer, and a wrong one is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

import fastkron_py
from benchmarks.gated import layers as gated
from benchmarks.gated.layers import BACKWARD, Problem, case, check, check_gradients, contenders, inputs
from benchmarks.registry import Contender

# torch.compile's are the same operations, and take a minute.
FORWARD = [c for c in contenders("float16") if c.name != "torch.compile"]
GRADIENTS = [c for c in BACKWARD if c.name != "torch.compile"]


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    with fastkron_py.backend("triton"):
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gated.LLAMAS, "small", (24, 40))


def problem(device: torch.device, whole: bool = False) -> Problem:
    return inputs(case("small", 33, "float16", gradients=True, whole=whole).parameters, device)


@pytest.mark.parametrize("contender", FORWARD, ids=lambda c: c.name)
def test_forward(contender: Contender, small: None, device: torch.device) -> None:
    row = case("small", 33, "float16")
    given = inputs(row.parameters, device)
    assert check(given, contender.prepare(given)()) <= max(row.tolerance, contender.tolerance)


@pytest.mark.parametrize("contender", GRADIENTS, ids=lambda c: c.name)
@pytest.mark.parametrize("whole", [False, True])
def test_backward(contender: Contender, whole: bool, small: None, device: torch.device) -> None:
    given = problem(device, whole)
    assert check_gradients(given, contender.prepare(given)()) <= gated.GRADIENT_TOLERANCES["float16"]


def test_a_wrong_result_is_seen(small: None, device: torch.device) -> None:
    given = problem(device)
    dx, dw = GRADIENTS[0].prepare(given)()
    assert check_gradients(given, [dx.roll(1, 0), dw]) > 0.1
    assert check_gradients(given, [dx, dw.roll(1, 1)]) > 0.1
    assert check_gradients(given, [dx, dw.flip(0)]) > 0.1
    given = problem(device, True)
    dx, dw, ddown = GRADIENTS[0].prepare(given)()
    assert check_gradients(given, [dx, dw, ddown.roll(1, 1)]) > 0.1
    swapped = Problem(given.x, given.weight.flip(0), None)
    assert check(given, FORWARD[0].prepare(swapped)()) > 0.1
