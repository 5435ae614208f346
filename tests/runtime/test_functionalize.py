"""torch.func.functionalize around public functions, beside other transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jvp, vmap

from fastkron_py import KroneckerProduct, gated_linear, hadamard, kron_matmul, kron_matmul_left, mode_matmul, poly_kan
from fastkron_py import rational as rational_function
from fastkron_py.nn import LoKrLinear

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

FACTORS = [torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)]
LAYER = LoKrLinear.from_linear(torch.nn.Linear(12, 8, dtype=torch.float64), 2)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "kron_matmul": lambda x: kron_matmul(x, FACTORS),
    "kron_matmul_left": lambda x: kron_matmul_left([f.mT for f in FACTORS], x.mT),
    "mode_matmul": lambda x: mode_matmul(x.view(-1, 3, 4), {1: FACTORS[0], 2: FACTORS[1]}),
    "hadamard": hadamard,
    "operator": lambda x: KroneckerProduct([f @ f.mT for f in FACTORS]) @ x.mT,
    "gated_linear": lambda x: gated_linear(x, FACTORS[0].new_ones(2, 6, 12), layout="stacked"),
    "poly_kan": lambda x: poly_kan(x, FACTORS[0].new_ones(4, 6, 12), evaluation="lut"),
    "rational": lambda x: rational_function(x, FACTORS[0].new_ones(3, 4), FACTORS[0].new_ones(3, 2)),
    "lokr": LAYER,
}
OF_TORCH = ("gated_linear", "poly_kan", "rational")  # in transforms made of torch's own operations


def test_writes_in_place() -> None:
    """What functionalize is for."""

    def call(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :2] = 0
        return kron_matmul(y.mul_(2), FACTORS)

    x = torch.randn(6, 12, dtype=torch.float64)
    torch.testing.assert_close(functionalize(call)(x), call(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_beside_another_transform(name: str) -> None:
    """It works, or raises; the operator of torch's dispatcher would lose a tangent."""
    call = CALLS[name]
    x = torch.randn(6, 12, dtype=torch.float64)
    nested: list[Callable[[], Any]] = [
        lambda: functionalize(grad(lambda x: call(x).square().sum()))(x),
        lambda: grad(lambda x: functionalize(call)(x).square().sum())(x),
        lambda: functionalize(lambda x: jvp(call, (x,), (x,))[1])(x),
    ]
    if name not in ("kron_matmul_left", "operator", "mode_matmul"):
        nested.append(lambda: functionalize(vmap(call))(x))
    if name in OF_TORCH:
        torch.testing.assert_close(nested[0](), grad(lambda x: call(x).square().sum())(x), rtol=1e-12, atol=1e-12)
        return
    for run in nested:
        with pytest.raises(NotImplementedError, match=r"torch\.func\.functionalize: expected no other transform beside it; got"):
            run()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="got Jvp in Functionalize"):
        functionalize(call)(forward_ad.make_dual(x, x))
