"""Starting: who is recognised as the launcher, what ranks refuse alike, and jobs under torchrun and mpirun."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import forked
import pytest
import torch
from launchers import HERE, JOB, LAUNCHERS, clean_environment, mpiexec, start, succeeded
from rank_pool import RankPool

from fastkron_py.distributed import init_process_group
from fastkron_py.distributed.agreement import pack_error
from fastkron_py.distributed.bootstrap import BACKEND, find_launcher, first_host, judge


def reports(result: subprocess.CompletedProcess[str]) -> list[dict]:
    lines = [json.loads(line) for line in succeeded(result).splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def together(commands: list[list[str]], variables: list[dict[str, str]]) -> list[dict]:
    """What several commands that run at the same time report."""
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda pair: start(pair[0], **pair[1]), zip(commands, variables, strict=True)))
    return sorted([r for result in results for r in reports(result)], key=lambda r: r["rank"])


def expected(launcher: str, size: int) -> list[dict]:
    rows = size // 2
    return [
        {"launcher": launcher, "rank": r, "world_size": size, "local_rank": r, "local_world_size": size, "backend": "gloo", "again": True}
        | {"row": r // 2, "col": r % 2, "sum": [r // 2 * 4 + 1] if rows else []}
        for r in range(size)
    ]


@pytest.mark.full
def test_torchrun_on_two_nodes() -> None:
    """Two agents, as on two hosts; ranks are counted through, local ranks on each node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *common]
    found = together([[*torchrun, "--node-rank", str(node), str(HERE / "job.py")] for node in range(2)], [{}, {}])
    assert found == [e | {"local_rank": 0, "local_world_size": 1} for e in expected("torchrun", 2)]


def test_mpiexec() -> None:
    assert reports(start([*mpiexec(2), *JOB])) == expected("mpi", 2)


@pytest.mark.full
def test_slurm() -> None:
    """What srun sets, without Slurm: two processes, the first one's port derived from the job's number."""
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    found = together([JOB, JOB], [slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)])
    assert found == expected("slurm", 2)


def test_alone() -> None:
    code = "import warnings; warnings.simplefilter('error')\nfrom fastkron_py.distributed import *\n"
    code += "i = init_process_group('gloo'); g = ProcessGrid(); print(i.launcher, i.world_size, g.shape)"
    result = forked.run(code, environment=clean_environment())
    assert result.stdout == "single 1 (1, 1)\n", result.stderr
    assert result.stderr == ""


@pytest.mark.full
def test_mpiexec_ends_when_a_rank_raises() -> None:
    """The others wait in a barrier, and would wait in MPI_Finalize for them: mpiexec ends all instead."""
    result = start([*mpiexec(2), *JOB, "raise-on-rank-1"])
    assert result.returncode != 0
    assert "ValueError: only here" in result.stderr


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_launcher")
def test_mpirun_without_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"mpirun started this process, and mpi4py or its MPI library cannot be loaded; install both"):
        find_launcher()


@pytest.mark.usefixtures("no_launcher")
def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="expected an integer in the environment variable RANK; got 'one'"):
        find_launcher()


SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"WORLD_SIZE=2 .* without MASTER_ADDR, MASTER_PORT; set MASTER_ADDR, MASTER_PORT, too"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, r"without MASTER_PORT; set MASTER_PORT, too"),
        (SRUN | {"SLURM_STEP_ID": "0"}, r"the environment variable SLURM_JOB_ID is missing; pass on what srun sets \(srun --export=ALL\)"),
        (SRUN | {"SLURM_JOB_ID": "7"}, r"the environment variable SLURM_STEP_ID is missing"),
    ],
)
def test_variables_that_are_missing(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        find_launcher()


def test_an_allocation_without_srun() -> None:
    """A batch script that starts Python itself: one rank, which says so, and where it runs."""
    code = "import logging; logging.basicConfig(level='INFO')\nfrom fastkron_py.distributed import *\n"
    code += "print(init_process_group('gloo').launcher)"
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    result = forked.run(code, environment=clean_environment(**batch))
    assert result.stdout == "single\n", result.stderr
    assert "<string>:3: RuntimeWarning: init_process_group: this process runs as the only rank in a Slurm allocation" in result.stderr
    assert "rank 0 of 1 on cpu, backend gloo, started by single" in result.stderr


def test_first_host_of_a_slurm_list() -> None:
    lists = {"gpu[007-012,20],cpu1": "gpu007", "a1,b2": "a1", "rack2-n[3]": "rack2-n3", "n1": "n1", "a-[1,3]-x": "a-1-x"}
    for nodes, host in lists.items():
        assert first_host(nodes) == host


# ---- what ranks refuse alike ---------------------------------------------------------------------


def report(**changes: object) -> dict:
    fields = {"WORLD_SIZE": 4, BACKEND: "nccl", "timeout": 60.0}
    fields |= {name: changes.pop(name) for name in list(changes) if name in fields}
    return {"host": "a", "gpu": "0"} | changes | ({} if "error" in changes else {"fields": fields})


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            [{}, {"gpu": ""}],
            RuntimeError,
            "NCCL needs a GPU for each rank; none (or no CUDA build of torch), or another rank's, on rank 1 of 2; use backend='gloo'",
        ),
        (
            [{}, {"gpu": "1"}, {}],
            RuntimeError,
            "NCCL needs a GPU for each rank; none (or no CUDA build of torch), or another rank's, on ranks 0, 2 of 3",
        ),
        (
            [{}, {BACKEND: "gloo"}],
            ValueError,
            "backend (None takes nccl where there is a GPU, else gloo): expected the same on every rank",
        ),
        ([{}, {"WORLD_SIZE": 3}], ValueError, "WORLD_SIZE: expected the same on every rank; got 4 on rank 0; 3 on rank 1"),
        ([{}, {"timeout": 5.0}], ValueError, "timeout: expected the same on every rank; got 60.0 on rank 0; 5.0 on rank 1"),
        ([{}, {"error": pack_error(TypeError("backend: wrong"))}], TypeError, "backend: wrong (on rank 1)"),
        ([{"error": pack_error(TypeError("backend: wrong"))}], TypeError, "backend: wrong"),
    ],
)
def test_judge_says_what_is_wrong(changes: list[dict], kind: type, message: str) -> None:
    error = judge([report(**c) for c in changes])
    assert type(error) is kind
    assert message in str(error)


def start_differently(backend, odd):
    init_process_group(odd if os.environ["RANK"] == "1" else backend)


@pytest.mark.parametrize(
    ("odd", "kind", "message"),
    [
        ("mpi", "ValueError", "backend: expected None or one of nccl, gloo; got 'mpi' (on rank 1)"),
        (7, "TypeError", "backend: expected None or one of nccl, gloo; got int (on rank 1)"),
        ("nccl", "ValueError", "backend (None takes nccl where there is a GPU, else gloo): expected the same on every rank"),
    ],
)
def test_every_rank_refuses_what_one_asks(odd: object, kind: str, message: str) -> None:
    pool = RankPool(2, backend=None)
    try:
        for outcome in pool.outcomes(start_differently, "gloo", odd):
            assert outcome.error == kind
            assert outcome.message.startswith(message)
        assert [info.world_size for info in pool.run(existing, "gloo")] == [2, 2]  # the refusal is not found again
    finally:
        pool.stop()


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows a machine without GPUs")
def test_nccl_without_a_gpu() -> None:
    pool = RankPool(2, backend="nccl")
    try:
        for outcome in pool.outcomes(start_differently, "nccl", "nccl"):
            assert outcome.error == "RuntimeError"
            assert "NCCL" in outcome.message
            assert "use backend='gloo'" in outcome.message
    finally:
        pool.stop()


@pytest.mark.usefixtures("no_launcher")
def test_a_wrong_timeout_alone() -> None:
    for timeout, kind in (("long", TypeError), (True, TypeError), (0, ValueError), (timedelta(0), ValueError), (float("inf"), ValueError)):
        with pytest.raises(kind, match="timeout: expected"):
            init_process_group("gloo", timeout=timeout)  # type: ignore[arg-type]


def start_with_one_missing(slurm, port, folder):
    rank = os.environ["RANK"]
    if rank == "2":
        return
    Path(folder, rank).touch()
    while not Path(folder, "1" if rank == "0" else "0").exists():  # the two that come do so together
        time.sleep(0.001)
    if slurm:
        os.environ.pop("RANK")
        os.environ.update({"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": rank, "SLURM_STEP_NODELIST": "127.0.0.1"})
        os.environ.update({"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "1"})
    init_process_group("gloo", timeout=2)


@pytest.mark.parametrize("slurm", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_rank_that_does_not_come(slurm: bool, tmp_path: Path) -> None:
    pool = RankPool(3, backend=None)
    try:
        outcomes = pool.outcomes(start_with_one_missing, slurm, os.getpid(), str(tmp_path))
    finally:
        pool.stop()
    server, other, _ = outcomes
    assert server.error == "CollectiveError"
    message = r"init_process_group: meeting at 127.0.0.1:\d+: failed on rank \d after [.\d]+ s: a peer has .*2/3"
    assert re.search(message, server.message)
    assert other.error in ("RuntimeError", "CollectiveError")  # the store may have gone with rank 0
    assert other.message.startswith("init_process_group: ")


def existing(backend):
    return init_process_group(backend)


def test_a_second_call_returns_the_same(ranks: RankPool) -> None:
    first, second = ranks.run(existing, None), ranks.run(existing, ranks.backend)
    assert first == second
    assert [info.rank for info in first] == list(range(ranks.world_size))
    other = "gloo" if ranks.backend == "nccl" else "nccl"
    for outcome in ranks.outcomes(existing, other):
        assert outcome.error == "ValueError"
        assert outcome.message == f"backend: expected '{ranks.backend}', the backend of the process group that exists; got '{other}'"
