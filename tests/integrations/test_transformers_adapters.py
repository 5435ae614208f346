"""PEFT's adapters on the projections of gated MLPs, with `use_fastkron` and without."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastkron_py.integrations import transformers as layers
from fastkron_py.integrations.transformers import use_fastkron
from fastkron_py.testing import assert_close

pytest.importorskip("peft", reason="the extra peft is not installed")
pytest.importorskip("transformers", reason="the extra llm is not installed")
peft: Any = importlib.import_module("peft")


class MLP(nn.Module):
    """Two wide weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """One wide weight, gate before up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(12, 40, bias=False), nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


LORA = {"r": 4, "lora_alpha": 6, "init_lora_weights": False}
CASES: dict[str, tuple[type[nn.Module], list[str], dict[str, Any]]] = {
    "all": (MLP, ["gate_proj", "up_proj", "down_proj"], {}),
    "gate alone": (MLP, ["gate_proj"], {}),
    "ranks that differ": (MLP, ["gate_proj", "up_proj"], {"rank_pattern": {"gate_proj": 7}}),
    "one weight": (Fused, ["gate_up_proj", "down_proj"], {}),
}


def adapted(kind: type[nn.Module], targets: list[str], config: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = peft.get_peft_model(kind(), config(target_modules=targets, **options))
    return model


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and gradients of x and of the adapters."""
    x = x.clone().requires_grad_()
    y = model(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *[p for p in model.parameters() if p.requires_grad]], dy)]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each call of the fused functions."""
    calls: list[None] = []
    for name in ("gated_linear", "gated_mlp"):
        function = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *a, _call=function, **k: calls.append(None) or _call(*a, **k))  # type: ignore[func-returns-value]
    return calls


@pytest.mark.parametrize("name", CASES)
def test_lora_is_added_before_the_activation(name: str, backend_name: str, device: torch.device, fused_calls: list[None]) -> None:
    """Adapters from before the change, against PEFT's own in float64."""
    kind, targets, options = CASES[name]
    model = adapted(kind, targets, peft.LoraConfig, **LORA, **options).to(device)
    plain = copy.deepcopy(model).double()
    x = torch.randn(2, 5, 12).to(device)
    for backward in ("save", "recompute"):
        with use_fastkron(model, backward=backward) as applied:
            assert len(applied.replaced) == 1
            found = results(model, x)
            for actual, expected in zip(found, results(plain, x.double()), strict=True):
                assert_close(actual, expected, steps=4)
    assert len(fused_calls) == 2


def test_dropout_draws_the_same_numbers(fused_calls: list[None]) -> None:
    model = adapted(MLP, ["gate_proj", "up_proj"], peft.LoraConfig, **LORA, lora_dropout=0.5).double()
    fused, x = copy.deepcopy(model), torch.randn(5, 12, dtype=torch.float64)
    use_fastkron(fused)
    torch.manual_seed(1)
    expected = results(model, x)
    torch.manual_seed(1)
    for got, want in zip(results(fused, x), expected, strict=True):
        assert_close(got, want, steps=64)
    assert fused_calls


def test_adapters_that_come_and_go(fused_calls: list[None]) -> None:
    """Added to a changed model, switched off, two at once, merged, taken away; all in the fused product."""
    mlp = MLP()
    use_fastkron(mlp)
    model: Any = peft.get_peft_model(mlp, peft.LoraConfig(target_modules=["gate_proj", "up_proj"], **LORA))
    model.add_adapter("second", peft.LoraConfig(target_modules=["up_proj"], **LORA))
    plain: Any = copy.deepcopy(model)
    layers_of_plain = plain.base_model.model
    layers_of_plain.__class__ = MLP
    x = torch.randn(2, 5, 12)

    def check() -> Tensor:
        fused_calls.clear()
        y = model(x)
        assert fused_calls == [None]
        assert_close(y, plain(x), steps=4)
        return y.detach()

    first = check()
    assert_close(model(x[0, 0]), plain(x[0, 0]), steps=4)
    for m in (model, plain):
        m.base_model.set_adapter(["default", "second"])
    assert not torch.allclose(check(), first)
    with model.disable_adapter(), plain.disable_adapter():
        assert not torch.allclose(check(), first)
    for m in (model, plain):
        m.base_model.set_adapter("default")
    assert_close(check(), first)
    for m in (model, plain):
        m.merge_adapter()
    assert_close(check(), first, steps=8)
    model.unload()
    assert_close(model.base_model.model(x), plain.unload()(x))


@pytest.mark.parametrize("name", ["DoRA", "LoKr", "a bias in B"])
def test_other_adapters_compute_as_before(name: str, fused_calls: list[None]) -> None:
    options: dict[str, Any] = {
        "DoRA": {**LORA, "use_dora": True},
        "LoKr": {"r": 2, "init_weights": False},
        "a bias in B": {**LORA, "lora_bias": True},
    }[name]
    config = peft.LoKrConfig if name == "LoKr" else peft.LoraConfig
    mlp = MLP()
    use_fastkron(mlp)
    torch.manual_seed(0)
    model = peft.get_peft_model(mlp, config(target_modules=["gate_proj", "up_proj"], **options))
    x = torch.randn(2, 5, 12)
    y = model(x)
    mlp.__class__ = MLP
    assert torch.equal(y, model(x))
    assert not fused_calls
    with pytest.raises(ValueError, match=r"got base_model.model: its gate_proj is peft\.\S+, an adapter's or a quantised layer"):
        use_fastkron(model)
