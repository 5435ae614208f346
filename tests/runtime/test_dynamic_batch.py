"""One compilation, and one exported program, for all batch sizes from 2 on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fastkron_py import KroneckerProduct, gated_linear, kron_matmul, kron_matmul_left, poly_kan, rational
from fastkron_py.nn import GRKAN, GroupRational
from fastkron_py.rational.api import layer_norm_rational, linear_rational, rational_linear

COEFFICIENTS = [(2, 4), (2, 2)]
# A function, one sample's shape, and the shapes of parameters.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], list[tuple[int, ...]]]] = {
    "kron_matmul": (lambda x, a, b, z: kron_matmul(x, [a, b], alpha=0.5, beta=2.0, z=z), (4,), [(2, 3), (2, 2), (6,)]),
    "batched kron_matmul": (lambda x, a, b: kron_matmul(x, [a, b.expand(x.shape[0], 2, 2)]), (3, 4), [(2, 3), (2, 2)]),
    "kron_matmul_left": (lambda x, a, b: kron_matmul_left([a, b], x.mT), (4,), [(3, 2), (2, 2)]),
    "solve": (lambda x, a, b: KroneckerProduct([a, b]).solve(x.mT), (4,), [(2, 2), (2, 2)]),
    "rational": (rational, (3, 4), COEFFICIENTS),
    "layer_norm_rational": (layer_norm_rational, (3, 4), [(4,), (4,), *COEFFICIENTS]),
    "rational_linear": (rational_linear, (3, 4), [*COEFFICIENTS, (3, 4), (3,)]),
    "gated_linear": (lambda x, up, gate: gated_linear(x, (up, gate)), (3, 4), [(5, 4), (5, 4)]),
    "poly_kan": (lambda x, c, bias: poly_kan(x, c, bias=bias), (3,), [(5, 4, 3), (4,)]),
    "poly_kan in a range": (lambda x, c: poly_kan(x, c, basis="bspline", normalization="minmax"), (3,), [(5, 4, 3)]),
    "linear_rational": (linear_rational, (3,), [(4, 3), (4,), *COEFFICIENTS]),
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        if name in CASES:
            self.function, self.sample, shapes = CASES[name]
            self.parameters_ = nn.ParameterList([nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes])
        else:
            layer = GroupRational(8, 2) if name == "GroupRational" else GRKAN(8, 16, num_groups=2)
            self.function, self.sample = layer.double(), (5, 8)
            self.parameters_ = nn.ParameterList()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *list(self.parameters_))


# One of each room; contracts compile all functions for another number of rows.
QUICK = ("batched kron_matmul", "solve", "rational", "gated_linear", "poly_kan in a range", "GRKAN")


@pytest.mark.parametrize("name", [*QUICK, *[pytest.param(n, marks=pytest.mark.full) for n in (*CASES, "GroupRational") if n not in QUICK]])
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
