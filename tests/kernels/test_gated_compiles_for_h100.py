"""The gated layers' kernels compile for sm_90, within an H100's shared memory and registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("compile_gated_for_h100")  # one worker: what is compiled serves all tests here

SHARED_MEMORY = 232_448  # bytes that a program can have on an H100


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One record for each kernel; with a cache of its own, so that they are really compiled."""
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONWARNINGS": "ignore"}
    paths = [str(root), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, str(Path(__file__).with_name("compile_gated_for_h100.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


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
