"""Processes forked from a server that has imported torch and the library: each costs a fraction of a second, not two.

Helper of several test files: no tests here.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

PRELOADED = ["torch", "torch.distributed.tensor", "torch._inductor.config", "fastkron_py.distributed", "fastkron_py.kron.tune.table"]
"""What the server imports, and its children use; deterministic algorithms import the third, which takes seconds."""


def context() -> ForkServerContext:
    """That of the server of this process, which the first child starts."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def start(code: str, *arguments: object) -> tuple[ForkServerProcess, Connection]:
    """Run code, to which `arguments` are these and `parent` is the other end of the connection; it finds what this process finds."""
    here, there = context().Pipe()
    process = context().Process(target=exec, args=(code, {"arguments": arguments, "parent": there}), daemon=True)
    process.start()
    there.close()
    return process, here
