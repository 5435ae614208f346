"""Who started this process, and the store through which its ranks meet: torchrun, mpirun, srun, or nobody."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from fastkron_py.distributed.failures import stage

_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    from fastkron_py.distributed import mpi  # imports this module

    env = os.environ
    if all(name in env for name in _TORCHRUN):
        return _torchrun(env, seconds)
    if mpi.started(env) and (mpi.available() or not _slurm_step(env)):
        if not mpi.available():
            raise RuntimeError(
                "init_process_group: mpirun started this process, and mpi4py or its MPI library cannot be loaded;"
                " install both (pip install mpi4py, with the MPI whose mpirun this is), or start with torchrun"
            )
        return mpi.launch(seconds)
    if _slurm_step(env):
        return _slurm(env, seconds)
    return Launch("single", 0, 1, 0, 1, dist.HashStore())


def serve_store(host: str, port: int, world_size: int, seconds: float) -> dist.TCPStore:
    """Rank 0's end of a store; port 0 lets the system choose one."""
    return dist.TCPStore(host, port, world_size, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def connect_store(host: str, port: int, world_size: int, seconds: float) -> dist.TCPStore:
    """The other ranks' end."""
    with stage(f"init_process_group: connecting to rank 0 at {host}:{port}"):
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def integer(env: Mapping[str, str], name: str) -> int:
    """An environment variable as a number.

    Raises:
        RuntimeError: it is none.
    """
    try:
        return int(env[name])
    except ValueError:
        raise RuntimeError(f"init_process_group: expected an integer in the environment variable {name}; got {env[name]!r}") from None


def _torchrun(env: Mapping[str, str], seconds: float) -> Launch:
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    with stage(f"init_process_group: meeting at {env['MASTER_ADDR']}:{env['MASTER_PORT']}"):
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))
    local_size = integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None
    return Launch("torchrun", rank, size, integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else -1, local_size, store)


def _slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process: in a batch script itself, and under salloc, there is no step's node list."""
    return "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _slurm(env: Mapping[str, str], seconds: float) -> Launch:
    rank, size = integer(env, "SLURM_PROCID"), integer(env, "SLURM_STEP_NUM_TASKS")
    host = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    # No port can be passed round before ranks have met: one that all of them can compute, by job and step.
    number = 100 * integer(env, "SLURM_JOB_ID") + integer(env, "SLURM_STEP_ID")
    port = integer(env, "MASTER_PORT") if "MASTER_PORT" in env else 20000 + number % 12000
    if rank == 0:
        try:
            store = serve_store(host, port, size, seconds)
        except RuntimeError as error:
            raise RuntimeError(
                f"init_process_group: rank 0 cannot listen on port {port}; set MASTER_PORT to a free one ({error})"
            ) from error
    else:
        store = connect_store(host, port, size, seconds)
    return Launch("slurm", rank, size, integer(env, "SLURM_LOCALID"), None, store)


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: ``"gpu[007-012,20],cpu1"`` begins with ``"gpu007"``."""
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
    return name or socket.gethostname()
