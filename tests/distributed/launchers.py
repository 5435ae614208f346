"""Jobs of several processes, started as users start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "OMPI_", "PMI", "MPI_", "MV2_", "SLURM_", "TORCHELASTIC")
# Containers run tests as root, which Open MPI refuses unless both are set.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
JOB = [sys.executable, "-W", "error", str(HERE / "job.py")]
TWO_RANKS = "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.size} ranks\\n', end='')"
PROBE_SECONDS = 60
TAIL = 2000  # characters of a stream that a failure shows, the error's last: reports of tests are cut off at their end


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"} | ROOT_MAY | more


def start(command: list[str], seconds: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """The ended command; one that does not end in time has its output so far, and no code."""
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(**variables))
    try:
        output, errors = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        job.terminate()  # a launcher then ends its ranks
        try:
            output, errors = job.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            job.kill()
            output, errors = job.communicate()
        errors += f"\ndid not end within {seconds:g} s"
    return subprocess.CompletedProcess(command, job.returncode, output, errors)


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    """What a command has printed; a test whose command fails says which, and how it ended."""
    if result.returncode != 0:
        shown = f"{result.stdout[-TAIL:]}\n--- stderr\n{result.stderr.rstrip()[-TAIL:]}"
        pytest.fail(f"{' '.join(result.args)}\nended with code {result.returncode}\n--- stdout\n{shown}", pytrace=False)
    return result.stdout


def mpiexec(ranks: int) -> list[str]:
    """The beginning of a command that starts ranks by MPI; where none works the test is skipped, and says why."""
    found, reason = _mpiexec()
    if reason:
        pytest.skip(reason)
    return [found, "-n", str(ranks)]


@cache
def _mpiexec() -> tuple[str, str]:
    """mpiexec beside Python, or in PATH; and the reason why it starts no ranks of mpi4py's."""
    found = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None or find_spec("mpi4py") is None:
        return "", "mpiexec or mpi4py is not installed; the test extra brings both"
    result = start([found, "-n", "2", sys.executable, "-c", TWO_RANKS], PROBE_SECONDS)
    if result.stdout.splitlines().count("2 ranks") == 2:
        return found, ""
    # Another MPI's mpiexec starts two processes that are each alone.
    shown = f"code {result.returncode}; {result.stdout.strip()!r}; {result.stderr.strip()[-500:]!r}"
    return found, f"{found} does not start two ranks that mpi4py's MPI library brings together: {shown}"
