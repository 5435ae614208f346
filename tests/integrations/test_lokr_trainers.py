"""Training a tiny Llama and a tiny FLUX with LoKr end to end: stock and with `use_fastkron`, saved, and read by each library."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastkron_py.integrations.peft import use_fastkron
from fastkron_py.nn import load_lokr, lokr_state

pytest.importorskip("lycoris", reason="the extra lycoris is not installed")
pytest.importorskip("transformers", reason="the extra llm is not installed")

import lycoris
import transformers

from fastkron_py.integrations.lycoris import use_fastkron as use_fastkron_in_lycoris

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
WAYS = ["eager", "autocast", *[pytest.param(way, marks=pytest.mark.full) for way in ("checkpointing", "compiled")]]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, use_cache=False, **sizes))


def flux() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "timestep_guidance_channels": 8}
    blocks = {"num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 4, 4, 4)}
    return diffusers.Flux2Transformer2DModel(patch_size=1, in_channels=4, **sizes, **blocks)


def loss_of_llama(model: Any) -> Tensor:
    tokens = torch.arange(40).view(2, 20) * 7 % 50
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def loss_of_flux(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    image, text = torch.randn(1, 6, 4, generator=generator), torch.randn(1, 5, 32, generator=generator)
    ids = [torch.arange(n).unsqueeze(1).expand(n, 4).float() for n in (6, 5)]
    given = {"hidden_states": image, "encoder_hidden_states": text, "img_ids": ids[0], "txt_ids": ids[1]}
    y = model(**given, timestep=torch.tensor([0.5]), guidance=torch.tensor([1.0]), return_dict=False)[0]
    loss: Tensor = (y - image).square().mean()
    return loss


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor], list[str]]] = {
    "llama": (llama, loss_of_llama, ["q_proj", "v_proj", "up_proj"]),
    "flux": (flux, loss_of_flux, ["to_q", "to_v", "linear_in"]),
}


def train(model: Any, loss_of: Callable[[Any], Tensor], parameters: Iterator[Any], way: str) -> list[float]:
    """Losses of a few steps."""
    own = [p for p in parameters if p.requires_grad]
    optimiser = torch.optim.AdamW(own, lr=0.02)
    if way == "checkpointing":
        model.gradient_checkpointing_enable() if hasattr(model, "gradient_checkpointing_enable") else model.enable_gradient_checkpointing()
        model.train()
    torch._dynamo.reset()
    called = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else contextlib.nullcontext():
            loss = loss_of(called)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(losses: list[float], others: list[float], way: str) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), rtol=3e-2 if way == "autocast" else 1e-4, atol=1e-4)
    assert losses[-1] < losses[0] - 1e-3  # something was learned


def adapted_by_peft(name: str) -> tuple[Any, Any]:
    make, _, targets = MODELS[name]
    base = make()
    config = peft.LoKrConfig(r=2, alpha=4, target_modules=targets, init_weights="lycoris")
    torch.manual_seed(1)
    return base, peft.get_peft_model(copy.deepcopy(base), config)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_peft(name: str, way: str, tmp_path: Path) -> None:
    loss_of = MODELS[name][1]
    found = []
    for fast in (False, True):
        base, model = adapted_by_peft(name)
        if fast:
            assert len(use_fastkron(model).replaced) >= 3
        if way == "checkpointing" and name == "llama":
            model.enable_input_require_grads()
        found.append(train(model.base_model.model if way == "checkpointing" else model, loss_of, model.parameters(), way))
    assert_same(*found, way)
    model.save_pretrained(tmp_path / "peft")
    ours = copy.deepcopy(base)
    names = load_lokr(ours, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "peft"))
    want = loss_of(model.eval()).item()
    assert len(names) >= 3
    assert loss_of(theirs.eval()).item() == pytest.approx(want, rel=1e-5)
    assert loss_of(ours.eval()).item() == pytest.approx(want, rel=1e-5)
    if name == "flux":
        other = copy.deepcopy(base)
        other.load_lora_adapter(lokr_state(ours, "diffusers"), prefix="transformer", adapter_name="default")
        assert loss_of(other.eval()).item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_lycoris(name: str, way: str, tmp_path: Path) -> None:
    make, loss_of, targets = MODELS[name]
    found = []
    for fast in (False, True):
        base = make()
        model = copy.deepcopy(base).requires_grad_(False)
        kind = lycoris.LycorisNetwork
        before = {n: getattr(kind, n) for n in ("TARGET_REPLACE_MODULE", "TARGET_REPLACE_NAME")}
        torch.manual_seed(1)
        try:
            kind.apply_preset({"target_name": [f".*{target}$" for target in targets], "target_module": []})
            network = kind(model, 1.0, lora_dim=2, alpha=4, network_module="lokr", warn_on_unmatched=False)
        finally:
            for n, former in before.items():
                setattr(kind, n, former)
        network.apply_to()
        if fast:
            assert len(use_fastkron_in_lycoris(network).replaced) >= 3
        if way == "checkpointing" and name == "llama":
            model.enable_input_require_grads()
        found.append(train(model, loss_of, network.parameters(), way))
    assert_same(*found, way)
    path = tmp_path / "it.safetensors"
    network.save_weights(str(path), None, {})
    want = loss_of(model.eval()).item()
    ours, theirs = copy.deepcopy(base), copy.deepcopy(base)
    assert len(load_lokr(ours, path)) == len(network.loras)
    assert loss_of(ours.eval()).item() == pytest.approx(want, rel=1e-5)
    save_file({k: t.contiguous() for k, t in lokr_state(ours).items()}, path)
    lycoris.create_lycoris_from_weights(1.0, str(path), theirs)[0].apply_to()
    assert loss_of(theirs.eval()).item() == pytest.approx(want, rel=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_our_layers_in_accelerate() -> None:
    """Layers from `load_lokr` train on, and states of the model load."""
    accelerate = pytest.importorskip("accelerate")
    base, model = adapted_by_peft("llama")
    state = {k: t.detach().clone() for k, t in model.state_dict().items() if "lokr_" in k}
    ours = copy.deepcopy(base)
    load_lokr(ours, state, scale=2.0)
    optimiser = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad and p.ndim], lr=0.02)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimiser = accelerator.prepare(ours, optimiser)
    losses = []
    for _ in range(3):
        loss = loss_of_llama(prepared)
        accelerator.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    other = copy.deepcopy(base)
    load_lokr(other, state, scale=2.0)
    other.load_state_dict(ours.state_dict())
    assert loss_of_llama(other).item() == pytest.approx(loss_of_llama(ours).item(), rel=1e-6)
