"""Kron-Matmul beside its peers: `kron` and its kin on one GPU, `kron_cpu`."""

from __future__ import annotations

from benchmarks.kron.figures import BACKWARD, FASTKRON_NOTE, FLOAT64, HALF, SMALL, SQUARE, SQUARE_H200, UNEQUAL, recorded
from benchmarks.kron.peers import (
    BACKWARD_TOLERANCE,
    COMPILED,
    COMPILED_BACKWARD,
    CUTENSOR,
    GPYTORCH,
    GPYTORCH_BACKWARD,
    LOOP,
    LOOP_BACKWARD,
    LOOP_TF32,
    OURS,
    OURS_BACKWARD,
    OURS_LEFT,
    OURS_TF32,
    PYFASTKRON,
)
from benchmarks.kron.problems import case, check, check_gradients, gradient_inputs, inputs
from benchmarks.registry import Benchmark, register

CPU_ROWS = ((1024, 8, 4), (256, 8, 5), (1024, 16, 3), (64, 16, 4), (128, 32, 3), (256, 64, 2), (8, 64, 3), (128, 128, 2))
QUICK = ((1024, 16, 3), (256, 64, 2), (1024, 8, 5), (20, 8, 3))
TF32_ROWS = tuple(row for row in SQUARE if row not in SMALL)
COLUMNS_NOTE = "GPyTorch and the left form start from x^T and end in y^T, the layout that GPyTorch works in."
FLOOR_NOTE = "The floor is one pass: the time to read x once and write y once, at 3.0 TB/s on an H100, elsewhere at the rate of a copy."

register(
    Benchmark(
        name="kron_cpu",
        description="Kron-Matmul on the CPU beside GPyTorch, a matmul-and-transpose loop and pyfastkron's x86 backend.",
        device="cpu",
        cases=[case(m, (p,) * n, quick=(m, p, n) in QUICK) for m, p, n in CPU_ROWS],
        contenders=[OURS, OURS_LEFT, GPYTORCH, LOOP, PYFASTKRON],
        inputs=inputs,
        check=check,
        baseline="GPyTorch",
        notes=(COLUMNS_NOTE,),
    )
)

register(
    Benchmark(
        name="kron",
        description="Kron-Matmul on one GPU, float32, square factors, beside every peer that runs there.",
        device="cuda",
        cases=[
            case(m, (p,) * n, quick=(m, p, n) in QUICK, recorded=recorded(right, h200=SQUARE_H200.get((m, p, n))))
            for (m, p, n), (right, _) in SQUARE.items()
        ],
        contenders=[OURS, GPYTORCH, LOOP, COMPILED, CUTENSOR, PYFASTKRON],
        inputs=inputs,
        check=check,
        baseline="GPyTorch",
        has_floor=True,
        notes=(FLOOR_NOTE, COLUMNS_NOTE, FASTKRON_NOTE),
    )
)

register(
    Benchmark(
        name="kron_unequal",
        description="Unequal, odd and rectangular factors on one GPU, float32.",
        device="cuda",
        cases=[case(m, ps, qs, quick=m == 20 or ps == (50, 50), recorded=recorded(time)) for (m, ps, qs), time in UNEQUAL.items()],
        contenders=[OURS, GPYTORCH, LOOP, CUTENSOR, PYFASTKRON],
        inputs=inputs,
        check=check,
        baseline="matmul + transpose",
        has_floor=True,
        notes=(FLOOR_NOTE, FASTKRON_NOTE),
    )
)

register(
    Benchmark(
        name="kron_float64",
        description="Kron-Matmul on one GPU, float64.",
        device="cuda",
        cases=[
            case(m, (p,) * n, dtype="float64", quick=(m, p, n) in QUICK, recorded=recorded(time)) for (m, p, n), time in FLOAT64.items()
        ],
        contenders=[OURS, GPYTORCH, LOOP, CUTENSOR, PYFASTKRON],
        inputs=inputs,
        check=check,
        baseline="GPyTorch",
        has_floor=True,
        notes=(FLOOR_NOTE, FASTKRON_NOTE),
    )
)

register(
    Benchmark(
        name="kron_half",
        description="Kron-Matmul on one GPU, bfloat16 and float16.",
        device="cuda",
        cases=[
            case(m, (p,) * n, dtype=dtype, quick=(m, p, n) == (1024, 64, 2), name_dtype=True)
            for dtype in ("bfloat16", "float16")
            for m, p, n in HALF
        ],
        contenders=[OURS, GPYTORCH, LOOP],
        inputs=inputs,
        check=check,
        baseline="matmul + transpose",
        has_floor=True,
        notes=(FLOOR_NOTE,),
    )
)

register(
    Benchmark(
        name="kron_tf32",
        description='Kron-Matmul on one GPU, float32 with precision="high" (TF32), beside the loop in TF32 and float32-class products.',
        device="cuda",
        cases=[case(m, (p,) * n, quick=(m, p, n) in QUICK) for m, p, n in TF32_ROWS],
        contenders=[OURS_TF32, OURS, LOOP_TF32, LOOP],
        inputs=inputs,
        check=check,
        baseline="matmul + transpose TF32",
        has_floor=True,
        notes=(FLOOR_NOTE,),
    )
)

register(
    Benchmark(
        name="kron_left",
        description="The left form beside the right form of the same product on one GPU, float32.",
        device="cuda",
        cases=[
            case(m, (p,) * n, quick=(m, p, n) in QUICK, recorded=recorded(left))
            for (m, p, n), (_, left) in SQUARE.items()
            if left is not None or (m, p, n) in QUICK
        ],
        contenders=[OURS_LEFT, OURS, GPYTORCH],
        inputs=inputs,
        check=check,
        baseline="fastkron_py",
        has_floor=True,
        notes=(FLOOR_NOTE, COLUMNS_NOTE, FASTKRON_NOTE + " Its left form here."),
    )
)

register(
    Benchmark(
        name="kron_backward",
        description="Forward and backward with all gradients on one GPU, float32: time, and peak memory in multiples of x.",
        device="cuda",
        cases=[
            case(m, (p,) * n, tolerance=BACKWARD_TOLERANCE, quick=(m, p, n) == (1024, 64, 2), recorded=recorded(time, peak))
            for (m, p, n), (time, peak) in BACKWARD.items()
        ],
        contenders=[OURS_BACKWARD, GPYTORCH_BACKWARD, LOOP_BACKWARD, COMPILED_BACKWARD],
        inputs=gradient_inputs,
        check=check_gradients,
        baseline="matmul + transpose",
        repeats=True,
        unit_bytes=lambda problem: problem.x.numel() * problem.x.element_size(),
        notes=(
            "Peak memory is the most that a call holds beyond x, the factors and the incoming gradient: "
            "dx and the factors' gradients are in it.",
            FASTKRON_NOTE + " Its memory may have been counted from another start.",
        ),
    )
)

register(
    Benchmark(
        name="kron_small",
        description="Small problems on one GPU: an eager call, the host's share of it, and a CUDA graph's replay.",
        device="cuda",
        cases=[case(m, (p,) * n, quick=m == 20, recorded=recorded(SQUARE[m, p, n][0])) for m, p, n in SMALL],
        contenders=[OURS, GPYTORCH, LOOP, COMPILED],
        inputs=inputs,
        check=check,
        baseline="GPyTorch",
        eager=True,
        notes=(
            "Times are of one of 20 calls in a row, up to the end of the last. "
            "host: until a call returns. graph: on the device, from a CUDA graph.",
            FASTKRON_NOTE,
        ),
    )
)
