"""What the LoKr examples share: one fine-tuning after the other, what each measured, and the picture."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoKrConfig, LoraConfig, get_peft_model
from torch import Tensor

from fastkron_py.cli.measure import peak_bytes
from fastkron_py.integrations.peft import use_fastkron

STYLES = ("C0", "C1--", "C2:", "0.6")
Loss = Callable[[Any, int, bool], Tensor]
"""Of a model on a step's batch, which may be the other way round: its sums then differ in their order alone."""


@dataclass
class Run:
    """A fine-tuning: its losses, the time of its steps, and the most bytes that one holds beyond the model and the optimizer."""

    name: str
    model: Any
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0

    @property
    def step(self) -> float:
        """Median milliseconds of a step."""
        return 1e3 * sorted(self.seconds)[len(self.seconds) // 2]


def options(doc: str | None, name: str, steps: int) -> Any:
    """The command line's."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--picture", type=Path, default=Path(f"out/lokr_{name}.png"))
    return parser.parse_args()


def train(run: Run, loss: Loss, steps: int, rate: float, is_reversed: bool = False) -> Run:
    """AdamW on the same batches in each run."""
    optimizer = torch.optim.AdamW([p for p in run.model.parameters() if p.requires_grad], lr=rate)
    run.model.train()

    def step(number: int) -> Tensor:
        found = loss(run.model, number, is_reversed)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    for number in range(steps):
        begin = time.perf_counter()
        run.losses.append(step(number).item())  # which waits for a GPU
        run.seconds.append(time.perf_counter() - begin)
    run.peak = peak_bytes(lambda: step(0), next(run.model.parameters()).device)
    return run


def fine_tune(base: Any, layers: Sequence[str], trained: Sequence[str], loss: Loss, steps: int, rate: float) -> list[Run]:
    """All four runs, from equal models and equal adapters; tell what each measured.

    Args:
        base: the model.
        layers: names of the layers that get adapters.
        trained: names of modules that are trained besides.
        loss: of a step.
        steps: of each run.
        rate: of AdamW.
    """
    where = {"target_modules": list(layers), "modules_to_save": list(trained)}
    lokr, lora = LoKrConfig(r=16, alpha=128, **where), LoraConfig(r=16, lora_alpha=16, **where)
    runs = []
    for name, config, is_ours, is_reversed in (
        ("LoKr, PEFT", lokr, False, False),
        ("LoKr, PEFT with fastkron_py", lokr, True, False),
        ("LoKr, PEFT, batches reversed", lokr, False, True),
        ("LoRA, PEFT", lora, False, False),
    ):
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(base), config)
        if is_ours:
            use_fastkron(model)
        run = train(Run(name, model), loss, steps, rate, is_reversed)
        runs.append(run)
        print(f"{name}: loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}, {run.step:.0f} ms and {run.peak / 2**20:.0f} MiB a step")
    for run in runs[1:3]:
        print(f"largest difference from PEFT's losses, {run.name}: {max(gaps(runs[0], run)):.1e}")
    return runs


def gaps(one: Run, other: Run) -> list[float]:
    """How far the losses of two runs are apart."""
    return [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]


def draw(path: Path, runs: Sequence[Run]) -> None:
    """The losses, how far those of LoKr are from PEFT's, and each run's time and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained", width_ratios=(4, 4, 3))
    for run, style in zip(runs, STYLES, strict=True):
        left.plot(run.losses, style, label=run.name)
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    for run, color in zip(runs[1:3], ("C1", "C2"), strict=True):
        middle.semilogy([max(g, 1e-8) for g in gaps(runs[0], run)], color, label=run.name)
    middle.set(xlabel="step", ylabel="difference from PEFT's loss")
    middle.legend(frameon=False)
    shown = [runs[0], runs[1], runs[3]]
    for offset, color, values, label in (
        (-0.2, "C0", [r.step for r in shown], "ms a step"),
        (0.2, "C3", [r.peak / 2**20 for r in shown], "MiB a step"),
    ):
        bars = right.bar([i + offset for i in range(len(shown))], values, 0.38, color=color, label=label)
        right.bar_label(bars, fmt="%.0f")
    right.set_xticks(range(len(shown)), ["LoKr,\nPEFT", "LoKr, PEFT with\nfastkron_py", "LoRA,\nPEFT"])
    right.legend(frameon=False)
    right.margins(y=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"wrote {path}")
