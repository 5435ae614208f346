"""Kronecker products over many GPUs. Imported as ``fastkron_py.distributed``."""

if __name__ != "fastkron_py.distributed":
    raise ImportError(f"import this package as fastkron_py.distributed, not as {__name__}")

from fastkron_py.distributed.api import kron_matmul, kron_matmul_left
from fastkron_py.distributed.bootstrap import ProcessInfo, init_process_group
from fastkron_py.distributed.failures import CollectiveError
from fastkron_py.distributed.grid import ProcessGrid, release_peer_memory
from fastkron_py.distributed.operators import KroneckerProduct, KroneckerSum
from fastkron_py.distributed.plan import Plan, Problem, plan

__all__ = [
    "CollectiveError",
    "KroneckerProduct",
    "KroneckerSum",
    "Plan",
    "Problem",
    "ProcessGrid",
    "ProcessInfo",
    "init_process_group",
    "kron_matmul",
    "kron_matmul_left",
    "plan",
    "release_peer_memory",
]


def __dir__() -> list[str]:
    """The public names alone, without the files that they come from."""
    return sorted(__all__)
