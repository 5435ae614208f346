"""The group-wise rational activation beside GELU and the algorithms of KAT and FlashKAT: `rational`, `rational_error`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.kron.problems import CHECKED_ELEMENTS
from benchmarks.registry import Benchmark, Call, Case, Contender, Recorded, register
from fastkron_py import reference

CHUNK_ELEMENTS = 1 << 22  # of x, whose gradients are taken in float64 at a time
SHAPE, GROUPS = (1024, 197, 768), 8  # the papers' setting
SMALL = (64, 197, 192)
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}
# Sums of terms of all sizes, added to one number in sequence.
ATOMIC_TOLERANCE = 4e-3
# Milliseconds of the released kernels in another run on an H100: (pass, dtype) to (FlashKAT, KAT).
RELEASED = {
    ("forward", "float32"): (0.74, 0.49),
    ("backward", "float32"): (2.05, 1218.0),
    ("forward", "bfloat16"): (0.73, 0.51),
    ("backward", "bfloat16"): (1.99, 794.0),
}


@dataclass(frozen=True)
class RationalProblem:
    """x and dy ``[..., C]``, a ``[G, 6]`` and b ``[G, 4]``: standard normal; version A, which the released kernels compute."""

    backward: bool
    x: Tensor
    a: Tensor
    b: Tensor
    dy: Tensor

    @property
    def step(self) -> int:
        """Every how many rows y and dx are checked."""
        return max(1, -(-self.x.numel() // CHECKED_ELEMENTS))

    def rows(self, t: Tensor) -> Tensor:
        """The checked rows."""
        return t.reshape(-1, t.shape[-1])[:: self.step]

    @cached_property
    def expected(self) -> list[Tensor]:
        """[y], or [dx, da, db], in float64; y and dx on the checked rows."""
        a, b = (c.detach().double().requires_grad_() for c in (self.a, self.b))
        if not self.backward:
            return [reference.rational(self.rows(self.x).double(), a, b, version="A").detach()]
        with torch.enable_grad():
            x = self.rows(self.x).detach().double().requires_grad_()
            y = reference.rational(x, a, b, version="A")
            (dx,) = torch.autograd.grad(y, x, self.rows(self.dy).double())
            da, db = torch.zeros_like(a), torch.zeros_like(b)
            size = max(1, CHUNK_ELEMENTS // self.x.shape[-1])
            flat = (t.reshape(-1, t.shape[-1]).split(size) for t in (self.x, self.dy))
            for rows, of_rows in zip(*flat, strict=True):
                y = reference.rational(rows.double(), a, b, version="A")
                ga, gb = torch.autograd.grad(y, (a, b), of_rows.double())
                da, db = da + ga, db + gb
        return [dx, da.detach(), db.detach()]

    @cached_property
    def expected_gelu(self) -> Tensor:
        """GELU's result or gradient on the checked rows, in float64."""
        x = self.rows(self.x).double()
        if self.backward:
            return torch.ops.aten.gelu_backward(self.rows(self.dy).double(), x)  # type: ignore[no-any-return]
        return torch.nn.functional.gelu(x)


@dataclass(frozen=True)
class OfGelu:
    """A result that is GELU's."""

    result: Tensor


def inputs(parameters: Mapping[str, Any], device: torch.device) -> RationalProblem:
    """Random, the same for all contenders; coefficients are float32."""
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = getattr(torch, parameters["dtype"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    groups = parameters["groups"]
    x, dy = (normal(*parameters["shape"]).to(dtype) for _ in range(2))
    return RationalProblem(parameters["which"] == "backward", x, normal(groups, 6), normal(groups, 4), dy)


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected))


def check(problem: RationalProblem, result: Any) -> float:
    """The largest relative (Frobenius) error of y, or of dx and of the coefficients' gradients."""
    if isinstance(result, OfGelu):
        return _relative(problem.rows(result.result), problem.expected_gelu)
    first, *rest = [result] if isinstance(result, Tensor) else list(result)
    return max(_relative(f, e) for f, e in zip([problem.rows(first), *rest], problem.expected, strict=True))


def check_coefficients(problem: RationalProblem, gradients: Sequence[Tensor]) -> float:
    """The larger mean absolute error of da and of db."""
    return max(float((g.double() - e).abs().mean()) for g, e in zip(gradients[1:], problem.expected[1:], strict=True))


# ---- contenders ------------------------------------------------------------------------------


def _ours(problem: RationalProblem) -> Call:
    x, a, b, dy = problem.x, problem.a, problem.b, problem.dy
    if problem.backward:
        return lambda: torch.ops.fastkron.rational_backward(dy, x, a, b, True, True, True, "A", dy.dtype, "")
    return lambda: fastkron_py.rational(x, a, b, version="A")


def _gelu(problem: RationalProblem) -> Call:
    x, dy = problem.x, problem.dy
    if problem.backward:
        return lambda: torch.ops.aten.gelu_backward(dy, x)
    return lambda: torch.nn.functional.gelu(x)


def _peer(name: str) -> Callable[[RationalProblem], Call]:
    def prepare(problem: RationalProblem) -> Call:
        from benchmarks.rational import peers

        x, a, b, dy = problem.x, problem.a, problem.b, problem.dy
        if problem.backward:
            backward = getattr(peers, f"{name}_backward")
            return lambda: backward(dy, x, a, b)
        forward = getattr(peers, f"{name}_forward")
        return lambda: forward(x, a, b)

    return prepare


def _obstacle(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "a Triton kernel, which needs a GPU"


OURS = Contender("fastkron_py", _ours, is_ours=True)
GELU = Contender("torch GELU", _gelu, restore=OfGelu)
FLASHKAT = Contender("FlashKAT's algorithm", _peer("flashkat"), obstacle=_obstacle, tolerance=ATOMIC_TOLERANCE)
KAT = Contender("KAT's algorithm", _peer("kat"), obstacle=_obstacle, tolerance=ATOMIC_TOLERANCE)


def case(which: str, dtype: str, shape: tuple[int, ...] = SHAPE, *, tolerance: float | None = None, quick: bool = False) -> Case:
    """A row: a pass over x of this shape."""
    passes = 3 if which == "backward" else 2
    recorded: list[Recorded] = []
    if shape == SHAPE:
        flashkat, kat = RELEASED[which, dtype]
        recorded = [Recorded("FlashKAT as released", "H100", flashkat / 1e3), Recorded("KAT as released", "H100", kat / 1e3)]
    return Case(
        label=f"{which} {dtype} " + "x".join(map(str, shape)),
        parameters={"which": which, "dtype": dtype, "shape": list(shape), "groups": GROUPS},
        dtype=dtype,
        tolerance=TOLERANCES[dtype] if tolerance is None else tolerance,
        floor_bytes=passes * math.prod(shape) * getattr(torch, dtype).itemsize,
        flops=math.prod(shape) * (44 if which == "backward" else 20),
        quick=quick,
        recorded=recorded,
    )


register(
    Benchmark(
        name="rational",
        description="The rational activation's forward and backward pass, 8 groups, degrees 5/4, version A, beside GELU, FlashKAT and KAT.",
        device="cuda",
        cases=[
            *[case(which, dtype) for dtype in ("float32", "bfloat16") for which in ("forward", "backward")],
            *[case(which, dtype, SMALL, quick=True) for dtype in ("float32", "bfloat16") for which in ("forward", "backward")],
        ],
        contenders=[OURS, GELU, FLASHKAT, KAT],
        inputs=inputs,
        check=check,
        baseline="torch GELU",
        has_floor=True,
        repeats=True,
        notes=(
            "The floor is the time to read x and write y, or to read x and dy and write dx, at 3.0 TB/s on an H100, elsewhere at the "
            "rate of a copy.",
            "FlashKAT's and KAT's algorithms are written afresh from the papers. The released kernels' figures are of another run on "
            "an H100, and are shown beside times of an H100 only.",
            "Errors are relative (Frobenius), the largest of those of y, or of dx and the coefficients' gradients.",
        ),
    )
)

register(
    Benchmark(
        name="rational_error",
        description="Mean absolute error of the coefficients' gradients in the papers' setting: 155 million standard normal numbers.",
        device="cuda",
        cases=[
            case("backward", "float32", tolerance=1.0),
            case("backward", "float32", SMALL, tolerance=1.0, quick=True),
        ],
        contenders=[OURS, FLASHKAT, KAT],
        inputs=inputs,
        check=check_coefficients,
        baseline="FlashKAT's algorithm",
        has_floor=True,
        repeats=True,
        notes=("Errors are the larger of the mean absolute errors of da and db, against float64.",),
    )
)
