"""A small Llama fine-tuned with LoKr by PEFT, by PEFT with fastkron_py, and with LoRA.

The texts are sources of Python's own library, read as bytes. A model learns one of them. Its adapters then learn another.

    python examples/lokr_llama.py [--steps 50] [--device cpu|cuda] [--picture out/lokr_llama.png]
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoKrConfig, LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastkron_py.integrations.peft import use_fastkron

FIRST, SECOND = "argparse.py", "statistics.py"
MODEL = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BATCH, LENGTH, RATE, ADAPTER_RATE = 8, 128, 2e-3, 1e-2


@dataclass
class Run:
    """A fine-tuning: its losses, and the time of its steps."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Median milliseconds of a step."""
        return 1e3 * sorted(self.seconds)[len(self.seconds) // 2]


def read(name: str, device: torch.device) -> Tensor:
    """The bytes of a file of Python's library."""
    data = (Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes()
    return torch.tensor(list(data), dtype=torch.long, device=device)


def train(model: Any, text: Tensor, steps: int, rate: float, run: Run, is_reversed: bool = False) -> Run:
    """AdamW on the same batches in each run; reversed ones differ in the order of their sums alone."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in range(steps):
        begin = time.perf_counter()
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator).tolist()
        batch = torch.stack([text[s : s + LENGTH] for s in starts])
        batch = batch.flip(0) if is_reversed else batch
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())  # which waits for a GPU
        run.seconds.append(time.perf_counter() - begin)
    return run


def fine_tune(base: Any, text: Tensor, steps: int) -> list[Run]:
    """All four runs, from equal models and equal adapters."""
    lokr = LoKrConfig(r=16, alpha=128, target_modules=LAYERS)
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=LAYERS)
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
        runs.append(train(model, text, steps, ADAPTER_RATE, Run(name), is_reversed))
    return runs


def draw(path: Path, runs: list[Run]) -> None:
    """The losses, and how far those of LoKr are from PEFT's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for run, style in zip(runs, ("C0", "C1--", "C2:", "0.6"), strict=True):
        left.plot(run.losses, style, label=f"{run.name}: {run.step:.0f} ms a step")
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    for run, color in zip(runs[1:3], ("C1", "C2"), strict=True):
        gaps = [abs(a - b) for a, b in zip(run.losses, runs[0].losses, strict=True)]
        right.semilogy([max(g, 1e-8) for g in gaps], color, label=run.name)
    right.set(xlabel="step", ylabel="difference from PEFT's loss")
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Train the model, fine-tune it four times, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--picture", type=Path, default=Path("out/lokr_llama.png"))
    options = parser.parse_args()
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**MODEL)).to(options.device)
    train(base, read(FIRST, options.device), 2 * options.steps, RATE, Run("the model"))
    runs = fine_tune(base, read(SECOND, options.device), options.steps)
    for run in runs:
        print(f"{run.name}: loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}, {run.step:.0f} ms a step")
    for run in runs[1:3]:
        gap = max(abs(a - b) for a, b in zip(run.losses, runs[0].losses, strict=True))
        print(f"largest difference from PEFT's losses, {run.name}: {gap:.1e}")
    draw(options.picture, runs)
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
