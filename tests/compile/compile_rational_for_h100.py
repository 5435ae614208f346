"""Compile the launches of rational functions for an H100: alone, in linear layers, and behind layer normalisation.

On a machine that has none; a line of JSON for each.
Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from compile_for_h100 import H100, compile_only, resources
from triton.runtime import driver

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
# name: (dtype of x, dtype of y, rows, channels, groups, version)
NORMALISED: dict[str, tuple[torch.dtype, torch.dtype, int, int, int, str]] = {
    "layer norm, tiny": (torch.float32, torch.bfloat16, 512 * 197, 192, 8, "B"),
    "layer norm, small": (torch.float32, torch.bfloat16, 256 * 197, 384, 8, "B"),
    "layer norm, base": (torch.float32, torch.bfloat16, 128 * 197, 768, 8, "B"),
    "layer norm, base of version A": (torch.float32, torch.bfloat16, 128 * 197, 768, 8, "A"),
    "layer norm, float64": (torch.float64, torch.float64, 197, 768, 8, "B"),
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
    from fastkron_py.rational import launches

    for name, width in (("KAT-T", 192), ("KAT-B", 768)):
        x, weight, bias = (torch.empty(s, dtype=torch.bfloat16) for s in ((2048, width), (4 * width, width), (4 * width,)))
        a, b = torch.empty(1, 6), torch.empty(8, 4)
        for keep in (False, True):
            current["problem"] = f"{name}, {'kept' if keep else 'not kept'}"
            tensors = (x, weight, bias, a, b)
            launches.linear_rational(tensors, ("B",), keep)(tensors)


def run(build: Callable[..., Any], tensors: Sequence[Any], options: tuple[Any, ...]) -> None:
    """Build and run a program."""
    build(tensors, options)(tensors)


def plain(current: dict[str, str]) -> None:
    """The function alone, and its gradients."""
    from fastkron_py.rational import program

    for current["problem"], (dtype, shape, groups, (m, n), version) in PROBLEMS.items():
        x, kind = torch.empty(shape, dtype=dtype), torch.float64 if dtype == torch.float64 else torch.float32
        a, b = torch.empty(groups, m + 1, dtype=kind), torch.empty(groups, n + (version == "C"), dtype=kind)
        run(program.forward, (x, a, b), (version, dtype, "triton"))
        run(program.gradients, (x, x, a, b), (True, True, True, version, dtype, "triton"))


def normalised(current: dict[str, str]) -> None:
    """Behind a layer normalisation."""
    from fastkron_py.rational import program

    for current["problem"], (dtype, of_y, rows, channels, groups, version) in NORMALISED.items():
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        a, b, weight = torch.empty(1, 6, dtype=kind), torch.empty(groups, 4, dtype=kind), torch.empty(channels, dtype=kind)
        x, dy = (torch.empty(rows, channels, dtype=of_tensor) for of_tensor in (dtype, of_y))
        mean, options = torch.empty(rows, dtype=kind), (1e-6, version, of_y, "triton")
        run(program.layer_norm_rational, (x, weight, weight, a, b), options)
        run(program.layer_norm_gradients, (dy, x, weight, weight, a, b, mean, mean), (*[True] * 5, *options))


def main() -> None:
    driver.set_active(H100())
    current = {"problem": ""}

    def describe(kernel: str, compiled: Any, options: dict[str, Any]) -> dict[str, Any]:
        cubin = compiled.asm["cubin"]
        return {**current, "num_warps": options["num_warps"], **resources(cubin), **loads_and_stores(cubin)}

    compile_only(describe)
    from fastkron_py.rational import launches
    from fastkron_py.runtime import backend
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.gpu import HOPPER

    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    launches.is_approximate = lambda dtype, device: dtype != torch.float64
    fused(current)
    plain(current)
    normalised(current)


if __name__ == "__main__":
    main()
