"""The launches and calls of torch that each drawn problem takes on a Hopper GPU, found on a machine without one.

    python -m benchmarks.kron.programs --seed 1 --count 150 --out old.json    # of one revision
    python -m benchmarks.kron.programs --seed 1 --count 150 --out new.json    # of another one
    python -m benchmarks.kron.programs --compare old.json new.json > changed.txt
    python -m benchmarks drawn --seed 1 --count 150 @changed.txt

A change of the plan's model changes some problems' programs. Only these need to be timed on a GPU, in both revisions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks.kron.drawn import cases
from benchmarks.registry import DRAW, Draw

MULTIPROCESSORS: Final = 132


@contextmanager
def pretending(gpu: Any = None) -> Iterator[None]:
    """Programs that are built here are those of a GPU, of an H100 or H200 without one; they cannot run."""
    from fastkron_py.runtime import backend, device, launch
    from fastkron_py.runtime.gpu import HOPPER

    gpu = gpu or replace(HOPPER, multiprocessors=MULTIPROCESSORS)
    driver = (lambda: 0), (lambda _: 0)
    with (
        patch.object(device, "gpu_of", lambda _: gpu),
        patch.object(backend, "triton_obstacle", lambda _: None),
        patch.object(launch, "driver", lambda: driver),
    ):
        yield


def _described(step: Any) -> list[str]:
    """The kernel, its grid and its arguments, or the function of torch and its numbers."""
    if hasattr(step.run, "configs"):
        kernel, grid, arguments = step.run.configs[0]
        return [kernel.__name__, str(grid), str({name: value for name, value in arguments.items() if not callable(value)})]
    return [getattr(step.run, "__qualname__", type(step.run).__name__), str(step.scalars)]


def program_of(parameters: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The steps of a problem's programs: forward; with backward, also forward where an intermediate is saved, and the gradients.

    Args:
        parameters: of a case of `drawn`.
    """
    from fastkron_py.kron import operator

    m, ps, qs, left = (parameters[name] for name in ("M", "P", "Q", "left"))
    dtype = getattr(torch, parameters["dtype"])
    x, dy = (torch.empty((size, m) if left else (m, size), dtype=dtype) for size in (math.prod(ps), math.prod(qs)))
    factors = [torch.empty((q, p) if left else (p, q), dtype=dtype) for p, q in zip(ps, qs, strict=True)]
    given = [x, *factors, None], (1.0, 0.0, "highest", "triton", left)
    found = {"forward": operator.forward(*given)}
    if parameters["kind"] == "backward":
        saving = operator.forward(*given, saves=True)
        if saving.saved:
            found["saving"] = saving
        options = (True, [True] * len(factors), 1.0, "highest", "triton", left)
        found["backward"] = operator.gradients([dy, x, *factors, None], options)
    return {name: [_described(step) for step in made._steps] for name, made in found.items()}


def programs(draw: Draw) -> dict[str, dict[str, list[list[str]]]]:
    """`program_of` each problem on a GPU, by its label."""
    with pretending():
        return {case.label: program_of(case.parameters) for case in cases(draw, torch.device("cuda"))}


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Labels of problems in both whose programs differ."""
    return [label for label, made in new.items() if label in old and made != old[label]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the programs of a seed's problems, or print what differs between two files as arguments of ``python -m benchmarks``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kron.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=DRAW.seed)
    parser.add_argument("--count", type=int, default=DRAW.count)
    parser.add_argument("--dtype", action="append", default=[])
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    options = parser.parse_args(arguments)
    if options.compare:
        old, new = (json.loads(path.read_text()) for path in options.compare)
        for label in changed(old, new):
            print(f"--only={label}")
    elif options.out:
        options.out.write_text(json.dumps(programs(Draw(options.seed, options.count, tuple(options.dtype))), indent=1))
    else:
        parser.error("expected --out FILE or --compare OLD NEW")


if __name__ == "__main__":
    main()
