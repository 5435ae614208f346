"""Runs one of the scripts that compile a family of kernels for sm_90, for the tests of what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton

from fastkron_py.runtime.gpu import HOPPER

SHARED_MEMORY = HOPPER.shared_memory
# Those of packages are theirs; but a launch says whether products and sums are fused, which Triton from 3.9 on asks for.
WARNINGS = "ignore,error:TRITON_DEFAULT_FP_FUSION"
TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
LIMIT = 1800  # seconds, of a script that takes minutes on a machine that does nothing else


def compiled(script: str, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """One record for each kernel, of ``compile_...for_h100.py`` in a process without the interpreter.

    Args:
        script: in tests/compile.
        cache: a folder for Triton's.
        *arguments: of the script.
    """
    here = Path(__file__).parent / "compile"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # Without lines of the source, which nothing here reads, compiling takes a tenth less.
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1", "PYTHONWARNINGS": WARNINGS}
    paths = [str(here.parents[1]), str(here.parent), str(here), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, str(here / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
