"""A small Kolmogorov-Arnold transformer that learns to read digits, beside the same transformer with GELU.

The images are scikit-learn's 1,797 digits of 8 x 8 pixels; the training settings are those of KAT's paper, shortened (docs/guides/kat.md).

    python examples/kat_digits.py [--quick] [--epochs 40] [--device cpu|cuda] [--picture out/kat_digits.png]
"""

from __future__ import annotations

import argparse
import importlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fastkron_py.integrations.timm import init_attention_mimetic_  # registers the models, too

timm: Any = importlib.import_module("timm")
create_optimizer: Any = importlib.import_module("timm.optim").create_optimizer_v2

MODEL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 3, "num_heads": 4}
QUICK = {**MODEL, "depth": 1}
BATCH, RATE, WEIGHT_DECAY, DROP_PATH, SMOOTHING = 128, 1e-3, 0.05, 0.1, 0.1
MIXUP, CUTMIX, SWITCH = 0.8, 1.0, 0.5
WARMUP = 5  # epochs
TEST_SHARE = 0.2


@dataclass
class Run:
    """A model and what it went through."""

    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)  # of each epoch
    accuracies: list[float] = field(default_factory=list)  # on the test images


@dataclass(frozen=True)
class Digits:
    """Images ``[n, 1, 8, 8]`` of mean 0 and deviation 1, and labels ``[n]``."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(device: torch.device) -> Digits:
    """scikit-learn's digits, a fifth of them held out."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].to(device), labels[order].to(device)
    held = round(TEST_SHARE * len(images))
    images = (images - images[held:].mean()) / images[held:].std()
    return Digits((images[held:], labels[held:]), (images[:held], labels[:held]))


def mixed(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """MixUp or CutMix of a batch with itself reversed, and smoothed targets ``[n, 10]`` mixed alike."""
    targets = torch.full((len(labels), 10), SMOOTHING / 10, device=labels.device)
    targets.scatter_(1, labels[:, None], 1 - SMOOTHING + SMOOTHING / 10)

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    is_cutmix = uniform() < SWITCH
    alpha = CUTMIX if is_cutmix else MIXUP
    share = beta(alpha, generator)
    if is_cutmix:
        side = images.shape[-1]
        size = round(side * math.sqrt(1 - share))
        top, left = (int(uniform() * (side - size + 1)) for _ in range(2))
        images = images.clone()
        images[..., top : top + size, left : left + size] = images.flip(0)[..., top : top + size, left : left + size]
        share = 1 - size**2 / side**2
    else:
        images = share * images + (1 - share) * images.flip(0)
    return images, share * targets + (1 - share) * targets.flip(0)


def beta(alpha: float, generator: torch.Generator) -> float:
    """A Beta(alpha, alpha) number (Joehnk's method)."""
    while True:
        u, v = torch.rand(2, generator=generator).double().pow(1 / alpha).tolist()
        if 0 < u + v <= 1:
            return float(u / (u + v))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images that are read rightly."""
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(run: Run, digits: Digits, epochs: int, tell: Any) -> None:
    """AdamW, a warm-up and a cosine, label smoothing, MixUp and CutMix, stochastic depth: KAT's settings. Equal seeds, equal batches."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)  # of stochastic depth
    images, labels = digits.train
    optimizer = create_optimizer(run.model, opt="adamw", lr=RATE, weight_decay=WEIGHT_DECAY)
    steps = len(images) // BATCH
    warmup = min(WARMUP, epochs // 2) * steps

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, epochs * steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(epochs):
        run.model.train()
        total = 0.0
        for batch in torch.randperm(len(images), generator=generator)[: steps * BATCH].split(BATCH):
            batch = batch.to(images.device)
            x, targets = mixed(images[batch], labels[batch], generator)
            loss = nn.functional.cross_entropy(run.model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total += loss.item()
        run.losses.append(total / steps)
        run.accuracies.append(accuracy(run.model, *digits.test))
        tell()


def draw(path: Path, runs: list[Run]) -> None:
    """Loss and test accuracy of both, and what the KAT's functions have become, group by group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    blocks: Any = runs[0].model.blocks
    shown = [blocks[0], blocks[-1]] if len(blocks) > 1 else [blocks[0]]
    figure, axes = pyplot.subplots(2, 1 + len(shown), figsize=(4 * (1 + len(shown)), 6), layout="constrained")
    for run, color in zip(runs, ("C0", "0.5"), strict=True):
        axes[0, 0].plot(run.losses, color=color, label=run.name)
        axes[1, 0].plot([100 * a for a in run.accuracies], color=color, label=run.name)
    axes[0, 0].set(xlabel="epoch", ylabel="training loss, of mixed images")
    axes[1, 0].set(xlabel="epoch", ylabel="test accuracy, %")
    axes[0, 0].legend(frameon=False)
    for column, block in enumerate(shown, 1):
        where = "first" if column == 1 else "last"
        for row, (act, begun) in enumerate(((block.mlp.act1, "identity"), (block.mlp.act2, "swish"))):
            axis = act.plot(axes[row, column])
            x = torch.linspace(-3, 3, 201)
            axis.plot(x, x if begun == "identity" else nn.functional.silu(x), "k:", linewidth=1)
            axis.set_title(f"{where} block, function {row + 1}, begun as {begun} (dotted)", fontsize="small")
            axis.get_legend().remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Train both, print their test accuracies, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one block and a few epochs, to see that it works")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--picture", type=Path, default=Path("out/kat_digits.png"))
    options = parser.parse_args()
    epochs = options.epochs or (12 if options.quick else 40)
    digits = load(options.device)
    runs = []
    for name, kind in (("rational (KAT)", "kat"), ("GELU (ViT)", "vit")):
        torch.manual_seed(0)
        model = timm.create_model(f"{kind}_tiny_patch16_224", drop_path_rate=DROP_PATH, **(QUICK if options.quick else MODEL))
        if kind == "vit":  # as the KAT begins
            torch.manual_seed(0)
            for block in model.blocks:
                init_attention_mimetic_(block.attn)
        runs.append(Run(name, model.to(options.device)))
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for run in runs:
            task = progress.add_task(run.name, total=epochs, state="")

            def tell(run: Run = run, task: Any = task) -> None:
                progress.update(task, advance=1, state=f"loss {run.losses[-1]:.3f}, test {run.accuracies[-1]:.1%}")

            train(run, digits, epochs, tell)
    table = Table("activation", "parameters", "loss", "test accuracy", title=f"{len(digits.test[1])} digits held out, {epochs} epochs")
    for run in runs:
        count = sum(p.numel() for p in run.model.parameters())
        table.add_row(run.name, f"{count:,}", f"{run.losses[-1]:.3f}", f"{run.accuracies[-1]:.2%}")
    console.print(table)
    for run in runs:
        print(f"{run.name}: test accuracy {run.accuracies[-1]:.4f}")
    draw(options.picture, runs)
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
