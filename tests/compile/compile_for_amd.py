"""Compile kernels' first choices for one of AMD's GPUs, on a machine without one; a line of JSON for each kernel.

The argument: the architecture, such as gfx942.
Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import re
import sys

import torch
from compile_for_gpus import problems
from compile_for_h100 import H100, choose_algorithm, compile_only
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# Each kernel and dtype that the architecture takes, about once.
BFLOAT16 = (
    *("kron 16^4, bfloat16", "kron 128^2, bfloat16", "131^2, copied, bfloat16", "kan, large, bfloat16", "kan, small, bfloat16"),
    *("rational, bfloat16", "linear layer and rational, bfloat16", "gated, large, bfloat16"),
    *("lokr by index, bfloat16", "lokr by index, rank 32, bfloat16"),
    *("rotation 1024, int8", "rotation 4^5, MXFP4"),
    *("rotation 256, 8192 columns, SwiGLU, int8", "rotation 256, 8192 columns, RMSNorm, int8"),
)
OTHERS = (
    *("kron 8^5", "kron 16^4", "kron 128^2", "kron 32^3, float64", "kron 128^2, float64", "kron 32^2, complex64", "kron 2^9, complex128"),
    *("hadamard 2^12", "points", "points, 32 columns", "kan, large", "kan, large, TF32", "kan, small, float64", "rational", "gated, TF32"),
    *("lokr by index", "lokr by index, float64"),
)
PROBLEMS = {"gfx942": (*BFLOAT16, *OTHERS), "gfx1201": BFLOAT16}
LANES = {"gfx942": 64, "gfx1201": 32}


class Target(H100):
    """As much of a driver as compiling for this architecture asks for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.name, LANES[self.name])


def resources(assembly: str) -> dict[str, int]:
    """Registers and stack bytes of a thread; a stack is what was spilled."""
    fields = {"reg": "vgpr_count", "stack": "private_segment_fixed_size"}
    return {name: int(re.search(rf"\.{field}:\s+(\d+)", assembly).group(1)) for name, field in fields.items()}  # type: ignore[union-attr]


def main() -> None:
    name = sys.argv[1]
    driver.set_active(Target(name))
    torch.version.hip = "7.0"
    current = ""
    compile_only(lambda kernel, compiled, options: {"problem": current, **resources(compiled.asm["amdgcn"])})
    from fastkron_py.kron import quantize, rotate
    from fastkron_py.runtime import backend
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.gpu import AMD

    devices.gpu_of = lambda device: AMD  # type: ignore[assignment]
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    choose_algorithm("looped")  # torch's products need no compiler
    # Rotations are not offered there, since none was run.
    quantize.one_rotation = lambda x, factors, order, segment, kind, device: rotate.rotation(
        x.shape[1], order, [f.shape for f in factors], segment=segment
    )
    table = problems()
    for current in PROBLEMS[name]:
        table[current]()


if __name__ == "__main__":
    main()
