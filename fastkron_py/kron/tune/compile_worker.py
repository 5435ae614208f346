"""``python -m fastkron_py.kron.tune.compile_worker``: compile launches for a GPU without touching one.

Lines of JSON in, one for each choice, and a line of JSON out for each. Compiled kernels go to Triton's cache on disk, from
which another process loads it. Processes of its own, and no pool of Python's: a program that tunes needs no ``__main__``
guard, nothing is pickled, and a compilation that takes too long can be ended.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fastkron_py.kron.forward import MultiplyLaunch, launches_of
from fastkron_py.kron.launches import MultiplyProblem, Rows
from fastkron_py.kron.tune.choice import Choice
from fastkron_py.kron.tune.entry import choice_from_json, choice_to_json


class Target:
    """As much of a driver as compiling asks for."""

    def __init__(self, backend: str, arch: Any, warp_size: int) -> None:
        self._target = GPUTarget(backend, arch, warp_size)

    def get_current_target(self) -> GPUTarget:
        """The target of the compiler."""
        return self._target

    def get_current_device(self) -> int:
        """The number of a device, under which compiled kernels are kept."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """A stream, on which nothing is launched."""
        return 0


def task_to_json(target: Any, problem: MultiplyProblem, choice: Choice) -> str:
    """One line of input."""
    return json.dumps(
        {
            "target": [target.backend, target.arch, target.warp_size],
            "shape": list(problem.shape),
            "x": list(problem.x),
            "factor_shapes": [list(s) for s in problem.factor_shapes],
            "factor_strides": [list(s) for s in problem.factor_strides],
            "sizes": list(problem.sizes),
            "precision": problem.precision,
            "dtype": str(problem.dtype).removeprefix("torch."),
            "launches": choice_to_json(choice),
        }
    )


def _problem(task: dict[str, Any]) -> MultiplyProblem:
    shapes, strides = (tuple(tuple(s) for s in task[name]) for name in ("factor_shapes", "factor_strides"))
    dtype, device = getattr(torch, task["dtype"]), torch.device("cpu")
    shape, sizes = tuple(task["shape"]), tuple(task["sizes"])
    return MultiplyProblem(shape, Rows(*task["x"]), None, shapes, strides, 0, len(shapes), sizes, False, task["precision"], dtype, device)


def _stack(compiled: Any) -> int:
    """Bytes that a thread spills to its stack; 0 without the tool that reads them."""
    cubin = compiled.asm.get("cubin")
    if cubin is None:
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603
    return max([int(size) for size in re.findall(r"STACK:(\d+)", text)], default=0)


def _compile(launch: MultiplyLaunch, sample: Tensor) -> tuple[int, int]:
    """Bytes of shared memory and of stack of one launch."""
    factors = (sample,) * (launch.stop - launch.start)
    first = {"x_ptr": sample, "factor_ptrs": factors, "z_ptr": sample, "y_ptr": sample, "alpha": 0, "beta": 0}
    compiled = launch.launcher.configs[0].launch(first, only_compile=True)
    return int(compiled.metadata.shared), _stack(compiled)


def _summary(error: BaseException) -> str:
    """One line of an exception, of the first one where a compiler has wrapped it in others."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:300]


def answer(line: str) -> dict[str, Any]:
    """The answer to one line of input: the most shared memory and stack of its launches, or an error."""
    task = json.loads(line)
    driver.set_active(Target(*task["target"]))
    problem = _problem(task)
    sample = torch.empty(1, dtype=problem.dtype)  # on a 16-byte boundary, like the tensors it stands for
    try:
        launches = launches_of(problem, choice_from_json(task["launches"]))
        needs = [_compile(launch, sample) for launch in launches if isinstance(launch, MultiplyLaunch)]
    except Exception as error:  # whatever a compiler raises is a property of this choice
        return {"error": _summary(error)}
    return {"shared": max(shared for shared, _ in needs), "stack": max(stack for _, stack in needs)}


def main() -> None:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a compiler's output does not belong between the answers
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=out, flush=True)


if __name__ == "__main__":
    main()
