"""`load_lokr`, `lokr_state` and `shard_lokr`: names, scales, projections that are cut or joined, parts for ranks, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refusal, assert_all_refused, value, wrong_type
from torch import Tensor, nn

from fastkron_py.nn import LoKrConv2d, LoKrLinear, load_lokr, lokr_state, shard_lokr
from fastkron_py.nn.lokr_tensors import cut_rows, join_rows
from fastkron_py.testing import assert_close


class Block(nn.Module):
    """Layers of several kinds, at names with dots and underscores."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(24, 24) for name in ("to_q", "to_k", "to_v")})
        self.ff = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.conv_in = nn.Conv2d(4, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv_in(x).flatten(2).mT
        h = self.attn["to_q"](h).sigmoid() * self.attn["to_k"](h) + self.attn["to_v"](h)
        y: Tensor = self.ff(h)
        return y


def randomised(model: nn.Module, scale: float = 0.3) -> nn.Module:
    for n, p in model.named_parameters():
        if "lokr_" in n:
            nn.init.normal_(p, std=scale)
    return model


def adapted(base: nn.Module, rank: int = 2, **options: Any) -> nn.Module:
    """A copy of a model with an adapter at each layer that can have one."""
    model = copy.deepcopy(base)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            parent, _, own = name.rpartition(".")
            layer: Any
            if isinstance(module, nn.Linear):
                layer = LoKrLinear.from_linear(module, rank, **{k: v for k, v in options.items() if k != "use_tucker"})
            else:
                layer = LoKrConv2d.from_conv(module, rank, **options)
            setattr(model.get_submodule(parent), own, layer)
    return randomised(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "low_rank": {"alpha": 3.0},
    "whole": {"rank": 16, "alpha": 4.0},
    "factor": {"factor": 2, "alpha": 1.0},
    "both": {"rank": 1, "decompose_both": True, "alpha": 3.0},
    "tucker": {"use_tucker": True, "alpha": 3.0},
    "decomposed": {"weight_decompose": True, "alpha": 3.0},
    "decomposed_by_inputs": {"weight_decompose": True, "wd_on_out": False},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("format", ["lycoris", "kohya", "diffusers", "peft"])
def test_what_is_written_is_read(name: str, format: str, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    base = Block()
    model = adapted(base, **OPTIONS[name])
    if "decomposed" in name and format in ("diffusers", "peft"):
        with pytest.raises(ValueError, match=r"has none for some; got .*to_q with weight_decompose"):
            lokr_state(model, format)
        return
    if format == "diffusers":
        model.conv_in = copy.deepcopy(base.conv_in)
    x = torch.randn(2, 4, 5, 5)
    state = lokr_state(model, format)
    files.save_file({k: t.contiguous() for k, t in state.items()}, tmp_path / "it.safetensors")
    scale = model.ff[0].scale if format == "peft" else None  # type: ignore[index, union-attr]
    for given in (state, str(tmp_path / "it.safetensors"), tmp_path / "it.safetensors"):
        other = copy.deepcopy(base)
        found = load_lokr(other, given, scale=scale)
        assert len(found) == (5 if format == "diffusers" else 6)
        torch.testing.assert_close(other(x), model(x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(base(x), model(x), rtol=1e-2, atol=1e-2)  # the control
    again = {n: t for n, t in other.named_parameters() if "lokr" in n and t.requires_grad}
    assert again
    if format in ("lycoris", "kohya"):
        torch.testing.assert_close(lokr_state(other, format), state)


@pytest.mark.parametrize(
    ("written", "prefix"),
    [
        ("lycoris_attn_to_q", None),
        ("lora_unet_attn_to_q", None),
        ("lora_te1_attn_to_q", "lora_te1"),
        ("unet.attn.to_q", "unet"),
        ("diffusion_model.attn.to_q", None),
        ("attn.to_q", None),
        ("base_model.model.attn.to_q", None),
    ],
)
def test_names(written: str, prefix: str | None) -> None:
    model = Block()
    state = {f"{written}.lokr_w1": torch.ones(4, 4), f"{written}.lokr_w2": torch.ones(6, 6), f"{written}.alpha": torch.tensor(8.0)}
    more = {"lora_other_x.lokr_w1": torch.ones(1, 1)} if prefix else {}
    assert load_lokr(model, state | more, prefix=prefix) == ("attn.to_q",)
    layer: Any = model.attn["to_q"]
    assert (layer.scale, layer.options.rank) == (1.0, 8)  # alpha of whole factors is the rank
    renamed = {k.replace(written, "blocks.7"): t for k, t in state.items()}
    assert load_lokr(Block(), renamed, names={"blocks.7": "attn.to_q"}) == ("attn.to_q",)


def dense(layer: Any) -> Tensor:
    """The adapter's weight."""
    w1, w2 = layer._scaled_factors()
    return sum(map(torch.kron, w1, w2)).detach() if layer.options.terms > 1 else torch.kron(w1, w2).detach()  # type: ignore[union-attr]


class Fused(nn.Module):
    """Projections in one layer, with grouped queries."""

    def __init__(
        self, sizes: tuple[int, ...] = (24, 24, 24), names: tuple[str, ...] = ("to_q", "to_k", "to_v"), fused: str = "to_qkv"
    ) -> None:
        super().__init__()
        self.one = nn.ModuleDict({fused: nn.Linear(24, sum(sizes))})
        self.three = nn.ModuleDict({name: nn.Linear(24, size) for name, size in zip(names, sizes, strict=True)})


@pytest.mark.parametrize("written", ["lycoris_attn_", "transformer.attn."])
@pytest.mark.parametrize("factor", [-1, 4, 2, 1])
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_fused_projection_is_cut(written: str, factor: int, decomposed: bool) -> None:
    """Exactly: by rows of w1, by rows of w2, or as a sum."""
    whole = randomised(nn.ModuleDict({"to_qkv": LoKrLinear(24, 72, 2, factor, alpha=3.0, weight_decompose=decomposed)}))
    model = nn.ModuleDict({"attn": Fused().three})
    state = lokr_state(nn.ModuleDict({"attn": whole}), "lycoris" if written[0] == "l" else "diffusers") if not decomposed else None
    if state is None:
        state = lokr_state(nn.ModuleDict({"attn": whole}), "lycoris")
    # 72 is 8 x 9, 4 x 18, 2 x 36 and 1 x 72; its thirds have 24 rows.
    if decomposed and factor in (-1, 4, 2):
        with pytest.raises(ValueError, match=r"parts: expected rows that are multiples of \d+, the rows of w2, or .*undecomposed"):
            load_lokr(model, state)
        return
    assert set(load_lokr(model, state)) == {"attn.to_q", "attn.to_k", "attn.to_v"}
    parts = [model["attn"][n] for n in ("to_q", "to_k", "to_v")]  # type: ignore[index]
    assert {p.options.terms for p in parts} == {{-1: 3, 4: 3, 2: 3, 1: 1}[factor]}
    if not decomposed:
        assert_close(torch.cat([dense(p) for p in parts]), dense(whole["to_qkv"]), steps=4)
    else:
        assert torch.equal(torch.cat([p.dora_scale for p in parts]), whole["to_qkv"].dora_scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", [None, "to_k"])
@pytest.mark.parametrize("form", ["low_rank", "whole", "both"])
def test_three_projections_are_joined(missing: str | None, form: str) -> None:
    options: dict[str, Any] = {"low_rank": {"rank": 1}, "whole": {"rank": 16}, "both": {"rank": 1, "decompose_both": True}}[form]
    three = nn.ModuleDict({n: LoKrLinear(24, 24, alpha=3.0, **options) for n in ("to_q", "to_k", "to_v") if n != missing})
    randomised(three)
    model = nn.ModuleDict({"attn": Fused().one})
    assert load_lokr(model, lokr_state(nn.ModuleDict({"attn": three}))) == ("attn.to_qkv",)
    layer: Any = model["attn"]["to_qkv"]  # type: ignore[index]
    want = [dense(three[n]) if n in three else torch.zeros(24, 24) for n in ("to_q", "to_k", "to_v")]
    assert_close(dense(layer), torch.cat(want), steps=8)
    x = torch.randn(5, 24)
    assert_close(layer(x).detach(), layer.base_layer(x).double().detach() + x.double() @ torch.cat(want).double().mT, steps=16)


def test_fluxs_names() -> None:
    block = nn.ModuleDict({n: nn.Linear(24, 24) for n in ("to_q", "to_k", "to_v")})
    single = nn.ModuleDict({"attn": block, "proj_mlp": nn.Linear(24, 96)})
    model = nn.ModuleDict({"single_transformer_blocks": nn.ModuleList([single])})
    whole = randomised(nn.ModuleDict({"single_blocks": nn.ModuleList([nn.ModuleDict({"linear1": LoKrLinear(24, 168, 2, 7)})])}))
    for format in ("kohya", "diffusers"):
        found = load_lokr(model, lokr_state(whole, format))
        assert [n.split("0.")[1] for n in found] == ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
        layers = [model.get_submodule(n) for n in found]
        assert_close(torch.cat([dense(layer) for layer in layers]), dense(whole.get_submodule("single_blocks.0.linear1")), steps=8)


def test_layers_that_are_shared_quantised_or_adapted() -> None:
    """All names of a shared layer get the adapter; a new adapter keeps the former one's dropout rates."""
    model: Any = nn.ModuleDict({"a": nn.Linear(24, 24)})
    model["b"] = model["a"]
    state = lokr_state(randomised(nn.ModuleDict({"a": LoKrLinear(24, 24, 2, alpha=3.0)})))
    load_lokr(model, state)
    assert isinstance(model["a"], LoKrLinear)
    assert model["a"] is model["b"]
    model["a"] = LoKrLinear(24, 24, 8, 4, dropout=0.25)
    former = model["a"]
    load_lokr(model, state, adapter_dtype=torch.float64)
    assert model["a"].base_layer is former.base_layer
    assert model["a"].options.dropout == 0.25
    assert model["a"].lokr_w1.dtype == torch.float64
    assert torch.equal(model["a"].lokr_w1.float(), state["lycoris_a.lokr_w1"])


@pytest.mark.parametrize(("kind", "world"), [("colwise", 2), ("colwise", 3), ("colwise", 8), ("rowwise", 2), ("rowwise", 4)])
@pytest.mark.parametrize("form", ["low_rank", "whole", "both"])
def test_parts_for_ranks(kind: str, world: int, form: str) -> None:
    options: dict[str, Any] = {"low_rank": {"rank": 1}, "whole": {"rank": 16}, "both": {"rank": 1, "decompose_both": True}}[form]
    whole = randomised(nn.ModuleDict({"up": LoKrLinear(24, 48, alpha=3.0, bias=False, **options), "other": LoKrLinear(24, 24, 2)}))
    state = lokr_state(whole)
    x, up = torch.randn(5, 24), whole["up"]
    results = []
    for rank in range(world):
        part = shard_lokr(state, {"*_up": kind}, rank, world)
        assert torch.equal(part["lycoris_other.lokr_w1"], state["lycoris_other.lokr_w1"])
        sizes = (24, 48 // world) if kind == "colwise" else (24 // world, 48)
        local: Any = nn.ModuleDict({"up": nn.Linear(*sizes, bias=False), "other": nn.Linear(24, 24)})
        load_lokr(local, part)
        local["up"].base_layer.weight.data.copy_(up.base_layer.weight.chunk(world, 0 if kind == "colwise" else 1)[rank])  # type: ignore[union-attr, operator]
        results.append(local["up"](x if kind == "colwise" else x.chunk(world, 1)[rank]))
    got = torch.cat(results, 1) if kind == "colwise" else torch.stack(results).sum(0)
    torch.testing.assert_close(got, up(x), rtol=1e-5, atol=1e-5)


def low_rank(name: str = "lycoris_attn_to_q", **more: Tensor) -> dict[str, Tensor]:
    tensors = {"lokr_w1": torch.ones(4, 4), "lokr_w2_a": torch.ones(6, 2), "lokr_w2_b": torch.ones(2, 6), "alpha": torch.tensor(2.0)}
    return {f"{name}.{k}": t for k, t in (tensors | more).items()}


def merged() -> nn.Module:
    layer = LoKrLinear(24, 24, 2)
    layer.merge()
    return nn.ModuleDict({"attn": nn.ModuleDict({"to_q": layer})})


MODEL = Block()
GOOD = "state: expected LoKr adapters of the model's layers; got "
REFUSED: dict[str, Refusal] = {
    "model": wrong_type(lambda: load_lokr([], {}), "model: expected a torch.nn.Module; got list"),  # type: ignore[arg-type]
    "state": wrong_type(
        lambda: load_lokr(MODEL, 3),  # type: ignore[arg-type]
        "state: expected names and tensors, or the path of a file or of PEFT's folder; got int",
    ),
    "no_tensor": wrong_type(lambda: load_lokr(MODEL, {"a.lokr_w1": 3}), "state['a.lokr_w1']: expected a tensor of a name; got int"),  # type: ignore[dict-item]
    "pickle": value(
        lambda: load_lokr(MODEL, "lora.pt"),
        "state: expected a .safetensors file: others are pickled, and reading one can run code; got 'lora.pt'",
    ),
    "no_file": value(lambda: load_lokr(MODEL, "none.safetensors"), "state: expected a file that exists; got 'none.safetensors'"),
    "nothing": value(
        lambda: load_lokr(MODEL, low_rank(), prefix="lora_te"), "state: expected keys that begin with 'lora_te'; got 4 others"
    ),
    "no_keys": value(lambda: load_lokr(MODEL, {}), "state: expected keys; got none"),
    "bare": value(
        lambda: load_lokr(torch.nn.Linear(4, 4), low_rank("lycoris_a")),
        "model: expected a module with linear layers or convolutions in it, which are replaced there; got such a layer itself",
    ),
    "no_layers": value(
        lambda: load_lokr(torch.nn.Sequential(torch.nn.GELU()), low_rank("lycoris_a")),
        "model: expected a module with linear layers or convolutions in it, which are replaced there; "
        "got none in torch.nn.modules.container.Sequential",
    ),
    "unknown": value(
        lambda: load_lokr(MODEL, {"lora_unet_x.lora_up.weight": torch.ones(1, 1)} | low_rank("lora_unet_attn_to_w") | low_rank("zzz")),
        GOOD + "lora_unet_x.lora_up.weight is no tensor of LoKr; lora_unet_attn_to_w: expected a layer of the model that can have an "
        "adapter; got none; the nearest is attn.to_v (names= gives other names); zzz: expected a layer of the model that can have an "
        "adapter; got none among 6 (prefix= leaves out the keys of other models)",
    ),
    "no_linear": value(
        lambda: load_lokr(MODEL, low_rank("lycoris_ff.1")),
        GOOD + "lycoris_ff.1: expected a layer of the model that can have an adapter; "
        "got torch.nn.modules.activation.GELU, neither a linear layer nor an nn.Conv2d",
    ),
    "sizes": value(
        lambda: load_lokr(MODEL, low_rank(lokr_w1=torch.ones(4, 2))),
        GOOD + "attn.to_q: w1 and w2: expected factors of a weight (24, 24); got lokr_w1 (4, 2) and lokr_w2_a (6, 2) and lokr_w2_b (2, 6)",
    ),
    "half_a_pair": value(
        lambda: load_lokr(MODEL, {"attn.to_q.lokr_w1": torch.ones(4, 4), "attn.to_q.lokr_w2_a": torch.ones(6, 2)}),
        GOOD + "attn.to_q: lokr_w2: expected lokr_w2, or lokr_w2_a and lokr_w2_b; got lokr_w2_a",
    ),
    "twice": value(
        lambda: load_lokr(MODEL, low_rank() | low_rank("lora_unet_attn_to_q")),
        GOOD + "lora_unet_attn_to_q: expected one adapter of attn.to_q; got a second one in the same file (prefix= takes those of one)",
    ),
    "without_alpha": value(
        lambda: load_lokr(MODEL, {k: t for k, t in low_rank().items() if "alpha" not in k}),
        GOOD + "lycoris_attn_to_q: alpha: expected a tensor of the file, or scale=; got none",
    ),
    "of_peft_without_scale": value(
        lambda: load_lokr(MODEL, {k: t for k, t in low_rank("base_model.model.attn.to_q").items() if "alpha" not in k}),
        GOOD + "base_model.model.attn.to_q: scale: expected alpha / rank, which PEFT has in adapter_config.json: "
        "pass its folder, or scale=; got None",
    ),
    "names": value(
        lambda: load_lokr(MODEL, low_rank("it"), names={"it": "attn"}),
        GOOD + "it: names['it']: expected layers of the model that can have an adapter; got attn",
    ),
    "dora_scale": value(
        lambda: load_lokr(MODEL, low_rank(dora_scale=torch.ones(24))),
        GOOD + "attn.to_q: dora_scale: expected shape (24, 1) or (1, 24); got shape (24,)",
    ),
    "merged": value(lambda: load_lokr(merged(), low_rank()), GOOD + "attn.to_q: is_merged: expected False: call unmerge() first; got True"),
    "too_many_terms": value(
        lambda: cut_rows({"lokr_w1": torch.ones(5, 2), "lokr_w2": torch.ones(33, 2)}, [56, 55, 54]),
        "parts: expected rows that are multiples of 33, the rows of w2, or a linear layer's sum of at most 8 terms, undecomposed "
        "(fuse the model's layers, or merge the adapter with the whole layer); got [56, 55, 54] rows",
    ),
    "joining_other_sizes": value(
        lambda: join_rows(
            [{"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(2, 2)}, {"lokr_w1": torch.ones(2, 4), "lokr_w2": torch.ones(4, 2)}], [8, 8]
        ),
        "parts: expected adapters of one size of w2, to be joined for one layer; got sizes [(4, 2, 2), (4, 4, 2)]",
    ),
    "format": value(lambda: lokr_state(merged(), "onnx"), "format: expected one of lycoris, kohya, diffusers, peft; got 'onnx'"),
    "without_layers": value(
        lambda: lokr_state(nn.Sequential(nn.Linear(1, 1))),
        "model: expected a module with layers LoKrLinear or LoKrConv2d in it; "
        "got none in torch.nn.modules.container.Sequential: load_lokr puts them there",
    ),
    "terms": value(
        lambda: lokr_state(nn.Sequential(LoKrLinear(4, 4, 2, terms=2))),
        "format: expected one that has a form for every layer: 'lycoris' has none for some; got 0 with a sum of terms",
    ),
    "factors_of_peft": value(
        lambda: lokr_state(nn.Sequential(LoKrLinear(36, 36, 1, 2), LoKrLinear(36, 36, 1, 3)), "peft"),
        "format: expected another one: PEFT and diffusers have one decompose_factor for all layers; got w1 of 0 2 x 2, 1 3 x 3",
    ),
    "rank": value(lambda: shard_lokr(low_rank(), {}, 2, 2), "rank: expected a rank below world_size=2; got 2"),
    "columns": value(
        lambda: shard_lokr(low_rank(), {"*": "rowwise"}, 0, 3),
        "state: lycoris_attn_to_q: columns of w1: expected a multiple of 3, the number of parts; got 4",
    ),
    "plan": value(lambda: shard_lokr(low_rank(), {"*": "rows"}, 0, 2), "plan['*']: expected one of colwise, rowwise; got 'rows'"),
}


def test_refused() -> None:
    before = {n: type(m) for n, m in MODEL.named_modules()}
    assert_all_refused(REFUSED)
    assert {n: type(m) for n, m in MODEL.named_modules()} == before  # nothing is changed


def test_a_file_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "it.safetensors"
    path.write_bytes(b"\x80\x02}q\x00.")  # a pickle
    with pytest.raises(ValueError, match=r"^state: expected a safetensors file; got .*it.safetensors"):
        load_lokr(Block(), path)
