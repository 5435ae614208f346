"""Many LoKr adapters on one linear layer, each row with its own: beside a loop over adapters, and the layer alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fastkron_py
from benchmarks.adapters.lokr import ANY_RESULT, GRADIENT_TOLERANCES, SCALE, TOLERANCES, contender, error
from benchmarks.registry import Benchmark, Case, Contender, register

TOKENS, SIZE, FACTOR = 4096, 4096, 8


@dataclass(frozen=True)
class Problem:
    """x ``[M, in]``, a frozen weight, w1 ``[A, out1, in1]``, w2 ``[A, out2, in2]`` or its pairs, each row's adapter, and dy or None."""

    x: Tensor
    weight: Tensor
    w1: Tensor
    w2: tuple[Tensor, ...]
    index: Tensor
    dy: Tensor | None

    def second(self, i: Any = slice(None)) -> Any:
        """W2 of an adapter, or of all, as `lokr_linear` takes it."""
        return self.w2[0][i] if len(self.w2) == 1 else tuple([t[i] for t in self.w2])


def inputs(parameters: Mapping[str, Any], device: torch.device) -> Problem:
    """Random numbers, the same for all contenders: tokens in random order, every 64th without an adapter."""
    adapters, rank, tokens, size = (parameters[name] for name in ("adapters", "rank", "tokens", "size"))
    needs, inner = bool(parameters["gradients"]), size // FACTOR
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int, of: int = 1) -> Tensor:
        t = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) / math.sqrt(of)
        return t.to(getattr(torch, parameters["dtype"]))

    whole = (draw(adapters, inner, inner, of=inner),)
    w2 = whole if rank is None else (draw(adapters, inner, rank, of=rank), draw(adapters, rank, inner, of=inner))
    index = torch.randint(adapters, (tokens,), generator=generator, device=device)
    index[::64] = -1
    x, w1, *w2_ = (t.requires_grad_(needs) for t in (draw(tokens, size), draw(adapters, FACTOR, FACTOR, of=FACTOR), *w2))
    return Problem(x, draw(size, size, of=size), w1, tuple(w2_), index, draw(tokens, size) if needs else None)


def by_index(p: Problem) -> Tensor:
    """One call for all adapters."""
    return fastkron_py.lokr_linear(p.x, p.w1, p.second(), base=linear(p.x, p.weight), index=p.index, scale=SCALE)


def by_loop(p: Problem) -> Tensor:
    """A call for each adapter on its rows, which the host asks for."""
    y = linear(p.x, p.weight)
    for i in range(len(p.w1)):
        rows = (p.index == i).nonzero().squeeze(1)
        y = y.index_add(0, rows, fastkron_py.lokr_linear(p.x[rows], p.w1[i], p.second(i), scale=SCALE))
    return y


def expected(p: Problem) -> tuple[Tensor, ...]:
    """The result, or the gradients, in float64."""
    x, w1, *w2 = (t.detach().double().requires_grad_(p.dy is not None) for t in (p.x, p.w1, *p.w2))
    with torch.enable_grad():
        y = linear(x, p.weight.double())
        for i in range(len(w1)):
            rows = (p.index == i).nonzero().squeeze(1)
            whole = w2[0][i] if len(w2) == 1 else w2[0][i] @ w2[1][i]
            y = y.index_add(0, rows, SCALE * linear(x[rows], torch.kron(w1[i], whole)))
        return (y,) if p.dy is None else torch.autograd.grad(y, [x, w1, *w2], p.dy.double())


def check(p: Problem, found: Any) -> float:
    """The largest error of the result, or of the gradients."""
    given = (found,) if p.dy is None else found
    return max([error(a, e) for a, e in zip(given, expected(p), strict=False)])


def contenders(gradients: bool) -> list[Contender]:
    """All of them. The layer alone computes something else."""
    return [
        contender(gradients, "fastkron_py", by_index, lambda p: [p.x, p.w1, *p.w2], is_ours=True),
        contender(gradients, "a loop over adapters", by_loop, lambda p: [p.x, p.w1, *p.w2]),
        contender(gradients, "layer alone", lambda p: linear(p.x, p.weight), lambda p: [p.x], tolerance=ANY_RESULT),
    ]


def case(adapters: int, rank: int | None, gradients: bool, tokens: int = TOKENS, size: int = SIZE, dtype: str = "bfloat16") -> Case:
    """A row: so many adapters, w2 whole or of low rank."""
    parameters = {"adapters": adapters, "rank": rank, "tokens": tokens, "size": size, "dtype": dtype, "gradients": gradients}
    inner = size // FACTOR
    per_token = FACTOR * inner * (inner if rank is None else 2 * rank) + FACTOR * FACTOR * inner
    return Case(
        label=f"{tokens} tokens, {adapters} adapters" + ("" if rank is None else f", rank {rank}"),
        parameters=parameters,
        dtype=dtype,
        tolerance=(GRADIENT_TOLERANCES if gradients else TOLERANCES)[dtype],
        floor_bytes=(2 * tokens * size + size * size) * getattr(torch, dtype).itemsize,
        flops=2 * tokens * (size * size + per_token) * (2 if gradients else 1) + (2 * tokens * per_token if gradients else 0),
        quick=adapters == 8,
    )


for _gradients in (False, True):
    register(
        Benchmark(
            name="lokr_batched" + ("_backward" if _gradients else ""),
            description=f"A linear layer with a LoKr adapter for each row, forward{' and backward' if _gradients else ''}: time.",
            device="cuda",
            cases=[case(adapters, rank, _gradients) for adapters in (1, 8, 64) for rank in (None, 32)],
            contenders=contenders(_gradients),
            inputs=inputs,
            check=check,
            baseline="a loop over adapters",
            notes=("Times are of the layer and its adapters together; a loop asks the host for each adapter's rows.",),
        )
    )
