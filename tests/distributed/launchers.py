"""Jobs of several processes, started as users start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "OMPI_", "PMI", "MPI_", "MV2_", "SLURM_", "TORCHELASTIC")


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"} | more


def start(command: list[str], seconds: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    env = clean_environment(**variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, check=False)


JOB = [sys.executable, "-W", "error", str(HERE / "job.py")]
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
if find_spec("mpi4py") is None:  # its ranks would each be alone
    MPIEXEC = None
NO_MPI = "mpiexec or mpi4py is not installed; the test extra brings both"
