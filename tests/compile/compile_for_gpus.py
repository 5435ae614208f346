"""Compile each kernel's first choice for one architecture, on a machine without a GPU; a line of JSON for each kernel.

Arguments: the compute capability, such as 8.6; features of its record to leave out, such as has_wgmma, between commas; "all" for every
launch, or "kinds" for the largest one of each kind (`kind_of`) in the problems of the tests; and, if only some kernels are compiled, pairs
of a problem and a kernel as JSON.
Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from canonical_cases import backward, multiply
from compile_for_h100 import H100, choose_algorithm, resources, take_points
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

HALF, SINGLE, DOUBLE, COMPLEX, COMPLEX_DOUBLE = torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128

# name: (dtype, rows, width of the factors, how many, whether the gradients are compiled as well)
KRON: dict[str, tuple[torch.dtype, int, int, int, bool]] = {
    **{f"kron {p}^{n}": (SINGLE, 1024, p, n, p != 4) for p, n in ((4, 6), (8, 5), (16, 4), (32, 3), (64, 2), (128, 2))},
    **{f"kron {p}^{n}, bfloat16": (HALF, 1024, p, n, p in (16, 128)) for p, n in ((16, 4), (64, 2), (128, 2))},
    **{f"kron {p}^{n}, float64": (DOUBLE, 1024, p, n, p in (8, 32, 128)) for p, n in ((8, 4), (16, 3), (32, 3), (64, 2), (128, 2))},
    **{f"kron {p}^{n}, complex64": (COMPLEX, 1024, p, n, False) for p, n in ((2, 9), (4, 4), (32, 2))},
    "kron 2^9, complex128": (COMPLEX_DOUBLE, 1024, 2, 9, False),
}
# name: (dtype, shape of x, the points' dimension)
TAKEN: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {
    "points": (SINGLE, (8192,), -1),
    "points, 32 columns": (SINGLE, (8192, 32), -2),
}
# name: (rows, in, out, degree, dtype, precision)
KAN: dict[str, tuple[int, int, int, int, torch.dtype, str]] = {
    "kan, large": (8192, 768, 768, 8, SINGLE, "highest"),
    "kan, large, TF32": (8192, 768, 768, 8, SINGLE, "high"),
    "kan, large, bfloat16": (8192, 768, 768, 8, HALF, "highest"),
    "kan, large, float64": (2048, 512, 512, 8, DOUBLE, "highest"),
    "kan, small": (64, 256, 512, 15, SINGLE, "highest"),
    "kan, one step": (32, 512, 1024, 24, SINGLE, "highest"),
    "kan, middle": (1000, 1024, 1024, 3, SINGLE, "highest"),
    "kan, middle, bfloat16": (1000, 1024, 1024, 3, HALF, "highest"),
    "kan, small, bfloat16": (64, 256, 512, 15, HALF, "highest"),
    "kan, small, float64": (64, 256, 512, 8, DOUBLE, "highest"),
}
# name: (dtype, the order m, k)
HADAMARD: dict[str, tuple[torch.dtype, int, int]] = {
    "hadamard 2^12": (SINGLE, 1, 12),
    "hadamard 2^14, bfloat16": (HALF, 1, 14),
    "hadamard 2^6, float64": (DOUBLE, 1, 6),
    "hadamard 28 * 2^9": (SINGLE, 28, 9),
    "hadamard 12 * 2^8": (SINGLE, 12, 8),
}
# name: (dtype, the format, width, the order of Sylvester's matrix, the factors' width and how many, columns with a scale in e8m0, 0 for one
# of each row, prologue); the largest launches first
ROTATED: dict[str, tuple[torch.dtype, str, int, int, int, int, int, str]] = {
    "rotation 1024, int8": (HALF, "int8", 16384, 1024, 1, 0, 0, ""),
    "rotation 256, float8": (HALF, "float8_e4m3fn", 32768, 256, 1, 0, 0, ""),
    "rotation 4^5, int8": (HALF, "int8", 8192, 1, 4, 5, 0, ""),
    "rotation 256, SwiGLU, int8": (HALF, "int8", 32768, 256, 1, 0, 0, "swiglu"),
    "rotation 256, RMSNorm, int8": (HALF, "int8", 32768, 256, 1, 0, 0, "rms_norm"),
    "rotation 256, 8192 columns, SwiGLU, int8": (HALF, "int8", 8192, 256, 1, 0, 0, "swiglu"),
    "rotation 256, 8192 columns, RMSNorm, int8": (HALF, "int8", 8192, 256, 1, 0, 0, "rms_norm"),
    "rotation 4^5, MXFP4": (HALF, "float4_e2m1fn_x2", 8192, 1, 4, 5, 32, ""),
    "rotation 1024, MXFP8": (HALF, "float8_e4m3fn", 8192, 1024, 1, 0, 32, ""),
}
# name: (dtype, rows, width of both factors)
COPIED: dict[str, tuple[torch.dtype, int, int]] = {
    "131^2, copied, bfloat16": (HALF, 64, 131),
    "131^2, copied, float64": (DOUBLE, 64, 131),
}
# name: (dtype, channels)
RATIONAL: dict[str, tuple[torch.dtype, int]] = {
    "rational": (SINGLE, 768),
    "rational, bfloat16": (HALF, 768),
    "rational, float64": (DOUBLE, 192),
}
# name: (rows, hidden, in, dtype, precision)
GATED: dict[str, tuple[int, int, int, torch.dtype, str]] = {
    "gated, large, bfloat16": (4096, 14336, 4096, HALF, "highest"),
    "gated, one token, bfloat16": (1, 14336, 4096, HALF, "highest"),
    "gated, TF32": (4096, 4096, 1024, SINGLE, "high"),
    "gated, float32": (4096, 1024, 512, SINGLE, "highest"),
    "gated, odd, bfloat16": (1000, 500, 300, HALF, "highest"),
}
# name: (dtype, rank of w2, columns of w1)
INDEXED: dict[str, tuple[torch.dtype, int | None, int]] = {
    "lokr by index, bfloat16": (HALF, None, 8),
    "lokr by index, rank 32, bfloat16": (HALF, 32, 8),
    "lokr by index, wide w1, bfloat16": (HALF, None, 64),
    "lokr by index": (SINGLE, None, 8),
    "lokr by index, rank 32": (SINGLE, 32, 8),
    "lokr by index, float64": (DOUBLE, None, 8),
}
# Problems of the table alone: the tests compile their kernels for others, in the same dtypes. Wide rows behind a prologue take a compiler
# 20 s for each architecture, a quarter of the columns a quarter of that.
UNTESTED = {
    *("rotation 256, SwiGLU, int8", "rotation 256, RMSNorm, int8"),
    *("kron 4^6", "kron 64^2", "kron 64^2, bfloat16", "kron 4^4, complex64", "kron 32^3, float64", "kron 64^2, float64"),
    *("lokr by index, wide w1, bfloat16", "lokr by index, rank 32"),
    *("kan, one step", "kan, middle", "kan, small, bfloat16", "rational", "gated, one token, bfloat16"),
}
# Problems whose kernels the tests compile for sm_90 by the other scripts: here, only for other architectures.
COMPILED_FOR_H100 = {*KRON, *COPIED, *TAKEN, *KAN, *RATIONAL, *GATED, "linear layer and rational, bfloat16"} - {"kan, large, float64"}


def run_kron(dtype: torch.dtype, rows: int, width: int, count: int, with_backward: bool) -> None:
    size = width**count
    x, factors = torch.empty(1, rows, size, 1, dtype=dtype), [torch.empty(1, width, width, dtype=dtype)] * count
    multiply(x, factors)
    if with_backward:
        backward(x, x, factors)


def run_copied(dtype: torch.dtype, rows: int, width: int) -> None:
    choose_algorithm("copying")
    run_kron(dtype, rows, width, 2, True)
    choose_algorithm("looped")


def run_hadamard(dtype: torch.dtype, m: int, bits: int) -> None:
    from fastkron_py.kron.hadamard import has_launch, program
    from fastkron_py.kron.hadamard_orders import padded_matrix

    x, (matrix,) = torch.empty(1000, m << bits, dtype=dtype), padded_matrix(m)
    if not has_launch(m, bits, dtype, x.device):
        return
    given = [x] if matrix is None else [x, matrix]
    program((x, matrix), (1.0, m, bits, "triton"))(given, (1.0,))


def run_rotation(dtype: torch.dtype, kind: str, width: int, order: int, p: int, count: int, size: int, prologue: str) -> None:
    from fastkron_py.kron.quantize import one_rotation, program

    x, given = torch.empty(512, width * (2 if prologue == "swiglu" else 1), dtype=dtype), [torch.empty(p, p, dtype=dtype)] * count
    if one_rotation(x[:, :width], given, order, size, kind, x.device) is None:
        return
    if prologue == "rms_norm":
        given.append(torch.empty(width, dtype=dtype))
    groups, scale_format = width // (order * p**count), "e8m0" if size else "float32"
    options = (1.0, 1.0, groups, order, size, kind, scale_format, prologue, 1e-6, "highest", "triton")
    program((x, *given), options)((x, *given), (1.0,))


def run_kan(rows: int, num_in: int, num_out: int, degree: int, dtype: torch.dtype, precision: str) -> None:
    from fastkron_py.kan import launches
    from fastkron_py.kan.bases.registry import find_basis
    from fastkron_py.kan.layer_config import LayerConfig
    from fastkron_py.runtime.builder import Builder

    layer = LayerConfig("chebyshev", tuple(find_basis("chebyshev").parameters.values()), degree + 1, "tanh", 0)
    x, dy = torch.empty(rows, num_in, dtype=dtype), torch.empty(rows, num_out, dtype=dtype)
    coefficients = torch.empty(degree + 1, num_out, num_in, dtype=dtype)
    build = Builder((x, coefficients, None))
    build.program([launches.add_forward(build, tuple(build.inputs), layer, precision)])((x, coefficients))
    build = Builder((dy, x, coefficients))
    found = launches.add_gradients(build, tuple(build.inputs), (True, True, False), layer, precision)
    build.program(found)((dy, x, coefficients))


def run_rational(dtype: torch.dtype, channels: int) -> None:
    from fastkron_py.rational import program

    x, kind = torch.empty(64, 197, channels, dtype=dtype), DOUBLE if dtype == DOUBLE else SINGLE
    a, b, weight = torch.empty(8, 6, dtype=kind), torch.empty(8, 4, dtype=kind), torch.empty(channels, dtype=kind)
    mean, options = torch.empty(64 * 197, dtype=kind), ("B", dtype, "triton")
    launch(program.forward, (x, a, b), options)
    launch(program.gradients, (x, x, a, b), (True, True, True, *options))
    launch(program.layer_norm_rational, (x, weight, weight, a, b), (1e-6, *options))
    launch(program.layer_norm_gradients, (x, x, weight, weight, a, b, mean, mean), (*[True] * 5, 1e-6, *options))


def launch(build: Callable[..., Any], tensors: Sequence[Any], options: tuple[Any, ...]) -> None:
    """Build and run a program."""
    build(tensors, options)(tensors)


def run_linear_rational() -> None:
    from fastkron_py.rational import launches

    x, weight, bias = (torch.empty(s, dtype=HALF) for s in ((2048, 768), (3072, 768), (3072,)))
    tensors = (x, weight, bias, torch.empty(1, 6), torch.empty(8, 4))
    launches.linear_rational(tensors, ("B",), True)(tensors)


def run_gated(rows: int, hidden: int, depth: int, dtype: torch.dtype, precision: str) -> None:
    from fastkron_py.gated import launches
    from fastkron_py.runtime.builder import Builder

    x, dy, weight = (torch.empty(s, dtype=dtype) for s in ((rows, depth), (rows, hidden), (2 * hidden, depth)))
    gated = launches.Options("silu", "interleaved", precision, "triton")
    build = Builder((x, weight, None, None))
    launches.add_forward(build, tuple(build.inputs), gated)
    build.program([])([x, weight])
    build = Builder((dy, x, weight, None, None))
    launches.add_recomputed_gradients(build, build.inputs[0], tuple(build.inputs[1:]), gated, again=True)
    build.program([])([dy, x, weight])
    build = Builder((dy, torch.empty(rows, 2 * hidden, dtype=dtype)))
    launches.add_stored_gradients(build, *build.inputs, options=gated, in_place=True)
    build.program([])([dy, torch.empty(rows, 2 * hidden, dtype=dtype)])


def run_indexed(dtype: torch.dtype, rank: int | None, in1: int) -> None:
    from fastkron_py.adapters.batched import program

    inner = 4096 // in1
    x, w1, index = torch.empty(512, 4096, dtype=dtype), torch.empty(7, in1, in1, dtype=dtype), torch.empty(512, dtype=torch.int64)
    pair = torch.empty(7, inner, rank or inner, dtype=dtype), None if rank is None else torch.empty(7, rank, inner, dtype=dtype)
    tensors = (x, w1, None, *pair, x, index)
    program(tensors, (1.0, None, "triton"))([t for t in tensors if t is not None], (1.0,))


def problems() -> dict[str, Callable[[], None]]:
    """What is launched, by name."""
    table: list[tuple[Callable[..., None], dict[str, Any]]] = [
        (run_kron, KRON),
        (run_copied, COPIED),
        (run_hadamard, HADAMARD),
        (run_rotation, ROTATED),
        (take_points, TAKEN),
        (run_kan, KAN),
        (run_rational, RATIONAL),
        (run_linear_rational, {"linear layer and rational, bfloat16": ()}),
        (run_gated, GATED),
        (run_indexed, INDEXED),
    ]
    return {name: lambda run=run, given=given: run(*given) for run, cases in table for name, given in cases.items()}


class Target(H100):
    """As much of a driver as compiling for this architecture asks for."""

    def __init__(self, major: int, minor: int) -> None:
        self.arch = 10 * major + minor

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def kind_of(kernel: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What a launch computes, whatever its tiles and strides are: the kernel, dtypes, device functions, and which parts it has."""

    def part(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple([part(name, v) for v in value])
        if isinstance(value, int) and not name.startswith("HAS_"):
            return None
        return getattr(value, "dtype", None) or getattr(value, "__name__", None) or repr(value)

    return kernel.__name__, *[part(name, value) for name, value in arguments.items() if not name.startswith(("SHAPES", "EVEN", "TILE"))]


def size_of(arguments: dict[str, Any]) -> int:
    """A number that grows with the shared memory and the registers of a launch."""

    def flat(value: Any) -> Iterator[int]:
        for v in value if isinstance(value, tuple) else (value,):
            yield from flat(v) if isinstance(v, tuple) else [v] if isinstance(v, int) else []

    tiles = [max(1, size) for name, value in arguments.items() if name.startswith(("BLOCK", "TILE")) for size in flat(value)]
    return math.prod(tiles) * arguments.get("num_stages", 1)


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    driver.set_active(Target(major, minor))
    launch = jit.JITFunction.run
    features = sys.argv[2].split(",") if sys.argv[2] else []
    wanted = {(problem, kernel) for problem, kernel in json.loads(sys.argv[4])} if sys.argv[4:] else None
    current = ""
    largest: dict[tuple[Any, ...], tuple[int, Callable[[], None]]] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        problem = current
        if warmup or (wanted is not None and (problem, self.__name__) not in wanted):  # ahead of a first run, which comes next
            return

        def compile_it() -> None:
            compiled = launch(self, *args, grid=grid, warmup=True, **options)
            line = {"problem": problem, "kernel": self.__name__, "shared": compiled.metadata.shared}
            print(json.dumps({**line, **resources(compiled.asm["cubin"])}), flush=True)

        if sys.argv[3] == "kinds":
            arguments = {**dict(zip(self.arg_names, args, strict=False)), **options}
            kind, size = kind_of(self, arguments), size_of(arguments)
            if size > largest.get(kind, (0, compile_it))[0]:
                largest[kind] = size, compile_it
        else:
            compile_it()

    jit.JITFunction.run = compile_only
    from fastkron_py.runtime import backend
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.gpu import nvidia

    gpu = replace(nvidia(major, minor), **dict.fromkeys(features, False))
    devices.gpu_of = lambda device: gpu  # type: ignore[assignment]
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    choose_algorithm("looped")  # torch's products need no compiler
    left_out = UNTESTED | (COMPILED_FOR_H100 if sys.argv[1:3] == ["9.0", ""] else set()) if sys.argv[3] == "kinds" else set()
    for name, run in problems().items():
        current = name
        if name not in left_out:
            run()
    for _, compile_it in largest.values():
        compile_it()


if __name__ == "__main__":
    main()
