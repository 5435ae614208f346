"""The gated layers' kernels compile for sm_90, within an H100's shared memory and registers."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_for_h100 import SHARED_MEMORY, compiled

pytestmark = pytest.mark.xdist_group("compile_gated_for_h100")  # one worker: what is compiled serves all tests here


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One record for each kernel; with a cache of its own, so that they are really compiled."""
    return compiled("compile_gated_for_h100.py", tmp_path_factory.mktemp("triton"))


def test_every_kernel_was_compiled(kernels: list[dict[str, Any]]) -> None:
    gated = {(k["kernel"], k["finish"]) for k in kernels if k["problem"] == "8B"}
    finishers = {"finish_gate", "finish_gate_and_pair", "finish_gradients", "finish_gradients_and_gate"}
    assert gated == {("_gemm_kernel", f) for f in finishers} | {("_gate_gradients_kernel", "")}
    assert ("_gemm_kernel", "finish_plain") in {(k["kernel"], k["finish"]) for k in kernels}


def test_shared_memory_suffices(kernels: list[dict[str, Any]]) -> None:
    """Of the preferred configuration: on an H100 nothing should fall back."""
    assert [k for k in kernels if k["shared"] > SHARED_MEMORY] == []


def test_nothing_spills(kernels: list[dict[str, Any]]) -> None:
    assert [k for k in kernels if k["stack"] > 0] == []
