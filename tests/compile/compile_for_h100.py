"""Compile what the launchers would launch on an H100, on a machine that has none; a line of JSON for each kernel.

The interpreter accepts much that the compiler refuses, and knows nothing of registers and shared memory.
The argument: what is compiled of a problem beside its product, by the problem's name, as JSON.
Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from canonical_cases import backward, multiply
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from fastkron_py.kron.families import torch_products

# name: (dtype, B, L, [(P, Q), ...], R)
PROBLEMS: dict[str, tuple[torch.dtype, int, int, list[tuple[int, int]], int]] = {
    "16^4": (torch.float32, 1, 1024, [(16, 16)] * 4, 1),
    "32^4": (torch.float32, 1, 16, [(32, 32)] * 4, 1),
    "64^3": (torch.float32, 1, 256, [(64, 64)] * 3, 1),
    "128^2": (torch.float32, 1, 1024, [(128, 128)] * 2, 1),
    "256^2": (torch.float32, 1, 1024, [(256, 256)] * 2, 1),
    "300, 451": (torch.float32, 1, 3, [(300, 300), (451, 451)], 1),
    "bfloat16 131, 7": (torch.bfloat16, 1, 20, [(131, 131), (7, 7)], 1),
    "4, 300": (torch.float32, 1, 1024, [(4, 4), (300, 300)], 1),
    "8^5": (torch.float32, 1, 1024, [(8, 8)] * 5, 1),
    "2^10, one launch": (torch.float32, 1, 20, [(2, 2)] * 10, 1),
    "odd": (torch.float32, 1, 20, [(5, 13), (7, 11), (9, 9), (11, 7), (13, 5)], 1),
    "left": (torch.float32, 1, 1, [(16, 16)] * 3, 128),
    "16^3, whole rows": (torch.float32, 1, 1024, [(16, 16)] * 3, 1),
    "4^7, whole rows": (torch.float32, 1, 1024, [(4, 4)] * 7, 1),
    "16^5": (torch.float32, 1, 16, [(16, 16)] * 5, 1),
    "8^7": (torch.float32, 1, 16, [(8, 8)] * 7, 1),
    "batched": (torch.float32, 5, 7, [(16, 12), (12, 16)], 1),
    "left, batched": (torch.float32, 5, 7, [(64, 64)], 64),
    "float64 32^3": (torch.float64, 1, 64, [(32, 32)] * 3, 1),
    "float64 8^4": (torch.float64, 1, 1024, [(8, 8)] * 4, 1),
    "float64 128^2": (torch.float64, 1, 64, [(128, 128)] * 2, 1),
    "bfloat16 16^4": (torch.bfloat16, 1, 1024, [(16, 16)] * 4, 1),
    "bfloat16 32^3": (torch.bfloat16, 1, 1024, [(32, 32)] * 3, 1),
    "float16 32, 16, 16 to 16, 32, 16": (torch.float16, 2, 1024, [(32, 16), (16, 32), (16, 16)], 1),
    "bfloat16 16, 16, 16 to 32, 32, 32": (torch.bfloat16, 1, 1024, [(16, 32)] * 3, 1),
    "bfloat16 128^2": (torch.bfloat16, 1, 1024, [(128, 128)] * 2, 1),
    "float16 16^4": (torch.float16, 1, 1024, [(16, 16)] * 4, 1),
    "float16 64^2": (torch.float16, 1, 1024, [(64, 64)] * 2, 1),
    "bfloat16 86, 128": (torch.bfloat16, 1, 1024, [(86, 86), (128, 128)], 1),
    "float16 51, last tile cut": (torch.float16, 1, 3, [(51, 51)], 9824),
    "bfloat16 256, 36": (torch.bfloat16, 1, 1024, [(256, 256), (36, 36)], 1),
    "bfloat16 172, 64": (torch.bfloat16, 1, 1024, [(172, 172), (64, 64)], 1),
    "float16 172, 60": (torch.float16, 1, 1024, [(172, 172), (60, 60)], 1),
    "bfloat16 128, 2, 128": (torch.bfloat16, 1, 1024, [(128, 128), (2, 2), (128, 128)], 1),
    "float16 128, 4, 64": (torch.float16, 1, 1024, [(128, 128), (4, 4), (64, 64)], 1),
    "bfloat16 64, 4, 64": (torch.bfloat16, 1, 1024, [(64, 64), (4, 4), (64, 64)], 1),
    "float16 100, 2, 100": (torch.float16, 1, 1024, [(100, 100), (2, 2), (100, 100)], 1),
    "bfloat16 64, 8, 64": (torch.bfloat16, 1, 1024, [(64, 64), (8, 8), (64, 64)], 1),
    "bfloat16 32, 8, 64": (torch.bfloat16, 1, 1024, [(32, 32), (8, 8), (64, 64)], 1),
    "bfloat16 64, 32, 32": (torch.bfloat16, 1, 1024, [(64, 64), (32, 32), (32, 32)], 1),
    "bfloat16 32, 64": (torch.bfloat16, 1, 1024, [(32, 32), (64, 64)], 1),
    "float16 100, 12": (torch.float16, 1, 1024, [(100, 100), (12, 12)], 1),
    "bfloat16 70 to 140, 100": (torch.bfloat16, 1, 1024, [(70, 140), (100, 100)], 1),
    "complex64 2^18": (torch.complex64, 1, 1, [(2, 2)] * 18, 1),
    "complex64 4^3, left": (torch.complex64, 1, 1, [(4, 4)] * 3, 4096),
    "complex64 2, left": (torch.complex64, 1, 64, [(2, 2)], 4096),
    "complex64 32^2": (torch.complex64, 1, 1024, [(32, 32)] * 2, 1),
    "complex64 64^2": (torch.complex64, 1, 64, [(64, 64)] * 2, 1),
    "complex128 2^18": (torch.complex128, 1, 1, [(2, 2)] * 18, 1),
    "complex128 4^3, left": (torch.complex128, 1, 1, [(4, 4)] * 3, 4096),
}
# Also compiled backward, where the argument says nothing of them: every width of a fused kernel, and some too wide for it.
COMPLEX = ("complex64 2^18", "complex64 4^3, left", "complex64 32^2", "complex64 64^2", "complex128 2^18")
BACKWARD = ("16^4", "32^4", "64^3", "128^2", "256^2", "300, 451", "4, 300", "8^5", "float64 32^3", *COMPLEX)
# How modes of wide factors are multiplied; of the others, by torch's products, which need no compiler.
ALGORITHMS = {
    "256^2": "wgmma",
    "300, 451": "looped",
    "bfloat16 131, 7": "copying",
    "complex64 64^2": "looped",
    "float16 51, last tile cut": "looped",
}
# name: (dtype, shape of x, the points' dimension), of 8192 points; 6553 are kept
POINTS: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {
    "points": (torch.float32, (8192,), -1),
    "points, rows of bfloat16": (torch.bfloat16, (33, 8192), -1),
    "points, columns": (torch.float32, (8192, 32), -2),
    "points, columns of complex64": (torch.complex64, (8192, 3), -2),
    "points of complex128": (torch.complex128, (8192,), -1),
}


TIMES = torch_products.multiply_times


class H100:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(describe: Callable[[str, Any, dict[str, Any]], dict[str, Any]]) -> None:
    """From now on a launch compiles its kernel, and prints a line of JSON for it.

    Args:
        describe: what is said of a kernel beside its name and shared memory, of its name, what was compiled and the launch's options.
    """
    launch = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if warmup:  # ahead of a first run, which comes next
            return
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        line = {"kernel": self.__name__, "shared": compiled.metadata.shared, **describe(self.__name__, compiled, options)}
        print(json.dumps(line), flush=True)

    jit.JITFunction.run = run


@cache
def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread; a stack is what was spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK")}  # type: ignore[union-attr]


@cache
def unguarded_stores(cubin: bytes) -> int:
    """Stores to shared memory that a warp could reach while another warp's product still reads there.

    A wait for products (WARPGROUP.DEPBAR) is a warp's own; only a barrier after it waits for the others'.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
    found, waited = 0, False
    for operation in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", text):
        if operation.startswith("WARPGROUP.DEPBAR"):
            waited = True
        elif operation.startswith("BAR"):
            waited = False
        elif operation.startswith("STS"):
            found += waited
    return found


def choose_algorithm(algorithm: str) -> None:
    """Take this algorithm for gradients of wide factors, and, but for torch's product in place, the family that has it for products."""
    from fastkron_py.kron import forward, gradients, planner
    from fastkron_py.kron.families import fragments
    from fastkron_py.kron.plan.gradients import bids

    names = {"wgmma": ("wgmma",), "looped": ("tile", "narrow"), "copying": ("torch_products",)}.get(algorithm, ())
    forward.families_in_force = SimpleNamespace(get=lambda: names)  # type: ignore[assignment]
    is_torchs = algorithm in ("matmul", "copying")
    torch_products.multiply_times = lambda mode: {algorithm: TIMES(mode).get(algorithm, 1.0)} if is_torchs else TIMES(mode)  # type: ignore[assignment]
    planner.plan.cache_clear()  # it knows the choice of another algorithm
    prices = f"{'tile_factor' if algorithm == 'looped' else algorithm}_gradients"

    def forced(case: Any) -> Any:
        """The register-resident kernel where it is taken, which no algorithm replaces."""
        found = bids(case)
        is_own = found[0].family == fragments.name
        return found if is_own else [bid for bid in found if bid.prices == prices] or found

    gradients.bids = forced  # type: ignore[assignment]


def take_points(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    """Take points from x, and put them back."""
    from fastkron_py.kron.points import Points, gathered, scattered
    from fastkron_py.runtime.backend import backend

    points = Points.of((torch.arange(8192) % 5 < 4).nonzero().squeeze(1), 8192)
    with backend("triton"):
        scattered(gathered(torch.empty(shape, dtype=dtype), points, dim), points, dim)


def main() -> None:
    driver.set_active(H100())
    variants: dict[str, list[str]] = json.loads(sys.argv[1])
    problem = what = ""

    def describe(kernel: str, compiled: Any, options: dict[str, Any]) -> dict[str, Any]:
        cubin = compiled.asm["cubin"]
        unguarded = unguarded_stores(cubin) if "chained" in kernel else 0
        single = compiled.asm["ptx"].count("st.global.b16")
        return {"problem": problem, "what": what, **resources(cubin), "unguarded": unguarded, "single": single}

    compile_only(describe)
    from fastkron_py.kron import quantize
    from fastkron_py.kron.quantize import LARGEST
    from fastkron_py.runtime import backend
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.gpu import HOPPER

    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    for problem, (dtype, groups, rows, shapes, columns) in PROBLEMS.items():
        k, n = (math.prod(s[i] for s in shapes) for i in (0, 1))
        x = torch.empty(groups, rows, k, columns, dtype=dtype)
        y = torch.empty(groups, rows, n, columns, dtype=dtype)
        factors = [torch.empty(groups, p, q, dtype=dtype) for p, q in shapes]
        choose_algorithm(ALGORITHMS.get(problem, "matmul"))
        what = "multiply"
        multiply(x, factors)
        also = variants.get(problem, ["backward"] if problem in BACKWARD else [])
        if "with z" in also:
            what = "with z"
            multiply(x, factors, y, 0.5, 2.0)
        if "times z" in also:
            what = "times z"
            multiply(x, factors, torch.empty(n, 1, dtype=dtype).expand(y.shape), epilogue="times")
        if "in TF32" in also:
            what = "in TF32"
            multiply(x, factors, precision="high")
        for kind in [kind for kind in LARGEST if f"as {kind}" in also]:
            what = f"as {kind}"
            rows, matrices = x.reshape(-1, k), [f[0] for f in factors]
            quantize.program([rows, *matrices], (0.1, 1.0, 1, 1, 0, kind, "float32", "", 0.0, None, "triton"))([rows, *matrices], (0.1,))
        if "backward" in also:
            what = "backward"
            backward(y, x, factors)
    what = "points"
    for problem in POINTS:
        take_points(*POINTS[problem])


if __name__ == "__main__":
    main()
