"""Hardware counters of every launch of a benchmark's call.

    python -m benchmarks.counters kron_half [--only "8192 x 64^2" ...] [--contender NAME] [--out FILE]

runs each case under Nsight Compute (``ncu``, which comes with CUDA) and prints, for each launch, how busy memory and the tensor cores
are and the causes for which warps wait. Counters tell a kernel's bound; times are taken without them, by the benchmarks.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.catalogue import all_benchmarks
from benchmarks.environment import describe
from benchmarks.registry import DRAW, Benchmark, Case
from benchmarks.runner import chosen_cases

SECONDS: Final = 120.0
# Column of the table: the counter, and the divisor of its value.
PERCENT: Final = ".avg.pct_of_peak_sustained_elapsed"
STALL: Final = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS: Final = {
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
SCALES: Final = {
    "byte": 1,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "nsecond": 1,
    "usecond": 1e3,
    "msecond": 1e6,
    "ns": 1,
    "us": 1e3,
    "ms": 1e6,
}


def _call_once(benchmark: Benchmark, case: Case, contender: str) -> None:
    """The work that is profiled: one call after one that compiles."""
    chosen = next(c for c in benchmark.contenders if c.name == contender)
    call = chosen.prepare(benchmark.inputs(case.parameters, torch.device("cuda")))
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def measure(benchmark: str, label: str, contender: str, ncu: str) -> list[dict[str, float | str]]:
    """Counters of each launch of one call, in order.

    Raises:
        RuntimeError: Nsight Compute could not count; with its message.
    """
    metrics = ",".join(name for name, _ in COUNTERS.values())
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    child = [sys.executable, "-m", "benchmarks.counters", benchmark, "--only", label, "--contender", contender, "--child"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([ncu, *options, "--metrics", metrics, *child], capture_output=True, text=True, timeout=SECONDS, cwd=root)
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


def main(arguments: list[str] | None = None) -> int:
    """Print, and with --out keep, the counters of a benchmark's cases."""
    known = all_benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    parser.add_argument("benchmark", choices=sorted(known), metavar="NAME", help="of a benchmark")
    parser.add_argument("--only", action="append", default=[], metavar="LABEL", help="cases with this in their label; may be repeated")
    parser.add_argument("--contender", default="fastkron_py", help="whose call is profiled")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    benchmark = known[options.benchmark]
    contenders = [c.name for c in benchmark.contenders]
    if options.contender not in contenders:
        parser.error(f"--contender: expected one of {', '.join(contenders)}; got {options.contender!r}")
    ncu = shutil.which("ncu")
    if ncu is None or not torch.cuda.is_available():
        parser.error("needs a CUDA GPU and Nsight Compute's ncu on the PATH")
    device = torch.device("cuda")
    try:
        cases = chosen_cases(benchmark, device, quick=False, only=options.only, draw=DRAW)
    except ValueError as error:
        parser.error(str(error))
    if options.child:  # the label is whole, and may be part of another one's
        case = next(c for c in cases if c.label in options.only)
        _call_once(benchmark, case, options.contender)
        return 0
    console, kept = Console(width=200), []
    for case in cases:
        launches = measure(benchmark.name, case.label, options.contender, ncu)
        kept.append({"case": case.label, "contender": options.contender, "launches": launches})
        table = Table("kernel", *COUNTERS, title=f"{benchmark.name}: {case.label}")
        for launch in launches:
            values = [f"{value:.1f}" if isinstance(value, float) else value[:28] for value in launch.values()]
            table.add_row(*values)
        console.print(table)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": describe(device), "counters": kept}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
