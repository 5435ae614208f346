"""`init_process_group`: from however the job was started to a process group, with a device for each rank.

What MPI and Slurm tell is put into the variables that torchrun sets; ranks then meet by torch's rendezvous, and compare what they were
asked for before torch makes the group.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import re
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import synchronize

from fastkron_py.distributed.agreement import difference, pack_error
from fastkron_py.distributed.failures import rank_text, stage
from fastkron_py.distributed.grid import forget_groups
from fastkron_py.runtime.checks import check_choice, check_number
from fastkron_py.runtime.errors import value_error

logger = logging.getLogger("fastkron_py")

BACKENDS: Final = ("nccl", "gloo")
BACKEND: Final = "backend (None takes nccl where there is a GPU, else gloo)"
TIMEOUT: Final = 600.0
"""Seconds that a collective waits for its peers, unless told otherwise."""
EXIT_PAUSE: Final = 0.05
_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM_SIZES: Final = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES")
# Variables that Open MPI, MPICH and Intel MPI (Hydra), MVAPICH2 and PMIx set in every process that they start.
_MPI_VARIABLES: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "PMIX_RANK")
ABORT_PAUSE: Final = 1.0
"""Seconds in which mpirun passes the traceback on, which it drops on an abort, and ranks with the same error print theirs."""


@dataclass(frozen=True)
class ProcessInfo:
    """The result of `init_process_group`.

    Attributes:
        launcher: ``"torchrun"``, ``"mpi"``, ``"slurm"``, ``"single"``, or ``"existing"`` for a group that existed before.
        rank: this process among all.
        world_size: number of processes.
        local_rank: this process among those on its host.
        local_world_size: number of processes on this host.
        device: where this rank's tensors belong; a GPU is the current device, too.
        backend: ``"nccl"`` (GPUs, with Gloo for tensors in host memory) or ``"gloo"``.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str


_made: tuple[Any, ProcessInfo] | None = None
_met: tuple[str, dist.Store] | None = None
"""The launcher, and the store, whose server may be this process: a group made after another has been destroyed meets in the same one."""
_meetings = 0  # groups that this process has asked for: each meets under its own keys of the store


def init_process_group(backend: str | None = None, *, timeout: float | timedelta = TIMEOUT) -> ProcessInfo:
    """Bring the ranks of a job together, however it was started, and give each its device.

    Recognises torchrun, mpirun or mpiexec (through mpi4py; no address has to be set), Slurm's srun, and a process
    that was started alone. A second call, or a call where torch's default group exists, returns the existing one.
    The group is destroyed when Python exits; once it is destroyed, all ranks may make another.

    Args:
        backend: ``"nccl"`` or ``"gloo"``; None takes NCCL if there are GPUs.
        timeout: how long ranks wait for each other, here and in collectives, in seconds or as a timedelta.

    Returns:
        Rank, sizes, device and backend.

    Raises:
        TypeError: backend is not a string, or timeout is not a duration.
        ValueError: another backend than these or than the existing group's, a timeout that is not positive,
            or arguments that differ between ranks.
        RuntimeError: NCCL or a GPU is missing, there are more ranks than GPUs on a host, or a rank did not join in time.
            Every rank raises these errors.

    Example:
        >>> info = init_process_group("gloo")
        >>> info.rank, info.world_size, info.device
        (0, 1, device(type='cpu'))
    """
    global _made
    if dist.is_initialized():
        info = _made[1] if _made is not None and _made[0] is dist.group.WORLD else _existing()
        if backend is not None and backend != info.backend:
            raise value_error("backend", f"{info.backend!r}, the backend of the process group that exists", repr(backend))
        return info
    error, seconds = None, TIMEOUT
    try:  # a wrong argument is told to the other ranks before it is raised, lest they wait
        seconds = _seconds(timeout)
        check_choice("backend", backend, BACKENDS, optional=True)
    except (TypeError, ValueError) as wrong:
        error = wrong
    launcher, store = _meet(seconds)
    rank, size = (0, 1) if launcher == "single" else (_integer("RANK"), _integer("WORLD_SIZE"))
    reports = _exchange(store, rank, size, _report(backend, size, seconds, error), seconds)
    if problem := judge(reports):
        raise problem
    info = _info(launcher, rank, reports)
    logger.info("rank %d of %d on %s, backend %s, started by %s", info.rank, info.world_size, info.device, info.backend, info.launcher)
    if info.device.type == "cuda":
        torch.cuda.set_device(info.device)
    backends = "cpu:gloo,cuda:nccl" if info.backend == "nccl" else "gloo"
    with stage("init_process_group: connecting all ranks"):
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    _made = (dist.group.WORLD, info)
    atexit.register(_destroy)
    if info.launcher == "mpi":
        _abort_on_uncaught_exception()  # after torch's own hook, which it calls
    return info


def _meet(seconds: float) -> tuple[str, dist.Store]:
    """The launcher, and the part of the ranks' store, of torch's own rendezvous, that the next group meets in."""
    global _met, _meetings
    if _met is None:
        launcher = find_launcher()
        if launcher == "single":
            _met = launcher, dist.HashStore()
        else:
            with stage(f"init_process_group: meeting at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"):
                _met = launcher, next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]
    _meetings += 1
    launcher, store = _met
    store.set_timeout(timedelta(seconds=seconds))
    return launcher, dist.PrefixStore(f"fastkron_py/{_meetings}", store)


def _seconds(timeout: Any) -> float:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if not 0 < check_number("timeout", timeout, "seconds or a timedelta") < math.inf:
        raise value_error("timeout", "a positive, finite duration", timeout)
    return float(timeout)


def _report(backend: str | None, size: int, seconds: float, error: Exception | None) -> dict[str, Any]:
    """The facts that one rank sends the others: arguments to compare, or an error of its; its host, and its GPU."""
    host, gpu = socket.gethostname(), ""
    if backend != "gloo" and error is None and dist.is_nccl_available() and torch.cuda.device_count() > 0:
        gpu = f"{host}, {torch.cuda.get_device_properties(_gpu_index()).uuid}"
    fields = {"WORLD_SIZE": size, BACKEND: backend or ("nccl" if gpu else "gloo"), "timeout": seconds}
    return {"host": host, "gpu": gpu} | ({"fields": fields} if error is None else {"error": pack_error(error)})


def _gpu_index() -> int:
    """The local rank's GPU; where there are fewer, the launcher may show each rank its own as number 0 (if not, `judge` sees)."""
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    return local_rank if local_rank < torch.cuda.device_count() else 0


def _exchange(store: dist.Store, rank: int, size: int, own: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Every rank's report, which each of them judges by itself: all raise the same error, or none does."""
    try:
        found = synchronize(store, json.dumps(own).encode(), rank, size, "report/", seconds)
    except dist.DistError as error:
        with stage("init_process_group: comparing all ranks' arguments"):
            missing = [other for other in range(size) if not store.check([f"report/{other}"])]
            text = f"{rank_text(missing)} of {size} did not come within {seconds:g} s" if missing else "a rank has left"
            raise RuntimeError(text) from error
    return [json.loads(report) for report in found]


def judge(reports: Sequence[dict[str, Any]]) -> Exception | None:
    """The reason why these ranks cannot work together, or None."""
    if error := difference(reports, range(len(reports))):
        return error
    gpus = [report["gpu"] for report in reports]
    poor = [rank for rank, gpu in enumerate(gpus) if not gpu or gpus.count(gpu) > 1]
    if reports[0]["fields"][BACKEND] == "gloo" or not poor:
        return None
    text = f"NCCL needs a GPU for each rank; none (or no CUDA build of torch), or another rank's, on {rank_text(poor)} of {len(gpus)}"
    return RuntimeError(f"init_process_group: {text}; use backend='gloo'")


def _info(launcher: str, rank: int, reports: Sequence[dict[str, Any]]) -> ProcessInfo:
    neighbours = [i for i, r in enumerate(reports) if r["host"] == reports[rank]["host"]]
    local_rank, local_size = dist.get_node_local_rank(neighbours.index(rank)), int(os.environ.get("LOCAL_WORLD_SIZE", len(neighbours)))
    backend = reports[rank]["fields"][BACKEND]
    device = torch.device("cuda", _gpu_index()) if backend == "nccl" else torch.device("cpu")
    return ProcessInfo(launcher, rank, len(reports), local_rank, local_size, device, backend)


def _existing() -> ProcessInfo:
    """About a default group that somebody else has made."""
    rank, size, cuda = dist.get_rank(), dist.get_world_size(), "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else str(dist.get_backend())
    return ProcessInfo("existing", rank, size, dist.get_node_local_rank(fallback_rank=rank), size, device, backend)


def _destroy() -> None:
    """At exit. After an exception peers may be gone, and the end of the process is all that is safe to wait for."""
    global _made
    made, _made = _made, None
    failed = getattr(sys, "last_value", None) is not None
    if failed or made is None or not dist.is_initialized() or made[0] is not dist.group.WORLD:
        return
    del made
    forget_groups()
    dist.destroy_process_group()
    # Where a grid or a mesh of the user's keeps a group alive, a thread of Gloo's may still hold a tensor of its last
    # collective, and taking the interpreter's lock after Python's end, to let go of it, would abort the process.
    time.sleep(EXIT_PAUSE)


# ---- who started this process --------------------------------------------------------------------


def find_launcher() -> str:
    """Recognise the launcher by its variables: "torchrun", "mpi", "slurm" or "single". The environment has torchrun's names then.

    torchrun comes first, since it may run under Slurm; MPI before Slurm, since variables of the batch script's
    one task are inherited by everything that mpirun starts in it. A RuntimeError says what is missing or makes no sense.
    """
    env = os.environ
    if all(name in env for name in _TORCHRUN):
        launcher = "torchrun"
    elif any(name in env for name in _MPI_VARIABLES) and (_mpi_available() or not _slurm_step(env)):
        if not _mpi_available():
            raise RuntimeError(
                "init_process_group: mpirun started this process, and mpi4py or its MPI library cannot be loaded;"
                " install both (pip install mpi4py, with the MPI whose mpirun this is), or start with torchrun"
            )
        launcher = "mpi"
        env.update(_of_mpi())
    elif _slurm_step(env):
        launcher = "slurm"
        env.update(_of_slurm())
    else:
        _check_alone(env)
        return "single"
    for name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & env.keys():
        _integer(name)
    return launcher


def _check_alone(env: Mapping[str, str]) -> None:
    """Refuse to run as the only rank if a variable says that there are others, and warn if Slurm gave room for others."""
    if env.get("WORLD_SIZE", "1") != "1":
        missing = ", ".join(name for name in _TORCHRUN if name not in env)
        raise RuntimeError(f"init_process_group: WORLD_SIZE={env['WORLD_SIZE']} in the environment, without {missing}; set {missing}, too")
    found = [f"{name}={env[name]}" for name in _SLURM_SIZES if env.get(name, "1") != "1"]
    if found and "SLURM_STEP_NUM_TASKS" not in env:
        text = f"this process runs as the only rank in a Slurm allocation with {', '.join(found)}: srun starts a rank for each task"
        warnings.warn(f"init_process_group: {text}", RuntimeWarning, stacklevel=5)  # the line that calls init_process_group


def _integer(name: str) -> int:
    """An environment variable as a number; a RuntimeError if it is missing or none."""
    if name not in os.environ:
        remedy = "pass on what srun sets (srun --export=ALL), or set it"
        raise RuntimeError(f"init_process_group: the environment variable {name} is missing; {remedy}")
    try:
        return int(os.environ[name])
    except ValueError:
        text = f"expected an integer in the environment variable {name}; got {os.environ[name]!r}"
        raise RuntimeError(f"init_process_group: {text}") from None


def _slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process: in a batch script itself, and under salloc, there is no step's node list."""
    return "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _of_slurm() -> dict[str, str]:
    """Torchrun's variables, of srun's. No port can be passed round before ranks have met: one that all can compute, by job and step."""
    env = os.environ
    found = {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"]}
    found["MASTER_ADDR"] = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in env:
        found["MASTER_PORT"] = str(20000 + (100 * _integer("SLURM_JOB_ID") + _integer("SLURM_STEP_ID")) % 12000)
    return found | ({"LOCAL_RANK": env["SLURM_LOCALID"]} if "SLURM_LOCALID" in env else {})


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: ``"gpu[007-012,20],cpu1"`` begins with ``"gpu007"``."""
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
    return name or socket.gethostname()


def _mpi_available() -> bool:
    """Whether mpi4py and an MPI library, which it may not find, can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return False
    return bool(MPI.Is_initialized())


def _of_mpi() -> dict[str, str]:
    """Torchrun's variables, of MPI's ranks, with a free port on rank 0's host that it broadcasts: nothing has to be set beforehand."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    found = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": local.rank, "LOCAL_WORLD_SIZE": local.size}
    local.Free()
    one_host = world.allreduce(found["LOCAL_WORLD_SIZE"], op=MPI.MIN) == world.size
    address = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.getfqdn()), free.getsockname()[1]
    found["MASTER_ADDR"], found["MASTER_PORT"] = world.bcast(address, root=0)
    return {name: str(value) for name, value in found.items()}


def _abort_on_uncaught_exception() -> None:
    """End the whole job when this rank fails.

    mpi4py calls MPI_Finalize when Python exits, which waits for every rank: without this a rank that raised would
    wait there for ranks that wait for it.
    """
    from mpi4py import MPI

    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        before(kind, value, trace)
        if sys.excepthook is hook:  # not inside the hook of a later group, which still holds the output back
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(ABORT_PAUSE)
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook
