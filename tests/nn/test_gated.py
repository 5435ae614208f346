"""`GatedMLP`: the layer, its initialisation, other libraries' states, packed states of another layout."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gated_cases import LAYOUTS, pack
from refusals import Refusal, assert_all_refused, value, wrong_type
from torch import Tensor, nn

from fastkron_py.gated import program
from fastkron_py.nn import GatedMLP, pack_gated, unpack_gated
from fastkron_py.testing import assert_close


class Llama(nn.Module):
    """The layer of a Llama, unpacked."""

    def __init__(self, width: int, hidden: int, bias: bool = False, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> None:
        super().__init__()
        self.names = names
        for name, (i, o) in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            setattr(self, name, nn.Linear(i, o, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        y: Tensor = down(nn.functional.silu(gate(x)) * up(x))
        return y


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_unpacked_states(layout: str, backend_name: str, device: torch.device) -> None:
    for bias, names in product([False, True], [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")]):
        theirs = Llama(16, 24, bias, names).to(device)
        mine = GatedMLP(16, 24, bias=bias, layout=layout, precision="highest", device=device)
        state = theirs.state_dict()
        kept = dict(state)
        mine.load_state_dict(state)
        assert state.keys() == kept.keys()  # a caller's own is left as it is
        gate, up = getattr(theirs, names[0]).weight, getattr(theirs, names[1]).weight
        assert torch.equal(mine.up_gate_weight, pack(up, gate, layout))
        for key, tensor in mine.unpacked_state_dict(names).items():
            assert torch.equal(tensor, state[key])
        x = torch.randn(3, 5, 16, device=device)
        assert_close(mine(x).detach(), theirs.double()(x.double()).detach(), rms_tol=2e-6, max_tol=1e-5)
        inside = nn.Sequential(nn.Identity(), GatedMLP(16, 24, bias=bias, layout=layout))
        inside.load_state_dict(nn.Sequential(nn.Identity(), theirs.float()).state_dict())
        assert torch.equal(inside[1].up_gate_weight.to(device), mine.up_gate_weight)


@pytest.mark.parametrize(("backward", "kept"), [("save", [40, 2 * 5 * 24]), ("recompute", [40])])
def test_what_is_kept_for_backward(
    backward: str, kept: list[int], backend_name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements of tensors that are no parameters: x ``[5, 8]``, and, saving, both projections ``[5, 48]``; never y."""
    monkeypatch.setattr(program, "_SMALL", 0)  # autograd keeps more of a small layer on a CPU
    for layout in LAYOUTS:
        layer = GatedMLP(8, 24, layout=layout, backward=backward, device=device)
        own = {p.data_ptr() for p in layer.parameters()}
        found: list[int] = []

        def pack_hook(t: Tensor, own: set[int] = own, found: list[int] = found) -> Tensor:
            if t.data_ptr() not in own:
                found.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda t: t):
            y = layer(torch.randn(5, 8, device=device, requires_grad=True))
        assert sorted(found) == kept
        y.sum().backward()


def test_what_replaces_the_down_projection_is_called(device: torch.device) -> None:
    """Hooks, those of all modules too, another forward and adapters are part of the layer."""
    layer = GatedMLP(6, 8, device=device)
    x = torch.randn(4, 6, device=device)
    plain = layer(x).detach()
    handle = layer.down_proj.register_forward_hook(lambda module, given, result: 2 * result)
    assert_close(layer(x).detach(), 2 * plain)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, result: 2 * result if module is layer.down_proj else None)
    assert_close(layer(x).detach(), 2 * plain)
    handle.remove()
    inner = layer.down_proj.forward
    layer.down_proj.forward = lambda y: -inner(y)  # type: ignore[method-assign]
    assert_close(layer(x).detach(), -plain)
    del layer.down_proj.forward
    assert_close(layer(x).detach(), plain)
    layer.down_proj = nn.Sequential(layer.down_proj, nn.ReLU())  # type: ignore[assignment]
    assert_close(layer(x).detach(), plain.relu())


def test_keys_of_states() -> None:
    """Those that strict loading counts."""
    layer, x = GatedMLP(6, 8, bias=True), torch.randn(4, 6)
    assert sorted(layer.state_dict()) == ["_extra_state", "down_proj.bias", "down_proj.weight", "up_gate_bias", "up_gate_weight"]
    before = layer(x)
    layer.load_state_dict(GatedMLP(6, 8, bias=True).unpacked_state_dict())
    assert not torch.equal(layer(x), before)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*up_gate_weight.*Unexpected key.*up_proj\.weight"):
        layer.load_state_dict({"up_proj.weight": torch.randn(8, 6)})


def test_another_layout_is_refused() -> None:
    first, second = GatedMLP(6, 8), GatedMLP(6, 8, layout="stacked")
    before = second.up_gate_weight.clone()
    message = r"state_dict\['_extra_state'\]: expected a state of a GatedMLP with layout='stacked'; got layout='interleaved'"
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(first.state_dict())
    # Of the right shape, but not the right order.
    state = first.state_dict()
    state["up_gate_weight"] = state["up_gate_weight"].reshape(2, 8, 6)
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(state)
    del state["_extra_state"]
    with pytest.raises(ValueError, match="with layout='stacked'; got layout='unknown'"):
        second.load_state_dict(state, strict=False)
    assert torch.equal(second.up_gate_weight, before)
    both = first.state_dict() | {"gate_proj.weight": torch.randn(8, 6), "up_proj.weight": torch.randn(8, 6)}
    with pytest.raises(ValueError, match="state_dict: expected up_gate_weight, or gate_proj and up_proj; got both"):
        first.load_state_dict(both)
    second.load_state_dict(first.unpacked_state_dict())
    assert_close(second(torch.ones(1, 6)).detach(), first(torch.ones(1, 6)).detach())


def test_packing_is_exact() -> None:
    for layout, shape, dtype in product(LAYOUTS, [(5, 3), (5,)], [torch.bfloat16, torch.float32]):
        up, gate = torch.randn(2, *shape).to(dtype)
        up.view(-1)[0] = torch.nan
        packed = pack_gated(up, gate, layout)
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        assert torch.equal(packed.view(bits), pack(up, gate, layout).view(bits))
        for given, back in zip((up, gate), unpack_gated(packed, layout), strict=True):
            assert torch.equal(back.contiguous().view(bits), given.view(bits))


def test_from_projections() -> None:
    theirs = Llama(6, 8, True)
    layer = GatedMLP.from_projections(theirs.gate_proj, theirs.up_proj, theirs.down_proj, layout="stacked")
    assert layer.down_proj is theirs.down_proj
    x = torch.randn(4, 6)
    assert_close(layer(x).detach(), theirs(x).detach(), rms_tol=1e-6, max_tol=4e-6)
    with pytest.raises(TypeError, match=r"gate: expected an nn\.Linear; got torch\.nn\..*Identity"):
        GatedMLP.from_projections(nn.Identity(), theirs.up_proj, theirs.down_proj)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="up: expected a bias where gate has one, and only there; got one without the other"):
        GatedMLP.from_projections(theirs.gate_proj, nn.Linear(6, 8, bias=False), theirs.down_proj)
    with pytest.raises(ValueError, match="down: expected up's 8 outputs as inputs; got 7"):
        GatedMLP.from_projections(theirs.gate_proj, theirs.up_proj, nn.Linear(7, 6))


def test_begins_like_linear_layers() -> None:
    layer = GatedMLP(400, 300, bias=True)
    assert layer.up_gate_bias is not None
    for t in (layer.up_gate_weight, layer.up_gate_bias):
        assert float(t.detach().abs().max()) <= 1 / 20
        assert 0.9 < float(t.detach().std()) * 20 * 3**0.5 < 1.1
    assert repr(layer).startswith("GatedMLP(\n  400, 300, 400, activation='silu', bias=True, layout='interleaved'\n")
    assert "backward='recompute'" in repr(GatedMLP(4, 3, backward="recompute"))


BAD: dict[str, Refusal] = {
    "in_features": value(lambda: GatedMLP(0, 2), "in_features: expected a positive integer; got 0"),
    "hidden_features": wrong_type(lambda: GatedMLP(2, 2.5), "hidden_features: expected a positive integer; got float"),  # type: ignore[arg-type]
    "out_features": value(lambda: GatedMLP(2, 2, 0), "out_features: expected a positive integer; got 0"),
    "bias": wrong_type(lambda: GatedMLP(2, 2, bias=1), "bias: expected True or False; got int"),  # type: ignore[arg-type]
    "activation": value(
        lambda: GatedMLP(2, 2, activation="swoosh"),
        "activation: expected one of clamped_swiglu, gelu, gelu_tanh, identity, mish, quick_gelu, relu, relu2, sigmoid, silu; got 'swoosh'",
    ),
    "activation of another kind": (
        lambda: GatedMLP(2, 2, activation=None),  # type: ignore[arg-type]
        TypeError,
        "activation: expected one of clamped_swiglu, gelu, gelu_tanh, identity, mish, quick_gelu, relu, relu2, sigmoid, silu; got None",
    ),
    "layout": value(lambda: GatedMLP(2, 2, layout="x"), "layout: expected one of interleaved, stacked; got 'x'"),
    "backward": value(lambda: GatedMLP(2, 2, backward="x"), "backward: expected one of save, recompute; got 'x'"),
    "precision": value(lambda: GatedMLP(2, 2, precision="x"), "precision: expected None or one of highest, high, medium; got 'x'"),
    "pack": value(lambda: pack_gated(torch.ones(2, 3), torch.ones(3, 3)), "gate: expected up's shape (2, 3); got shape (3, 3)"),
    "pack four": value(
        lambda: pack_gated(torch.ones(2, 3, 1), torch.ones(2, 3, 1)),
        "up: expected a weight [hidden, in] or a bias [hidden]; got shape (2, 3, 1)",
    ),
    "unpack odd": value(
        lambda: unpack_gated(torch.ones(3, 2)),
        "packed: expected [2 * hidden, in] or [2 * hidden], since layout is 'interleaved'; got shape (3, 2)",
    ),
    "unpack": value(
        lambda: unpack_gated(torch.ones(4, 2), "stacked"),
        "packed: expected [2, hidden, in] or [2, hidden], since layout is 'stacked'; got shape (4, 2)",
    ),
}


def test_bad_input() -> None:
    assert_all_refused(BAD)
