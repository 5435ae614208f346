"""Small problems of eager calls: random Kronecker products, chosen ones, and layers, each as a function of tensors beside torch's."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

import fastkron_py
from benchmarks.kron import drawn
from benchmarks.kron.peers import loop
from benchmarks.registry import Case, Draw
from benchmarks.timing import captured

Function = Callable[..., Tensor]

# Rows, widths of the factors, dtype, and whether gradients are taken: the worst ones of earlier eager runs, and the smallest product.
CHOSEN: Final = (
    (138, (74, 114), (219, 223), "float16", "forward"),
    (164, (255, 194), (1439, 6), "bfloat16", "forward"),
    (9, (519, 143), (24, 132), "float32", "forward"),
    (5993, (307,), (307,), "bfloat16", "forward"),
    (4, (37, 460, 256), (37, 4, 4), "float32", "forward"),
    (2842, (5, 33), (12, 33), "float32", "forward"),
    (10, (166, 3), (11, 528), "float32", "backward"),
    (64, (200, 30), (200, 30), "float32", "backward"),
    (256, (32, 32), (32, 32), "float32", "backward"),
    (16, (8, 8), (8, 8), "float32", "forward"),
    (16, (8, 8), (8, 8), "float32", "backward"),
)
LAYERS: Final = ("rational", "poly_kan", "gated_linear", "lokr", "lokr rank 32", "hadamard", "mode_matmul", "K @ v", "K.solve")
SMALL_BUT: Final = ("lokr", "lokr rank 32")  # layers of a large model; the others are small
TOLERANCES: Final = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3, "float64": 1e-12}
TOKENS: Final = 512
WIDTH: Final = 4096  # of the large layers


@dataclass(frozen=True)
class Problem:
    """The same function of some tensors by several contenders.

    Attributes:
        ours: by this library.
        torch: by torch: the loop, or a layer's formula.
        in_place: by matrix products of the modes where they stand; None for layers.
        given: the tensors.
        needs_gradients: whether the gradients of all tensors are taken as well.
    """

    ours: Function
    torch: Function
    in_place: Function | None
    given: tuple[Tensor, ...]
    needs_gradients: bool

    @cached_property
    def dy(self) -> Tensor:
        """The gradient of the result."""
        generator = torch.Generator(device=self.given[0].device).manual_seed(1)
        y = self.torch(*[t.detach() for t in self.given])
        drawn_dy = torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.float32)
        return (drawn.COTANGENT * drawn_dy).to(y.dtype)

    def call(self, function: Function) -> Callable[[], Any]:
        """The function's call on the tensors, with the gradients of all of them where they are taken."""
        given, needs_gradients = self.given, self.needs_gradients
        if not needs_gradients:
            return lambda: function(*given)
        dy = self.dy

        def gradients() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(function(*given), given, dy)

        return gradients

    @cached_property
    def expected(self) -> list[Tensor]:
        """The result, or all gradients, in float64."""
        given = tuple([t.detach().double().requires_grad_(self.needs_gradients) for t in self.given])
        with torch.set_grad_enabled(self.needs_gradients):
            y = self.torch(*given)
            return list(torch.autograd.grad(y, given, self.dy.double())) if self.needs_gradients else [y]

    @cached_property
    def launches(self) -> tuple[int, int] | None:
        """How many nodes the CUDA graphs of this library's forward and of its backward pass have; None if there can be no graphs."""
        if self.given[0].device.type != "cuda":
            return None
        try:
            with torch.set_grad_enabled(self.needs_gradients):
                forward = graph_nodes(lambda: self.ours(*self.given))
            return forward, graph_nodes(self.call(self.ours)) - forward if self.needs_gradients else 0
        except RuntimeError:  # as in `K.solve`: torch.linalg.solve waits for the device, which no capture permits
            return None


def graph_nodes(call: Callable[[], Any]) -> int:
    """The number of launches and copies of a call, as a CUDA graph holds them.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    graph, held = captured(call, keep_graph=True)
    count = ctypes.c_size_t()
    failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    del held
    if failed:
        raise RuntimeError(f"cuGraphGetNodes: expected 0; got {failed}")
    return count.value


# ---- rows --------------------------------------------------------------------------------------


def chosen_cases() -> list[Case]:
    """The chosen products and all layers, these forward, and with backward."""
    found = []
    for m, ps, qs, dtype, kind in CHOSEN:
        parameters = {"M": m, "P": list(ps), "Q": list(qs), "dtype": dtype, "kind": kind, "left": False}
        found.append(drawn.case_of(parameters, "chosen", quick=m == 16))
    for layer in LAYERS:
        for kind in drawn.PASSES:
            dtype = "bfloat16" if layer in SMALL_BUT else "float32"
            parameters = {"layer": layer, "dtype": dtype, "kind": kind}
            found.append(Case(f"layer: {layer} {dtype} {kind}", parameters, dtype, TOLERANCES[dtype], quick=layer == "mode_matmul"))
    return found


def cases(draw: Draw, device: torch.device) -> list[Case]:
    """The chosen rows, then those that `drawn` draws, of each seed.

    Raises:
        ValueError: as `drawn.cases`.
    """
    found = chosen_cases()
    for seed in range(draw.seed, draw.seed + draw.seeds):
        found += [drawn.case_of(case.parameters, f"{seed}.{i}") for i, case in enumerate(drawn.cases(draw._replace(seed=seed), device))]
    return found


def inputs(parameters: dict[str, Any], device: torch.device) -> Problem:
    """Random tensors of a row, the same for all contenders."""
    needs_gradients = parameters["kind"] == "backward"
    if "layer" in parameters:
        (ours, by_torch), tensors = _layer(parameters["layer"], getattr(torch, parameters["dtype"]), device)
        return Problem(ours, by_torch, None, tuple([t.requires_grad_(needs_gradients) for t in tensors]), needs_gradients)
    found = drawn.drawn_inputs(parameters, device)
    given = (found.x, *found.factors)
    if parameters["left"]:
        return Problem(
            lambda x, *factors: fastkron_py.kron_matmul_left(factors, x),
            lambda x, *factors: drawn.loop_left(x, factors),
            lambda x, *factors: drawn.in_place_left(x, factors),
            given,
            needs_gradients,
        )
    return Problem(
        lambda x, *factors: fastkron_py.kron_matmul(x, factors),
        lambda x, *factors: loop(x, factors),
        lambda x, *factors: drawn.in_place(x, factors),
        given,
        needs_gradients,
    )


def error_of(problem: Problem, results: Tensor | Sequence[Tensor]) -> float:
    """The largest error of an element over the largest element, of the result or of any gradient."""
    listed = [results] if isinstance(results, Tensor) else list(results)
    if [t.shape for t in listed] != [t.shape for t in problem.expected]:
        return math.inf
    errors = [(a.double() - e).abs().max() / e.abs().max() for a, e in zip(listed, problem.expected, strict=True)]
    return float(torch.stack(errors).max())  # NaN stays NaN


# ---- layers ------------------------------------------------------------------------------------


def _rational(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Version B: ``P(x) / (1 + |Q(x)|)`` in groups of columns, by Horner's rule."""
    shape, x = x.shape, x.unflatten(-1, (numerator.shape[0], -1))
    a, b = numerator.mT[..., None], denominator.mT[..., None]
    p, q = a[-1], b[-1]
    for coefficient in a[:-1].flip(0):
        p = p * x + coefficient
    for coefficient in b[:-1].flip(0):
        q = q * x + coefficient
    return (p / (1 + (q * x).abs())).view(shape)


def _chebyshev(x: Tensor, coefficients: Tensor) -> Tensor:
    """A sum over degrees of Chebyshev polynomials of tanh x."""
    t = x.tanh()
    basis = [torch.ones_like(t), t]
    while len(basis) < len(coefficients):
        basis.append(2 * t * basis[-1] - basis[-2])
    return torch.cat(basis, -1) @ coefficients.permute(0, 2, 1).flatten(0, 1)


def _solve(b: Tensor, *factors: Tensor) -> Tensor:
    """One solve with each factor, in its mode."""
    x = b.view(*[f.shape[0] for f in factors])
    for dim, f in enumerate(factors):
        x = torch.linalg.solve(f, x.movedim(dim, 0).flatten(1)).view(x.movedim(dim, 0).shape).movedim(0, dim)
    return x.reshape(-1)


def _layer(name: str, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Function, Function], list[Tensor]]:
    """This library's function of a layer's tensors, torch's formula, and the tensors."""
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int, of: int = 1) -> Tensor:
        t = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) / math.sqrt(of)
        return t.to(dtype)

    if name == "rational":
        return (fastkron_py.rational, _rational), [draw(TOKENS, 768), draw(8, 6), draw(8, 4)]
    if name == "poly_kan":
        return (fastkron_py.poly_kan, _chebyshev), [draw(TOKENS, 256), draw(5, 256, 256, of=256)]
    if name == "gated_linear":
        of_gate: Function = lambda x, w: (x @ w[0].mT) * silu(x @ w[1].mT)  # noqa: E731
        ours: Function = lambda x, w: fastkron_py.gated_linear(x, w, layout="stacked")  # noqa: E731
        return (ours, of_gate), [draw(TOKENS, 256), draw(2, 512, 256, of=256)]
    if name.startswith("lokr"):
        base, size = draw(WIDTH, WIDTH, of=WIDTH), WIDTH // 8
        w2 = [draw(size, 32, of=32), draw(32, size, of=size)] if "rank" in name else [draw(size, size, of=size)]
        ours = lambda x, w1, *w2: fastkron_py.lokr_linear(x, w1, w2[0] if len(w2) == 1 else w2, base=linear(x, base))  # noqa: E731

        def by_peft(x: Tensor, w1: Tensor, *w2: Tensor) -> Tensor:
            whole = w2[0] if len(w2) == 1 else w2[0] @ w2[1]
            return linear(x, base.to(x.dtype)) + linear(x, torch.kron(w1, whole))

        return (ours, by_peft), [draw(TOKENS, WIDTH), draw(8, 8, of=8), *w2]
    if name == "hadamard":
        matrix = fastkron_py.hadamard(torch.eye(1024, device=device))
        return (fastkron_py.hadamard, lambda x: x @ matrix.to(x.dtype)), [draw(TOKENS, 1024)]
    if name == "mode_matmul":
        ours = lambda x, rows, columns: fastkron_py.mode_matmul(x, {1: rows, 2: columns})  # noqa: E731
        return (ours, lambda x, rows, columns: rows.mT @ x @ columns), [draw(16, 64, 48), draw(64, 32, of=64), draw(48, 24, of=48)]
    factors = [draw(8, 8, of=8) + 3 * torch.eye(8, dtype=dtype, device=device) for _ in range(3)]
    product = fastkron_py.KroneckerProduct(factors)
    if name == "K @ v":
        by_loop: Function = lambda v, *factors: drawn.loop_left(v[:, None], factors)[:, 0]  # noqa: E731
        return (lambda v, *_: product @ v, by_loop), [draw(512), *factors]
    return (lambda b, *_: product.solve(b), _solve), [draw(512), *factors]
