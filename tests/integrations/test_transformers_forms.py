"""Which forward passes `use_fastkron` takes for a gated MLP: the formula, whatever the names, and nothing that comes close to it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.integrations import transformers as layers
from fastkron_py.integrations.transformers import Form, read_form, use_fastkron
from fastkron_py.testing import assert_close

pytest.importorskip("transformers", reason="the extra llm is not installed")
activations: Any = importlib.import_module("transformers.activations")


class Two(nn.Module):
    """Two wide weights, under names that say nothing."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], act: nn.Module | None = None, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10, bias), nn.Linear(6, 10, bias), nn.Linear(10, 5, bias)
        self.act = act or nn.SiLU()
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class One(Two):
    """One weight for both."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        del self.b
        self.a = nn.Linear(6, 20, self.c.bias is not None)


def product(m: Any, x: Tensor) -> Tensor:
    return m.c(m.act(m.b(x)) * m.a(x))  # type: ignore[no-any-return]


def fused(halves: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate, up = halves(m.a(x))
        return m.c(up * m.act(gate))  # type: ignore[no-any-return]

    return forward


def clamped(m: Any, x: Tensor) -> Tensor:
    g, u = m.a(x).clamp(max=2), m.b(x).clamp(-2, 2)
    return m.c((u + 1) * g * torch.sigmoid(1.702 * g))  # type: ignore[no-any-return]


def rounded(m: Any, x: Tensor) -> Tensor:
    return m.c((m.act(m.b(x).float()) * m.a(x).float()).to(x.dtype))  # type: ignore[no-any-return]


def moshi(m: Any, x: Tensor) -> Tensor:
    wide = m.a(x).view(*x.shape[:2], 2, -1)
    return m.c(m.act(wide[..., 0, :]) * wide[..., 1, :])  # type: ignore[no-any-return]


def scaled(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(x) * F.silu(0.75 * m.b(x))) * 0.5  # type: ignore[no-any-return]


def dropped(m: Any, x: Tensor) -> Tensor:
    hidden = F.dropout(m.act(m.b(x)) * m.a(x), p=0.3, training=m.training)
    return F.dropout(m.c(hidden), 0.2, m.training)


FORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "two weights": (lambda: Two(product), {"up": "a", "gate": "b", "down": "c", "activation": "silu"}),
    "no biases": (lambda: Two(product, bias=False), {"gate": "b"}),
    "gate first": (lambda: Two(lambda m, x: m.c(F.silu(m.a(x)) * m.b(x))), {"up": "b", "gate": "a"}),
    "rounded to float32": (lambda: Two(rounded), {"gate": "b"}),
    "gate, up": (lambda: One(fused(lambda t: t.chunk(2, -1))), {"up": "a", "gate": "a", "layout": "gate, up"}),
    "up, gate": (lambda: One(fused(lambda t: t.chunk(2, -1)[::-1])), {"layout": "up, gate"}),
    "no biases, fused": (lambda: One(fused(lambda t: t.chunk(2, -1)), bias=False), {"layout": "gate, up"}),
    "reshaped": (lambda: One(moshi), {"layout": "gate, up"}),
    "of GPT-OSS": (lambda: Two(clamped), {"up": "b", "gate": "a", "activation": "clamped_swiglu(2, 1.702, 1, 1)"}),
    "multiplied": (lambda: Two(scaled), {"activation": "clamped_swiglu(inf, 0.75, 0, 0.75)", "scale": 0.5}),
    "dropouts": (lambda: Two(dropped), {"drops": True}),
    **{
        name: (lambda name=name: Two(product, activations.ACT2FN[name]), {"gate": "b", "activation": ours})
        for name, ours in {
            **{"gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
            **{"quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid", "mish": "mish", "swish": "silu"},
        }.items()
    },
    "linear": (lambda: Two(product, activations.ACT2FN["linear"]), {"activation": "identity"}),
}


def wide(m: nn.Module) -> nn.Module:
    """With weights that reach clamps and curves."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(2 * torch.randn_like(p))
    return m


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_and_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one fused call, with the gradients of every parameter, as transformers' own functions in float64."""
    make, expected = FORMS[name]
    mlp = wide(make()).eval()
    form = read_form(mlp)
    assert isinstance(form, Form)
    assert {key: getattr(form, key) for key in expected} == expected
    plain = copy.deepcopy(mlp).double()
    calls = []
    monkeypatch.setattr(layers, "gated_mlp", lambda *args, _call=layers.gated_mlp, **kwargs: calls.append(None) or _call(*args, **kwargs))
    for backward in ("save", "recompute"):
        with use_fastkron(mlp, backward=backward):
            x = torch.randn(3, 7, 6, requires_grad=True)
            y, right = mlp(x), plain(x.double())
            assert_close(y, right)
            dy = torch.randn_like(y)
            found = torch.autograd.grad(y, [x, *mlp.parameters()], dy)
            wanted = torch.autograd.grad(right, [x, *plain.parameters()], dy.double())
            for a, b in zip(found, wanted, strict=True):
                assert_close(a, b)
    assert len(calls) == 2


def test_compiled() -> None:
    for name in ("gate, up", "multiplied", "dropouts"):
        torch.compiler.reset()
        mlp = wide(FORMS[name][0]()).eval()
        plain, x = copy.deepcopy(mlp).double(), torch.randn(3, 7, 6)
        use_fastkron(mlp)
        assert_close(torch.compile(mlp, backend="eager", fullgraph=True)(x), plain(x.double()))


def test_gate_of_gpt_oss() -> None:
    """Against transformers' own function."""
    gpt_oss: Any = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    pairs = 5 * torch.randn(20, 64, dtype=torch.float64)
    expected = gpt_oss.GptOssExperts._apply_gate(SimpleNamespace(limit=7.0, alpha=1.702), pairs)
    torch.testing.assert_close(find_activation("clamped_swiglu").gate(pairs[:, 1::2], pairs[:, ::2]), expected)


def test_an_active_dropout_is_drawn() -> None:
    mlp = wide(Two(dropped))
    x = torch.randn(3, 7, 6)
    torch.manual_seed(1)
    expected = mlp(x)
    use_fastkron(mlp)
    torch.manual_seed(1)
    assert torch.equal(mlp(x), expected)
    assert not torch.equal(mlp(x), expected)
    assert not torch.equal(mlp.eval()(x), expected)


# ---- what is not the formula -------------------------------------------------------------------------


def _normed() -> nn.Module:
    m = Two(lambda m, x: m.c(m.norm(m.act(m.b(x)) * m.a(x))))
    m.norm = nn.LayerNorm(10)
    return m


def _learned() -> nn.Module:
    m = Two(lambda m, x: m.c(m.act(m.b(x)) * m.a(x)) * m.scale)
    m.scale = nn.Parameter(torch.ones(()))
    return m


NO_FORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a norm": (_normed, "parameters or buffers besides"),
    "a parameter": (_learned, "parameters or buffers besides"),
    "another activation": (lambda: Two(product, nn.Tanh()), "does not get up"),
    "an activation nearby": (lambda: Two(product, nn.Hardswish()), "does not get up"),
    "an activation of the product": (lambda: Two(lambda m, x: m.c(m.act(m.b(x) * m.a(x)))), "does not get up"),
    "every other column": (lambda: One(fused(lambda t: (t[..., 1::2], t[..., ::2]))), "does not get up"),
    "a sum": (lambda: Two(lambda m, x: m.c(m.act(m.b(x)) + m.a(x))), "does not get up"),
    "other columns": (lambda: Two(lambda m, x: m.c(m.act(m.b(x)) * m.a(x).flip(-1))), "does not get up"),
    "other rows": (lambda: Two(lambda m, x: m.c(m.act(m.b(x)) * m.a(x).flip(-2))), "does not get up"),
    "another limit": (lambda: Two(lambda m, x: m.c(m.act(m.b(x)).clamp(max=3) * m.a(x))), "does not get up"),
    "a residual": (lambda: Two(lambda m, x: x[..., :5] + product(m, x)), "more than multiply"),
    "an activation after it": (lambda: Two(lambda m, x: m.act(product(m, x))), "more than multiply"),
    "a tuple": (lambda: Two(lambda m, x: (product(m, x), None)), "does not run by itself"),
    "an error": (lambda: Two(lambda m, x: m.c(m.a(x) * m.b(x) * m.missing)), "does not run by itself: AttributeError"),
}


@pytest.mark.parametrize("name", NO_FORMS)
def test_what_comes_close_is_left_alone(name: str) -> None:
    make, reason = NO_FORMS[name]
    mlp = make()
    state = {key: t.clone() for key, t in mlp.state_dict().items()}
    with pytest.raises(ValueError, match=f"model: expected gated MLPs, .*; got it: .*{reason}"):
        use_fastkron(mlp)
    assert all(torch.equal(t, state[key]) for key, t in mlp.state_dict().items())


def test_what_is_no_mlp_is_not_named() -> None:
    """Input before or beside the projections, other sizes, other numbers of projections."""
    other = Two(product)
    other.c = nn.Linear(11, 5)
    four = Two(product)
    four.d = nn.Linear(6, 10)
    for module in (
        Two(lambda m, x: m.c(m.a(2 * x) * m.b(x))),
        Two(lambda m, x: m.a(x) @ m.b(x).mT @ m.c(m.a(x))),
        other,
        four,
        nn.Linear(2, 2),
    ):
        assert read_form(module) is None


def test_the_summary() -> None:
    model = nn.ModuleList([Two(product), Two(product), One(moshi), Two(product, nn.Tanh())])
    lines = str(use_fastkron(model)).splitlines()
    assert lines[:3] == ["Applied(3 replaced, 1 left alone)", "  2 Two replaced", "  1 One replaced"]
    assert lines[3].startswith("  1 Two left alone: its down projection does not get up * act(gate) with one of clamped_swiglu, gelu, ")


def test_weights_are_not_read() -> None:
    with torch.device("meta"):
        mlp = Two(product)
    assert use_fastkron(mlp).replaced == ("",)
    assert mlp(torch.empty(3, 6, device="meta")).shape == (3, 5)
