"""The benchmark of modes: its problems, and that every algorithm is the one that was asked for, and right."""

from __future__ import annotations

import pytest
import torch
from canonical_cases import watch_kernels

pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

from benchmarks import distribution
from benchmarks.kron.modes import ALGORITHMS, OURS, cases, error_of, forced, inputs_of
from benchmarks.registry import Draw, registered

SMALL = {"before": 6, "P": 70, "after": 3, "Q": 66, "dtype": "float32"}
LOOPED = {"forward": "_sliced_multiply_fwd_kernel", "backward": "_factor_gradient_kernel"}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["matmul", "copying", "looped"])
def test_the_algorithm_that_was_asked_for_is_right(
    algorithm: str, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_kernels(monkeypatch)
    inputs = inputs_of(SMALL | {"kind": kind}, device)
    (contender,) = [c for c in registered()["modes"].contenders if c.name == algorithm]
    found = contender.prepare(inputs)()
    assert error_of(inputs, found) < 1e-5
    assert error_of(inputs, found + found.abs().max()) > 0.1  # the check finds a wrong result
    assert (LOOPED[kind] in seen) == (algorithm == "looped")
    assert ("_copy_matrices_kernel" in seen) == (algorithm == "copying")


def test_the_plans_choice_is_right(device: torch.device) -> None:
    for kind in ("forward", "backward"):
        inputs = inputs_of(SMALL | {"kind": kind}, device)
        assert error_of(inputs, OURS.prepare(inputs)()) < 1e-5
        assert set(inputs.modelled) <= set(ALGORITHMS)


def test_refusals(device: torch.device) -> None:
    (wgmma,) = [c for c in registered()["modes"].contenders if c.name == "wgmma"]
    with pytest.raises(NotImplementedError, match="no choice"):
        wgmma.prepare(inputs_of(SMALL | {"kind": "forward", "dtype": "float64"}, device))
    with pytest.raises(NotImplementedError, match="unknown"), forced("unknown"):
        pass
    with pytest.raises(ValueError, match="narrowest: expected 1 to 2500; got 2501"):
        cases(Draw(narrowest=2501), device)


def test_problems_are_those_of_the_seed() -> None:
    draw = Draw(seed=3, count=40, dtypes=("float64",), kinds=("backward",))
    found = cases(draw, torch.device("cuda"))
    assert found == cases(draw, torch.device("cuda"))
    assert found[:10] == cases(draw._replace(count=10), torch.device("cuda"))
    assert {(c.dtype, c.parameters["kind"]) for c in found} == {("float64", "backward")}
    assert all(33 <= c.parameters[side] <= 2500 for c in found for side in "PQ")
    assert min(c.parameters["after"] for c in found) == 1 < max(c.parameters["after"] for c in found)


def test_a_run_tells_how_far_the_plan_is_from_the_fastest() -> None:
    (case,) = cases(Draw(count=1, kinds=("forward",)), torch.device("cuda"))
    seconds = {OURS.name: 3.0, "matmul": 2.0, "looped": 4.0}
    results = [{"contender": name, "status": "ok", "times": {"median": s}, "graph_times": None} for name, s in seconds.items()]
    found = {"subject": OURS.name, "cases": [{"label": case.label, "parameters": case.parameters, "results": results}]}
    assert distribution.of(found)[distribution.BETTER]["all"]["worst"] == pytest.approx(2 / 3)
