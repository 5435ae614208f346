"""`row_counts`: first calls at new numbers of rows, with all the compiling in them, each problem in a process of its own.

python -m benchmarks.eager.row_counts    # the kernels that these calls compile for an H100, counted on a machine without one
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from benchmarks.kron.problems import label
from benchmarks.registry import Apart, Benchmark, Call, Case, Contender, register

PROBLEMS: Final = (((8,) * 5, "float32"), ((12, 40, 7), "float32"), ((64, 64), "bfloat16"), ((300, 451), "float32"), ((16,) * 4, "float64"))
COUNTS: Final = {"forward": 40, "backward": 12}  # of numbers of rows
MOST_ROWS: Final = 700
CHILD_SECONDS: Final = 180.0
OURS: Final = "fastkron_py"


def row_counts(kind: str) -> list[int]:
    """The numbers of rows."""
    return random.Random(0).sample(range(1, MOST_ROWS + 1), COUNTS[kind])


def first_calls(parameters: Mapping[str, Any], device: torch.device) -> list[float]:
    """Seconds of one call at each of the numbers of rows."""
    import fastkron_py

    dtype, rows = getattr(torch, parameters["dtype"]), row_counts(parameters["kind"])
    factors = [torch.randn(p, p, device=device).to(dtype) / p**0.5 for p in parameters["P"]]
    needs_gradients, width = parameters["kind"] == "backward", torch.Size(parameters["P"]).numel()
    found = []
    for m in rows:
        given = [t.requires_grad_(needs_gradients) for t in (torch.randn(m, width, device=device).to(dtype), *factors)]
        dy = torch.randn(m, width, device=device).to(dtype)
        start = time.perf_counter()
        y = fastkron_py.kron_matmul(given[0], given[1:])
        if needs_gradients:
            torch.autograd.grad(y, given, dy)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return found


# ---- kernels, counted without a GPU --------------------------------------------------------------


def specialised(value: Any, parameter: Any) -> Any:
    """What Triton compiles a kernel for, of an argument: a constant, or a type, whether it is 1, and whether 16 divides it."""
    if parameter.is_constexpr:
        return repr(value)
    if isinstance(value, tuple):
        return tuple([specialised(v, parameter) for v in value])
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    if value == 1 and not parameter.do_not_specialize:
        return 1
    is_divisible = value % 16 == 0 and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    return -(2**31) <= value < 2**31, is_divisible


def compiled(step: Any) -> tuple[Any, ...]:
    """What tells the kernel of a program's launch from others; all operands begin at a 16-byte boundary."""
    kernel, _, arguments = step.run.configs[0]
    parameters = {parameter.name: parameter for parameter in kernel.params}
    sizes = {number: len(parts) for number, parts in step.tuples}
    shapes = {d.number: (tuple(d.template["block_shape"]), d.itemsize) for d in step.descriptors}
    operands = tuple([sizes.get(number, shapes.get(number)) for number in step.operands])
    return kernel, operands, *[(name, specialised(v, parameters[name]) if name in parameters else v) for name, v in arguments.items()]


def programs(parameters: Mapping[str, Any], rows: int) -> Iterator[Any]:
    """The programs of a call with this number of rows, inside of `benchmarks.kron.programs.pretending`."""
    from fastkron_py.kron import operator

    dtype, ps, is_backward = getattr(torch, parameters["dtype"]), parameters["P"], parameters["kind"] == "backward"
    x, factors = torch.empty(rows, math.prod(ps), dtype=dtype), [torch.empty(p, p, dtype=dtype) for p in ps]
    made = operator.forward([x, *factors, None], (1.0, 0.0, "highest", "triton", False), saves=is_backward)
    yield made
    if is_backward:
        makes = {make.number: make for step in made._steps for make in step.makes}
        saved = [makes[number] for number, _ in made._results[len(made._results) - made.saved :]]
        between = torch.empty(saved[0].shape, dtype=dtype) if saved else None
        yield operator.gradients([x, x, *factors, between], (True, [True] * len(ps), 1.0, "highest", "triton", False))


def kernels(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """How many kernels calls of all numbers of rows compile, and how many launches one of them makes at most."""
    from benchmarks.kron.programs import pretending

    found, most = set(), 0
    with pretending():
        for rows in row_counts(parameters["kind"]):
            steps = [step for made in programs(parameters, rows) for step in made._steps if step.results is None]
            found |= {compiled(step) for step in steps}
            most = max(most, len(steps))
    return len(found), most


# ---- compiles on a GPU ---------------------------------------------------------------------------


def _in_child(parameters: dict[str, Any], device: torch.device) -> Mapping[str, Apart]:
    """The same in a process with an empty cache of Triton's; a compile leaves one such file of a kernel there, of one in Gluon too."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.eager.row_counts", json.dumps(parameters), device.type]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS)
        if done.returncode:
            raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
        seconds = json.loads(done.stdout.splitlines()[-1])
        compiles = len(list(Path(cache).rglob("*.llir")))
    return {OURS: Apart(0.0, seconds, {"total": sum(seconds), "longest": max(seconds), "compiles": compiles})}


def _elsewhere(_: Any) -> Call:
    raise RuntimeError("runs in a process of its own")


def _show(found: dict[str, Any], console: Console) -> None:
    """Print one line for each problem."""
    for case in found["cases"]:
        of = case.get("details", {})
        told = f"{of['total']:.2f} s in all, {of['longest']:.2f} s the longest call, {of['compiles']} compiles" if of else "failed"
        console.print(f"{case['label']}: {told}", highlight=False, soft_wrap=True)


def _case(ps: tuple[int, ...], dtype: str, kind: str) -> Case:
    name = f"{COUNTS[kind]} row counts{label(1, ps, ps).removeprefix('1')} {dtype} {kind}"
    return Case(name, {"P": list(ps), "dtype": dtype, "kind": kind}, dtype, 1.0, quick=ps == (64, 64))


register(
    Benchmark(
        name="row_counts",
        description="First calls at 40 new numbers of rows, 12 with backward: seconds, and how many kernels were compiled.",
        device="cuda",
        cases=[_case(ps, dtype, kind) for ps, dtype in PROBLEMS for kind in COUNTS],
        contenders=[Contender(OURS, _elsewhere, is_ours=True)],
        inputs=lambda parameters, device: None,
        check=lambda problem, result: 0.0,
        baseline=OURS,
        apart=_in_child,
        table=_show,
    )
)

if __name__ == "__main__" and len(sys.argv) > 1:
    print(json.dumps(first_calls(json.loads(sys.argv[1]), torch.device(sys.argv[2]))))
elif __name__ == "__main__":
    cases = [_case(ps, dtype, kind) for ps, dtype in PROBLEMS for kind in COUNTS]
    print(json.dumps({case.label: kernels(case.parameters) for case in cases}, indent=1))
