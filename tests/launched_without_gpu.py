"""Runs the scripts of launch/, which need an interpreter of their own without TRITON_INTERPRET.

Helper of several test files: no tests here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from compiled_for_h100 import WARNINGS


def launched(script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """What a script prints in its last line, and its standard error."""
    root = Path(__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONWARNINGS": WARNINGS}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).parent / "launch" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
