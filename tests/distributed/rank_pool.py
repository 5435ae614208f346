"""Processes that form a group once and run many test cases: a case is a function that every rank calls.

Ranks are forked from a server that has imported torch, so that a pool costs a fraction of a second. A rank that
hangs is asked for its stack before the pool is killed, and a pool that lost a rank is replaced before the next case.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib.util
import multiprocessing as mp
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import forked

TIMEOUT = 120.0
"""Seconds after which a case counts as hanging. Nothing else depends on how fast ranks are."""
DUMP = 30.0
"""Seconds that a rank has to write down its stack."""


@dataclasses.dataclass
class Outcome:
    """What one rank's call came to."""

    rank: int
    value: Any = None
    error: str | None = None  # the exception's type
    message: str = ""
    trace: str = ""
    stage: str | None = None  # of a CollectiveError


def assert_refused(outcomes: Sequence[Outcome], kind: str, message: str, alone: bool | None = None) -> None:
    """Every rank raised an error of this type, with a message that begins so; and, alone, one that ends with the rank that erred."""
    for outcome in outcomes:
        assert outcome.error == kind, outcome.trace
        assert outcome.message.startswith(message)
        if alone is not None:
            assert outcome.message.endswith("(on rank 1)") == alone


class RankPool:
    """``world_size`` ranks of one process group.

    Args:
        world_size: how many.
        backend: "gloo", or "nccl" with a GPU each; None leaves `init_process_group` to the cases.
        group_timeout: the process group's, in seconds.
    """

    def __init__(self, world_size: int, backend: str | None = "gloo", group_timeout: float = TIMEOUT) -> None:
        self.world_size = world_size
        self.backend = backend
        self._group_timeout = group_timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def start(self) -> None:
        context = forked.context()
        self._folder = tempfile.TemporaryDirectory(prefix="fastkron-ranks-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.world_size):
            here, there = context.Pipe()
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            arguments = (there, variables, self._stack_file(rank), self.backend, self._group_timeout, sys.path)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def stop(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(5)
        self._kill()

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list[Any]:
        """What the case returns on each rank; fails if it raises on any."""
        outcomes = self.outcomes(case, *args, timeout=timeout, **kwargs)
        failed = [o for o in outcomes if o.error is not None]
        if failed:
            shown = "\n".join(f"--- rank {o.rank}\n{o.trace}" for o in failed)
            raise AssertionError(f"{case.__name__} failed on {len(failed)} of {len(outcomes)} ranks\n{shown}")
        return [o.value for o in outcomes]

    def outcomes(
        self, case: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, expect_dead: Sequence[int] = (), **kwargs: Any
    ) -> list[Outcome]:
        """What the case returns or raises on each rank (without those that are expected to die)."""
        if not self._pipes:
            self.start()
        where = (case.__code__.co_filename, case.__qualname__)
        for pipe in self._pipes:
            pipe.send((where, args, kwargs))
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        pending = dict(zip(self._pipes, range(self.world_size), strict=True))
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(list(pending.values()))
                self._kill()
                raise AssertionError(f"{case.__name__}: ranks {list(pending.values())} hang after {timeout:g} s\n{stacks}")
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    if rank not in expect_dead:
                        self._processes[rank].join(5)
                        code = self._processes[rank].exitcode
                        self._kill()
                        raise AssertionError(f"{case.__name__}: rank {rank} died with exit code {code}") from None
        if expect_dead or any(o.error == "CollectiveError" for o in found.values()):
            self._kill()  # a group that has failed once is not used again
        return [found[rank] for rank in sorted(found)]

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"stack-{rank}.txt")

    def _stacks(self, ranks: Sequence[int]) -> str:
        files = {rank: Path(self._stack_file(rank)) for rank in ranks}
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        # The main thread's stack comes last, and ends with the server's loop that forked it.
        deadline = time.monotonic() + DUMP
        while time.monotonic() < deadline and not all(f'"{mp.forkserver.__file__}"' in f.read_text() for f in files.values()):
            time.sleep(0.05)
        return "\n".join(f"--- rank {rank}\n{file.read_text()}" for rank, file in files.items())

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if hasattr(self, "_folder"):
            self._folder.cleanup()


# ---- in a rank ---------------------------------------------------------------------------------

_modules: dict[str, ModuleType] = {}


def _find(where: tuple[str, str]) -> Callable[..., Any]:
    path, name = where
    if path not in _modules:
        spec = importlib.util.spec_from_file_location(f"rank_cases_{len(_modules)}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _modules[path] = module
    found: Callable[..., Any] = getattr(_modules[path], name)
    return found


def _serve(pipe: Connection, variables: dict[str, str], stack_file: str, backend: str | None, timeout: float, path: list[str]) -> None:
    os.environ.update(variables)
    sys.path[:] = path
    stack = Path(stack_file).open("w")  # noqa: SIM115  # open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    import torch

    from fastkron_py.distributed import init_process_group

    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    ready = False
    while (task := pipe.recv()) is not None:
        outcome = Outcome(rank=int(variables["RANK"]))
        try:
            if backend is not None and not ready:
                init_process_group(backend, timeout=timedelta(seconds=timeout))
                ready = True
            where, args, kwargs = task
            outcome.value = _on_cpu(_find(where)(*args, **kwargs))
        except Exception as error:
            outcome.error = type(error).__name__
            outcome.message = str(error)
            outcome.trace = traceback.format_exc()
            outcome.stage = getattr(error, "stage", None)
        try:
            pipe.send(outcome)
        except Exception as error:  # a value that does not travel
            pipe.send(Outcome(rank=outcome.rank, error=type(error).__name__, message=str(error), trace=traceback.format_exc()))


def _on_cpu(value: Any) -> Any:
    """Results as NumPy arrays where they are tensors: these need no shared memory to travel."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy() if value.dtype != torch.bfloat16 else value.detach().cpu().float().numpy()
    if isinstance(value, tuple | list):
        return type(value)(_on_cpu(v) for v in value)
    if isinstance(value, dict):
        return {k: _on_cpu(v) for k, v in value.items()}
    return value
