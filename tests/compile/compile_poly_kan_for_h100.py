"""Compile the polynomial KAN launches for an H100 on a machine that has none; a line of JSON for each kernel.

Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compile_for_h100 import H100, compile_only, resources
from triton.backends.nvidia import compiler
from triton.runtime import driver

# name: (rows, in, out, degree, basis, dtype, precision, size of a table)
PROBLEMS: dict[str, tuple[int, int, int, int, str, torch.dtype, str, int]] = {
    "large": (8192, 768, 768, 8, "chebyshev", torch.float32, "highest", 0),
    "large TF32": (8192, 768, 768, 8, "chebyshev", torch.float32, "high", 0),
    "large bfloat16": (8192, 768, 768, 8, "chebyshev", torch.bfloat16, "highest", 0),
    "large float16, degree 15": (8192, 768, 768, 15, "chebyshev", torch.float16, "highest", 0),
    "large bspline": (8192, 768, 768, 8, "bspline", torch.float32, "high", 0),
    "large bfloat16 table": (8192, 768, 768, 8, "chebyshev", torch.bfloat16, "highest", 4096),
    "large fourier": (8192, 768, 768, 8, "fourier", torch.bfloat16, "highest", 0),
    "large in plain Triton": (8192, 768, 768, 8, "chebyshev", torch.float32, "highest", 0),
    "large TF32 in plain Triton": (8192, 768, 768, 8, "chebyshev", torch.float32, "high", 0),
    "large, of odd sizes": (5001, 601, 331, 7, "chebyshev", torch.float32, "highest", 0),
    "large, of odd sizes, in plain Triton": (5001, 601, 331, 7, "chebyshev", torch.float32, "highest", 0),
    "large, five degrees": (4096, 200, 800, 5, "chebyshev", torch.float32, "highest", 0),
    "large, two degrees": (4096, 256, 512, 2, "chebyshev", torch.float32, "highest", 0),
    "small": (64, 256, 512, 15, "chebyshev", torch.float32, "highest", 0),
    "small float16": (64, 256, 512, 15, "chebyshev", torch.float16, "highest", 0),
    "odd float64": (37, 13, 29, 3, "chebyshev", torch.float64, "highest", 0),
    "legendre": (64, 256, 512, 8, "legendre", torch.float32, "high", 0),
    "hermite": (64, 256, 512, 8, "hermite", torch.float32, "high", 0),
    "jacobi": (64, 256, 512, 8, "jacobi", torch.float32, "high", 0),
    "gegenbauer": (64, 256, 512, 8, "gegenbauer", torch.float32, "high", 0),
    "fourier": (64, 256, 512, 8, "fourier", torch.float32, "high", 0),
    "bspline": (64, 256, 512, 8, "bspline", torch.float32, "high", 0),
    "rbf float64": (64, 256, 512, 8, "rbf", torch.float64, "high", 0),
    "table": (64, 256, 512, 8, "chebyshev", torch.bfloat16, "high", 4096),
}


def is_serialised(ptx: str) -> bool:
    """Whether the assembler waits for each of a kernel's products."""
    tool = compiler.get_ptxas(90).path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [tool, "-arch=sm_90a", "-v", str(file), "-o", str(file.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return "serialized" in done.stderr


def copies_follow_stores(ptx: str) -> bool:
    """Whether a warpgroup's stores are fenced, and all its warps have come so far, before one has a tile copied."""
    stores = [ptx[: copy.start()].rpartition("st.shared")[2] for copy in re.finditer("cp.async.bulk.tensor", ptx)]
    return all(re.search(r"fence\.proxy\.async.*bar\.sync", between, re.DOTALL) for between in stores)


def main() -> None:
    driver.set_active(H100())
    current = ""

    def describe(kernel: str, compiled: Any, options: dict[str, Any]) -> dict[str, Any]:
        # Of the kernels that have to keep products in flight, and of plain ones, which do not.
        is_asked = "pipelined" in kernel or "gemm" in kernel or current == "large TF32 in plain Triton"
        ptx = compiled.asm["ptx"]
        return {
            "problem": current,
            "serialised": is_asked and is_serialised(ptx),
            "copies": ptx.count("cp.async.bulk.tensor"),
            "ordered": copies_follow_stores(ptx),
            "ordered without barriers": copies_follow_stores(ptx.replace("bar.sync", "")),
            **resources(compiled.asm["cubin"]),
        }

    compile_only(describe)
    from fastkron_py.kan import launches
    from fastkron_py.kan.bases.registry import find_basis
    from fastkron_py.kan.layer_config import LayerConfig
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.builder import Builder
    from fastkron_py.runtime.gpu import HOPPER

    for name, (rows, num_in, num_out, degree, basis, dtype, precision, table) in PROBLEMS.items():
        current = name
        gpu = replace(HOPPER, has_wgmma=not name.endswith("in plain Triton"))
        devices.gpu_of = lambda device, gpu=gpu: gpu  # type: ignore[assignment, misc]
        layer = LayerConfig(basis, tuple(find_basis(basis).parameters.values()), degree + 1, "tanh", table)
        x, dy = torch.empty(rows, num_in, dtype=dtype), torch.empty(rows, num_out, dtype=dtype)
        coefficients = torch.empty(degree + 1, num_out, num_in, dtype=dtype)
        build = Builder((x, coefficients, None))
        build.program([launches.add_forward(build, tuple(build.inputs), layer, precision)])((x, coefficients))
        build = Builder((dy, x, coefficients))
        found = launches.add_gradients(build, tuple(build.inputs), (True, True, False), layer, precision)
        build.program(found)((dy, x, coefficients))


if __name__ == "__main__":
    main()
