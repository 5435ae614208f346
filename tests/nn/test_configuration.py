"""States of layers: one of another configuration is rejected, one of an earlier version loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fastkron_py.nn import GRKAN, KAN, GatedMLP, GroupRational, PolyKANConv2d, PolyKANLinear, SplineKANLinear


class Pair(NamedTuple):
    """Layers of two configurations whose parameters have the same names and shapes."""

    first: Callable[[], nn.Module]
    second: Callable[[], nn.Module]
    differs: str  # of the second and the first layer, with the name in the state before it


PAIRS = {
    "basis": Pair(
        lambda: PolyKANLinear(6, 3, 4, "chebyshev", normalization="tanh"),
        lambda: PolyKANLinear(6, 3, 4, "legendre", normalization="tanh"),
        "'_extra_state'.: expected a state of a PolyKANLinear with basis='legendre'; got basis='chebyshev'",
    ),
    "parameters": Pair(
        lambda: PolyKANLinear(6, 3, 4, "jacobi", basis_parameters={"a": 2.0}),
        lambda: PolyKANLinear(6, 3, 4, "jacobi"),
        "with basis_parameters={'a': 0.0, 'b': 0.0}; got basis_parameters={'a': 2.0, 'b': 0.0}",
    ),
    "normalization": Pair(
        lambda: KAN([6, 3, 2], 4, normalization="clamp"),
        lambda: KAN([6, 3, 2], 4, normalization="tanh"),
        "'0._extra_state'.: expected a state of a PolyKANLinear with normalization='tanh'; got normalization='clamp'",
    ),
    "convolution": Pair(
        lambda: PolyKANConv2d(2, 3, 3, 4, "chebyshev", normalization="tanh"),
        lambda: PolyKANConv2d(2, 3, 3, 4, "chebyshev", normalization="none"),
        "a PolyKANConv2d with normalization='none'; got normalization='tanh'",
    ),
    "order": Pair(
        lambda: SplineKANLinear(6, 3, 5, 3),
        lambda: SplineKANLinear(6, 3, 6, 2),
        "with basis_parameters={'order': 2.0}; got basis_parameters={'order': 3.0}",
    ),
    "base_activation": Pair(
        lambda: SplineKANLinear(6, 3, base_activation=nn.SiLU()),
        lambda: SplineKANLinear(6, 3, base_activation=nn.GELU()),
        "with base_activation=\"GELU[(]approximate='none'[)]\"; got base_activation='SiLU[(][)]'",
    ),
    "denominator": Pair(
        lambda: GroupRational(6, 3, version="A"),
        lambda: GroupRational(6, 3, version="B"),
        "'_extra_state'.: expected a state of a GroupRational with version='B'; got version='A'",
    ),
    "in_a_network": Pair(
        lambda: GRKAN(8, version="A"), lambda: GRKAN(8, version="B"), "'act1._extra_state'.: .* with version='B'; got version='A'"
    ),
    "activation": Pair(
        lambda: GatedMLP(6, 8, activation="silu"),
        lambda: GatedMLP(6, 8, activation="gelu"),
        "with activation='gelu'; got activation='silu'",
    ),
}


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    layer = make().double()
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


def operand(layer: nn.Module) -> Tensor:
    shape = (2, 2, 5, 4) if isinstance(layer, PolyKANConv2d) else (5, 8 if isinstance(layer, GRKAN) else 6)
    return torch.rand(shape, dtype=torch.float64)


def test_a_state_of_another_configuration_is_rejected() -> None:
    for pair in PAIRS.values():
        first, second = drawn(pair.first), drawn(pair.second)
        state, before = first.state_dict(), {n: p.detach().clone() for n, p in second.named_parameters()}
        with pytest.raises(ValueError, match=r"^state_dict\[" + (".*" if pair.differs[0] != "'" else "") + pair.differs + "$"):
            second.load_state_dict(state)
        assert all([torch.equal(p, before[n]) for n, p in second.named_parameters()])
        # The control: without the configuration it loads, as one of an earlier version, and is another function.
        if "GatedMLP" not in str(first):
            second.load_state_dict({key: t for key, t in state.items() if not key.endswith("_extra_state")})
            x = operand(first)
            assert (first(x) - second(x)).abs().max() > 1e-3


def test_states_of_the_same_configuration() -> None:
    """Inside of another default device; cast."""
    for make, *_ in PAIRS.values():
        first, second, third = drawn(make), drawn(make), drawn(make)
        state = first.state_dict()
        with torch.device("meta"):
            second.load_state_dict(state)
            assert {t.device.type for t in second.state_dict().values()} == {"cpu"}
        x = operand(first)
        assert torch.equal(second(x), first(x))
        third.load_state_dict({key: t.bfloat16() for key, t in state.items()})
        assert torch.equal(third(x), first.bfloat16().double()(x))


def test_defaults_and_noise_are_no_difference() -> None:
    given = PolyKANLinear(6, 3, 4, "jacobi", basis_parameters={"a": 0})
    given.load_state_dict(PolyKANLinear(6, 3, 4, "jacobi", basis_parameters={"b": 0.0}, evaluation="lut").state_dict())
    SplineKANLinear(6, 3, base_activation=nn.SiLU(inplace=True)).load_state_dict(SplineKANLinear(6, 3).state_dict())
    GroupRational(6, 3, version="D").load_state_dict(GroupRational(6, 3, version="B", init="gelu").state_dict())


def test_states_of_earlier_gated_layers_have_the_number_of_the_layout() -> None:
    first, second = GatedMLP(6, 8, layout="stacked"), GatedMLP(6, 8, activation="gelu", layout="stacked")
    state = first.state_dict() | {"_extra_state": torch.tensor(1, dtype=torch.uint8)}
    second.load_state_dict(state)
    assert torch.equal(second.up_gate_weight, first.up_gate_weight)
    with pytest.raises(ValueError, match="with layout='stacked'; got layout='interleaved'"):
        second.load_state_dict(state | {"_extra_state": torch.tensor(0, dtype=torch.uint8)})


def test_other_numbers_are_no_configuration() -> None:
    layer = GroupRational(6, 3)
    for numbers in (torch.tensor([1, 2, 3]), torch.tensor(0)):
        with pytest.raises(ValueError, match=r"^state_dict\['_extra_state'\]: expected a configuration; got other numbers$"):
            layer.load_state_dict(layer.state_dict() | {"_extra_state": numbers})
    layer.load_state_dict(layer.state_dict() | {"_extra_state": torch.empty(3, device="meta")})
