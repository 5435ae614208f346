"""Polynomial KAN layers beside their peers: `poly_kan` and its kin on one GPU."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.kan.ablation import STEPS
from benchmarks.kan.peers import (
    BASIS_KERNEL,
    BASIS_KERNEL_BACKWARD,
    COMPILED,
    COMPILED_BACKWARD,
    OURS,
    OURS_BACKWARD,
    OURS_CPU,
    OURS_CPU_BACKWARD,
    OURS_TABLE,
    RECURRENCE,
    RECURRENCE_BACKWARD,
    TABLE,
    TRIGONOMETRIC,
    TRIGONOMETRIC_BACKWARD,
)
from benchmarks.kan.problems import case, check, check_gradients, inputs
from benchmarks.registry import Benchmark, register
from fastkron_py.kan.bases.registry import basis_names

SMALL = ((128, 40, 256, 8), (64, 256, 512, 15), (32, 512, 1024, 24))
LARGE = ((8192, 768, 768, 8), (65536, 256, 256, 8))
# Tiles that are partly full, and widths that no tensor descriptor takes.
MIDDLE = (
    *((100, 1000, 1000, 3), (1024, 784, 256, 4), (2048, 300, 700, 4), (4096, 200, 800, 5)),
    *((2048, 301, 701, 4), (4096, 201, 801, 5), (3000, 129, 1031, 3), (8192, 512, 512, 8)),
)
# A tiny layer, one of digits, MNIST's width, narrow layers of many rows, wide ones.
CPU = (
    *((32, 8, 8, 3), (64, 64, 64, 4), (256, 784, 256, 4), (1024, 784, 256, 4)),
    *((1024, 64, 64, 8), (8192, 32, 16, 8), (2048, 512, 512, 3), (4096, 200, 800, 5)),
)
HALF = ((16384, 1024, 1024, 8), (65536, 512, 512, 8))
ROWS = [(r, "float32") for r in SMALL + LARGE] + [(r, "tf32") for r in LARGE] + [(r, "bfloat16") for r in HALF]
WEIGHT_NOTE = "Peers start from coefficients laid out for one product with the stored basis, [(degree + 1) * in, out]."
TF32_NOTE = 'Rows named tf32 allow TF32 on all sides (torch\'s float32 matmul precision "high"); the others allow it nowhere.'
TABLE_NOTE = "Tables have 4096 entries; their error is in the error column, beside its bound in docs/how_it_works/kan.md."

register(
    Benchmark(
        name="poly_kan",
        description="A Chebyshev KAN layer forward on one GPU beside torch's forms and a basis kernel followed by cuBLAS.",
        device="cuda",
        cases=[case(row, kind, quick=row in (SMALL[0], LARGE[0])) for row, kind in ROWS],
        contenders=[OURS, OURS_TABLE, TRIGONOMETRIC, RECURRENCE, COMPILED, BASIS_KERNEL],
        inputs=inputs,
        check=check,
        baseline="torch.compile of the recurrence",
        has_floor=True,
        notes=(WEIGHT_NOTE, TF32_NOTE, TABLE_NOTE),
    )
)

register(
    Benchmark(
        name="poly_kan_backward",
        description="A Chebyshev KAN layer forward and backward on one GPU: time, and peak memory in multiples of x.",
        device="cuda",
        cases=[case(row, kind, gradients=True, quick=row in (SMALL[0], LARGE[0])) for row, kind in ROWS],
        contenders=[OURS_BACKWARD, TRIGONOMETRIC_BACKWARD, RECURRENCE_BACKWARD, COMPILED_BACKWARD, BASIS_KERNEL_BACKWARD],
        inputs=inputs,
        check=check_gradients,
        baseline="torch.compile of the recurrence",
        repeats=True,
        unit_bytes=lambda problem: problem.x.numel() * problem.x.element_size(),
        notes=(WEIGHT_NOTE, TF32_NOTE, "Peak memory is the most that a call holds beyond x, the coefficients and the incoming gradient."),
    )
)

register(
    Benchmark(
        name="poly_kan_small",
        description="Small KAN layers forward and backward on one GPU: an eager call, the host's share of it, and a CUDA graph's replay.",
        device="cuda",
        # All of them in a graph too, however many bytes they move.
        cases=[replace(case(row, "float32", gradients=True, quick=row == SMALL[0]), floor_bytes=0) for row in SMALL],
        contenders=[OURS_BACKWARD, TRIGONOMETRIC_BACKWARD, RECURRENCE_BACKWARD, COMPILED_BACKWARD],
        inputs=inputs,
        check=check_gradients,
        baseline="torch.compile of the recurrence",
        eager=True,
        notes=(WEIGHT_NOTE,),
    )
)

register(
    Benchmark(
        name="poly_kan_middle",
        description="KAN layers of middle and odd sizes forward and backward on one GPU.",
        device="cuda",
        cases=[case(row, "float32", gradients=True, quick=row == MIDDLE[0]) for row in MIDDLE],
        contenders=[OURS_BACKWARD, RECURRENCE_BACKWARD, COMPILED_BACKWARD],
        inputs=inputs,
        check=check_gradients,
        baseline="torch recurrence",
        repeats=True,
        notes=(WEIGHT_NOTE,),
    )
)

for _gradients in (False, True):
    register(
        Benchmark(
            name="poly_kan_cpu" + ("_backward" if _gradients else ""),
            description=f"A Chebyshev KAN layer in float32 on a CPU, forward{' and backward' if _gradients else ''}: "
            "time, and peak memory in multiples of x.",
            device="cpu",
            cases=[case(row, "float32", gradients=_gradients, quick=row == CPU[1]) for row in CPU],
            contenders=[OURS_CPU_BACKWARD, TRIGONOMETRIC_BACKWARD, RECURRENCE_BACKWARD, COMPILED_BACKWARD]
            if _gradients
            else [OURS_CPU, TRIGONOMETRIC, RECURRENCE, COMPILED],
            inputs=inputs,
            check=check_gradients if _gradients else check,
            baseline="torch recurrence",
            unit_bytes=lambda problem: problem.x.numel() * problem.x.element_size(),
            notes=(WEIGHT_NOTE,),
        )
    )

register(
    Benchmark(
        name="poly_kan_bases",
        description="Every basis forward and backward on one GPU, at one size.",
        device="cuda",
        cases=[case(LARGE[0], "tf32", gradients=True, basis=name, quick=name == "legendre") for name in basis_names()],
        contenders=[OURS_BACKWARD],
        inputs=inputs,
        check=check_gradients,
        baseline="fastkron_py",
    )
)

register(
    Benchmark(
        name="poly_kan_ablation",
        description="PolyKAN's steps one after the other, forward on one GPU: how values are made, and how their product is done.",
        device="cuda",
        cases=[case(row, "float32", quick=row == SMALL[1]) for row in (*SMALL, (8192, 256, 256, 8))],
        contenders=[OURS, TRIGONOMETRIC, RECURRENCE, TABLE, *STEPS, OURS_TABLE],
        inputs=inputs,
        check=check,
        baseline="torch acos/cos",
        notes=(
            "The steps are this project's kernel with the features of the paper's at that step: one tile of 16 rows a program and a table "
            "of 4096 entries, coefficients [in, out, degree + 1]; then tiles of 32 x 32 of batch and outputs; then the reduction split in "
            "two stages; then coefficients [d, o, j]; then the recurrence in place of the table. fastkron_py chooses all of that itself.",
            TABLE_NOTE,
        ),
    )
)
