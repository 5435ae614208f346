"""Several processes that compile at once, with a time limit for each choice."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as WaitTimeoutError
from dataclasses import dataclass
from typing import Any, Final

from fastkron_py.kron.launches import MultiplyProblem
from fastkron_py.kron.tune.choice import Choice
from fastkron_py.kron.tune.compile_worker import task_to_json

START_SECONDS: Final = 120.0  # importing torch and Triton from a slow disk
COMPILE_SECONDS: Final = 30.0  # one choice; most take two to five


@dataclass(frozen=True)
class Compiled:
    """A choice that a process has compiled, or why not."""

    choice: Choice
    shared: int = 0  # bytes of shared memory of the launch that needs most
    stack: int = 0  # bytes spilled by a thread of the launch that spills most
    error: str | None = None


class _Worker:
    """One process, started when it is first asked and again after it had to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # of starting and of closing
        self._closed = False

    def ask(self, task: str, limit: float) -> dict[str, Any]:
        """The answer to a task, or an error that says why there is none."""
        with self._lock:
            if self._closed:
                return {"error": "the search has ended"}
            fresh = self._process is None or self._process.poll() is not None
            if fresh:
                self.stop()
                self._process = _start()
        if fresh and "error" in self._exchange("", START_SECONDS):
            return {"error": "the compiling process did not start"}
        return self._exchange(task + "\n", limit)

    def _exchange(self, text: str, limit: float) -> dict[str, Any]:
        process, late = self._process, threading.Event()
        if process is None or process.stdin is None or process.stdout is None:
            return {"error": "the compiling process was stopped"}

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            process.stdin.write(text)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.stop()
        return {"error": f"compiling took longer than {limit:g} s" if late.is_set() else "the compiling process ended"}

    def close(self) -> None:
        """Start no process any more, and let the one there is answer no more."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """End the process, and wait until it has."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[str]:
    # One thread each, no GPU, and this process's packages.
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "fastkron_py.kron.tune.compile_worker"]
    return subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8", env=env
    )


class Compilers:
    """Compile choices in several processes; a context manager, at whose end no process is left.

    Args:
        target: the GPU to compile for (Triton's GPUTarget), or None under the interpreter, which compiles nothing.
        processes: how many at most; None takes one for every two CPUs, up to eight.
        limit: seconds for one choice.
    """

    def __init__(self, target: Any, processes: int | None = None, limit: float = COMPILE_SECONDS) -> None:
        count = processes or min(8, max(1, (os.cpu_count() or 2) // 2))
        self._target, self._limit = target, limit
        self._workers = [_Worker() for _ in range(count)]
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()

    def compile(self, multiply: MultiplyProblem, choices: Sequence[Choice], seconds: float) -> Iterator[Compiled]:
        """Compile choices, in the order in which they get done, within a limit of seconds in all."""
        if self._target is None:
            yield from (Compiled(choice) for choice in choices)
            return
        pending = [self._threads.submit(self._one, multiply, choice) for choice in choices]
        try:
            for future in as_completed(pending, timeout=max(0.0, seconds)):
                yield future.result()
        except WaitTimeoutError:
            return
        finally:
            for future in pending:
                future.cancel()

    def _one(self, multiply: MultiplyProblem, choice: Choice) -> Compiled:
        worker = self._free.get()
        try:
            return Compiled(choice, **worker.ask(task_to_json(self._target, multiply, choice), self._limit))
        finally:
            self._free.put(worker)
