"""The rational benchmarks: peers compute what they are compared with, and the checks see what is wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rational import activations as benchmark
from benchmarks.rational import cpu as rational_cpu
from benchmarks.rational import layers as rational_layers
from benchmarks.rational import peers as rational_peers
from benchmarks.rational.activations import OURS, OfGelu, case, check, check_coefficients, inputs

SHAPE = (3, 7, 48)  # groups of 6 channels: blocks that are not full
DTYPES = ["float32", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_every_algorithm_computes_the_same(which: str, dtype: str, device: torch.device) -> None:
    problem = inputs(case(which, dtype, SHAPE).parameters, device)
    tolerance = 2e-6 if dtype == "float32" else 8e-3  # the interpreter cuts bfloat16 off
    assert 0 < check(problem, OURS.prepare(problem)()) < tolerance
    for name in ("kat", "flashkat"):
        assert 0 < check(problem, benchmark._peer(name)(problem)()) < tolerance, name
    gelu = benchmark.GELU.prepare(problem)()
    assert 0 < check(problem, OfGelu(gelu)) < tolerance


def test_the_checks_see_errors(device: torch.device) -> None:
    problem = inputs(case("backward", "float32", SHAPE).parameters, device)
    dx, da, db = rational_peers.flashkat_backward(problem.dy, problem.x, problem.a, problem.b)
    fine = check_coefficients(problem, [dx, da, db])
    assert check_coefficients(problem, [dx, da, db + 0.01]) > max(0.009, 10 * fine)
    assert check(problem, [dx, da * 1.001, db]) > 5e-4
    assert check(problem, [dx.roll(1, 0), da, db]) > 0.1


@pytest.mark.parametrize("dtype", list(rational_cpu.TOLERANCES))
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_on_a_cpu(which: str, dtype: str) -> None:
    given = rational_cpu.case(which, dtype, SHAPE)
    problem = rational_cpu.inputs(given.parameters, torch.device("cpu"))
    for contender in (rational_cpu.OURS, rational_cpu.PLAIN):
        result = contender.prepare(problem)()
        assert 0 < check(problem, result) < given.tolerance, contender.name
        wrong = result * 1.02 if which == "forward" else (*result[:2], result[2] * 1.02)
        assert check(problem, wrong) > 1e-2


@pytest.mark.parametrize("keep", [False, True])
def test_linear_layers(keep: bool, device: torch.device) -> None:
    """Every contender computes what it is compared with, and an error in either result is seen."""
    problem = rational_layers.inputs(rational_layers.case("small", 40, 16, keep).parameters, device)
    for contender in (rational_layers.ONE_KERNEL, rational_layers.TWO_KERNELS, rational_layers.GELU, rational_layers.LINEAR):
        result = contender.restore(contender.prepare(problem)())
        assert 0 < rational_layers.check(problem, result) < 8e-3, contender.name  # the interpreter cuts bfloat16 off
    y, *z = result if isinstance(result := rational_layers.ONE_KERNEL.prepare(problem)(), tuple) else (result,)
    assert rational_layers.check(problem, (y * 1.02, *z) if keep else y * 1.02) > 1e-2
    if keep:
        assert rational_layers.check(problem, (y, z[0].roll(1, 0))) > 0.1
