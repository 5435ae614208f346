"""Two projections as tensors of their own: joined by a view or by a copy, and the operators of compiled graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastkron_py.functional import gated_mlp
from fastkron_py.ops.gated_split import gated_split, join, lie_together
from fastkron_py.testing import assert_close

OPTIONS = ("silu", None, "")


def weights(together: bool, device: torch.device, requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    """up, gate ``[6, 5]``, each with a version of its own, as parameters have."""
    both = torch.randn(2, 6, 5, device=device)
    up, gate = (torch.zeros(6, 5, device=device, requires_grad=requires_grad) for _ in range(2))
    up.data, gate.data = (both[0], both[1]) if together else (both[1].clone(), both[0].clone())
    return up, gate


@pytest.mark.parametrize("together", [True, False])
def test_join(together: bool, device: torch.device) -> None:
    up, gate = weights(together, device)
    assert lie_together(up, gate) is together
    assert not lie_together(gate, up)
    weight = join(up, gate)
    assert (weight.data_ptr() == up.data_ptr()) is together
    assert torch.equal(weight, torch.stack([up, gate]))
    dy = torch.randn_like(weight)
    found = torch.autograd.grad(weight, [up, gate], dy)
    assert torch.equal(torch.stack(found), dy)


def test_what_does_not_lie_together(device: torch.device) -> None:
    both = torch.randn(3, 6, 5, device=device)
    assert not lie_together(both[0], both[2])
    assert not lie_together(both[0].mT, both[1].mT)
    assert not lie_together(both[0], both[1, :3])
    assert not lie_together(both[0], torch.randn(6, 5, device=device, dtype=torch.float64))
    assert not lie_together(both[0].to("meta"), both[1].to("meta"))


@pytest.mark.parametrize("changed", [0, 1])
def test_a_weight_that_changes_before_its_gradient_is_an_error(changed: int, device: torch.device) -> None:
    given = weights(True, device)
    x = torch.randn(4, 5, device=device, requires_grad=True)
    y = gated_mlp(x, join(*given), torch.randn(5, 6, device=device), layout="stacked")
    with torch.no_grad():
        given[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def tensors(together: bool, device: torch.device, whole: bool = True, bias: bool = True) -> tuple[Any, ...]:
    up, gate = weights(together, device)
    x = torch.randn(4, 5, device=device, requires_grad=True)
    down = torch.randn(5, 6, device=device, requires_grad=True) if whole else None
    biases = (torch.randn(2, 6, device=device, requires_grad=True), torch.randn(5, device=device, requires_grad=True) if whole else None)
    return x, up, gate, biases[0] if bias else None, down, biases[1] if bias else None


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ["gated_split", "gated_split_saving"])
def test_operators_keep_their_contracts(name: str, together: bool, device: torch.device) -> None:
    torch.library.opcheck(getattr(torch.ops.fastkron, name), (*tensors(together, device), *OPTIONS))


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize(("whole", "bias"), [(True, True), (False, False)])
def test_values_and_gradients_are_gated_mlps(saving: bool, whole: bool, bias: bool, device: torch.device) -> None:
    given = tensors(True, device, whole, bias)
    y = gated_split(given, saving, "silu", None)
    double = [None if t is None else t.detach().double().requires_grad_() for t in given]
    x, up, gate, both, down, after = double
    assert x is not None
    assert up is not None
    assert gate is not None
    up_bias, gate_bias = (None, None) if both is None else (both[0], both[1])
    linear = torch.nn.functional.linear
    expected = linear(x, up, up_bias) * torch.nn.functional.silu(linear(x, gate, gate_bias))
    expected = expected if down is None else linear(expected, down, after)
    assert_close(y, expected)
    dy = torch.randn_like(y)
    inputs = [t for t in given if t is not None]
    found = torch.autograd.grad(y, inputs, dy)
    for a, b in zip(found, torch.autograd.grad(expected, [t for t in double if t is not None], dy.double()), strict=True):
        assert_close(a, b)
    # Of frozen tensors none, of the others the same.
    frozen = (given[0].detach(), given[1], given[2].detach(), *given[3:])
    up_alone = torch.autograd.grad(gated_split(frozen, saving, "silu", None), given[1], dy)
    assert torch.equal(up_alone[0], found[1])
