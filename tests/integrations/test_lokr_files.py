"""LoKr files of each writer in each reader give equal outputs: LyCORIS, its form for kohya, diffusers, PEFT, and this package."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastkron_py.integrations.peft import lokr_config
from fastkron_py.nn import load_lokr, lokr_state

lycoris = pytest.importorskip("lycoris", reason="the extra lycoris is not installed")
kohya_form = pytest.importorskip("lycoris.kohya", reason="the extra lycoris is not installed")

HAS_DIFFUSERS = importlib.util.find_spec("diffusers") is not None
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:UserWarning:peft", "ignore::FutureWarning:diffusers", "ignore::DeprecationWarning:diffusers"
)


class JointTransformerBlock(nn.Module):
    """A name that kohya's form of LyCORIS looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(36, 64), nn.Linear(36, 64, bias=False)
        self.ff = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 36))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ff(self.to_q(x).sigmoid() * self.to_k(x))
        return y


def model_of(kind: type[nn.Module] = nn.Module) -> Any:
    """A model of a block of linear layers, and of one of convolutions."""

    class Net(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.block = JointTransformerBlock()
            self.convs = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.Conv2d(24, 36, (1, 1)))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(self.convs(x).flatten(2).mT)
            return y

    return Net()


LINEAR = ["block.to_q", "block.to_k", "block.ff.0", "block.ff.2"]
ALL = [*LINEAR, "convs.0", "convs.1"]
FORMS: dict[str, dict[str, Any]] = {
    "low_rank": {"alpha": 3, "conv_alpha": 1},
    "whole": {"full_matrix": True, "alpha": 3},
    "factor": {"factor": 4},
    "both": {"decompose_both": True, "lora_dim": 1, "alpha": 3},
    "decomposed": {"weight_decompose": True},
    "decomposed_by_inputs": {"weight_decompose": True, "wd_on_out": False},
    "tucker": {"use_tucker": True, "conv_alpha": 3},
}


def randomised(module: Any) -> None:
    for n, p in module.named_parameters():
        if "lokr_" in n:
            nn.init.normal_(p, std=0.5)
        elif "dora_scale" in n:
            p.data.mul_(1 + torch.rand_like(p))


# ---- writers: the state that a library has of adapters that are not 0, and the model with these ------


def by_lycoris(base: Any, form: str, kohya: bool = False) -> tuple[dict[str, Tensor], Any]:
    model = copy.deepcopy(base)
    options = {"lora_dim": 2, "alpha": 2, "conv_lora_dim": 2, "conv_alpha": 2} | FORMS[form]
    kind = lycoris.LycorisNetwork
    before = {name: getattr(kind, name) for name in ("TARGET_REPLACE_MODULE", "TARGET_REPLACE_NAME", "LORA_PREFIX")}
    try:
        kind.apply_preset({"target_name": ALL, "target_module": [], "lora_prefix": "lora_unet" if kohya else "lycoris"})
        network = kind(model, 1.0, network_module="lokr", warn_on_unmatched=False, **options)
    finally:
        for name, former in before.items():
            setattr(kind, name, former)
    network.apply_to()
    randomised(network)
    return {k: t.detach().clone().contiguous() for k, t in network.state_dict().items()}, model


def by_peft(base: Any, form: str) -> Any:
    options: dict[str, Any] = {
        "low_rank": {"r": 2, "alpha": 3},
        "whole": {"r": 32, "alpha": 8},
        "factor": {"r": 2, "decompose_factor": 4},
    }.get(form, {})
    options = options or {"both": {"r": 1, "decompose_both": True, "alpha": 3}, "tucker": {"r": 2, "use_effective_conv2d": True}}[form]
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoKrConfig(target_modules=ALL, **options))
    randomised(model)
    return model


# ---- readers: a model with the adapters of a file ------------------------------------------------------


def in_ours(base: Any, path: Path, **options: Any) -> Any:
    model = copy.deepcopy(base)
    assert len(load_lokr(model, path, **options)) in (4, 6)
    return model


def in_lycoris(base: Any, path: Path) -> Any:
    model = copy.deepcopy(base)
    network, _ = lycoris.create_lycoris_from_weights(1.0, str(path), model)
    assert len(network.loras) in (4, 6)
    network.apply_to()
    return model


def in_kohya(base: Any, path: Path) -> Any:
    model = copy.deepcopy(base)
    network, _ = kohya_form.create_network_from_weights(1.0, str(path), None, None, model)
    assert len(network.unet_loras) in (4, 6)
    network.apply_to(None, model, False, True)
    return model


def in_peft(base: Any, ours: Any, path: Path) -> dict[str, Any]:
    """By the state in a model of the same configuration, and by PEFT's file of it."""
    model = peft.get_peft_model(copy.deepcopy(base), lokr_config(ours))
    assert not peft.set_peft_model_state_dict(model, lokr_state(ours, "peft")).unexpected_keys
    model.save_pretrained(path)
    return {"peft from ours": model, "peft from its file": peft.PeftModel.from_pretrained(copy.deepcopy(base), str(path))}


def in_all(base: Any, ours: Any, path: Path, is_tucker: bool = False) -> dict[str, Any]:
    """In every library, by the names of each, and in this one again."""
    models = in_peft(base, ours, path / "peft")
    for format, read in {"lycoris": in_lycoris, "kohya": in_kohya}.items():
        save_file({k: t.contiguous() for k, t in lokr_state(ours, format).items()}, path / f"{format}.safetensors")
        models[f"ours from {format}"] = in_ours(base, path / f"{format}.safetensors")
        if not is_tucker:  # which LyCORIS's own readers do not take
            models[f"{format} from ours"] = read(base, path / f"{format}.safetensors")
    return models


def operand() -> Tensor:
    return torch.randn(2, 1, 5, 5)


def assert_equal(models: dict[str, Any], base: Any) -> None:
    x = operand()
    results = {name: model(x).detach() for name, model in models.items()}
    want = next(iter(results.values()))
    for name, y in results.items():
        assert (y - want).abs().max() <= 1e-5 * want.abs().max(), name
    assert (base(x) - want).abs().max() > 0.02  # the control


@pytest.mark.parametrize("kohya", [False, True], ids=["lycoris", "kohya"])
@pytest.mark.parametrize("form", FORMS)
def test_lycoris(form: str, kohya: bool, tmp_path: Path) -> None:
    base = model_of()
    state, model = by_lycoris(base, form, kohya)
    theirs, again = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save_file(state, theirs)
    ours = in_ours(base, theirs)
    assert ours.block.to_q.options.weight_decompose == ("decomposed" in form)
    written = lokr_state(ours, "kohya" if kohya else "lycoris")
    assert written.keys() == state.keys()
    save_file({k: t.contiguous() for k, t in written.items()}, again)
    models = {"lycoris": model, "ours": ours, "ours from ours": in_ours(base, again)}
    if form != "tucker" and form != "decomposed_by_inputs":  # which LyCORIS's own readers do not take
        read: Callable[[Any, Path], Any] = in_kohya if kohya else in_lycoris
        models |= {"lycoris from its own": read(base, theirs), "lycoris from ours": read(base, again)}
    if form not in ("tucker", "decomposed", "decomposed_by_inputs"):  # which a configuration of PEFT does not give to all layers
        models |= in_all(base, ours, tmp_path)
    assert_equal(models, base)


@pytest.mark.parametrize("form", ["low_rank", "whole", "factor", "both", "tucker"])
def test_peft(form: str, tmp_path: Path) -> None:
    base = model_of()
    model = by_peft(base, form)
    model.save_pretrained(tmp_path / "theirs")
    ours = in_ours(base, tmp_path / "theirs")
    models = {"peft": model, "ours": ours, "ours from its file": in_ours(base, tmp_path / "theirs" / "adapter_model.safetensors")}
    models |= in_all(base, ours, tmp_path, form == "tucker")
    assert_equal(models, base)


@pytest.mark.skipif(not HAS_DIFFUSERS, reason="diffusers is not installed")
@pytest.mark.parametrize("form", ["low_rank", "whole", "factor", "both"])
def test_diffusers(form: str, tmp_path: Path) -> None:
    from diffusers.loaders import PeftAdapterMixin
    from diffusers.models.modeling_utils import ModelMixin

    class Mixed(ModelMixin, PeftAdapterMixin):  # type: ignore[misc]
        pass

    base = model_of(Mixed)
    state, _ = by_lycoris(base, form)
    ours = copy.deepcopy(base)
    load_lokr(ours, {k: t for k, t in state.items() if "convs" not in k})
    written = lokr_state(ours, "diffusers")
    theirs = copy.deepcopy(base)
    theirs.load_lora_adapter(written, prefix="transformer", adapter_name="default")
    theirs.save_lora_adapter(tmp_path)
    (saved,) = tmp_path.glob("*.safetensors")
    assert all("lokr" in key for key in load_file(saved))
    models = {"ours": ours, "diffusers from ours": theirs, "ours from diffusers": in_ours(base, saved)}
    again = copy.deepcopy(base)
    load_lokr(again, written)
    assert_equal(models | {"ours from ours": again} | in_all(base, models["ours from diffusers"], tmp_path), base)
