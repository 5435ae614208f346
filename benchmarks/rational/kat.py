"""Training KAT-T, KAT-S and KAT-B beside vision transformers with GELU and KATs by FlashKAT's algorithm: `kat`, `kat_compiled`."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.conditions import missing
from benchmarks.registry import Benchmark, Call, Case, Contender, Recorded, register
from fastkron_py.cli.measure import peak_bytes

SIZES = {"tiny": 512, "small": 256, "base": 128}  # batches
QUICK = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
# Of an untrained model's loss, which is about the logarithm of the number of classes.
TOLERANCE = 0.25
FORWARD_TOLERANCE = 2e-4  # float32 beside float64, relative Frobenius error of the logits
# Images a second and GiB at most, with weights and the optimizer's state, in another run on an H100.
RECORDED = {"tiny": (5996, 11.7), "small": (3337, 11.7), "base": (1662, 12.4)}


@dataclass
class TrainingProblem:
    """One model size on synthetic images of normal pixels."""

    size: str
    quick: bool
    images: Tensor  # [B, 3, H, W]
    labels: Tensor  # [B]
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """Of the labels."""
        return QUICK["num_classes"] if self.quick else 1000

    def model(self, kind: str, **options: Any) -> nn.Module:
        """One of timm's "vit" or "kat" models of this size, with seeded weights."""
        timm = _timm()
        torch.manual_seed(0)
        arguments = {**(QUICK if self.quick else {}), "weight_init": "", **options}
        with torch.device(self.images.device):
            made: nn.Module = timm.create_model(f"{kind}_{self.size}_patch16_224", **arguments)
        return made


def _timm() -> Any:
    importlib.import_module("fastkron_py.integrations.timm")
    return importlib.import_module("timm")


def _obstacle(device: torch.device) -> str | None:
    return missing("timm")


def _needs_a_gpu(device: torch.device) -> str | None:
    return _obstacle(device) or (None if device.type == "cuda" else "a Triton kernel, which needs a GPU")


def inputs(parameters: Mapping[str, Any], device: torch.device) -> TrainingProblem:
    """Images and labels, the same for all contenders."""
    quick, batch = parameters["quick"], parameters["batch"]
    generator = torch.Generator(device=device).manual_seed(0)
    side = QUICK["img_size"] if quick else 224
    images = torch.randn(batch, 3, side, side, generator=generator, device=device)
    labels = torch.randint(QUICK["num_classes"] if quick else 1000, (batch,), generator=generator, device=device)
    return TrainingProblem(parameters["size"], quick, images, labels)


def check(problem: TrainingProblem, loss: Tensor) -> float:
    """How far the loss is from that of guessing."""
    return abs(float(loss) / math.log(problem.classes) - 1)


def training_step(problem: TrainingProblem, model: nn.Module, compiled: bool = False) -> Call:
    """A step of AdamW under bfloat16 autocast, which returns the loss. Gradients are let go at its end, as before the next step."""
    kind = problem.images.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=kind == "cuda")
    forward: Callable[..., Tensor] = torch.compile(model) if compiled else model

    def step() -> Tensor:
        with torch.enable_grad():
            with torch.autocast(kind, torch.bfloat16):
                loss = cross_entropy(forward(problem.images), problem.labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


# ---- contenders ------------------------------------------------------------------------------


def _agrees(problem: TrainingProblem, model: nn.Module) -> None:
    """Compare a KAT's logits with those of the same model on the CPU in float64, by torch operations."""
    images = problem.images[:2]
    # The patches' convolution would be in TF32 on a GPU.
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = model(images).double().cpu()
        expected = copy.deepcopy(model).double().cpu()(images.double().cpu())
    error = float((found - expected).norm() / expected.norm())
    if not error < FORWARD_TOLERANCE:
        raise RuntimeError(f"logits differ from the model's in float64 by {error:.1e}, more than {FORWARD_TOLERANCE:.0e}")


def _kat(recompute: Any = False, *, fused: bool = True, compiled: bool = False) -> Callable[[TrainingProblem], Call]:
    def prepare(problem: TrainingProblem) -> Call:
        model: Any = problem.model("kat", recompute=recompute)
        if not fused:
            for block in model.blocks:
                block.norm2.register_forward_pre_hook(lambda module, args: None)  # one that is looked at is called by itself
        _agrees(problem, model)
        return training_step(problem, model, compiled)

    return prepare


def _vit(compiled: bool = False) -> Callable[[TrainingProblem], Call]:
    def prepare(problem: TrainingProblem) -> Call:
        return training_step(problem, problem.model("vit"), compiled)

    return prepare


class _FlashKATFunction(torch.autograd.Function):
    """Reads, keeps and returns float32, also under autocast, as the released function does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        peers = importlib.import_module("benchmarks.rational.peers")
        x = x.float().contiguous()
        ctx.save_for_backward(x, a, b)
        return peers.flashkat_forward(x, a, b)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        peers = importlib.import_module("benchmarks.rational.peers")
        return peers.flashkat_backward(dy.contiguous(), *ctx.saved_tensors)  # type: ignore[no-any-return]


class _FlashKATRational(nn.Module):
    """In the place of a `GroupRational` of version A."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.groups = act.num_groups
        self.numerator, self.denominator = act.numerator, act.denominator

    def forward(self, x: Tensor) -> Tensor:
        return _FlashKATFunction.apply(x, self.numerator.repeat(self.groups, 1), self.denominator)  # type: ignore[no-any-return, no-untyped-call]


def _flashkat(problem: TrainingProblem) -> Call:
    model: Any = problem.model("kat", rational_version="A")
    for block in model.blocks:
        block.mlp.act1, block.mlp.act2 = _FlashKATRational(block.mlp.act1), _FlashKATRational(block.mlp.act2)
    return training_step(problem, model)


def _unit_bytes(problem: TrainingProblem) -> int:
    """What the vision transformer's step holds at most."""
    return peak_bytes(training_step(problem, problem.model("vit")), problem.images.device)


VIT = Contender("ViT", _vit(), obstacle=_obstacle, seconds=120)
CONTENDERS = [
    Contender("KAT", _kat(), obstacle=_obstacle, is_ours=True, seconds=120),
    VIT,
    Contender("KAT, norm apart", _kat(False, fused=False), obstacle=_obstacle, seconds=120),
    Contender("KAT, second recomputed", _kat((False, True)), obstacle=_obstacle, seconds=120),
    Contender("KAT, both recomputed", _kat(True), obstacle=_obstacle, seconds=120),
    Contender("FlashKAT's algorithm", _flashkat, obstacle=_needs_a_gpu, seconds=120),
]
COMPILED = [
    Contender("KAT", _kat(compiled=True), obstacle=_obstacle, is_ours=True, seconds=400),
    Contender("ViT", _vit(compiled=True), obstacle=_obstacle, seconds=400),
]


def cases() -> list[Case]:
    """A row for each size, and a small one that a CPU can train."""
    rows = []
    for size, batch in SIZES.items():
        rate, _ = RECORDED[size]
        recorded = [Recorded("FlashKAT as released", "H100", batch / rate)]
        parameters = {"size": size, "batch": batch, "dtype": "bfloat16", "quick": False}
        rows.append(Case(f"{size}, batch {batch}", parameters, "bfloat16", TOLERANCE, items=batch, recorded=recorded))
    parameters = {"size": "tiny", "batch": 8, "dtype": "bfloat16", "quick": True}
    return [*rows, Case("2 blocks of width 64, batch 8", parameters, "bfloat16", TOLERANCE, items=8, quick=True)]


NOTES = (
    "A step: forward, backward and fused AdamW under bfloat16 autocast, on images of 224 x 224 normal pixels.",
    "x: memory at most, beside that of ViT, beyond weights and the optimizer's state, which are equal.",
    "Errors are those of an untrained model's loss beside that of guessing; a KAT's logits were compared with float64 before.",
)

register(
    Benchmark(
        name="kat",
        description="Training Kolmogorov-Arnold transformers beside vision transformers of the same size.",
        device="cuda",
        cases=cases(),
        contenders=CONTENDERS,
        inputs=inputs,
        check=check,
        baseline="ViT",
        unit_bytes=_unit_bytes,
        notes=NOTES,
    )
)

register(
    Benchmark(
        name="kat_compiled",
        description="The same under torch.compile.",
        device="cuda",
        cases=cases(),
        contenders=COMPILED,
        inputs=inputs,
        check=check,
        baseline="ViT",
        unit_bytes=_unit_bytes,
        notes=NOTES,
    )
)
