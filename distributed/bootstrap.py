"""`init_process_group`: from however the job was started to a process group, with a device for each rank."""

from __future__ import annotations

import atexit
import io
import json
import logging
import math
import os
import re
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from fastkron_py.distributed.failures import PackedError, differing, pack_error, rank_text, stage, unpack_error
from fastkron_py.distributed.grid import forget_groups
from fastkron_py.runtime.errors import type_error, type_name, value_error

logger = logging.getLogger("fastkron_py")

BACKENDS: Final = ("nccl", "gloo")
TIMEOUT: Final = 600.0
"""Seconds that a collective waits for its peers, unless told otherwise."""
EXIT_PAUSE: Final = 0.05
PART: Final = "fastkron_py/part"
"""Key under which rank 0 names the part of the store that ranks meet in."""
LOOK: Final = 0.05
"""Seconds between two looks at it, at first."""
FAREWELL: Final = 10.0
"""Seconds that rank 0, after an error, leaves at most for the other ranks to learn of it."""
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
        backend: ``"nccl"`` (GPUs, with Gloo beside it for tensors in host memory) or ``"gloo"``.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str


class Report(TypedDict):
    """The facts that one rank sends the others before the group is made."""

    error: PackedError | None
    token: str
    WORLD_SIZE: int
    host: str
    backend: str
    nccl: bool
    gpus: int
    uuid: str
    timeout: float


_made: tuple[Any, ProcessInfo] | None = None
_met: tuple[Launch, dist.Store] | None = None
"""Found once: a group that is made after another has been destroyed meets in the same store, whose server may be this process."""


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
        TypeError: backend is no string, or timeout no duration.
        ValueError: another backend than these or than the existing group's, a timeout that is not positive,
            or arguments that differ between ranks.
        RuntimeError: NCCL or a GPU is missing, there are more ranks than GPUs on a host, or a rank did not come.
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
        seconds = _check_timeout(timeout)
        _check_backend(backend)
    except (TypeError, ValueError) as wrong:
        error = wrong
    launch, shared = _meet(seconds)
    store, reports = _exchange(launch, shared, _report(backend, launch, seconds, error), seconds)
    info = _info(launch, reports)
    logger.info("rank %d of %d on %s, backend %s, started by %s", info.rank, info.world_size, info.device, info.backend, info.launcher)
    if info.device.type == "cuda":
        torch.cuda.set_device(info.device)
    with stage("init_process_group: connecting all ranks"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if info.backend == "nccl" else "gloo",
            store=dist.PrefixStore("torch", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=seconds),
        )
    _made = (dist.group.WORLD, info)
    atexit.register(_destroy)
    return info


def _meet(seconds: float) -> tuple[Launch, dist.Store]:
    global _met
    if _met is None:
        launch = find_launch()
        _met = launch, _rendezvous(launch, seconds)
    _met[1].set_timeout(timedelta(seconds=seconds))
    return _met


def _check_backend(backend: Any) -> None:
    expected = f"None or one of {', '.join(BACKENDS)}"
    if backend is not None and not isinstance(backend, str):
        raise type_error("backend", expected, type_name(backend))
    if backend not in (None, *BACKENDS):
        raise value_error("backend", expected, repr(backend))


def _check_timeout(timeout: Any) -> float:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise type_error("timeout", "seconds or a timedelta", type_name(timeout))
    if not 0 < timeout < math.inf:
        raise value_error("timeout", "a positive, finite duration", timeout)
    return float(timeout)


def _report(backend: str | None, launch: Launch, seconds: float, error: Exception | None) -> Report:
    gpus = torch.cuda.device_count() if backend != "gloo" and error is None else 0
    return Report(
        error=None if error is None else pack_error(error),
        token=secrets.token_hex(8),
        WORLD_SIZE=launch.world_size,
        host=socket.gethostname(),
        backend=str(backend) if backend is not None else "nccl" if gpus else "gloo",
        nccl=dist.is_nccl_available(),
        gpus=gpus,
        uuid=str(torch.cuda.get_device_properties(_gpu_index(launch, gpus)).uuid) if gpus else "",
        timeout=seconds,
    )


def _gpu_index(launch: Launch, gpus: int) -> int:
    """The local rank's GPU; where there are fewer, the launcher may show each rank its own as number 0 (if not, `judge` sees)."""
    return launch.local_rank if 0 <= launch.local_rank < gpus else 0


def _exchange(launch: Launch, shared: dist.Store, own: Report, seconds: float) -> tuple[dist.Store, list[Report]]:
    """Every rank's report, judged by rank 0 on behalf of all, so that all raise the same error or none does; and a store for the group.

    Messages stay in a store: torchrun's is that of all attempts, which its agents count each for itself. So rank 0 opens a new part
    of the store each time. A rank that finds an earlier part gets no answer to its own token there, and looks again.
    """
    rank = launch.rank
    if rank == 0:
        shared.set(PART, own["token"])
        store: dist.Store = dist.PrefixStore(own["token"], shared)
        verdict = _verdict(store, own, seconds)
    else:
        store, verdict = _answer(launch, shared, own, 2 * seconds)  # rank 0 may itself wait for another one
    if verdict["error"]:
        store.set(f"seen/{rank}", "")
        if rank == 0:  # the store may end with this process: not before the others have read the verdict
            for other in [r for r, report in enumerate(verdict["reports"]) if report]:
                _arrives(store, f"seen/{other}", FAREWELL / launch.world_size)
        raise unpack_error(verdict["error"])
    return store, list(verdict["reports"])


def _verdict(store: dist.Store, own: Report, seconds: float) -> dict[str, Any]:
    """Rank 0's answer to all reports that arrive."""
    keys, until = [f"report/{rank}" for rank in range(1, own["WORLD_SIZE"])], time.monotonic() + seconds
    came = [json.loads(store.get(key)) if _arrives(store, key, max(until - time.monotonic(), LOOK)) else None for key in keys]
    reports: list[Any] = [own, *came]
    missing = [rank for rank, report in enumerate(reports) if report is None]
    text = f"init_process_group: {rank_text(missing)} of {len(reports)} did not come within {seconds:g} s"
    error = RuntimeError(text) if missing else judge(reports)
    verdict = {"error": error and pack_error(error), "reports": reports}
    store.set("verdict", json.dumps(verdict))
    return verdict


def _answer(launch: Launch, shared: dist.Store, own: Report, seconds: float) -> tuple[dist.Store, dict[str, Any]]:
    """Rank 0's answer to this rank's report, and the part of the store that it is in."""
    began, part, other = time.monotonic(), b"", ""
    while (waited := time.monotonic() - began) < seconds and _arrives(shared, PART, seconds):
        try:
            part, before = shared.get(PART), part
            store = dist.PrefixStore(part.decode(), shared)
            if part != before:
                store.set(f"report/{launch.rank}", json.dumps(own))
            verdict = json.loads(store.get("verdict")) if store.check(["verdict"]) else {"reports": []}
        except dist.DistError:
            break
        if own["token"] in [report["token"] for report in verdict["reports"] if report]:
            return store, verdict
        size = len(verdict["reports"])
        other = f"; it answered {size} ranks, and WORLD_SIZE is {launch.world_size} here" if size not in (0, launch.world_size) else ""
        time.sleep(
            min(LOOK + waited / 20, 1.0)
        )  # not by waiting for a key in the store, since torch warns each time that one does not come
    raise RuntimeError(f"init_process_group: rank 0 has ended, or did not answer rank {launch.rank} within {seconds:g} s{other}")


def _arrives(store: dist.Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistError:
        return False
    return True


def judge(reports: Sequence[Report]) -> Exception | None:
    """The reason why these ranks cannot work together, or None."""
    for rank, report in enumerate(reports):
        if report["error"] is not None:
            alone = "" if all(r["error"] == report["error"] for r in reports) else f" (on rank {rank})"
            return unpack_error({**report["error"], "message": report["error"]["message"] + alone})
    for name, why in (("WORLD_SIZE", ""), ("backend", " (None takes nccl where there is a GPU, else gloo)"), ("timeout", "")):
        values = [repr(report[name]) for report in reports]  # type: ignore[literal-required]
        if error := differing(name, values, range(len(reports)), "the same on every rank" + why):
            return error
    if reports[0]["backend"] == "nccl" and (problem := _judge_gpus(reports)):
        return RuntimeError(f"init_process_group: {problem}")
    return None


def _judge_gpus(reports: Sequence[Report]) -> str:
    without = [i for i, r in enumerate(reports) if not r["nccl"]]
    if without:
        return f"NCCL is missing from torch on {rank_text(without)}; install a CUDA build of torch, or use backend='gloo'"
    blind = [i for i, r in enumerate(reports) if not r["gpus"]]
    if blind:
        return f"NCCL needs a GPU for each rank; {rank_text(blind)} of {len(reports)} found none; use backend='gloo'"
    for host in dict.fromkeys(r["host"] for r in reports):
        ranks = [i for i, r in enumerate(reports) if r["host"] == host]
        gpus = {reports[i]["uuid"] for i in ranks}
        if len(gpus) < len(ranks):
            return f"NCCL needs a GPU for each rank; {len(ranks)} ranks on host {host} ({rank_text(ranks)}) share {len(gpus)} GPU(s)"
    return ""


def _info(launch: Launch, reports: Sequence[Report]) -> ProcessInfo:
    own = reports[launch.rank]
    neighbours = [i for i, r in enumerate(reports) if r["host"] == own["host"]]
    local_rank = launch.local_rank if launch.local_rank >= 0 else neighbours.index(launch.rank)
    cuda = own["backend"] == "nccl"
    device = torch.device("cuda", _gpu_index(launch, own["gpus"])) if cuda else torch.device("cpu")
    local_size = launch.local_world_size or len(neighbours)
    return ProcessInfo(launch.launcher, launch.rank, launch.world_size, local_rank, local_size, device, own["backend"])


def _existing() -> ProcessInfo:
    """About a default group that somebody else has made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.get_backend()
    cuda = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    local_rank = dist.get_node_local_rank(fallback_rank=rank)
    return ProcessInfo("existing", rank, size, local_rank, size, device, "nccl" if cuda else str(backend))


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


class Launch(NamedTuple):
    """This process among those that were started with it.

    Attributes:
        launcher: ``"torchrun"``, ``"mpi"``, ``"slurm"`` or ``"single"``.
        rank: this process among all.
        world_size: number of processes.
        local_rank: number of this process on its host; negative where the launcher does not tell.
        local_world_size: number of processes on this host; None where the launcher does not tell.
        address: ``host:port`` at which rank 0 serves torch's store.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    address: str


def find_launch() -> Launch:
    """Recognise the launcher by its variables.

    torchrun comes first, since it may run under Slurm; MPI before Slurm, since variables of the batch script's
    one task are inherited by everything that mpirun starts in it.

    Raises:
        RuntimeError: mpirun started this process, and mpi4py or an MPI library is missing; or variables do not make sense.
    """
    env = os.environ
    if all(name in env for name in _TORCHRUN):
        local_size = _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None
        local_rank = _integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else -1
        address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        return Launch("torchrun", _integer(env, "RANK"), _integer(env, "WORLD_SIZE"), local_rank, local_size, address)
    if any(name in env for name in _MPI_VARIABLES) and (_mpi_available() or not _slurm_step(env)):
        if not _mpi_available():
            raise RuntimeError(
                "init_process_group: mpirun started this process, and mpi4py or its MPI library cannot be loaded;"
                " install both (pip install mpi4py, with the MPI whose mpirun this is), or start with torchrun"
            )
        return _mpi()
    if _slurm_step(env):
        return _slurm(env)
    _check_alone(env)
    return Launch("single", 0, 1, 0, 1, "")


def _rendezvous(launch: Launch, seconds: float) -> dist.Store:
    """The store that all ranks share, by torch's own rendezvous."""
    if launch.launcher == "single":
        return dist.HashStore()
    url = "env://" if launch.launcher == "torchrun" else f"tcp://{launch.address}"
    with stage(f"init_process_group: meeting at {launch.address}"):
        store: dist.Store = next(dist.rendezvous(url, launch.rank, launch.world_size, timeout=timedelta(seconds=seconds)))[0]
    return store


def _check_alone(env: Mapping[str, str]) -> None:
    """Refuse to run as the only rank if a variable says that there are others, and warn if Slurm gave room for others."""
    if env.get("WORLD_SIZE", "1") != "1":
        missing = ", ".join(name for name in _TORCHRUN if name not in env)
        raise RuntimeError(f"init_process_group: WORLD_SIZE={env['WORLD_SIZE']} in the environment, without {missing}; set {missing}, too")
    found = [f"{name}={env[name]}" for name in _SLURM_SIZES if env.get(name, "1") != "1"]
    if found and "SLURM_STEP_NUM_TASKS" not in env:
        text = f"this process runs as the only rank in a Slurm allocation with {', '.join(found)}: srun starts a rank for each task"
        warnings.warn(f"init_process_group: {text}", RuntimeWarning, stacklevel=5)  # the line that calls init_process_group


def _integer(env: Mapping[str, str], name: str) -> int:
    """An environment variable as a number.

    Raises:
        RuntimeError: it is missing, or it is not a number.
    """
    if name not in env:
        remedy = "pass on what srun sets (srun --export=ALL), or set it"
        raise RuntimeError(f"init_process_group: the environment variable {name} is missing; {remedy}")
    try:
        return int(env[name])
    except ValueError:
        raise RuntimeError(f"init_process_group: expected an integer in the environment variable {name}; got {env[name]!r}") from None


def _slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process: in a batch script itself, and under salloc, there is no step's node list."""
    return "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _slurm(env: Mapping[str, str]) -> Launch:
    host = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" in env:
        port = _integer(env, "MASTER_PORT")
    else:  # no port can be passed round before ranks have met: one that all of them can compute, by job and step
        port = 20000 + (100 * _integer(env, "SLURM_JOB_ID") + _integer(env, "SLURM_STEP_ID")) % 12000
    local_rank = _integer(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else -1
    return Launch("slurm", _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_STEP_NUM_TASKS"), local_rank, None, f"{host}:{port}")


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: ``"gpu[007-012,20],cpu1"`` begins with ``"gpu007"``."""
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
    return name or socket.gethostname()


def _mpi_available() -> bool:
    """Whether mpi4py and an MPI library can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # RuntimeError: mpi4py found no MPI library
        return False
    return bool(MPI.Is_initialized())


def _mpi() -> Launch:
    """Rank, size and local rank from MPI, and a free port on rank 0's host that it broadcasts: nothing has to be set beforehand."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    local_rank, local_size = local.rank, local.size
    local.Free()
    one_host = world.allreduce(local_size, op=MPI.MIN) == world.size
    address = ""
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{os.environ.get('MASTER_ADDR') or ('127.0.0.1' if one_host else socket.getfqdn())}:{free.getsockname()[1]}"
    _abort_on_uncaught_exception(world)
    return Launch("mpi", world.rank, world.size, local_rank, local_size, world.bcast(address, root=0))


def _abort_on_uncaught_exception(world: Any) -> None:
    """End the whole job when this rank fails.

    mpi4py calls MPI_Finalize when Python exits, which waits for every rank: without this a rank that raised would
    wait there for ranks that wait for it.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        before(kind, value, trace)
        # torch's hook around this one buffers the output, to put the rank before it; an abort would lose it.
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            print(sys.stderr.getvalue(), end="", file=sys.__stderr__, flush=True)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(ABORT_PAUSE)
        world.Abort(1)

    sys.excepthook = hook
