"""Kronecker products over many GPUs. Imported as ``fastkron_py.distributed``."""

if __name__ != "fastkron_py.distributed":
    raise ImportError(f"import this package as fastkron_py.distributed, not as {__name__}")

from fastkron_py.distributed.bootstrap import ProcessInfo, init_process_group
from fastkron_py.distributed.failures import CollectiveError
from fastkron_py.distributed.grid import ProcessGrid

__all__ = ["CollectiveError", "ProcessGrid", "ProcessInfo", "init_process_group"]
