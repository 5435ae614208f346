"""Compile the kernels of benchmarks' contenders, in several processes at once and before anything is timed.

Compilers keep their results on disk, where the process that times finds it: Triton its kernels, torch.compile its graphs. What is left for
that process, such as torch.compile's tracing, it does itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from benchmarks import timing
from benchmarks.catalogue import all_benchmarks
from benchmarks.registry import DRAW, Benchmark, Case, Contender, Draw
from benchmarks.runner import FAILURES, blank, chosen_cases, free


class Share(NamedTuple):
    """What one process compiles: of the calls of some benchmarks, chosen as `run` does, each `of`-th from `index` on."""

    index: int
    of: int
    names: list[str]
    device: str | None
    quick: bool
    only: list[str]
    draw: Draw = DRAW


def _calls(share: Share) -> Iterator[tuple[Benchmark, Case, Contender, torch.device]]:
    for benchmark in (b for b in all_benchmarks().values() if b.name in share.names):
        device = torch.device(share.device or benchmark.device)
        if benchmark.apart or (device.type == "cuda" and not torch.cuda.is_available()):
            continue
        for case in chosen_cases(benchmark, device, share.quick, share.only, Draw(*share.draw)):
            for contender in benchmark.contenders:
                if blank(case, contender, device).status == "ok":
                    yield benchmark, case, contender, device


def compile_share(share: Share) -> int:
    """Prepare each call and make it once; how many could be made. The others say why when they are timed."""
    made = 0
    with torch.no_grad():
        for benchmark, case, contender, device in islice(_calls(share), share.index, None, share.of):
            try:
                with timing.time_limit(contender.seconds):
                    contender.prepare(benchmark.inputs(case.parameters, device))()
                made += 1
            except FAILURES:
                pass
            free(device)
    return made


def compile_all(
    names: Sequence[str],
    processes: int,
    *,
    device: str | None = None,
    quick: bool = False,
    only: Sequence[str] = (),
    draw: Draw = DRAW,
) -> int:
    """Share the calls of these benchmarks out among processes, and wait for them.

    Args:
        names: of benchmarks.
        processes: at once.
        device: in place of the benchmarks' own, as in `runner.run`.
        quick: as in `runner.run`.
        only: as in `runner.run`.
        draw: as in `runner.run`.

    Returns:
        How many calls were made.
    """
    shares = [Share(i, processes, list(names), device, quick, list(only), draw) for i in range(processes)]
    command = [sys.executable, "-m", "benchmarks.warm"]
    children = [subprocess.Popen([*command, json.dumps(share)], stdout=subprocess.PIPE, text=True) for share in shares]
    try:
        said: list[Any] = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return sum(int(text.split()[-1]) for text in said if text.split())


if __name__ == "__main__":
    print(compile_share(Share(*json.loads(sys.argv[1]))))
