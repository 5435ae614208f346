"""LyCORIS's LoKr modules with and without `use_fastkron`: the same results, gradients, states and random numbers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lycoris", reason="the extra lycoris is not installed")

from lycoris import LycorisNetwork
from lycoris.modules.lokr import LokrModule

from fastkron_py.integrations.lycoris import FastLoKr, revert_fastkron, use_fastkron
from fastkron_py.nn import LoKrConv2d, LoKrLinear
from fastkron_py.testing import assert_close


class Net(nn.Module):
    """Linear layers and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 36, 3, padding=1)
        self.point = nn.Conv2d(36, 36, 1, bias=False)
        self.line = nn.Conv1d(36, 30, 3)
        self.up = nn.Linear(30, 48)
        self.down = nn.Linear(48, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(self.point(self.conv(x)).relu().flatten(2)).mT
        y: Tensor = self.down(self.up(h).relu())
        return y


CONFIGS: dict[str, dict[str, Any]] = {
    "low_rank": {"alpha": 3, "conv_alpha": 3},
    "whole": {"full_matrix": True},
    "both": {"decompose_both": True, "lora_dim": 1, "conv_lora_dim": 1},
    "tucker": {"use_tucker": True},
    "factor": {"factor": 2},
    "unbalanced": {"unbalanced_factorization": True},
    "rs_lora": {"rs_lora": True},
    "scalar": {"use_scalar": True},
    "bypass": {"bypass_mode": True},
    "bypass_dropout": {"bypass_mode": True, "dropout": 0.4},
    "rank_dropout": {"rank_dropout": 0.5},
    "scaled_rank_dropout": {"rank_dropout": 0.3, "rank_dropout_scale": True},
    "module_dropout": {"module_dropout": 0.5},
    "decomposed": {"weight_decompose": True},
    "decomposed_rank_dropout": {"weight_decompose": True, "rank_dropout": 0.5},
    "decomposed_scalar": {"weight_decompose": True, "use_scalar": True},
    "decomposed_by_inputs": {"weight_decompose": True, "wd_on_out": False},
}


def network(name: str, multiplier: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A model and a network over all of its layers, applied, with adapters that are not 0."""
    model = Net().to(dtype)
    LycorisNetwork.apply_preset({"target_name": [".*"]})
    options = {"lora_dim": 2, "alpha": 2, "conv_lora_dim": 2, "conv_alpha": 2} | CONFIGS[name]
    found = LycorisNetwork(model, multiplier, network_module="lokr", **options)
    assert all(m.wd == name.startswith("decomposed") for m in modules(found))
    found.apply_to()
    found.to(dtype)
    for n, p in found.named_parameters():
        nn.init.normal_(p, std=0.3) if "dora" not in n else p.data.mul_(1.1)
    return model, found


def operand(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 4, 5, 5, dtype=torch.float64).to(dtype)


def run(model: Any, net: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The result and the gradients, from a seed: dropout draws the same numbers each time."""
    net.zero_grad()
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return y.detach(), grads | {"x": x.grad}  # type: ignore[dict-item]


def modules(net: nn.Module) -> list[Any]:
    return [m for m in net.modules() if isinstance(m, LokrModule)]


@pytest.mark.parametrize("name", CONFIGS)
def test_results_and_gradients(name: str) -> None:
    for training, multiplier in ((True, 1.0), (True, 0.7), (False, 0.7)):
        model, net = network(name, multiplier)
        net.train(training)
        x = operand()
        want, grads = run(model, net, x)
        with use_fastkron(net) as applied:
            assert len(applied.replaced) == 5
            assert not applied.left_alone
            got, fast_grads = run(model, net, x)
        assert not any(isinstance(m, FastLoKr) for m in modules(net))
        assert_close(got, want, steps=64)
        assert fast_grads.keys() == grads.keys()
        for n, g in grads.items():
            assert_close(fast_grads[n], g, steps=256, name=n)
        again, _ = run(model, net, x)
        assert torch.equal(again, want)


def test_two_networks_on_one_model() -> None:
    """The second network's base is the first one's result, also where the first is changed later."""
    model, first = network("low_rank")
    second = LycorisNetwork(model, 0.5, lora_dim=1, conv_lora_dim=1, network_module="lokr", weight_decompose=True)
    second.apply_to()
    second.double()
    for n, p in second.named_parameters():
        nn.init.normal_(p, std=0.3) if "dora" not in n else None
    x = operand()
    want = model(x).detach()
    for net in (first, second):
        use_fastkron(net)
        assert_close(model(x), want, steps=64)


def test_states_merging_and_copies() -> None:
    model, net = network("low_rank", dtype=torch.float32)
    x = operand(torch.float32)
    before = net.state_dict()
    use_fastkron(net)
    assert net.state_dict().keys() == before.keys()
    want = model(x).detach()
    copied_model, copied = copy.deepcopy((model, net))
    assert torch.equal(copied_model(x), want)
    revert_fastkron(copied)
    torch.testing.assert_close(copied_model(x), want, rtol=1e-4, atol=1e-4)
    other_model, other = network("low_rank", dtype=torch.float32)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other_model(x), want, rtol=1e-4, atol=1e-4)


def test_half_types() -> None:
    for name, adapter_dtype in itertools.product(("low_rank", "decomposed", "decomposed_by_inputs"), (torch.bfloat16, torch.float32)):
        model, net = network(name, dtype=torch.float32)
        x = operand(torch.float32)
        want = model(x).detach()
        for p in model.parameters():
            p.data = p.data.bfloat16()
        for n, p in net.named_parameters():
            p.data = p.data.to(adapter_dtype if "dora" not in n else torch.float32)
        use_fastkron(net)
        got = model(x.bfloat16())
        assert got.dtype == torch.bfloat16
        # Each of five layers rounds its operands, its result and the adapter's.
        torch.testing.assert_close(got.float(), want, rtol=0, atol=5 * 6 * 2**-8 * want.abs().max().item())


def test_reasons() -> None:
    grouped = LokrModule("grouped", nn.Conv2d(4, 4, 1, groups=2), lora_dim=1)
    with pytest.raises(ValueError, match=r"^network: expected LoKr modules .* got it: its convolution has 2 groups$"):
        use_fastkron(grouped)
    replaced = LokrModule("replaced", nn.Linear(4, 4), lora_dim=1)
    replaced.forward = replaced.forward
    with pytest.raises(ValueError, match=r"got it: its forward was replaced, as for a parametrization$"):
        use_fastkron(replaced)
    with pytest.raises(ValueError, match=r"got torch.nn.modules.linear.Linear, which has none among its modules \(Linear\)$"):
        use_fastkron(nn.Linear(2, 2))
    for function, argument in ((use_fastkron, "network"), (revert_fastkron, "model")):
        with pytest.raises(TypeError, match=rf"^{argument}: expected a torch.nn.Module; got list$"):
            function([])  # type: ignore[arg-type]


def test_the_wrong_object() -> None:
    """The message tells what it is."""
    pytest.importorskip("peft", reason="the extra peft is not installed")
    from fastkron_py.integrations.peft import use_fastkron as use_fastkron_in_peft

    model, net = network("low_rank")
    with pytest.raises(
        ValueError, match=r"^network: expected .*its network, not the model.* with layers of a LyCORIS network: pass that to"
    ):
        use_fastkron(model)
    with pytest.raises(ValueError, match=r"^model: expected LoKr layers of PEFT .* got .* with lycoris.modules.lokr.LokrModule$"):
        use_fastkron_in_peft(net)
    first = use_fastkron(net)
    assert use_fastkron(net).left_alone == dict.fromkeys(first.replaced, "already patched by use_fastkron")
    with pytest.raises(ValueError, match=r"^model: .* with lycoris.modules.lokr.LokrModule$"):
        use_fastkron_in_peft(net)
    unapplied = nn.Module()
    unapplied.loras = [nn.Linear(2, 2)]  # as LyCORIS's network holds them until apply_to
    with pytest.raises(ValueError, match=r"with modules of LyCORIS that are not applied: call its apply_to\(\) first$"):
        use_fastkron(unapplied)


@pytest.mark.parametrize("form", ["low_rank", "both", "whole", "tucker", "conv"])
def test_states_of_our_layers(form: str) -> None:
    """`nn.LoKrLinear` and `nn.LoKrConv2d` read LyCORIS's names, and LyCORIS reads those that they write."""
    rank = 12 if form == "whole" else 2
    if form in ("tucker", "conv"):
        base: Any = nn.Conv2d(24, 36, 3)
        own: Any = LoKrConv2d.from_conv(base, rank, alpha=3, use_tucker=form == "tucker")
    else:
        base = nn.Linear(36, 64)
        own = LoKrLinear.from_linear(base, rank, alpha=3, decompose_both=form == "both")
    theirs: Any = LokrModule("it", copy.deepcopy(base), lora_dim=rank, alpha=3, decompose_both=form == "both", use_tucker=form == "tucker")
    assert {n for n, _ in theirs.named_parameters()} == {n for n, _ in own.named_parameters() if n.startswith("lokr")}
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    own.load_adapter_state_dict(theirs.state_dict())
    x = torch.randn(2, 24, 5, 5) if base.weight.ndim == 4 else torch.randn(5, 36)
    torch.testing.assert_close(own(x), theirs(x), rtol=1e-4, atol=1e-5)
    for p in own.parameters():
        nn.init.normal_(p.data, std=0.3) if p.requires_grad else None
    theirs.load_state_dict(own.adapter_state_dict())
    torch.testing.assert_close(own(x), theirs(x), rtol=1e-4, atol=1e-5)
