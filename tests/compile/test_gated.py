"""The gated layers' kernels compile for sm_90, within an H100's shared memory and registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled_for_h100 import LIMIT, SHARED_MEMORY, compiled

from fastkron_py.gated.activations.registry import activation_names, find_activation

# One worker: what is compiled serves all tests here.
pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_gated_for_h100")]
REGISTERS = 65536  # of a multiprocessor; warps get them in eights for each thread
RESERVED = 1024  # bytes of shared memory, for each program


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> list[dict[str, Any]]:
    """One record for each kernel."""
    return compiled("compile_gated_for_h100.py", triton_cache)


def test_every_kernel_was_compiled(kernels: list[dict[str, Any]]) -> None:
    gated = {(k["kernel"], k["epilogue"]) for k in kernels if k["problem"] == "8B"}
    epilogues = {"epilogue_gate", "epilogue_gate_and_pair", "epilogue_gradients", "epilogue_gradients_and_gate"}
    assert gated == {("_gemm_kernel", f) for f in epilogues} | {("_gate_gradients_kernel", "")}
    assert ("_gemm_kernel", "epilogue_plain") in {(k["kernel"], k["epilogue"]) for k in kernels}


def test_shared_memory_suffices(kernels: list[dict[str, Any]]) -> None:
    """Of the preferred configuration: on an H100 nothing should fall back."""
    assert [k for k in kernels if k["shared"] > SHARED_MEMORY] == []


def test_the_second_launch_waits_for_the_end_of_the_first(kernels: list[dict[str, Any]]) -> None:
    """With its tiles stored; no other kernel waits, or lets the next one begin early."""
    gemms = [k for k in kernels if k["early"] is not None]
    second = [k for k in gemms if k["early"]]
    assert len(second) == sum(k["lets next"] for k in kernels) >= 4
    assert all(k["wait"] > k["store"] > 0 and not k["lets next"] for k in second)
    assert all(k["wait"] == -1 for k in kernels if not k["early"])


@pytest.mark.parametrize("activation", [name for name in activation_names() if find_activation(name).allows_overlap])
def test_programs_of_two_launches_fit_a_multiprocessor(kernels: list[dict[str, Any]], activation: str) -> None:
    """The second launch would else wait for the first one's end, and be slow: each of its programs has little in flight."""
    first, second = (k for k in kernels if k["problem"] == f"beside, {activation}")
    assert (first["early"], second["early"]) == (False, True)
    assert (first["warps"], second["warps"]) == (8, 4)
    assert sum(k["shared"] + RESERVED for k in (first, second)) <= SHARED_MEMORY + RESERVED
    assert sum(-(-k["reg"] // 8) * 8 * 32 * k["warps"] for k in (first, second)) <= REGISTERS


def test_nothing_spills(kernels: list[dict[str, Any]]) -> None:
    assert [k for k in kernels if k["stack"] > 0] == []
