"""Gated MLPs beside cuBLAS: the wide half of Llama's, forward, and forward with backward; the whole of them, forward with backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.conditions import kernels_need_cuda
from benchmarks.registry import Benchmark, Call, Case, Contender, register
from fastkron_py.functional import gated_mlp

LLAMAS = {"8B": (4096, 14336), "70B": (8192, 28672), "405B": (16384, 53248)}
TOKENS = (512, 4096, 16384)
CHECKED = 64  # rows, and columns, that are compared, spread over all
COMPILE_SECONDS = 90.0
# Ours rounds the result alone: 1.7e-3 in bfloat16. Products that are stored in between are rounded too.
TOLERANCES = {"bfloat16": 2.0e-3, "float16": 2.5e-4, "float32": 2e-6}
STORED_TOLERANCES = {"bfloat16": 6e-3, "float16": 8e-4}
GRADIENT_TOLERANCES = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 4e-6}
CPU_ROWS = ((16, 256, 512), (1024, 256, 512), (1, 1024, 4096), (128, 1024, 4096), (512, 768, 2048), (2048, 768, 3072))  # M, in, hidden


@dataclass(frozen=True)
class Problem:
    """x ``[M, K]`` ~ N(0, 1), weight ``[2, H, K]`` ~ U(-1/sqrt(K), 1/sqrt(K)), up then gate; of a whole MLP also down ``[K, H]``.

    dy is the gradient of the result, ``[M, H]`` or ``[M, K]``.
    """

    x: Tensor
    weight: Tensor
    dy: Tensor | None
    down: Tensor | None = None

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.weight.shape[1])

    @property
    def concatenated(self) -> Tensor:
        """``[2 H, K]``, up before gate: the same memory."""
        return self.weight.detach().flatten(0, 1)

    @cached_property
    def interleaved(self) -> Tensor:
        """``[2 H, K]``, rows of up and gate interleaved."""
        return self.weight.detach().transpose(0, 1).flatten(0, 1).contiguous()

    @property
    def rows(self) -> Tensor:
        """Rows that are compared."""
        return torch.arange(0, self.x.shape[0], max(1, self.x.shape[0] // CHECKED), device=self.x.device)

    @property
    def columns(self) -> Tensor:
        """Columns of the result that are compared."""
        return torch.arange(0, self.hidden, max(1, self.hidden // CHECKED), device=self.x.device)

    @cached_property
    def expected(self) -> Tensor:
        """Those rows and columns of the result, in float64."""
        up, gate = (self.weight.detach()[i][self.columns].double() for i in range(2))
        x = self.x.detach()[self.rows].double()
        return (x @ up.mT) * torch.nn.functional.silu(x @ gate.mT)

    def _gradient(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Of the gated result, in float64."""
        assert self.dy is not None
        if self.down is None:
            return self.dy[rows][:, columns].double()
        return self.dy[rows].double() @ self.down.detach()[:, columns].double()

    def _pairs(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of up and of gate, and the gated result."""
        x = self.x.detach()[rows].double()
        up, gate = (x @ self.weight.detach()[i][columns].double().mT for i in range(2))
        dy, s = self._gradient(rows, columns), torch.sigmoid(gate)
        return dy * gate * s, dy * up * s * (1 + gate * (1 - s)), up * gate * s

    @cached_property
    def expected_gradients(self) -> tuple[Tensor, ...]:
        """In float64: compared rows of dx; compared rows of both halves of dW ``[2, columns, K]``; compared columns of ddown."""
        x, weight, columns = self.x.detach(), self.weight.detach(), self.columns
        device = x.device
        dx = torch.zeros(len(self.rows), x.shape[1], dtype=torch.float64, device=device)
        for part in torch.arange(self.hidden, device=device).split(4096):  # not all of W in float64
            dup, dgate, _ = self._pairs(self.rows, part)
            dx += dup @ weight[0][part].double() + dgate @ weight[1][part].double()
        dw = torch.zeros(2, len(columns), x.shape[1], dtype=torch.float64, device=device)
        ddown = torch.zeros(x.shape[1], len(columns), dtype=torch.float64, device=device)
        for part in torch.arange(x.shape[0], device=device).split(4096):
            dup, dgate, y = self._pairs(part, columns)
            dw += torch.stack([dup.mT @ x[part].double(), dgate.mT @ x[part].double()])
            if self.down is not None and self.dy is not None:
                ddown += self.dy[part].double().mT @ y
        return (dx, dw) if self.down is None else (dx, dw, ddown)


def inputs(parameters: Mapping[str, Any], device: torch.device) -> Problem:
    """Random numbers, the same for all contenders."""
    m, k, h = (parameters[name] for name in ("M", "in", "hidden"))
    dtype = getattr(torch, parameters["dtype"])
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(m, k, generator=generator, device=device, dtype=dtype)
    weight = torch.empty(2, h, k, device=device, dtype=dtype).uniform_(-1 / math.sqrt(k), 1 / math.sqrt(k), generator=generator)
    needs, whole = bool(parameters["gradients"]), bool(parameters["whole"])
    dy = torch.randn(m, k if whole else h, generator=generator, device=device, dtype=dtype) if needs else None
    down = None
    if whole:
        down = torch.empty(k, h, device=device, dtype=dtype).uniform_(-1 / math.sqrt(h), 1 / math.sqrt(h), generator=generator)
        down.requires_grad_(needs)
    return Problem(x.requires_grad_(needs), weight.requires_grad_(needs), dy, down)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    return float((actual.detach().double() - expected).norm() / expected.norm())


def check(problem: Problem, y: Tensor) -> float:
    """Error of rows and columns spread over all of y; of pairs ``[M, 2 H]``, up before gate, that of their gated values."""
    y = y[problem.rows]
    if y.shape[1] == 2 * problem.hidden:
        up, gate = (t[:, problem.columns].double() for t in y.chunk(2, 1))
        return error(up * torch.nn.functional.silu(gate), problem.expected)
    return error(y[:, problem.columns], problem.expected)


def check_gradients(problem: Problem, gradients: Sequence[Tensor]) -> float:
    """The largest error of dx, dW ``[2, H, K]`` (or ``[2 H, K]``, up before gate) and ddown, on rows or columns spread over all of them."""
    dx, dw, *ddown = gradients
    found = [dx[problem.rows], dw.reshape(2, problem.hidden, -1)[:, problem.columns], *[d[:, problem.columns] for d in ddown]]
    return max([error(a, e) for a, e in zip(found, problem.expected_gradients, strict=True)])


# ---- contenders --------------------------------------------------------------------------------


def _interleaved(problem: Problem) -> Call:
    weight = problem.interleaved
    return lambda: fastkron_py.gated_linear(problem.x, weight)


def _stacked(problem: Problem) -> Call:
    return lambda: fastkron_py.gated_linear(problem.x, problem.weight, layout="stacked")


def _gemm(problem: Problem) -> Call:
    weight = problem.concatenated
    return lambda: problem.x @ weight.mT


def _with_kernel(problem: Problem) -> Call:
    from benchmarks.gated.swiglu_kernel import swiglu_in_place

    weight = problem.concatenated
    return lambda: swiglu_in_place(problem.x @ weight.mT)


def composed(x: Tensor, weight: Tensor, down: Tensor | None = None) -> Tensor:
    """Torch's own operations on ``[2 H, K]``, up before gate."""
    up, gate = torch.nn.functional.linear(x, weight).chunk(2, -1)
    y = torch.nn.functional.silu(gate) * up
    return y if down is None else torch.nn.functional.linear(y, down)


def _compiled(problem: Problem) -> Call:
    torch.compiler.reset()
    call = torch.compile(composed, dynamic=False)
    weight = problem.concatenated
    return lambda: call(problem.x, weight)


Forward = Callable[..., Tensor]
"""(x, weight, and down where there is one) to the result."""


def _gradients(forward: Forward, flat: bool) -> Callable[[Problem], Call]:
    def prepare(problem: Problem) -> Call:
        weight = problem.concatenated.requires_grad_() if flat else problem.weight
        given = [t for t in (problem.x, weight, problem.down) if t is not None]

        def call() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(forward(*given), given, problem.dy)

        return call

    return prepare


def _ours_with(backward: str) -> Forward:
    def forward(x: Tensor, weight: Tensor, down: Tensor | None = None) -> Tensor:
        if down is None:
            return fastkron_py.gated_linear(x, weight, layout="stacked", backward=backward)
        return gated_mlp(x, weight, down, layout="stacked", backward=backward)

    return forward


def _in_place(x: Tensor, weight: Tensor, down: Tensor | None = None) -> Tensor:
    from benchmarks.gated.swiglu_kernel import InPlaceSwiGLU

    y: Tensor = InPlaceSwiGLU.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if down is None else torch.nn.functional.linear(y, down)


def _compiled_gradients(problem: Problem) -> Call:
    torch.compiler.reset()
    return _gradients(torch.compile(composed, dynamic=False), True)(problem)


def contenders(dtype: str) -> list[Contender]:
    """Of the forward pass; those that store both projections err more."""
    stored = STORED_TOLERANCES[dtype]
    return [
        Contender("fastkron_py", _interleaved, is_ours=True),
        Contender("fastkron_py, stacked", _stacked, is_ours=True),
        Contender("cuBLAS alone", _gemm, tolerance=stored),
        Contender("cuBLAS + SwiGLU kernel", _with_kernel, obstacle=kernels_need_cuda, tolerance=stored),
        Contender("torch.compile", _compiled, tolerance=stored, seconds=COMPILE_SECONDS),
    ]


BACKWARD = (
    Contender("fastkron_py, save", _gradients(_ours_with("save"), False), is_ours=True),
    Contender("fastkron_py, recompute", _gradients(_ours_with("recompute"), False), is_ours=True),
    Contender("cuBLAS, in place", _gradients(_in_place, True), obstacle=kernels_need_cuda),
    Contender("torch", _gradients(composed, True)),
    Contender("torch.compile", _compiled_gradients, seconds=COMPILE_SECONDS),
)


def case(model: str, tokens: int, dtype: str, *, gradients: bool = False, whole: bool = False, quick: bool = False) -> Case:
    """A row: a model's MLP, or the wide half of it, at a number of tokens."""
    k, h = LLAMAS[model]
    label = f"{model} {tokens}" + (" float16" if dtype == "float16" else "")
    return sized(label, tokens, k, h, dtype, gradients=gradients, whole=whole, quick=quick)


def sized(
    label: str, tokens: int, k: int, h: int, dtype: str, *, gradients: bool = False, whole: bool = False, quick: bool = False
) -> Case:
    """A row of any size."""
    weights = 3 if whole else 2
    return Case(
        label=label,
        parameters={"M": tokens, "in": k, "hidden": h, "dtype": dtype, "gradients": gradients, "whole": whole},
        dtype=dtype,
        tolerance=(GRADIENT_TOLERANCES if gradients else TOLERANCES)[dtype],
        floor_bytes=(tokens * (k + (k if whole else h)) + weights * h * k) * getattr(torch, dtype).itemsize,
        flops=2 * tokens * weights * h * k * (3 if gradients else 1),
        quick=quick,
    )


for _dtype, _name in (("bfloat16", "gated"), ("float16", "gated_float16")):
    register(
        Benchmark(
            name=_name,
            description=f"up * silu(gate) of Llama's MLPs in {_dtype} on one GPU: time, and peak memory in multiples of the result.",
            device="cuda",
            cases=[case(m, t, _dtype, quick=(m, t) in (("8B", 512), ("8B", 4096))) for m in LLAMAS for t in TOKENS],
            contenders=contenders(_dtype),
            inputs=inputs,
            check=check,
            baseline="cuBLAS + SwiGLU kernel",
            repeats=True,
            unit_bytes=lambda problem: problem.x.shape[0] * problem.hidden * problem.x.element_size(),
            notes=(
                "cuBLAS alone stores both projections and gates nothing; its error is that of gating the pairs it stored.",
                "Peers' weights are concatenated, [2 * hidden, in]. Peak memory is the most that a call holds beyond x and the weight.",
            ),
        )
    )

register(
    Benchmark(
        name="gated_error",
        description="The source's numeric table: equal numbers of tokens, inputs and hidden units, bfloat16, against float64.",
        device="cuda",
        cases=[sized(f"{n}^3", n, n, n, "bfloat16", quick=n == 1024) for n in (1024, 2048, 4096, 8192, 16384)],
        contenders=[
            Contender("fastkron_py", _interleaved, is_ours=True),
            Contender("torch", lambda problem: partial(composed, problem.x, problem.concatenated), tolerance=STORED_TOLERANCES["bfloat16"]),
        ],
        inputs=inputs,
        check=check,
        baseline="torch",
        notes=("Inputs are N(0, 1) and weights U(-1/sqrt(n), 1/sqrt(n)); a result with up and gate swapped errs by more than 0.5.",),
    )
)

for _whole, _name, _what in (
    (False, "gated_backward", "The wide half of Llama's MLPs"),
    (True, "gated_mlp_backward", "Llama's MLPs, the down projection with them,"),
):
    register(
        Benchmark(
            name=_name,
            description=f"{_what} forward and backward on one GPU: time, and peak memory in multiples of one projection.",
            device="cuda",
            cases=[
                case(m, t, "bfloat16", gradients=True, whole=_whole, quick=(m, t) == ("8B", 4096))
                for m, t in (("8B", 4096), ("8B", 16384), ("70B", 4096), ("70B", 16384))
            ],
            contenders=BACKWARD,
            inputs=inputs,
            check=check_gradients,
            baseline="cuBLAS, in place",
            unit_bytes=lambda problem: problem.x.shape[0] * problem.hidden * problem.x.element_size(),
            notes=("Peak memory is the most that a call holds beyond its arguments and dy; gradients are among it.",),
        )
    )

for _is_backward in (False, True):
    register(
        Benchmark(
            name="gated_cpu" + ("_backward" if _is_backward else ""),
            description=f"up * silu(gate) in float32 on a CPU, forward{' and backward' if _is_backward else ''}: "
            "time, and peak memory in multiples of the result.",
            device="cpu",
            cases=[
                sized(f"{m}, {k} -> {h}", m, k, h, "float32", gradients=_is_backward, quick=(m, k) == (1024, 256)) for m, k, h in CPU_ROWS
            ],
            contenders=BACKWARD
            if _is_backward
            else [
                Contender("fastkron_py", _stacked, is_ours=True),
                Contender("torch", lambda problem: partial(composed, problem.x, problem.concatenated)),
                Contender("torch.compile", _compiled, seconds=COMPILE_SECONDS),
            ],
            inputs=inputs,
            check=check_gradients if _is_backward else check,
            baseline="torch",
            unit_bytes=lambda problem: problem.x.shape[0] * problem.hidden * problem.x.element_size(),
        )
    )
