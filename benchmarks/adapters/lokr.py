"""A linear layer with a LoKr adapter beside PEFT's formula, the layer alone, and LoRA: forward, and forward with backward."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fastkron_py
from benchmarks.registry import Benchmark, Call, Case, Contender, register

LORA_RANK = 32
SCALE = 0.5
ANY_RESULT = 10.0  # a tolerance for contenders that compute another layer
CHECKED = 64  # rows that are compared, spread over all
# The layer's product, the adapter's and, of peers, the built weight are each rounded.
TOLERANCES = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}
GRADIENT_TOLERANCES = {"bfloat16": 1.5e-2, "float16": 2e-3, "float32": 1e-4}


@dataclass(frozen=True)
class Problem:
    """x ``[M, in]``, a frozen weight ``[out, in]``, w1 ``[out1, in1]``, w2 ``[out2, in2]`` or its pair of low rank, and LoRA's pair.

    dy is the gradient of the result, ``[M, out]``, or None.
    """

    x: Tensor
    weight: Tensor
    w1: Tensor
    w2: tuple[Tensor, ...]
    lora: tuple[Tensor, Tensor]
    dy: Tensor | None

    @property
    def factor(self) -> Any:
        """W2, as `lokr_linear` takes it."""
        return self.w2[0] if len(self.w2) == 1 else self.w2

    @property
    def whole(self) -> Tensor:
        """W2 as a matrix."""
        return self.w2[0] if len(self.w2) == 1 else self.w2[0] @ self.w2[1]

    @property
    def trained(self) -> list[Tensor]:
        """The tensors whose gradients are taken."""
        return [self.x, self.w1, *self.w2]

    @property
    def rows(self) -> Tensor:
        """Rows that are compared."""
        return torch.arange(0, self.x.shape[0], max(1, self.x.shape[0] // CHECKED), device=self.x.device)

    @cached_property
    def total(self) -> Tensor:
        """The layer's weight with the adapter's, in float64."""
        w2 = [t.detach().double() for t in self.w2]
        whole = w2[0] if len(w2) == 1 else w2[0] @ w2[1]
        return self.weight.double() + SCALE * torch.kron(self.w1.detach().double(), whole)

    @cached_property
    def expected_gradients(self) -> tuple[Tensor, ...]:
        """In float64: compared rows of dx, dw1, and the gradients of w2 or of its pair."""
        assert self.dy is not None
        w1, *w2 = (t.detach().double() for t in (self.w1, *self.w2))
        whole = w2[0] if len(w2) == 1 else w2[0] @ w2[1]
        dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(whole)
        for x, dy in zip(self.x.detach().split(2048), self.dy.split(2048), strict=True):
            modes = x.double().unflatten(1, (w1.shape[1], -1))  # [M, in1, in2]
            gradient = dy.double().unflatten(1, (w1.shape[0], -1))  # [M, out1, out2]
            dw1 += SCALE * torch.einsum("mab,mib->ai", gradient, modes @ whole.mT)
            dw2 += SCALE * torch.einsum("mib,mij->bj", w1.mT @ gradient, modes)
        of_second = (dw2,) if len(w2) == 1 else (dw2 @ w2[1].mT, w2[0].mT @ dw2)
        return self.dy[self.rows].double() @ self.total, dw1, *of_second


def inputs(parameters: Mapping[str, Any], device: torch.device) -> Problem:
    """Random numbers, the same for all contenders."""
    m, k, n, f, rank = (parameters[name] for name in ("M", "in", "out", "factor", "rank"))
    needs = bool(parameters["gradients"])
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int, of: int = 1) -> Tensor:
        t = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) / math.sqrt(of)
        return t.to(getattr(torch, parameters["dtype"]))

    sizes = (n // f, k // f)
    w2 = (draw(*sizes, of=sizes[1]),) if rank is None else (draw(sizes[0], rank, of=rank), draw(rank, sizes[1], of=sizes[1]))
    trained = [draw(m, k), draw(f, f, of=f), *w2, draw(n, LORA_RANK, of=LORA_RANK), draw(LORA_RANK, k, of=k)]
    x, w1, *w2_, b, a = (t.requires_grad_(needs) for t in trained)
    return Problem(x, draw(n, k, of=k), w1, tuple(w2_), (b, a), draw(m, n) if needs else None)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    return float((actual.detach().double() - expected).norm() / expected.norm())


def check(problem: Problem, y: Tensor) -> float:
    """Error of rows spread over all of y."""
    return error(y[problem.rows], problem.x.detach()[problem.rows].double() @ problem.total.mT)


def check_gradients(problem: Problem, gradients: Sequence[Tensor]) -> float:
    """The largest error of compared rows of dx, and of the factors' gradients."""
    dx, *rest = gradients
    found = [dx[problem.rows], *rest]
    return max([error(a, e) for a, e in zip(found, problem.expected_gradients, strict=False)])


# ---- contenders --------------------------------------------------------------------------------


def ours(p: Problem) -> Tensor:
    """The layer, and `lokr_linear` on its result: without gradients in place, as `LoKrLinear` does it."""
    base = linear(p.x, p.weight)
    return fastkron_py.lokr_linear(p.x, p.w1, p.factor, base=base, out=None if p.x.requires_grad else base, scale=SCALE)


def by_peft(p: Problem) -> Tensor:
    """PEFT's formula: the weight is built, and x multiplied by it."""
    return linear(p.x, p.weight) + linear(p.x, torch.kron(p.w1, p.whole.contiguous()) * SCALE)


def alone(p: Problem) -> Tensor:
    """The layer without an adapter."""
    return linear(p.x, p.weight)


def with_lora(p: Problem) -> Tensor:
    """The layer with a LoRA adapter."""
    return linear(p.x, p.weight) + linear(linear(p.x, p.lora[1]), p.lora[0]) * SCALE


Forward = Callable[[Problem], Tensor]


def without_lycoris(device: torch.device) -> str | None:
    """Why LyCORIS's contenders cannot run: it may be there without toml, which it imports."""
    missing = [name for name in ("lycoris", "toml") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed (the extra lycoris)" if missing else None


def by_bypass(backend: str) -> Forward:
    """LyCORIS's module in bypass mode: the layer's result plus x times the factors."""

    def forward(p: Problem) -> Tensor:
        from lycoris.functional.lokr import kron_bypass

        w2 = (p.w2[0], None, None) if len(p.w2) == 1 else (None, *p.w2)
        return linear(p.x, p.weight) + kron_bypass(p.x, p.w1, None, None, *w2, scale=SCALE, backend=backend)

    return forward


def by_merge(backend: str) -> Forward:
    """LyCORIS's module as it is by default: the adapter's weight is built, and rounded as part of the layer's."""

    def forward(p: Problem) -> Tensor:
        from lycoris.functional.lokr import kron_weight

        w2 = (p.w2[0], None, None) if len(p.w2) == 1 else (None, *p.w2)
        change = (p.weight + kron_weight(p.w1, None, None, *w2, scale=SCALE, backend=backend)) - p.weight
        return linear(p.x, p.weight) + linear(p.x, change)

    return forward


def contender(
    gradients: bool, name: str, forward: Callable[[Any], Tensor], trained: Callable[[Any], Sequence[Tensor]], **options: Any
) -> Contender:
    """A contender that computes the result, or the gradients of the trained tensors; the runner records none by itself."""

    def prepare(problem: Any) -> Call:
        if not gradients:
            return lambda: forward(problem)

        def call() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(forward(problem), trained(problem), problem.dy)

        return call

    return Contender(name, prepare, **options)


def contenders(gradients: bool) -> list[Contender]:
    """All of them. The layer alone and LoRA compute something else: their errors are no errors."""

    def first(found: Any) -> Any:  # the other gradients are of other shapes
        return found[:1] if gradients else found

    lycoris: dict[str, Any] = {"obstacle": without_lycoris, "seconds": 300.0}
    return [
        contender(gradients, "fastkron_py", ours, lambda p: p.trained, is_ours=True),
        contender(gradients, "PEFT's formula", by_peft, lambda p: p.trained),
        *[contender(gradients, f"LyCORIS bypass, {b}", by_bypass(b), lambda p: p.trained, **lycoris) for b in ("triton", "torch")],
        *[contender(gradients, f"LyCORIS merge, {b}", by_merge(b), lambda p: p.trained, **lycoris) for b in ("triton", "torch")],
        contender(gradients, "layer alone", alone, lambda p: [p.x], tolerance=ANY_RESULT),
        contender(gradients, f"LoRA of rank {LORA_RANK}", with_lora, lambda p: [p.x, *p.lora], tolerance=ANY_RESULT, restore=first),
    ]


def case(tokens: int, sizes: tuple[int, int], factor: int, rank: int | None, dtype: str, gradients: bool, quick: bool = False) -> Case:
    """A row: tokens, input and output sizes, w1 of factor x factor, w2 whole or of low rank."""
    k, n = sizes
    middle = factor * (n // factor if rank is None else rank)
    adapter = middle * (k // factor) + middle * factor + (0 if rank is None else middle * (n // factor))
    label = f"{tokens}, {k} -> {n}, w1 {factor} x {factor}" + ("" if rank is None else f", rank {rank}")
    return Case(
        label=label,
        parameters={"M": tokens, "in": k, "out": n, "factor": factor, "rank": rank, "dtype": dtype, "gradients": gradients},
        dtype=dtype,
        tolerance=(GRADIENT_TOLERANCES if gradients else TOLERANCES)[dtype],
        floor_bytes=(tokens * (k + n) + k * n) * getattr(torch, dtype).itemsize,
        flops=2 * tokens * (k * n + adapter) * (2 if gradients else 1) + (2 * tokens * adapter if gradients else 0),
        quick=quick,
    )


# Layers of Llama, SDXL and FLUX: tokens, sizes, w1.
GPU_ROWS = [
    (4096, (4096, 4096), 8),
    (4096, (3072, 12288), 16),
    (512, (4096, 4096), 8),
    (16384, (1280, 1280), 8),
    (16384, (640, 640), 4),
    (4096, (2048, 2048), 8),
    (4096, (4096, 14336), 16),
    (4096, (14336, 4096), 16),
]
CPU_ROWS = [(512, (640, 640), 8), (512, (1280, 1280), 8), (512, (768, 3072), 16), (2048, (768, 768), 16), (32, (2048, 2048), 16)]

for _device, _dtype, _rows, _rank in (("cuda", "bfloat16", GPU_ROWS, 32), ("cpu", "float32", CPU_ROWS, 8)):
    for _gradients in (False, True):
        register(
            Benchmark(
                name="lokr" + ("_cpu" if _device == "cpu" else "") + ("_backward" if _gradients else ""),
                description=f"A linear layer with a LoKr adapter in {_dtype}, forward{' and backward' if _gradients else ''}: "
                "time, and peak memory in multiples of the result.",
                device=_device,
                cases=[
                    case(tokens, sizes, factor, rank, _dtype, _gradients, quick=i < 2)
                    for i, (tokens, sizes, factor) in enumerate(_rows)
                    for rank in (None, _rank)
                ],
                contenders=contenders(_gradients),
                inputs=inputs,
                check=check_gradients if _gradients else check,
                baseline="PEFT's formula",
                unit_bytes=lambda problem: problem.x.shape[0] * problem.weight.shape[0] * problem.x.element_size(),
                notes=(
                    "Times are of the layer and its adapter together. The layer alone and LoRA have another result: theirs is not checked.",
                    "Gradients are those of x and of the adapter; the layer's weight is frozen.",
                    "LyCORIS steps down from Triton to torch.compile where a factor is too large for its kernel, and on CPUs to torch.",
                ),
            )
        )
