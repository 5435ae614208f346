"""What only a CUDA device can show of gated layers: Llama's sizes, graphs, streams, memory, TF32 and three passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gated_cases import expected, expected_gradients, pack, problem, relative
from gemm_cases import gemm_columns
from graphs import graphed
from torch import Tensor

from fastkron_py import backend, gated_linear
from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.nn import GatedMLP
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.program import Program
from fastkron_py.tiling import gemm_config as tuning
from fastkron_py.tiling.gemm_config import GemmSpan, GemmTile

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LAYOUTS = ("interleaved", "stacked")


@pytest.mark.parametrize("rows", [1, 17, 127, 512, 4096])
@pytest.mark.parametrize(("depth", "hidden"), [(4096, 14336), (8192, 28672)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama(rows: int, depth: int, hidden: int, layout: str) -> None:
    """On 64 of the columns (all, of few rows) and 128 of the rows, spread over all; bfloat16's bound, and torch's own error above it."""
    x = torch.randn(rows, depth, device=CUDA, dtype=torch.bfloat16)
    weight = torch.empty(2, hidden, depth, device=CUDA, dtype=torch.bfloat16).uniform_(-(depth**-0.5), depth**-0.5)
    packed = weight if layout == "stacked" else weight.transpose(0, 1).flatten(0, 1).contiguous()
    # The bound is of a mean over many elements.
    columns = torch.arange(0, hidden, hidden // 64 if rows > 100 else 1)
    some = torch.arange(0, rows, max(1, rows // 128))
    reference = expected(x[some], weight[0][columns], weight[1][columns], "silu")
    y = gated_linear(x, packed, layout=layout)
    assert bool(y.isfinite().all())
    error = relative(y[some][:, columns], reference)
    up, gate = (torch.nn.functional.linear(x[some], w) for w in weight)
    eager = (up * torch.nn.functional.silu(gate))[:, columns]
    assert error < 2.0e-3
    assert error < relative(eager, reference)
    assert torch.equal(y, gated_linear(x, packed, layout=layout))


@pytest.mark.parametrize(("precision", "bound"), [("highest", 2e-6), ("high", 2e-3)])
@pytest.mark.parametrize("shape", [(960, 736, 480), (252, 123, 431)], ids=str)
@pytest.mark.parametrize("mode", ["save", "recompute"])
def test_float32(precision: str, bound: float, shape: tuple[int, int, int], mode: str, generator: torch.Generator) -> None:
    x, up, gate, dy = problem(*shape, torch.float32, CUDA, generator)
    x, weight = x.requires_grad_(), pack(up, gate, "stacked").requires_grad_()
    with backend("triton"):
        y = gated_linear(x, weight, layout="stacked", precision=precision, backward=mode)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
    for a, e in zip((y, dx, *dw), expected_gradients(x, up, gate, dy, "silu"), strict=True):
        assert relative(a, e) < bound


@pytest.mark.parametrize("mode", ["save", "recompute"])
def test_graph(mode: str, generator: torch.Generator) -> None:
    layer = GatedMLP(256, 704, backward=mode, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(300, 256, device=CUDA, dtype=torch.bfloat16)

    def call() -> list[Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y))]

    reference = [t.detach().clone() for t in call()]
    graph, found = graphed(call)
    for t in found:
        t.detach().fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_of_two_launches(layout: str, generator: torch.Generator) -> None:
    """Divided by hand, so that the device does not matter."""
    spans = (GemmSpan(0, 8448, GemmTile(128, 256, 64, 8, 3, 2, 16)), GemmSpan(8448, 11520, GemmTile(128, 128, 64, 8, 4)))
    x, up, gate, dy = problem(1000, 5760, 512, torch.bfloat16, CUDA, generator)
    weight = pack(up, gate, layout).requires_grad_()
    expected_y, _, *expected_dw = expected_gradients(x, up, gate, dy, "silu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "gemm_spans", lambda sizes: spans)
        CACHE.forget()
        divided = []
        run = Program.__call__

        def counted(program: Program, *given: Any) -> Any:
            divided.append(len(gemm_columns(program)))
            return run(program, *given)

        patch.setattr(Program, "__call__", counted)
        for mode in ("save", "recompute"):

            def call(mode: str = mode) -> list[Tensor]:
                y = gated_linear(x, weight, layout=layout, backward=mode)
                return [y.detach(), *torch.autograd.grad(y, weight, dy)]

            reference = [t.clone() for t in call()]
            halves = reference[1] if layout == "stacked" else (reference[1][0::2], reference[1][1::2])
            assert relative(reference[0], expected_y) < 2e-3
            assert max(relative(a, e) for a, e in zip(halves, expected_dw, strict=True)) < 8e-3
            graph, found = graphed(call)
            for t in found:
                t.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
        assert divided.count(2) >= 6  # forward passes twice for each mode, and the gradients that multiply once more
        assert set(divided) == {0, 2}
    CACHE.forget()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_takes_no_memory_but_the_result(layout: str) -> None:
    x = torch.randn(4096, 1024, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(8192, 1024, device=CUDA, dtype=torch.bfloat16)
    weight = weight if layout == "interleaved" else weight.view(2, 4096, 1024)
    gated_linear(x, weight, layout=layout)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = gated_linear(x, weight, layout=layout)
    assert torch.cuda.max_memory_allocated() - before == y.numel() * y.element_size()


@pytest.mark.parametrize(("mode", "kept", "peak"), [("save", 2.3, 3.7), ("recompute", 0.3, 3.7)])
def test_memory_of_training(mode: str, kept: float, peak: float) -> None:
    """In sizes of y ``[M, H]``, the result and x being a quarter each: held for backward, and at most."""
    layer = GatedMLP(1024, 4096, backward=mode, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(16384, 1024, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    layer.zero_grad(set_to_none=True)
    x.grad = None
    unit = 16384 * 4096 * 2
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = layer(x)
    assert torch.cuda.memory_allocated() - before < kept * unit
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < peak * unit


def test_many_runs_are_equal() -> None:
    """Bit for bit, over pipelines of any timing."""
    x = torch.randn(1000, 1024, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(2, 1536, 1024, device=CUDA, dtype=torch.bfloat16) / 32
    reference = gated_linear(x, weight, layout="stacked")
    for _ in range(200):
        assert torch.equal(gated_linear(x, weight, layout="stacked"), reference)


@triton.jit
def _apply(x_ptr, y_ptr, FUNCTION: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    tl.store(y_ptr + i, FUNCTION(tl.load(x_ptr + i), C))


@pytest.mark.parametrize("name", ["silu", "sigmoid", "gelu_tanh"])
@pytest.mark.parametrize("which", [0, 1], ids=["value", "derivative"])
def test_quick_activations(name: str, which: int) -> None:
    """Beside the formula in float64, up to infinity; the quick sigmoid is another than the exact one."""
    found = find_activation(name)
    assert found.quick_constants != found.constants
    x = torch.cat([torch.linspace(-30, 30, 1016), torch.tensor([-torch.inf, torch.inf, torch.nan, -1e4, 1e4, -90.0, 90.0, 0.0])]).to(CUDA)
    y = torch.full_like(x, torch.nan)
    function = found.derivative if which else found.value
    _apply[(1,)](x, y, function, found.quick_constants, x.numel(), enable_fp_fusion=True)
    host = found.host_derivative if which else found.host
    expected = host(x.double())
    assert torch.equal(y.isnan(), expected.isnan())
    finite = expected.isfinite()
    assert torch.equal(y[~finite & ~y.isnan()], expected[~finite & ~y.isnan()].float())
    error = (y[finite].double() - expected[finite]).abs() / (1 + x[finite].double().abs())
    assert float(error.max()) < 5e-7
