"""Processes that are forked, since importing torch takes a new one two seconds.

Helper of several test files: no tests here. `start` forks a server that has imported the library, too, for what runs beside a test; `run`
forks a process that has imported torch alone, for whole programs, to which everything else is as new as in a process of their own.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest import mock

PRELOADED = [
    *("torch", "torch.distributed.tensor", "torch._inductor.config"),
    *("fastkron_py.distributed", "fastkron_py.kron.tune.table", "cpu_kernel"),
]
"""What the server imports, if it can, and its children use; deterministic algorithms import the third, which takes seconds."""


def context() -> ForkServerContext:
    """That of the server of this process, which the first child starts."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    # Python 3.11's server does not take the path over that it is given: it would find no module of the tests, and say nothing.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return found


def start(code: str, *arguments: object) -> tuple[ForkServerProcess, Connection]:
    """Run code, to which `arguments` are these and `parent` is the other end of the connection; it finds what this process finds."""
    here, there = context().Pipe()
    process = context().Process(target=exec, args=(code, {"arguments": arguments, "parent": there}), daemon=True)
    process.start()
    there.close()
    return process, here


# ---- programs ------------------------------------------------------------------------------------

_FORKS = """
import json, os, sys, traceback, types, torch

def run(code, arguments, folder, environment, files):
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["-c", *arguments]
    sys.modules["numba"] = None  # takes longer to import than most programs run: torch's products serve
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    child = os.fork()
    if not child:
        status = run(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run(
    code: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``python -c code`` would: its exit status, and what it printed.

    Args:
        code: the program.
        *arguments: its arguments.
        folder: where it runs, if not here.
        environment: its variables, if not this process's. Those that torch reads when it is imported have no effect.
        seconds: that it may take.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as name:
        files = [f"{name}/out", f"{name}/err"]
        task = [code, arguments, str(folder or Path.cwd()), dict(os.environ if environment is None else environment), files]
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], seconds)[0]:
            _end(server)
            raise TimeoutError(f"no end after {seconds:g} s:\n{Path(files[1]).read_text()}")
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, *[Path(file).read_text() for file in files])


@cache
def _server() -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [sys.executable, "-c", _FORKS], env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1, start_new_session=True
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """End the server and what it has forked."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, 9)
    server.communicate()
