"""The LoKr benchmark's problems and peers: those that compute the same layer agree, and a wrong one is refused."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator

import pytest
import torch

from benchmarks.adapters import batched
from benchmarks.adapters.lokr import ANY_RESULT, case, check, check_gradients, contenders, inputs, without_lycoris


@pytest.fixture(autouse=True)
def _as_the_runner() -> Iterator[None]:
    """The runner calls contenders where nothing is recorded."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("gradients", [False, True])
def test_contenders(gradients: bool, device: torch.device) -> None:
    for rank, dtype in itertools.product((None, 2), ("float32", "bfloat16")):
        row = case(33, (24, 40), 4, rank, dtype, gradients)
        given = inputs(row.parameters, device)
        for contender in contenders(gradients):
            found = contender.prepare(given)()
            if contender.tolerance < ANY_RESULT:
                assert (check_gradients if gradients else check)(given, found) <= row.tolerance
            else:  # the control: another layer's result is far off
                assert gradients or check(given, found) > 0.1


def test_a_wrong_gradient_is_seen(device: torch.device) -> None:
    given = inputs(case(33, (24, 40), 4, 2, "float32", True).parameters, device)
    right = contenders(True)[0].prepare(given)()
    for i in range(len(right)):
        wrong = [g.roll(1, 0) if i == j else g for j, g in enumerate(right)]
        assert check_gradients(given, wrong) > 0.1


@pytest.mark.parametrize("gradients", [False, True])
def test_contenders_with_many_adapters(gradients: bool, device: torch.device) -> None:
    for rank, dtype in itertools.product((None, 2), ("float32", "bfloat16")):
        row = batched.case(3, rank, gradients, tokens=130, size=128, dtype=dtype)
        given = batched.inputs(row.parameters, device)
        for contender in batched.contenders(gradients)[:2]:
            found = contender.prepare(given)()
            assert batched.check(given, found) <= row.tolerance
            moved = tuple(t.roll(1, 0) for t in found) if gradients else found.roll(1, 0)
            assert batched.check(given, moved) > 0.1  # the control


def test_what_lycoris_lacks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    for there, missing in (("lycoris toml", None), ("lycoris", "toml"), ("toml", "lycoris"), ("", "lycoris and toml")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: name if name in there.split() else None)
        assert without_lycoris(device) == (missing and f"{missing} not installed (the extra lycoris)")
