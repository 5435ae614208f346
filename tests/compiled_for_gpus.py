"""Each kernel's first choice, compiled for every architecture that has a record; run as a script, a table.

python tests/compiled_for_gpus.py > benchmarks/results/compiled_kernels.csv
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from compiled_for_h100 import compiled

# Where tensor cores are not Hopper's, and where nothing takes tensor descriptors either, sm_90's figures are those of the same kernels.
WITHOUT_WGMMA = ("9.0", "has_wgmma")
BY_POINTERS = (*WITHOUT_WGMMA, "has_descriptors")
BASELINES = {"8.0": BY_POINTERS, "8.6": BY_POINTERS, "8.9": BY_POINTERS, "9.0": ("9.0",), "10.0": WITHOUT_WGMMA, "12.0": WITHOUT_WGMMA}
TESTED = [capability for capability in BASELINES if capability != "8.9"]  # whose record differs from that of 8.6 in rates alone


class Compiled(NamedTuple):
    """The most that any of a problem's launches of one kernel takes."""

    shared: int  # bytes of a program
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack


Kernels = dict[tuple[str, str], Compiled]  # by problem and kernel


def compiled_for_gpus(cache: Path, is_for_table: bool = False) -> dict[tuple[str, ...], Kernels]:
    """By a compute capability and the features that its record is without. Two processes at a time.

    Args:
        cache: a folder for Triton's. Shared, since much of what is compiled for sm_90 is the same with and without some features.
        is_for_table: also compile for 8.9, for problems that no test needs, every launch and not the largest of each kind, and those
            kernels for sm_90 without a feature that spill nothing where they are compared.
    """
    with ThreadPoolExecutor(2) as pool:
        targets = [(capability,) for capability in (BASELINES if is_for_table else TESTED)]
        chosen = "all" if is_for_table else "kinds"
        found = dict(zip(targets, pool.map(lambda target: _kernels(cache, target, chosen), targets), strict=True))
        compared: dict[tuple[str, ...], set[tuple[str, str]]] = {}
        for (capability,) in targets:
            baseline = BASELINES[capability]
            names = {name for name, kernel in found[capability,].items() if kernel.spilled > 0}
            compared[baseline] = compared.get(baseline, set()) | names
        plain = [baseline for baseline in compared if baseline not in found]
        made = pool.map(lambda target: _kernels(cache, target, "all", None if is_for_table else sorted(compared[target])), plain)
        return found | dict(zip(plain, made, strict=True))


def _kernels(cache: Path, target: tuple[str, ...], chosen: str, wanted: list[tuple[str, str]] | None = None) -> Kernels:
    found: Kernels = {}
    capability, *features = target
    arguments = [capability, ",".join(features), chosen, *([] if wanted is None else [json.dumps(wanted)])]
    for line in compiled("compile_for_gpus.py", cache, *arguments):
        name, most = (line["problem"], line["kernel"]), Compiled(line["shared"], line["reg"], line["stack"])
        found[name] = Compiled(*map(max, found.get(name, most), most))
    return found


def table(kernels: dict[tuple[str, ...], Kernels]) -> list[list[str]]:
    """Rows with a head: kilobytes of shared memory, registers, and bytes that are spilled, where any are."""
    columns = {f"sm_{capability.replace('.', '')}": (capability,) for capability in BASELINES}
    columns["sm_90, plain"] = BY_POINTERS
    names = dict.fromkeys(name for target in columns.values() for name in kernels[target])
    problems = list(dict.fromkeys(problem for problem, _ in names))
    rows = [["problem", "kernel", *columns]]
    for problem, kernel in sorted(names, key=lambda name: problems.index(name[0])):
        found = [kernels[target].get((problem, kernel)) for target in columns.values()]
        rows.append([problem, kernel.strip("_").removesuffix("_kernel"), *[_cell(each) for each in found]])
    return rows


def _cell(found: Compiled | None) -> str:
    if found is None:
        return ""
    spilled = f", spills {found.spilled}" if found.spilled else ""
    return f"{found.shared / 1024:.0f} KB, {found.registers}{spilled}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = table(compiled_for_gpus(Path(folder), is_for_table=True))
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
