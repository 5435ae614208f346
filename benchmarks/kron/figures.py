"""Rows of the Kron-Matmul benchmarks, with the figures of FastKron that another run took.

pyfastkron 1.1.0 refuses GPUs beyond compute capability 8.x. These are its sm_80 kernels with that gate lifted, with torch 2.11:
medians, in microseconds. On an H100 80GB, FastKron was tuned where that was faster. On an H200 it was not tuned. Unless a table's
name says H200, its figures are of the H100. A run shows those of its own GPU only, in a column of their own.
"""

from __future__ import annotations

from benchmarks.registry import Recorded

FASTKRON = "FastKron (recorded)"
FASTKRON_NOTE = (
    "FastKron (recorded): its sm_80 kernels with their gate lifted, on the GPU of this run (H100 80GB, tuned where that was "
    "faster; H200, not tuned). Taken in another run, so it enters no measured ratio."
)

# (M, P, N): microseconds of FastKron's right form and of its left form; None where it was not taken.
SQUARE: dict[tuple[int, int, int], tuple[float | None, float | None]] = {
    (1024, 8, 4): (57, 93),
    (1024, 8, 5): (276, 332),
    (1024, 8, 6): (2384, 2529),
    (1024, 16, 3): (31, 68),
    (1024, 16, 4): (515, 1005),
    (1024, 16, 5): (10694, None),
    (1024, 32, 2): (14, 17),
    (1024, 32, 3): (337, 375),
    (1024, 32, 4): (13356, None),
    (1024, 64, 2): (48, 1163),
    (1024, 64, 3): (3453, 123864),
    (1024, 128, 2): (288, 276),
    (256, 128, 3): (13149, 12179),
    (320, 128, 3): (16233, None),
    (16, 8, 8): (3393, 3342),
    (16, 16, 5): (204, 342),
    (16, 16, 6): (2952, None),
    (16, 32, 4): (301, 256),
    (16, 32, 5): (10538, None),
    (16, 64, 3): (69, None),
    (1, 64, 4): (314, 306),
    (256, 8, 7): (6394, None),
    (1024, 4, 7): (201, None),
    (1024, 4, 9): (4039, None),
    (1526, 4, 6): (80, None),
    (2967, 4, 7): (547, None),
    (4096, 4, 7): (756, None),
    (156, 8, 3): (111, None),
    (20, 8, 3): (158, None),
    (20, 2, 7): (162, None),
    (20, 2, 9): (152, None),
    (20, 2, 10): (48, None),
    (1, 2, 11): (173, None),
    (10, 64, 2): (94, None),
    (1, 8, 4): (70, None),
    (1, 32, 4): (113, None),
}

# Of the right form on an H200.
SQUARE_H200: dict[tuple[int, int, int], float] = {
    (1024, 8, 5): 285,
    (1024, 8, 6): 2389,
    (1024, 16, 4): 514,
    (1024, 16, 5): 10912,
    (1024, 32, 3): 400,
    (1024, 32, 4): 15980,
    (1024, 64, 2): 46,
    (1024, 64, 3): 3458,
    (1024, 128, 2): 288,
    (320, 128, 3): 16569,
    (256, 8, 7): 5762,
    (16, 8, 8): 3186,
    (16, 16, 6): 2980,
    (16, 32, 5): 9955,
    (1, 64, 4): 306,
}

SMALL = ((156, 8, 3), (20, 8, 3), (20, 2, 7), (20, 2, 9), (20, 2, 10), (1, 2, 11), (10, 64, 2), (1, 8, 4), (1, 32, 4))

# (M, P_i, Q_i): microseconds.
UNEQUAL: dict[tuple[int, tuple[int, ...], tuple[int, ...]], float] = {
    (1024, (2,) * 4, (32,) * 4): 3974,
    (256, (8,) * 5, (16,) * 5): 1393,
    (1024, (16,) * 4, (32,) * 4): 7265,
    (1024, (12,) * 4, (12,) * 4): 448,
    (1024, (31,) * 3, (31,) * 3): 905,
    (1024, (50, 50), (50, 50)): 127,
    (256, (52, 50, 65), (65, 20, 52)): 1973,
    (1024, (127, 127), (127, 127)): 1128,
    (20, (5, 7, 9, 11, 13), (13, 11, 9, 7, 5)): 83,
    (1024, (8, 16, 32), (8, 16, 32)): 55,
}

FLOAT64: dict[tuple[int, int, int], float] = {
    (1024, 8, 5): 735,
    (1024, 8, 6): 5667,
    (1024, 16, 3): 74,
    (1024, 16, 4): 921,
    (1024, 32, 2): 45,
    (1024, 32, 3): 1112,
    (1024, 64, 2): 101,
    (1024, 64, 3): 8574,
    (1024, 128, 2): 560,
    (256, 128, 3): 25857,
    (16, 8, 8): 7635,
    (16, 16, 5): 354,
    (16, 32, 4): 749,
    (1, 64, 4): 703,
}

HALF = ((1024, 8, 5), (1024, 8, 6), (1024, 16, 4), (1024, 32, 3), (1024, 64, 2), (1024, 64, 3), (1024, 128, 2))

# Forward and backward with all gradients: microseconds, and peak memory in multiples of x.
BACKWARD: dict[tuple[int, int, int], tuple[float, float]] = {
    (1024, 8, 5): (3964, 11.3),
    (1024, 16, 4): (4410, 9.0),
    (1024, 32, 3): (1994, 7.0),
    (1024, 64, 2): (762, 5.0),
    (256, 64, 3): (3419, 7.0),
    (1024, 128, 2): (992, 5.0),
    (16, 16, 5): (1863, 11.0),
}


def recorded(h100: float | None, peak_of_x: float | None = None, *, h200: float | None = None) -> list[Recorded]:
    """FastKron's figures for a case, in microseconds, on the GPUs that it was measured on. The peak is that of the H100."""
    figures = [] if h100 is None else [Recorded(FASTKRON, "H100", h100 / 1e6, peak_of_x)]
    return figures if h200 is None else [*figures, Recorded(FASTKRON, "H200", h200 / 1e6)]
