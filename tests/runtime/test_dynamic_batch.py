"""One compilation, and one exported program, for all batch sizes from 2 on, where these are no rows: contracts have those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fastkron_py import KroneckerProduct, kron_matmul, kron_matmul_left, poly_kan

# A function, one sample's shape, and the shapes of parameters.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], list[tuple[int, ...]]]] = {
    "batched kron_matmul": (lambda x, a, b: kron_matmul(x, [a, b.expand(x.shape[0], 2, 2)]), (3, 4), [(2, 3), (2, 2)]),
    "kron_matmul_left": (lambda x, a, b: kron_matmul_left([a, b], x.mT), (4,), [(3, 2), (2, 2)]),
    "solve": (lambda x, a, b: KroneckerProduct([a, b]).solve(x.mT), (4,), [(2, 2), (2, 2)]),
    "poly_kan in a range": (lambda x, c: poly_kan(x, c, basis="bspline", normalization="minmax"), (3,), [(5, 4, 3)]),
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function, self.sample, shapes = CASES[name]
        self.parameters_ = nn.ParameterList([nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *list(self.parameters_))


@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_all_batch_sizes(name: str) -> None:
    model = Model(name)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    example = torch.randn(4, *model.sample, dtype=torch.float64)
    exported = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)).module()
    for batch in (2, 3, 5, 17):
        x = torch.randn(batch, *model.sample, dtype=torch.float64, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        inputs = [x, *model.parameters()]
        y, expected = compiled(x), model(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(exported(x), expected)
        dy = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy))
    assert counter.frame_count == 1
