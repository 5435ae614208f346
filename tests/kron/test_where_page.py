"""docs/reference/where.md is what programs launch on GPUs that are not there: `python tests/kron/test_where_page.py` writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import pytest
import torch

from benchmarks.kron.programs import pretending
from fastkron_py.kron import hadamard, quantize
from fastkron_py.runtime.gpu import NAMED

PAGE: Final = Path(__file__).parents[2] / "docs/reference/where.md"
HEAD: Final = """# What runs where: rotations

What `kron_quantize` and `hadamard` launch for 4096 rows of 4096 columns, by GPU and dtype. This
page is made from the programs themselves. "one launch": the row is read once, and nothing but the
result is written. "n + m": n launches and m calls of torch. "torch": by its operations alone.

| GPU | architecture | tests |
| --- | --- | --- |
| H100, H200 | sm_90 | compiled and run |
| A100 | sm_80 | compiled, never run |
| RTX 3090 | sm_86 | compiled, never run |
| RTX 4090 | sm_89 | compiled, never run |
| B200 | sm_100 | compiled, never run |
| RTX 5090 | sm_120 | compiled, never run |
| MI300X | gfx942 | compiled, never run; rotating kernels compile there, but are not offered |
| CPU | | run, by torch |
"""
GPUS: Final = ("H100", "A100", "RTX 3090", "RTX 4090", "B200", "RTX 5090", "MI300X", "CPU")
FORMATS: Final = ("int8", "float8_e4m3fn", "float4_e2m1fn_x2", "int4")
WIDTH: Final = 4096
# name: (order of Sylvester's matrix, the factors, columns with a scale, the scale's format, prologue, formats)
ROTATIONS: Final[dict[str, tuple[int, list[int], int, str, str, tuple[str, ...]]]] = {
    "`[n, Hadamard(256)]`": (256, [], 0, "float32", "", FORMATS),
    "`[n, F, F, F, F]`, 4 x 4": (1, [4] * 4, 0, "float32", "", FORMATS[:1]),
    "`[n, Hadamard(128)]`, `group_size=128`": (128, [], 128, "float32", "", FORMATS[:2]),
    "`[n, Hadamard(128)]`, `group_size=32`, e8m0": (128, [], 32, "e8m0", "", FORMATS),
    "`[n, Hadamard(256)]`, SwiGLU": (256, [], 0, "float32", "swiglu", FORMATS[:2]),
    "`[n, Hadamard(256)]`, RMSNorm": (256, [], 0, "float32", "rms_norm", FORMATS[:2]),
    "`[A, B]`, 64 x 64": (1, [64, 64], 0, "float32", "", FORMATS),
}
DTYPES: Final = {"half precision": torch.bfloat16, "float32": torch.float32}
TRANSFORMS: Final = {"4096": (1, 12), "14336 = 28 * 2^9": (28, 9), "32768": (1, 15)}


def steps_of(gpu: str, dtype: torch.dtype, kind: str, case: tuple[int, list[int], int, str, str, tuple[str, ...]]) -> str:
    """The steps of a program on a GPU."""
    if gpu == "CPU":
        return "torch"
    order, sizes, size, scale_format, prologue, _ = case
    given = [torch.empty(4096, WIDTH * (2 if prologue == "swiglu" else 1), dtype=dtype), *[torch.empty(p, p, dtype=dtype) for p in sizes]]
    if prologue == "rms_norm":
        given.append(torch.empty(WIDTH, dtype=dtype))
    groups = WIDTH // (order * int(torch.tensor(sizes or [1]).prod()))
    options = 1.0, 1.0, groups, order, size, kind, scale_format, prologue, 1e-6, "highest", "triton"
    with pretending(NAMED[gpu]), patch.object(quantize, "is_interpreting", lambda: False):
        steps: list[Any] = quantize.program(given, options)._steps
    launches = sum([hasattr(step.run, "configs") for step in steps])
    if launches == len(steps) == 1:
        return "one launch"
    return f"{launches} + {len(steps) - launches}" if launches else "torch"


def transform_of(gpu: str, dtype: torch.dtype, order: tuple[int, int]) -> str:
    """How rows are transformed on a GPU."""
    if gpu == "CPU":
        return "torch"
    with pretending(NAMED[gpu]):
        return "one launch" if hadamard.has_launch(*order, dtype, torch.device("cpu")) else "`kron_matmul`"


def page() -> str:
    """The text of the page."""
    head = ["| factors | x | values | " + " | ".join(GPUS) + " |", "| --- " * (len(GPUS) + 3) + "|"]
    lines = [HEAD, "## `kron_quantize`", "", *head]
    for name, case in ROTATIONS.items():
        for x, dtype in DTYPES.items():
            for kind in case[5]:
                cells = [steps_of(gpu, dtype, kind, case) for gpu in GPUS]
                lines.append(f"| {name} | {x} | {kind} | " + " | ".join(cells) + " |")
    lines += ["", "## `hadamard`", "", "| n | x | " + " | ".join(GPUS) + " |", "| --- " * (len(GPUS) + 2) + "|"]
    for name, order in TRANSFORMS.items():
        for x, dtype in {**DTYPES, "float64": torch.float64}.items():
            lines.append(f"| {name} | {x} | " + " | ".join([transform_of(gpu, dtype, order) for gpu in GPUS]) + " |")
    return "\n".join(lines) + "\n"


@pytest.mark.full
def test_the_page_is_what_programs_launch() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
