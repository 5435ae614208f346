"""Hugging Face models with `use_fastkron`: the same numbers, states and modules; what is left alone; the way back."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastkron_py
from fastkron_py.integrations.transformers import GatedProjections, revert_fastkron, use_fastkron
from fastkron_py.nn import LoKrLinear
from fastkron_py.testing import assert_close

pytest.importorskip("transformers", reason="the extra llm is not installed")
transformers: Any = importlib.import_module("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
FAMILIES = {
    "Llama": "LlamaConfig",
    "Mistral": "MistralConfig",
    "Qwen2": "Qwen2Config",
    "Qwen3": "Qwen3Config",
    "Gemma": "GemmaConfig",
    "Gemma2": "Gemma2Config",
    "Gemma3": "Gemma3TextConfig",
}
IDS = torch.arange(2, 18).reshape(2, 8)


def tiny(family: str = "Llama", **options: Any) -> Any:
    torch.manual_seed(0)
    # Wide weights, so that the MLPs matter to the result.
    config = getattr(transformers, FAMILIES[family])(**{**SIZES, "initializer_range": 0.3, "attn_implementation": "eager", **options})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def mlps(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def loss_of(model: Any) -> Tensor:
    device = next(model.parameters()).device
    loss: Tensor = model(IDS.to(device), labels=IDS.to(device), use_cache=False).loss
    return loss


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(IDS.to(next(model.parameters()).device), use_cache=False).logits
    return logits


def gradients_of(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def cloned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in state.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def assert_close_model(actual: Tensor, expected: Tensor) -> None:
    """Other kernels may multiply, in another order, and a model's later layers magnify the roundings of its first ones."""
    assert_close(actual, expected, rms_tol=1e-5, max_tol=4e-5)


def assert_applied(model: Any) -> None:
    assert all(isinstance(mlp, GatedProjections) for mlp in mlps(model))


def places(model: Any) -> list[int]:
    return [p.data_ptr() for p in model.parameters()]


# ---- the same numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_and_comes_back(family: str, place: torch.device) -> None:
    for backward in ("save", "recompute"):
        model = tiny(family).to(place)
        state, classes, parameters = cloned(model.state_dict()), [type(m) for m in mlps(model)], list(model.parameters())
        logits, gradients, memory = logits_of(model), gradients_of(model), places(model)
        with use_fastkron(model, backward=backward) as applied:
            assert places(model) == memory
            assert applied.replaced == ("model.layers.0.mlp", "model.layers.1.mlp")
            assert not applied.left_alone
            assert_applied(model)
            assert all(isinstance(m, c) for m, c in zip(mlps(model), classes, strict=True))
            assert_same(model.state_dict(), state)
            assert_close_model(logits_of(model), logits)
            found = gradients_of(model)
            for name, gradient in gradients.items():
                assert_close_model(found[name], gradient)
            mlps(model)[0].up_proj.weight.data.neg_()
            assert (logits_of(model) - logits).norm() > 0.01 * logits.norm()
            mlps(model)[0].up_proj.weight.data.neg_()
        assert [type(m) for m in mlps(model)] == classes
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert not any(name.startswith("_fastkron") for m in mlps(model) for name in vars(m))
        assert places(model) == memory
        assert_same(model.state_dict(), state)
        assert torch.equal(logits_of(model), logits)
        applied.close()


def test_checkpointing_and_generation() -> None:
    model = tiny().train()
    gradients, tokens = gradients_of(model), model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(2, 4))
    use_fastkron(model)
    assert torch.equal(model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(2, 4)), tokens)
    layer = model.model.layers[0]
    x = torch.randn(2, 3, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(layer.mlp(x).sum(), x)
    for reentrant in (True, False):
        x.grad = None
        torch.utils.checkpoint.checkpoint(layer.mlp, x, use_reentrant=reentrant).sum().backward()
        assert_close(x.grad, expected)
    for name, gradient in gradients_of(model).items():
        assert_close(gradient, gradients[name])


# ---- states, copies, conversions -----------------------------------------------------------------


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": _saved,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_are_changed_and_can_be_changed_back(way: str) -> None:
    model = tiny()
    applied = use_fastkron(model, backward="recompute")
    logits = logits_of(model)
    twin = COPIES[way](model)
    applied.close()
    assert_applied(twin)
    assert mlps(twin)[0]._fastkron_backward == "recompute"
    assert_same(twin.state_dict(), model.state_dict())
    with torch.no_grad():
        mlps(model)[0].up_proj.weight.zero_()
    assert_close(logits_of(twin), logits)
    revert_fastkron(twin)
    assert [type(m) for m in mlps(twin)] == [type(m) for m in mlps(model)]
    assert_close(logits_of(twin), logits)
    assert use_fastkron(twin).replaced


def test_states_are_those_of_transformers(tmp_path: Path) -> None:
    model, other = tiny(), tiny()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    use_fastkron(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(cloned(loaded.state_dict()), cloned(model.state_dict()))
    assert use_fastkron(loaded).replaced
    model.load_state_dict(other.state_dict())
    assert_applied(model)
    assert_close(logits_of(model), logits_of(other))
    model.load_state_dict(tiny().state_dict(), assign=True)
    assert_close(logits_of(model), logits_of(tiny()))
    gradients = gradients_of(tiny())
    for name, gradient in gradients_of(model).items():
        assert_close(gradient, gradients[name])


# ---- what is left alone ----------------------------------------------------------------------------


class Adapter(nn.Module):
    """A projection that another library has wrapped."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)  # type: ignore[no-any-return]


class OtherMLP(nn.Module):
    """Of nobody known."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def _set(path: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(mlp: Any) -> None:
        *parents, name = path.split(".")
        target = mlp
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value(getattr(target, name)))

    return change


def _parameter(convert: Callable[[Tensor], Tensor]) -> Callable[[Any], nn.Parameter]:
    return lambda p: nn.Parameter(convert(p.detach()), requires_grad=False)


OBSTACLES: dict[str, Callable[[Any], Any]] = {
    r"its gate_proj is \S+\.Adapter, an adapter's": _set("gate_proj", Adapter),
    "its up_proj has hooks": lambda mlp: mlp.up_proj.register_forward_hook(lambda *_: None),
    r"its gate_proj is \S+\.ParametrizedLinear": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.gate_proj),
    "the weight of its up_proj is of dtype torch.float8_e4m3fn": _set("up_proj.weight", _parameter(lambda t: t.to(torch.float8_e4m3fn))),
    "its gate_proj and up_proj differ in dtype": _set("gate_proj.weight", _parameter(lambda t: t.double())),
    "its gate_proj and up_proj differ in shape": _set("gate_proj.weight", _parameter(lambda t: t[:1])),
    r"its down projection does not get up \* act\(gate\) with one of .*silu": _set("act_fn", lambda _: nn.Tanh()),
    "its act_fn has hooks": lambda mlp: mlp.act_fn.register_forward_hook(lambda *_: None),
    "only one of its gate_proj and up_proj has a bias": _set("up_proj.bias", lambda _: nn.Parameter(torch.zeros(24))),
    "its forward was replaced by another library": _set("forward", lambda f: lambda x: f(x)),
}


def test_what_does_not_fit_is_left_alone_and_told() -> None:
    for reason, change in OBSTACLES.items():
        model = tiny()
        change(mlps(model)[0])
        kind = type(mlps(model)[0])
        applied = use_fastkron(model)
        assert applied.replaced == ("model.layers.1.mlp",)
        assert list(applied.left_alone) == ["model.layers.0.mlp"]
        assert type(mlps(model)[0]) is kind
        assert repr(applied) == "Applied(1 replaced, 1 left alone)"
        alone = mlps(model)[0]
        with pytest.raises(ValueError, match=f"model: expected gated MLPs, .*; got it: {reason}") as raised:
            use_fastkron(alone)
        assert applied.left_alone["model.layers.0.mlp"] in str(raised.value)


def test_tied_weights() -> None:
    """A module in two MLPs, and one weight in both projections."""
    model = tiny()
    first, second = mlps(model)
    second.up_proj = first.up_proj
    second.gate_proj.weight = second.up_proj.weight
    logits, gradients = logits_of(model), gradients_of(model)
    assert not use_fastkron(model).left_alone
    assert_close_model(logits_of(model), logits)
    for name, gradient in gradients_of(model).items():
        assert_close_model(gradient, gradients[name])


def test_a_model_that_holds_its_patch_is_copied_and_saved() -> None:
    model = tiny()
    model.applied = use_fastkron(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.applied.replaced == model.applied.replaced
        assert_close(logits_of(twin), logits_of(model))
        twin.applied.close()
        assert not any(isinstance(m, GatedProjections) for m in mlps(twin))
    assert_applied(model)


def test_bad_arguments() -> None:
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: use_fastkron("model"), TypeError, "model: expected a torch.nn.Module; got str"),  # type: ignore[arg-type]
        (lambda: revert_fastkron(None), TypeError, "model: expected a torch.nn.Module; got None"),  # type: ignore[arg-type]
        (lambda: use_fastkron(tiny(), backward="keep"), ValueError, "backward: expected one of save, recompute; got 'keep'"),
        (lambda: use_fastkron(tiny(), precision="low"), ValueError, "precision: expected"),
        (lambda: use_fastkron(nn.Linear(2, 2)), ValueError, "got torch.nn.modules.linear.Linear, which has none"),
        (lambda: use_fastkron(OtherMLP()), ValueError, "got it: its down projection does not get up"),
        (lambda: use_fastkron(nn.ModuleList([OtherMLP() for _ in range(5)])), ValueError, "; and 2 more"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()


def test_a_second_time_changes_nothing() -> None:
    model = tiny()
    with use_fastkron(model) as first:
        with use_fastkron(model) as second:
            assert second.left_alone == dict.fromkeys(first.replaced, "already patched by use_fastkron")
        assert_applied(model)
    use_fastkron(model)
    assert_applied(model)


@pytest.mark.parametrize("training", [True, False])
def test_t5_reads_the_weight_of_its_last_layer(training: bool) -> None:
    config = transformers.T5Config(d_model=24, d_ff=30, dropout_rate=0.0)
    block = importlib.import_module("transformers.models.t5.modeling_t5").T5DenseActDense(config).train(training)
    x = torch.randn(2, 5, 24)
    want = block(x).detach()
    block.wo = LoKrLinear.from_linear(block.wo, 2)
    assert_close(block(x).detach(), want.double(), steps=4)
    block.half().wo.float()  # T5 keeps this one in float32, and casts its operand
    assert block(x.half()).dtype == torch.float32


LATER: dict[str, Callable[[Any], Any]] = {
    "another activation": _set("act_fn", lambda _: nn.Tanh()),
    "an adapter of gate_proj": _set("gate_proj", Adapter),
    "an adapter of down_proj": _set("down_proj", Adapter),
    "a parametrisation": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.up_proj).parametrizations.weight.original0.data.mul_(2),
    "a hook": lambda mlp: mlp.up_proj.register_forward_hook(lambda module, args, y: 3 * y),
    "a hook of down_proj": lambda mlp: mlp.down_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a hook of the activation": lambda mlp: mlp.act_fn.register_forward_hook(lambda module, args, y: -y),
    "another forward": lambda mlp: setattr(mlp.gate_proj, "forward", lambda x: x.new_ones(*x.shape[:-1], 24)),
    "an assigned weight": lambda mlp: setattr(mlp.gate_proj, "weight", nn.Parameter(-mlp.gate_proj.weight.detach())),
    "a weight that moved": lambda mlp: setattr(mlp.up_proj.weight, "data", mlp.up_proj.weight.data.neg()),
    "a frozen weight": lambda mlp: mlp.gate_proj.weight.requires_grad_(False),
    "a bias": lambda mlp: setattr(mlp.down_proj, "bias", nn.Parameter(torch.ones_like(mlp.down_proj.weight[:, 0]))),
}


@pytest.mark.parametrize("change", LATER)
def test_what_comes_later_is_seen(change: str, device: torch.device) -> None:
    """After calls that were recorded, too, and gone again where it can go."""
    for backend in ("torch", "triton"):
        mlp = mlps(tiny())[0].to(device)
        plain = copy.deepcopy(mlp).double()
        use_fastkron(mlp)
        x, dy = torch.randn(2, 3, 16, device=device)

        def check(mlp: Any = mlp, plain: Any = plain, x: Tensor = x, dy: Tensor = dy) -> Tensor:
            y, expected = mlp(x), plain(x.double())
            assert_close(y, expected)
            parameters = [(dict(mlp.named_parameters())[name], p) for name, p in plain.named_parameters() if p.requires_grad]
            found, right = (
                torch.autograd.grad(out, ps, dy.to(out.dtype), allow_unused=True)
                for out, ps in zip((y, expected), zip(*parameters, strict=True), strict=True)
            )
            for a, b in zip(found, right, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert_close(a, b)
            return y.detach()

        with fastkron_py.backend(backend):
            before, _, _ = (check() for _ in range(3))
            handles = [LATER[change](m) for m in (mlp, plain)]
            after, _ = (check() for _ in range(2))
            assert torch.equal(after, before) is (change == "a frozen weight")
            if hasattr(handles[0], "remove"):
                for handle in handles:
                    handle.remove()
                assert torch.equal(check(), before)


def test_down_projections_with_adapters_and_functional_calls() -> None:
    mlp = mlps(tiny())[0]
    plain = copy.deepcopy(mlp)
    use_fastkron(mlp)
    for m in (mlp, plain):
        m.down_proj = Adapter(m.down_proj)
    x = torch.randn(3, 16)
    assert_close(mlp(x), plain(x))
    state = {name: t + 0.1 for name, t in plain.state_dict().items()}

    def loss(module: nn.Module, state: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, state, (x,)).square().sum()

    expected = torch.func.grad(loss, argnums=1)(plain, state)
    for name, gradient in torch.func.grad(loss, argnums=1)(mlp, state).items():
        assert_close(gradient, expected[name])
