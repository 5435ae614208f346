"""The benchmark of modes: its problems, and that every algorithm is the one that was asked for, and right."""

from __future__ import annotations

import pytest
import torch
from canonical_cases import watch_kernels

from benchmarks.kron.modes import error_of, inputs_of
from benchmarks.registry import registered

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
