"""Who started this process, and the store through which its ranks meet: torchrun, mpirun, srun, or nobody."""

from __future__ import annotations

import io
import os
import re
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from fastkron_py.distributed.failures import stage

_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM_SIZES: Final = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES")
# Variables that Open MPI, MPICH and Intel MPI (Hydra), MVAPICH2 and PMIx set in every process that they start.
_MPI_VARIABLES: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "PMIX_RANK")
ABORT_PAUSE: Final = 1.0
"""Seconds in which mpirun passes the traceback on, which it drops on an abort, and ranks with the same error print theirs."""


@dataclass(frozen=True)
class Launch:
    """This process among those that were started with it.

    Attributes:
        launcher: ``"torchrun"``, ``"mpi"``, ``"slurm"`` or ``"single"``.
        local_rank: number of this process on its host.
        local_world_size: number of processes on this host; None where the launcher does not tell.
        store: key-value store that all ranks share.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    store: dist.Store


def find_launch(seconds: float) -> Launch:
    """Recognise the launcher by its variables and open the store.

    torchrun comes first, since it may run under Slurm; MPI before Slurm, since variables of the batch script's
    one task are inherited by everything that mpirun starts in it.

    Raises:
        RuntimeError: mpirun started this process, and mpi4py or an MPI library is missing; variables do not make
            sense; or the other ranks cannot be reached.
    """
    env = os.environ
    if all(name in env for name in _TORCHRUN):
        return _torchrun(env, seconds)
    if any(name in env for name in _MPI_VARIABLES) and (_mpi_available() or not _slurm_step(env)):
        if not _mpi_available():
            raise RuntimeError(
                "init_process_group: mpirun started this process, and mpi4py or its MPI library cannot be loaded;"
                " install both (pip install mpi4py, with the MPI whose mpirun this is), or start with torchrun"
            )
        return _mpi(seconds)
    if _slurm_step(env):
        return _slurm(env, seconds)
    _check_alone(env)
    return Launch("single", 0, 1, 0, 1, dist.HashStore())


def _check_alone(env: Mapping[str, str]) -> None:
    """Refuse to run as the only rank if a variable says that there are others, and warn if Slurm gave room for others."""
    if env.get("WORLD_SIZE", "1") != "1":
        missing = ", ".join(name for name in _TORCHRUN if name not in env)
        raise RuntimeError(f"init_process_group: WORLD_SIZE={env['WORLD_SIZE']} in the environment, without {missing}; set {missing}, too")
    found = [f"{name}={env[name]}" for name in _SLURM_SIZES if env.get(name, "1") != "1"]
    if found and "SLURM_STEP_NUM_TASKS" not in env:
        text = f"this process runs as the only rank in a Slurm allocation with {', '.join(found)}: srun starts a rank for each task"
        warnings.warn(f"init_process_group: {text}", RuntimeWarning, stacklevel=5)  # the line that calls init_process_group


def _serve_store(host: str, port: int, world_size: int, seconds: float) -> dist.TCPStore:
    """Rank 0's end of a store; port 0 lets the system choose one."""
    return dist.TCPStore(host, port, world_size, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def _connect_store(host: str, port: int, world_size: int, seconds: float) -> dist.TCPStore:
    """The other ranks' end."""
    with stage(f"init_process_group: connecting to rank 0 at {host}:{port}"):
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)


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


def _torchrun(env: Mapping[str, str], seconds: float) -> Launch:
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    with stage(f"init_process_group: meeting at {env['MASTER_ADDR']}:{env['MASTER_PORT']}"):
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))
    local_size = _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None
    return Launch("torchrun", rank, size, _integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else -1, local_size, store)


def _slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process: in a batch script itself, and under salloc, there is no step's node list."""
    return "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _slurm(env: Mapping[str, str], seconds: float) -> Launch:
    rank, size = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_STEP_NUM_TASKS")
    host = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" in env:
        port = _integer(env, "MASTER_PORT")
    else:  # no port can be passed round before ranks have met: one that all of them can compute, by job and step
        port = 20000 + (100 * _integer(env, "SLURM_JOB_ID") + _integer(env, "SLURM_STEP_ID")) % 12000
    if rank == 0:
        try:
            store = _serve_store(host, port, size, seconds)
        except RuntimeError as error:
            raise RuntimeError(
                f"init_process_group: rank 0 cannot listen on port {port}; set MASTER_PORT to a free one ({error})"
            ) from error
    else:
        store = _connect_store(host, port, size, seconds)
    return Launch("slurm", rank, size, _integer(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else -1, None, store)


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


def _mpi(seconds: float) -> Launch:
    """Rank, size and local rank from MPI; a store that rank 0 serves on a free port, whose address it broadcasts.

    Nothing has to be set beforehand. The server's port is chosen by the system when it starts to listen, so that
    no other process can take it in between.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    local_rank, local_size = local.rank, local.size
    local.Free()
    one_host = world.allreduce(local_size, op=MPI.MIN) == world.size
    store, address, port, problem = None, "127.0.0.1" if one_host else _own_address(), 0, ""
    if world.rank == 0:
        try:
            store = _serve_store(address, 0, world.size, seconds)
            port = store.port
        except (RuntimeError, OSError) as error:  # the others are told, lest they wait
            problem = str(error)
    address, port, problem = world.bcast((address, port, problem), root=0)
    if problem:
        raise RuntimeError(f"init_process_group: rank 0 could not listen for the other ranks: {problem}")
    if store is None:
        store = _connect_store(address, port, world.size, seconds)
    _abort_on_uncaught_exception(world)
    return Launch("mpi", world.rank, world.size, local_rank, local_size, store)


def _own_address() -> str:
    """An address of this host that others can reach: MASTER_ADDR if set, else that of the host's name, else of its default route."""
    preset = os.environ.get("MASTER_ADDR")
    if preset:
        return preset
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except socket.gaierror:
        found = set()
    reachable = sorted(a for a in found if not a.startswith("127."))
    if reachable:
        return reachable[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


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
