"""Compile the launches of layer normalisation with a rational function for an H100, on a machine that has none.

Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from compile_for_h100 import H100, resources
from compile_rational_for_h100 import loads_and_stores
from triton.runtime import driver, jit

# name: (dtype of x, dtype of y, rows, channels, groups, version)
PROBLEMS: dict[str, tuple[torch.dtype, torch.dtype, int, int, int, str]] = {
    "tiny": (torch.float32, torch.bfloat16, 512 * 197, 192, 8, "B"),
    "small": (torch.float32, torch.bfloat16, 256 * 197, 384, 8, "B"),
    "base": (torch.float32, torch.bfloat16, 128 * 197, 768, 8, "B"),
    "base of version A": (torch.float32, torch.bfloat16, 128 * 197, 768, 8, "A"),
    "float64": (torch.float64, torch.float64, 197, 768, 8, "B"),
}


def main() -> None:
    driver.set_active(H100())
    launch = jit.JITFunction.run
    current = {"problem": ""}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        cubin = compiled.asm["cubin"]
        line = {**current, "kernel": self.__name__, "shared": compiled.metadata.shared, "num_warps": options["num_warps"]}
        print(json.dumps({**line, **resources(cubin), **loads_and_stores(cubin)}), flush=True)

    jit.JITFunction.run = compile_only
    from fastkron_py.rational import launches as triton_rational
    from fastkron_py.rational import layer_norm_launch as launcher
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.gpu import HOPPER

    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    triton_rational.is_approximate = lambda dtype, device: dtype != torch.float64
    for problem, (dtype, of_y, rows, channels, groups, version) in PROBLEMS.items():
        current["problem"] = problem
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        a, b = torch.empty(1, 6, dtype=kind), torch.empty(groups, 4, dtype=kind)
        weight = torch.empty(channels, dtype=kind)
        # Of few elements: nothing is read here, and a launch depends on the number of rows that it is told.
        x, y, mean = torch.empty(16, dtype=dtype), torch.empty(16, dtype=of_y), torch.empty(16, dtype=kind)
        function = triton_rational.coefficients(a, b, version, (kind,), x.device)
        made = launcher.Problem(rows, channels, function, 1e-6)
        launcher.forward_launcher(made)(x, weight, weight, a, b, y, mean, mean)
        backward = launcher.backward_launchers(made)
        backward.first(x, y, mean, mean, weight, weight, a, b, x, mean)
        sums = torch.empty(16, dtype=torch.float64)
        backward.columns(mean, weight, weight, sums)
        backward.second(sums, b, a, b)


if __name__ == "__main__":
    main()
