"""Hardware counters of every launch of a product.

    python -m benchmarks.kron.counters 1024:16,16,16,16,16 16:64,64,64 [--left] [--backward]

runs itself under Nsight Compute (``ncu``, which comes with CUDA) and prints, for each launch, how busy memory and the tensor cores are
and what the warps wait for. Counters say what bounds a kernel; times are taken without them, by the benchmarks.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import fastkron_py
from benchmarks.environment import describe

SECONDS = 120.0
# Column of the table: the counter, and what its value is divided by.
PERCENT = ".avg.pct_of_peak_sustained_elapsed"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e3),
    "read MB": ("dram__bytes_read.sum", 1e6),
    "written MB": ("dram__bytes_write.sum", 1e6),
    "DRAM %": (f"dram__throughput{PERCENT}", 1),
    "L2 %": (f"lts__throughput{PERCENT}", 1),
    "L1 %": (f"l1tex__throughput{PERCENT}", 1),
    "tensor %": (f"sm__pipe_tensor_cycles_active{PERCENT}", 1),
    "issue %": (f"sm__issue_active{PERCENT}", 1),
    "warps %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "registers": ("launch__registers_per_thread", 1),
    "waits: memory": (STALL.format("long_scoreboard"), 1),
    "shared": (STALL.format("short_scoreboard"), 1),
    "barrier": (STALL.format("barrier"), 1),
    "products": (STALL.format("gmma"), 1),
    "queue": (STALL.format("lg_throttle"), 1),
}
SCALES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "nsecond": 1, "usecond": 1e3, "msecond": 1e6, "ns": 1, "us": 1e3, "ms": 1e6}


def _once(rows: int, widths: Sequence[int], form: str) -> None:
    """The work that is profiled: one call after one that compiles."""
    factors = [torch.randn(p, p, device="cuda") / math.sqrt(p) for p in widths]
    size = math.prod(widths)
    x = torch.randn(*((size, rows) if form == "left" else (rows, size)), device="cuda")
    dy = torch.randn_like(x)

    def call() -> None:
        if form == "left":
            fastkron_py.kron_matmul_left(factors, x)
        elif form == "backward":
            torch.ops.fastkron.kron_matmul_backward(dy, x, factors, None, True, [True] * len(factors), 1.0, None, "triton", False)
        else:
            fastkron_py.kron_matmul(x, factors)

    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def measure(problem: str, form: str, ncu: str) -> list[dict[str, float | str]]:
    """Counters of each launch of one call, in order.

    Raises:
        RuntimeError: Nsight Compute could not count; with what it said.
    """
    metrics = ",".join(name for name, _ in COUNTERS.values())
    options = [
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--metrics",
        metrics,
    ]
    command = [ncu, *options, sys.executable, "-m", "benchmarks.kron.counters", problem, f"--{form}", "--child"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=Path(__file__).resolve().parents[2])
    table = [row for row in csv.reader(done.stdout.splitlines()) if len(row) > len(COUNTERS)]
    if len(table) < 3:
        raise RuntimeError(f"ncu counted nothing: {(done.stdout + done.stderr)[-500:]}")
    head, units, *rows = table
    found: list[dict[str, float | str]] = []
    for row in rows:
        launch: dict[str, float | str] = {"kernel": row[head.index("Kernel Name")]}
        for name, (counter, scale) in COUNTERS.items():
            column = head.index(counter)
            launch[name] = float(row[column].replace(",", "")) * SCALES.get(units[column], 1) / scale
        found.append(launch)
    return found


def _problem(text: str) -> tuple[int, list[int]]:
    rows, _, widths = text.partition(":")
    try:
        return int(rows), [int(p) for p in widths.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ROWS:WIDTH,WIDTH,... such as 1024:16,16,16, got {text!r}") from None


def main(arguments: list[str] | None = None) -> int:
    """Print, and with --out keep, the counters of the named problems."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kron.counters", description=__doc__)
    parser.add_argument("problems", nargs="+", type=_problem, metavar="ROWS:WIDTHS", help="such as 1024:16,16,16")
    form = parser.add_mutually_exclusive_group()
    for name in ("right", "left", "backward"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name)
    parser.set_defaults(form="right")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _once(*options.problems[0], options.form)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None or not torch.cuda.is_available():
        parser.error("needs a CUDA GPU and Nsight Compute's ncu on the PATH")
    console, kept = Console(width=200), []
    for rows, widths in options.problems:
        problem = f"{rows}:{','.join(map(str, widths))}"
        launches = measure(problem, options.form, ncu)
        kept.append({"problem": problem, "form": options.form, "launches": launches})
        table = Table("kernel", *COUNTERS, title=f"{options.form} {problem}")
        for launch in launches:
            values = [f"{value:.1f}" if isinstance(value, float) else value[:28] for value in launch.values()]
            table.add_row(*values)
        console.print(table)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": describe(torch.device("cuda")), "counters": kept}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
