"""``python -m benchmarks [NAME ...] [--out DIR] [--quick] [--seconds S] [--device cpu|cuda] [--only LABEL ...] [--compile N]``.

``python -m benchmarks drawn [--seed S] [--count N] [--dtype D ...] [--kind forward|backward]
[--narrowest P]`` draws its problems.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.catalogue import all_benchmarks
from benchmarks.registry import DRAW, Draw
from benchmarks.runner import QUICK_SECONDS, SECONDS, run
from benchmarks.warm import compile_all


def _list(console: Console) -> None:
    table = Table("benchmark", "device", "what", title="python -m benchmarks NAME")
    for benchmark in all_benchmarks().values():
        table.add_row(benchmark.name, benchmark.device, benchmark.description)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the named benchmarks; without names, all that fit this machine. Returns 1 if a contender's result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; without one, all that fit this machine")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for NAME.json and the plots")
    parser.add_argument("--quick", action="store_true", help="a few cases and rounds, to see that it works")
    parser.add_argument("--seconds", type=float, help=f"that one benchmark may take ({SECONDS:g}; quick: {QUICK_SECONDS:g})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="in place of the benchmark's own")
    parser.add_argument("--only", action="append", default=[], metavar="LABEL", help="cases with this in their label; may be repeated")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="first compile all kernels, in N processes at once")
    drawing = parser.add_argument_group("problems that are drawn")
    drawing.add_argument("--seed", type=int, default=DRAW.seed, help="of the generator")
    drawing.add_argument("--seeds", type=int, default=DRAW.seeds, metavar="N", help="how many seeds, for benchmarks that take several")
    drawing.add_argument("--count", type=int, default=DRAW.count, help="of problems")
    drawing.add_argument("--dtype", action="append", default=[], help="to draw from; may be repeated")
    drawing.add_argument("--kind", action="append", default=[], help="forward or backward; both without it")
    drawing.add_argument("--narrowest", type=int, default=DRAW.narrowest, metavar="P", help="least width of a factor")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    options = parser.parse_args(arguments)
    console = Console()
    if options.list:
        _list(console)
        return 0
    fitting = [b.name for b in all_benchmarks().values() if b.device != "cuda" or torch.cuda.is_available()]
    names = options.names or fitting
    draw = Draw(options.seed, options.count, tuple(options.dtype), tuple(options.kind), options.narrowest, options.seeds)
    wrong = False
    try:
        if options.compile > 0:
            begun = time.perf_counter()
            made = compile_all(names, options.compile, device=options.device, quick=options.quick, only=options.only, draw=draw)
            console.print(f"compiled for {made} calls in {time.perf_counter() - begun:.0f} s", highlight=False)
        for name in names:
            found = run(
                name,
                out=options.out,
                quick=options.quick,
                device=options.device,
                seconds=options.seconds,
                only=options.only,
                draw=draw,
                console=console,
            )
            wrong |= any(r["status"] == "wrong" for case in found["cases"] for r in case["results"])
    except ValueError as error:
        parser.error(str(error))
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
