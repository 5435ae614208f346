"""How processes that mpirun started find each other. The one place that imports mpi4py."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from fastkron_py.distributed.launch import Launch, connect_store, serve_store

# Variables that Open MPI, MPICH and Intel MPI (Hydra), MVAPICH2 and PMIx set in every process that they start.
VARIABLES: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "PMIX_RANK")
ABORT_PAUSE: Final = 1.0
"""Seconds in which mpirun passes the traceback on, which it drops on an abort, and ranks with the same error print theirs."""


def started(environment: Mapping[str, str]) -> bool:
    """Whether mpirun (or mpiexec) started this process."""
    return any(name in environment for name in VARIABLES)


def available() -> bool:
    """Whether mpi4py and an MPI library can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # RuntimeError: mpi4py found no MPI library
        return False
    return bool(MPI.Is_initialized())


def launch(seconds: float) -> Launch:
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
    store, address, port, problem = None, "127.0.0.1" if one_host else own_address(), 0, ""
    if world.rank == 0:
        try:
            store = serve_store(address, 0, world.size, seconds)
            port = store.port
        except (RuntimeError, OSError) as error:  # the others are told, lest they wait
            problem = str(error)
    address, port, problem = world.bcast((address, port, problem), root=0)
    if problem:
        raise RuntimeError(f"init_process_group: rank 0 could not listen for the other ranks: {problem}")
    if store is None:
        store = connect_store(address, port, world.size, seconds)
    _abort_on_uncaught_exception(world)
    return Launch("mpi", world.rank, world.size, local_rank, local_size, store)


def own_address() -> str:
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
        # torch's hook around this one holds back what is printed, to put the rank before it; an abort would lose it.
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            print(sys.stderr.getvalue(), end="", file=sys.__stderr__, flush=True)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(ABORT_PAUSE)
        world.Abort(1)

    sys.excepthook = hook
