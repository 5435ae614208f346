"""What only a CUDA device can show of LoKr layers: sizes of real models, graphs, memory."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import graphed
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py import lokr_linear
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
RANKS = pytest.mark.parametrize("rank", [None, 32], ids=["matrix", "pair"])


def factors(out: int, columns: int, side: int, rank: int | None, dtype: torch.dtype) -> list[Tensor]:
    """w1 ``[side, side]``, and w2 or its pair, of results about as large as x."""
    sizes = (out // side, columns // side)
    shapes = [(side, side), *([sizes] if rank is None else [(sizes[0], rank), (rank, sizes[1])])]
    return [(torch.randn(shape, device=CUDA) / math.sqrt(shape[1])).to(dtype).requires_grad_() for shape in shapes]


@RANKS
@pytest.mark.parametrize(("tokens", "columns", "out", "side"), [(512, 4096, 4096, 8), (4096, 3072, 12288, 16), (4096, 1280, 1280, 8)])
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layers(tokens: int, columns: int, out: int, side: int, rank: int | None, factor_dtype: torch.dtype) -> None:
    """On 64 rows spread over all, in bfloat16; and all of the factors' gradients."""
    x = torch.randn(tokens, columns, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    w1, *w2 = factors(out, columns, side, rank, factor_dtype)
    base, dy = (torch.randn(tokens, out, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    y = lokr_linear(x, w1, w2[0] if rank is None else tuple(w2), base=base, scale=0.5)
    dx, *grads = torch.autograd.grad(y, [x, w1, *w2], dy)
    doubles = [t.detach().double().requires_grad_() for t in (w1, *w2)]
    whole = doubles[1] if rank is None else doubles[1] @ doubles[2]
    some = torch.arange(0, tokens, tokens // 64, device=CUDA)
    weight = 0.5 * torch.kron(doubles[0].detach(), whole.detach())
    assert_close(y[some], base[some].double() + x[some].double() @ weight.T, steps=5)
    assert_close(dx[some], dy[some].double() @ weight, steps=5)
    modes = x.detach().double().unflatten(1, (side, -1))
    product = doubles[0] @ (modes @ whole.mT)
    wanted = torch.autograd.grad(0.5 * product, doubles, dy.double().unflatten(1, (side, -1)))
    for g, w, t in zip(grads, wanted, (w1, *w2), strict=True):
        assert g.dtype == t.dtype
        assert_close(g.bfloat16(), w, steps=8)


@RANKS
def test_graph(rank: int | None) -> None:
    x = torch.randn(300, 256, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(512, 256, device=CUDA, dtype=torch.bfloat16)
    w1, *w2 = (t.detach() for t in factors(512, 256, 8, None if rank is None else 4, torch.float32))
    second = w2[0] if rank is None else tuple(w2)
    graph, (y,) = graphed(lambda: [lokr_linear(x, w1, second, base=linear(x, weight))])
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, lokr_linear(x, w1, second, base=linear(x, weight)))


@RANKS
def test_memory_beyond_the_layer(rank: int | None) -> None:
    """Beside the base layer's result: the result, and one operand between the factors. No weight, of 128 MiB here."""
    x = torch.randn(1024, 8192, device=CUDA, dtype=torch.bfloat16)
    base = torch.randn(1024, 8192, device=CUDA, dtype=torch.bfloat16)
    w1, *w2 = (t.detach() for t in factors(8192, 8192, 16, rank, torch.bfloat16))
    second = w2[0] if rank is None else tuple(w2)
    lokr_linear(x, w1, second, base=base)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = lokr_linear(x, w1, second, base=base)
    assert torch.cuda.max_memory_allocated() - before < (2.1 if rank is None else 1.2) * y.nbytes
