"""Compile the rational kernels' launches for an H100, on a machine that has none; a line of JSON for each.

Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from compile_for_h100 import H100, resources
from triton.runtime import driver, jit

# name: (dtype, shape, groups, degrees, version)
PROBLEMS: dict[str, tuple[torch.dtype, tuple[int, ...], int, tuple[int, int], str]] = {
    "float32": (torch.float32, (1024, 197, 768), 8, (5, 4), "B"),
    "bfloat16": (torch.bfloat16, (1024, 197, 768), 8, (5, 4), "B"),
    "float16 of version A": (torch.float16, (1024, 197, 768), 8, (5, 4), "A"),
    "version C": (torch.float32, (64, 197, 192), 8, (5, 4), "C"),
    "version N, shared": (torch.bfloat16, (64, 197, 192), 1, (5, 4), "N"),
    "float64": (torch.float64, (64, 197, 192), 8, (5, 4), "B"),
    "degrees 16": (torch.float32, (64, 197, 192), 8, (16, 16), "B"),
    "odd": (torch.bfloat16, (9, 21), 3, (0, 1), "A"),
    "wrap": (torch.float32, (5, 2 * 66000), 2, (3, 2), "B"),
}


def loads_and_stores(cubin: bytes) -> dict[str, int]:
    """How many of the loads and stores are of 16 bytes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
    return {f"wide_{what}": len(re.findall(rf"\b{what}\.E\.128", text)) for what in ("LDG", "STG")}


def fused(current: dict[str, str]) -> None:
    """KAT's first linear layers with the function on their result, the result's argument kept and not."""
    from fastkron_py.rational import program_linear_rational

    program_linear_rational.is_approximate = lambda dtype, device: True
    for name, width in (("KAT-T", 192), ("KAT-B", 768)):
        x, weight, bias = (torch.empty(s, dtype=torch.bfloat16) for s in ((2048, width), (4 * width, width), (4 * width,)))
        a, b = torch.empty(1, 6), torch.empty(8, 4)
        for keep in (False, True):
            current["problem"] = f"{name}, {'kept' if keep else 'not kept'}"
            tensors = (x, weight, bias, a, b)
            program_linear_rational.forward(tensors, ("B",), keep)(tensors)


def main() -> None:
    driver.set_active(H100())
    launch = jit.JITFunction.run
    current = {"problem": ""}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        cubin = compiled.asm["cubin"]
        line = {**current, "kernel": self.__name__, "shared": compiled.metadata.shared}
        print(json.dumps({**line, **resources(cubin), **loads_and_stores(cubin)}), flush=True)

    jit.JITFunction.run = compile_only
    from fastkron_py.rational import launches as triton_rational
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.gpu import HOPPER

    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    triton_rational.is_approximate = lambda dtype, device: dtype != torch.float64
    fused(current)
    for problem, (dtype, shape, groups, (m, n), version) in PROBLEMS.items():
        current["problem"] = problem
        # Of the large one a view of few elements, whose strides are the dense one's: nothing is read here.
        x = torch.empty(1, dtype=dtype).expand(shape)
        dense = torch.empty(shape, device="meta").stride()
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        a, b = torch.empty(groups, m + 1, dtype=kind), torch.empty(groups, n + (version == "C"), dtype=kind)
        runs = triton_rational.find_runs(shape, [dense] * 3, groups)
        function = triton_rational.coefficients(a, b, version, (kind,), x.device)
        of_forward = triton_rational.Problem(runs._replace(row_strides=runs.row_strides[:2]), function, (dtype, dtype, kind, kind))
        triton_rational.forward_launcher(of_forward)(x, a, b, x)
        made = triton_rational.backward_launchers(triton_rational.Problem(runs, function, (dtype, dtype, dtype, kind, kind)))
        partial = torch.empty(16, dtype=made.dtype)
        made.first(x, x, a, b, x, partial)
        made.second(partial, b, a, b)


if __name__ == "__main__":
    main()
