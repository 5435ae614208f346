"""Groups of rows times a Hadamard matrix of order 256, rows rounded to int8: ConvRot, in front of a quantised layer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastkron_py
from benchmarks.registry import Benchmark, Call, Case, Contender, register
from fastkron_py import Hadamard
from fastkron_py.kron.quantize import LARGEST, rounded

WIDTHS = (3840, 10240, 15360)
ROWS = (16384, 4096, 512)
ORDER = 256
CHECKED_ROWS = 64
H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))  # ConvRot's, of which a group's matrix is the fourth power


class Rotation(NamedTuple):
    """x ``[M, n]``, and orthogonal factors in bfloat16: Sylvester's matrix of 256 for each group, and ConvRot's."""

    x: Tensor
    sylvester: list[Any]
    fours: list[Any]


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> Rotation:
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(parameters["M"], parameters["n"], generator=generator, device=device).to(torch.bfloat16)
    h4 = torch.tensor(H4, device=device, dtype=torch.bfloat16) / 2
    groups = parameters["n"] // ORDER
    return Rotation(x, [groups, Hadamard(ORDER, ORDER**-0.5)], [groups, *[h4] * 4])


def _error(problem: Rotation, found: Any) -> float:
    """Relative Frobenius error of the first rows against a rotation in float64; the format's own error is most of it."""
    wanted = fastkron_py.kron_matmul(problem.x[:CHECKED_ROWS].double(), problem.sylvester)
    got = found if isinstance(found, Tensor) else _first_rows(found)
    return float(torch.linalg.norm(got - wanted) / torch.linalg.norm(wanted))


def _first_rows(found: Any) -> Tensor:
    """Values and scales as rows in float64."""
    values, scales = (t[:CHECKED_ROWS].double() for t in found)
    return values * scales.view(-1, 1)


def _in_sylvesters_matrix(found: Any) -> Tensor:
    """The first rows, rotated back by ConvRot's matrix, which is symmetric, and through Sylvester's; both keep norms of errors."""
    y = _first_rows(found)
    h4 = torch.tensor(H4, device=y.device, dtype=y.dtype) / 2
    groups = y.shape[1] // ORDER
    return fastkron_py.kron_matmul(fastkron_py.kron_matmul(y, [groups, *[h4] * 4]), [groups, Hadamard(ORDER, ORDER**-0.5)])


def _ours(name: str) -> Callable[[Rotation], Call]:
    def prepare(problem: Rotation) -> Call:
        factors = getattr(problem, name)
        return lambda: fastkron_py.kron_quantize(problem.x, factors, torch.int8)

    return prepare


def _by_torch(compiled: bool) -> Callable[[Rotation], Call]:
    """A product of the groups, the rows' largest values, and rounding."""

    def rotated(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        return rounded((x.view(-1, ORDER) @ matrix).view(x.shape).float(), 1 / LARGEST["int8"], "int8")

    def prepare(problem: Rotation) -> Call:
        matrix = problem.sylvester[1].matrix(problem.x)
        function = torch.compile(rotated) if compiled else rotated
        return lambda: function(problem.x, matrix)

    return prepare


def _no_kitchen(device: torch.device) -> str | None:
    return None if importlib.util.find_spec("comfy_kitchen") else "comfy-kitchen is not installed"


def _kitchen(problem: Rotation) -> Call:
    backend = importlib.import_module("comfy_kitchen.backends.cuda")
    return lambda: backend.quantize_int8_rowwise_convrot64(problem.x, ORDER)


def _case(rows: int, width: int) -> Case:
    return Case(
        label=f"{rows} x {width}",
        parameters={"M": rows, "n": width, "dtype": "bfloat16"},
        dtype="bfloat16",
        tolerance=0.02,
        floor_bytes=3 * rows * width + 4 * rows,
        quick=(rows, width) == (512, 3840),
    )


for name, is_eager in (("rotate", False), ("rotate_eager", True)):
    register(
        Benchmark(
            name=name,
            description=f"Groups of 256 times a Hadamard matrix, rows rounded to int8 (ConvRot), bfloat16{', eager' * is_eager}.",
            device="cuda",
            cases=[_case(rows, width) for width in WIDTHS for rows in ROWS],
            contenders=[
                Contender("fastkron_py", _ours("sylvester"), is_ours=True),
                Contender("fastkron_py, four 4 x 4 tensors", _ours("fours"), restore=_in_sylvesters_matrix, is_ours=True),
                Contender("comfy-kitchen", _kitchen, obstacle=_no_kitchen, restore=_in_sylvesters_matrix),
                Contender("torch", _by_torch(False)),
                Contender("torch.compile", _by_torch(True)),
            ],
            inputs=_inputs,
            check=_error,
            baseline="comfy-kitchen",
            has_floor=True,
            eager=is_eager,
        )
    )
