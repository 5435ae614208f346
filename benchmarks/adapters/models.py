"""Whole models with LoKr adapters by PEFT, as it comes and with `use_fastkron`, beside LoRA: `lokr_llama` and `lokr_vit`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from benchmarks.conditions import missing, tf32
from benchmarks.gated.llama import LlamaProblem, llama_of
from benchmarks.registry import Benchmark, Case, Contender, register
from benchmarks.training import STEPS, TOLERANCES, Make, TrainingProblem, check, details, trained, unit_bytes

STOCK = "PEFT"
LORA_RANK = 32
ANOTHER_FUNCTION = 1e6  # a tolerance for LoRA, whose curve is another one
# In bfloat16 the controls end 5e-5 to 2e-3 away from PEFT on CPUs at widths of 64 to 512, 6.2e-3 on an H200 at a width of 4096;
# adapters scaled by 1.1 end up to 2e-2 away.
OF_ADAPTERS = {**TOLERANCES, "bfloat16": 1e-2}


@dataclass
class _Adapted:
    """The settings of the adapters.

    Attributes:
        factor: of both factorisations.
        rank: of w2; None for a whole w2.
        scale: of the adapter's product.
        layers: names of the layers that have adapters.
        trained: names of modules that are trained besides.
    """

    factor: int
    rank: int | None
    scale: float
    layers: list[str]
    trained: list[str]

    def lokr(self) -> Any:
        """PEFT's configuration."""
        rank = 1 << 20 if self.rank is None else self.rank  # PEFT makes w2 whole where the rank is not small beside it
        return self._made("LoKrConfig", r=rank, alpha=self.scale * rank, decompose_factor=self.factor)

    def lora(self) -> Any:
        """LoRA's, of scale 1."""
        return self._made("LoraConfig", r=LORA_RANK, lora_alpha=LORA_RANK)

    def _made(self, name: str, **options: Any) -> Any:
        config = getattr(importlib.import_module("peft"), name)
        return config(target_modules=self.layers, modules_to_save=self.trained, **options)


@dataclass
class LlamaWithAdapters(LlamaProblem):
    """A Llama with adapters on all linear layers but the output's."""

    adapted: _Adapted

    def loss(self, model: nn.Module, number: int, is_reversed: bool) -> Tensor:
        """Of the next token, under autocast, as trainers compute it: the adapters' parameters are in float32."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return super().loss(model, number, is_reversed)


@dataclass
class ViTWithAdapters(TrainingProblem):
    """A vision transformer of timm with adapters, and images of one pattern for each class, in noise.

    Attributes:
        config: of `timm.create_model`.
        images: ``[STEPS, B, 3, H, W]``.
        labels: ``[STEPS, B]``. One in `MISLABELLED` is of any class, so that the loss stays away from 0.
        dtype: of autocast.
        adapted: the adapters.
    """

    config: dict[str, Any]
    images: Tensor
    labels: Tensor
    dtype: torch.dtype
    adapted: _Adapted

    def model(self) -> nn.Module:
        """With seeded weights."""
        torch.manual_seed(0)
        with torch.device(self.device):
            made: nn.Module = importlib.import_module("timm").create_model("vit_base_patch16_224", **self.config)
        return made.train()

    def loss(self, model: nn.Module, number: int, is_reversed: bool) -> Tensor:
        """Of the class, under autocast."""
        images, labels = (t[number].flip(0) if is_reversed else t[number] for t in (self.images, self.labels))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return cross_entropy(model(images), labels)


LLAMA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VIT_LAYERS = ["qkv", "attn.proj", "fc1", "fc2"]
MISLABELLED = 2


def llama_inputs(parameters: Mapping[str, Any], device: torch.device) -> LlamaWithAdapters:
    """The same tokens and weights for all contenders."""
    adapted = _Adapted(parameters["factor"], parameters["rank"], parameters["scale"], LLAMA_LAYERS, ["lm_head"])
    return LlamaWithAdapters(STOCK, parameters["learning_rate"], device, **llama_of(parameters, device), adapted=adapted)


def vit_inputs(parameters: Mapping[str, Any], device: torch.device) -> ViTWithAdapters:
    """The same images and weights for all contenders."""
    generator = torch.Generator(device=device).manual_seed(0)
    side, classes, shape = parameters["side"], parameters["classes"], (STEPS, parameters["batch"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def choose(count: int) -> Tensor:
        return torch.randint(count, shape, generator=generator, device=device)

    labels, images, patterns = choose(classes), draw(*shape, 3, side, side), draw(classes, 3, side, side)
    for batch, label in zip(images, labels, strict=True):
        batch += patterns[label]
    labels = torch.where(choose(MISLABELLED) == 0, choose(classes), labels)
    config = {"img_size": side, "embed_dim": parameters["width"], "depth": parameters["layers"], "num_heads": parameters["heads"]}
    adapted = _Adapted(parameters["factor"], parameters["rank"], parameters["scale"], VIT_LAYERS, ["head"])
    dtype = getattr(torch, parameters["dtype"])
    options = {"config": config | {"num_classes": classes}, "images": images, "labels": labels, "dtype": dtype, "adapted": adapted}
    return ViTWithAdapters(STOCK, parameters["learning_rate"], device, **options)


# ---- contenders --------------------------------------------------------------------------------


def with_lora(problem: Any) -> nn.Module:
    """The model with LoRA's adapters."""
    return _adapted(problem, problem.adapted.lora())


def with_lokr(problem: Any) -> nn.Module:
    """The model with LoKr's adapters."""
    return _adapted(problem, problem.adapted.lokr())


def _adapted(problem: Any, config: Any) -> nn.Module:
    model = problem.model()
    torch.manual_seed(1)
    found: nn.Module = importlib.import_module("peft").get_peft_model(model, config)
    return found


def with_fastkron(problem: Any) -> nn.Module:
    """The same on `lokr_linear`."""
    model = with_lokr(problem)
    applied = importlib.import_module("fastkron_py.integrations.peft").use_fastkron(model)
    if applied.left_alone:
        raise RuntimeError(f"layers that were left alone: {dict(applied.left_alone)}")
    return model


def _unrounded(layer: Any, name: str, x: Tensor) -> Tensor:
    """PEFT's product of x with an adapter's weight, in float32; by TF32 on a GPU."""
    with torch.autocast(x.device.type, enabled=False), tf32():
        return linear(x.float(), layer.get_delta_weight(name).float())


def without_rounding(problem: Any) -> nn.Module:
    """PEFT's layers, whose adapters' weights are not rounded to bfloat16, and whose results are added before they are rounded.

    Nothing of this library is in it: another layer that rounds where ours does not.
    """
    model = with_lokr(problem)
    kind = importlib.import_module("peft.tuners.lokr.layer").LoKrLayer
    for module in model.modules():
        if isinstance(module, kind):
            module._get_delta_activations = partial(_unrounded, module)  # type: ignore[assignment]
    return model


def contenders(package: str) -> list[Contender]:
    """All of them; each needs PEFT and the package that the model comes from."""

    def obstacle(device: torch.device) -> str | None:
        return missing("peft") or missing(package)

    def contender(name: str, make: Make, is_reversed: bool = False, **options: Any) -> Contender:
        return Contender(name, trained(name, make, is_reversed), obstacle=obstacle, seconds=120, **options)

    return [
        contender("PEFT with fastkron_py", with_fastkron, is_ours=True),
        contender("PEFT, weight unrounded", without_rounding),
        contender("PEFT, batch reversed", with_lokr, is_reversed=True),
        contender(f"LoRA of rank {LORA_RANK}", with_lora, tolerance=ANOTHER_FUNCTION),
        contender(STOCK, with_lokr),
    ]


def cases(sizes: list[tuple[str, str, dict[str, Any], bool]], tokens: Callable[[dict[str, Any]], int]) -> list[Case]:
    """A row for each size, with w2 whole and of low rank."""
    rows = []
    for label, dtype, size, quick in sizes:
        for rank in (size["rank"], None):
            parameters = {**size, "rank": rank, "dtype": dtype}
            kind = f"w1 {size['factor']} x {size['factor']}, " + ("w2 whole" if rank is None else f"rank {rank}")
            is_quick = quick and rank is not None
            rows.append(Case(f"{label}, {kind}", parameters, dtype, OF_ADAPTERS[dtype], items=tokens(size), quick=is_quick))
    return rows


NOTES = (
    "A step: forward, backward and AdamW under bfloat16 autocast (float32 on a CPU). Adapters are in float32, as PEFT makes them.",
    f"Errors: the largest relative difference of the losses of {STEPS} steps. LoRA's curve is another function's, and not compared.",
    "Weight unrounded: PEFT's layers with the adapter's weight in float32. Batch reversed: sums over the batch in another order.",
    "So far apart are runs that only round differently. How far each run is from PEFT's, and where: in the JSON.",
    "x: memory at most beside PEFT's, beyond weights and the optimizer's state.",
)

# Scales and learning rates at which the losses fall well within 50 steps; the output's layer is trained besides.
LARGE_LLAMA = {
    "factor": 8,
    "rank": 32,
    "scale": 8.0,
    "learning_rate": 3e-3,
    "width": 4096,
    "hidden": 14336,
    "layers": 8,
    "heads": 32,
    "vocabulary": 512,
    "batch": 2,
    "length": 2048,
}
SMALL_LLAMA = {
    "factor": 4,
    "rank": 4,
    "scale": 8.0,
    "learning_rate": 1e-2,
    "width": 64,
    "hidden": 160,
    "layers": 2,
    "heads": 4,
    "vocabulary": 32,
    "batch": 4,
    "length": 32,
}
LARGE_VIT = {
    "factor": 8,
    "rank": 32,
    "scale": 1.0,
    "learning_rate": 1e-3,
    "width": 768,
    "layers": 12,
    "heads": 12,
    "side": 224,
    "classes": 100,
    "batch": 128,
}
SMALL_VIT = {
    "factor": 4,
    "rank": 4,
    "scale": 1.0,
    "learning_rate": 1e-2,
    "width": 64,
    "layers": 2,
    "heads": 2,
    "side": 32,
    "classes": 10,
    "batch": 16,
}

for _name, _description, _package, _inputs, _rows in (
    (
        "lokr_llama",
        "A training step of a Hugging Face Llama with LoKr adapters on all linear layers of its blocks: time, memory, 50 steps' losses.",
        "transformers",
        llama_inputs,
        cases(
            [
                ("8 layers of width 4096, 2 x 2048 tokens", "bfloat16", LARGE_LLAMA, False),
                ("2 layers of width 64, 4 x 32 tokens", "float32", SMALL_LLAMA, True),
            ],
            lambda size: size["batch"] * size["length"],
        ),
    ),
    (
        "lokr_vit",
        "The same of timm's ViT-B, and images a second.",
        "timm",
        vit_inputs,
        cases(
            [
                ("ViT-B, batch 128", "bfloat16", LARGE_VIT, False),
                ("2 blocks of width 64, batch 16", "float32", SMALL_VIT, True),
            ],
            lambda size: size["batch"],
        ),
    ),
):
    register(
        Benchmark(
            name=_name,
            description=_description,
            device="cuda",
            cases=_rows,
            contenders=contenders(_package),
            inputs=_inputs,
            check=check,
            baseline=STOCK,
            peers_first=True,
            unit_bytes=unit_bytes(with_lokr),
            details=details,
            notes=NOTES,
        )
    )
