"""The first call's cost: in a process that finds no compiled kernel, and in a second one that does (`kron_first_call`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.kron.problems import case, check, inputs
from benchmarks.registry import Apart, Benchmark, Call, Contender, register

FIRST, SECOND, IMPORT = "first process", "second process", "import fastkron_py"
ROWS = ((20, 8, 3), (20, 2, 10), (1024, 8, 5), (1024, 16, 4), (1024, 64, 3), (1024, 128, 2), (16, 32, 4))
PAIRS = 2  # of processes for a case; each takes seconds to import torch and to reach the GPU
CHILD_SECONDS = 120.0


def _processes(parameters: dict[str, Any], device: torch.device) -> Mapping[str, Apart]:
    """Pairs of processes, each pair with an empty cache of Triton's of its own."""
    root = Path(__file__).resolve().parents[2]
    found: dict[str, list[dict[str, float]]] = {FIRST: [], SECOND: []}
    for _ in range(PAIRS):
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [sys.executable, "-m", "benchmarks.kron.first_call_child", json.dumps(parameters), device.type]
            for name in (FIRST, SECOND):
                done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS)
                if done.returncode:
                    raise RuntimeError(f"the {name} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    both = found[FIRST] + found[SECOND]
    result = {name: Apart(max(r["error"] for r in those), [r["first"] for r in those]) for name, those in found.items()}
    return result | {IMPORT: Apart(0.0, [r["import"] for r in both])}


def _elsewhere(_: Any) -> Call:
    raise RuntimeError("runs in a process of its own")


register(
    Benchmark(
        name="kron_first_call",
        description="Seconds of the first call in a fresh process without compiled kernels, and in a second process.",
        device="cuda",
        cases=[case(m, (p,) * n, quick=m == 20) for m, p, n in ROWS],
        contenders=[Contender(FIRST, _elsewhere, is_ours=True), Contender(SECOND, _elsewhere, is_ours=True), Contender(IMPORT, _elsewhere)],
        inputs=inputs,
        check=check,
        baseline=FIRST,
        apart=_processes,
        notes=(
            "First call with its results waited for, after torch's context is up; the import is counted beyond torch's.",
            "The second process finds the first one's kernels in Triton's cache on disk.",
        ),
    )
)
