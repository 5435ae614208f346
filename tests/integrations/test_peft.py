"""PEFT's LoKr layers with and without `use_fastkron`: the same results, gradients, states and random numbers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoKrConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lokr.layer import LoKrLayer
from torch import Tensor, nn

from fastkron_py.integrations.peft import FastLoKr, revert_fastkron, use_fastkron
from fastkron_py.nn import LoKrLinear
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:peft", "ignore:Already unmerged:UserWarning")


class Net(nn.Module):
    """Linear layers and convolutions of one and two dimensions, and a grouped one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 36, 3, padding=1)
        self.point = nn.Conv2d(36, 36, 1)
        self.depth = nn.Conv2d(36, 36, 3, padding=1, groups=4)
        self.line = nn.Conv1d(36, 30, 3)
        self.up = nn.Linear(30, 48)
        self.down = nn.Linear(48, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.depth(self.point(self.conv(x)).relu())
        h = self.line(h.flatten(2)).mT
        y: Tensor = self.down(self.up(h).relu())
        return y


TARGETS = ["conv", "point", "line", "up", "down"]
CONFIGS: dict[str, dict[str, Any]] = {
    "low_rank": {"r": 2, "alpha": 3},
    "whole": {"r": 16, "alpha": 8},
    "both": {"r": 1, "decompose_both": True},
    "tucker": {"r": 2, "use_effective_conv2d": True},
    "factor": {"r": 2, "decompose_factor": 2},
    "rank_dropout": {"r": 2, "rank_dropout": 0.5},
    "scaled_rank_dropout": {"r": 2, "rank_dropout": 0.3, "rank_dropout_scale": True},
    "module_dropout": {"r": 2, "module_dropout": 0.5},
}


def randomised(model: nn.Module) -> Any:
    """Adapters that are not 0."""
    for n, p in model.named_parameters():
        if "lokr_" in n:
            nn.init.normal_(p, std=0.3)
    return model


def made(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    config = LoKrConfig(**({"target_modules": TARGETS, "init_weights": False} | CONFIGS[name] | options))
    return randomised(get_peft_model(Net().to(dtype), config).to(dtype))


def operand(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 4, 5, 5, dtype=torch.float64).to(dtype)


def run(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The result and the gradients, from a seed: dropout draws the same numbers each time."""
    model.zero_grad()
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return y.detach(), grads | {"x": x.grad}  # type: ignore[dict-item]


def layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoKrLayer)]


@pytest.mark.parametrize("name", CONFIGS)
def test_results_and_gradients(name: str) -> None:
    for training in (True, False):
        model = made(name).train(training)
        x = operand()
        want, grads = run(model, x)
        with use_fastkron(model) as applied:
            assert len(applied.replaced) >= 4
            assert all("line" in n for n in applied.left_alone)
            assert sum(isinstance(m, FastLoKr) for m in layers(model)) == len(applied.replaced)
            got, fast_grads = run(model, x)
        assert not any(isinstance(m, FastLoKr) for m in layers(model))
        assert_close(got, want, steps=16)
        assert fast_grads.keys() == grads.keys()
        for n, g in grads.items():
            assert_close(fast_grads[n], g, steps=64, name=n)
        again, _ = run(model, x)
        assert torch.equal(again, want)


def test_reasons() -> None:
    model = made("whole", target_modules=[*TARGETS, "depth"])
    left = use_fastkron(model).left_alone
    assert left == {
        "base_model.model.depth": "its convolution has 4 groups",
        "base_model.model.line": "PEFT's weight of a Conv1d with a whole lokr_w2 is no Kronecker product",
    }
    with pytest.raises(ValueError, match=r"got torch.nn.modules.linear.Linear, which has none among its modules \(Linear\)$"):
        use_fastkron(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module; got list$"):
        use_fastkron([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module; got list$"):
        revert_fastkron([])  # type: ignore[arg-type]


def test_a_second_time_changes_nothing() -> None:
    model = made("low_rank")
    first = use_fastkron(model)
    with use_fastkron(model) as second:
        assert second.replaced == ()
        assert {*second.left_alone} == {*first.replaced, *first.left_alone}
        assert {second.left_alone[n] for n in first.replaced} == {"already patched by use_fastkron"}
    assert sum(isinstance(m, FastLoKr) for m in layers(model)) == len(first.replaced) > 0
    first.close()
    assert not any(isinstance(m, FastLoKr) for m in layers(model))


def test_a_replaced_forward_is_left_alone() -> None:
    model = made("low_rank")
    layer = layers(model)[-1]
    layer.forward = layer.forward
    left = use_fastkron(model).left_alone
    assert left["base_model.model.down"] == "its forward is another version's, or was replaced by another library"


def test_switching_merging_and_several_adapters() -> None:
    model = made("low_rank").eval()
    x = operand()
    base = model.get_base_model()
    model.add_adapter("second", LoKrConfig(r=1, target_modules=["up", "conv"], init_weights=False))
    randomised(model.double())
    steps = [
        lambda: model.set_adapter("second"),
        lambda: model.set_adapter("default"),
        lambda: model.base_model.set_adapter(["default", "second"]),
    ]

    def results() -> list[Tensor]:
        found = []
        for step in steps:
            step()
            found.append(model(x))
        with model.disable_adapter():
            found.append(model(x))
        return found

    want = results()
    use_fastkron(model)
    model.add_adapter("third", LoKrConfig(r=1, target_modules=["up"], init_weights=False))  # of a layer that is changed
    for got, w in zip(results(), want, strict=True):
        assert_close(got, w.detach(), steps=16)
    model.merge_adapter()
    assert_close(model(x), want[2].detach(), steps=64)
    model.unmerge_adapter()
    assert_close(model(x), want[2].detach(), steps=64)
    assert_close(model.merge_and_unload()(x), want[2].detach(), steps=64)
    assert base is model.get_base_model()


def test_saving_copying_and_optimising(tmp_path: Path) -> None:
    model = made("low_rank", dtype=torch.float32)
    x = operand(torch.float32)
    before, parameters = model.state_dict(), list(model.parameters())
    use_fastkron(model)
    assert model.state_dict().keys() == before.keys()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    want = model(x).detach()
    model.save_pretrained(tmp_path)
    base = Net()
    base.load_state_dict(copy.deepcopy(model).unload().state_dict())
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(loaded(x), want, rtol=1e-4, atol=1e-5)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    unpickled = torch.load(file, weights_only=False)
    assert torch.equal(unpickled(x), want)
    for each in (copied, unpickled):
        revert_fastkron(each)
        assert not any(isinstance(m, FastLoKr) for m in layers(each))
        torch.testing.assert_close(each(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")], ids="-".join)
def test_half_types(dtypes: tuple[str, str]) -> None:
    """Layers and adapters of other dtypes: as close to float64 as PEFT is, up to the rounding of the operands."""
    of_layer, of_adapter = (getattr(torch, d) for d in dtypes)
    model = get_peft_model(nn.Sequential(nn.Linear(24, 30)).to(of_layer), LoKrConfig(r=2, target_modules=["0"], init_weights=False))
    layer = layers(model)[0]
    for n, p in layer.named_parameters():
        if "lokr" in n:
            p.data = p.data.to(of_adapter)
    x = torch.randn(7, 24).to(of_layer)
    want = copy.deepcopy(model).double()(x.double())
    use_fastkron(model)
    got = model(x)
    assert got.dtype == of_layer
    assert_close(got, want.detach(), steps=4)
    got.sum().backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())


def test_lora_beside_lokr() -> None:
    """Another kind of adapter is not touched."""
    model = get_peft_model(Net(), LoraConfig(target_modules=["up"]))
    with pytest.raises(ValueError, match=r"got peft.peft_model.PeftModel with peft.tuners.lora.layer.Linear, peft.tuners.lora.model"):
        use_fastkron(model)
    with pytest.raises(
        ValueError, match=r"with a LoKrConfig\) that can be replaced; got .*Sequential with fastkron_py.nn.lokr.LoKrLinear$"
    ):
        use_fastkron(nn.Sequential(LoKrLinear(4, 4, 2)))


@pytest.mark.parametrize("both", [False, True], ids=["second", "both"])
def test_states_of_our_layer(both: bool) -> None:
    """`nn.LoKrLinear` reads PEFT's names, and PEFT reads those that it writes."""
    base = nn.Sequential(nn.Linear(36, 64))
    model = get_peft_model(copy.deepcopy(base), LoKrConfig(r=2, alpha=6, target_modules=["0"], decompose_both=both))
    randomised(model)
    own = LoKrLinear.from_linear(base[0], 2, decompose_both=both, alpha=6)
    theirs = layers(model)[0]
    own.load_adapter_state_dict({n: p for n, p in theirs.state_dict().items() if n.startswith("lokr")})
    x = torch.randn(5, 36)
    torch.testing.assert_close(own(x), model(x))
    for p in own.parameters():
        nn.init.normal_(p.data, std=0.3) if p.requires_grad else None
    written = {f"{n}.default": t for n, t in own.adapter_state_dict("peft").items()}
    assert not theirs.load_state_dict(written, strict=False).unexpected_keys
    torch.testing.assert_close(own(x), model(x))
