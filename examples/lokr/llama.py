"""A small Llama fine-tuned with LoKr by PEFT, by PEFT with fastkron_py, and with LoRA.

The texts are sources of Python's own library, read as bytes. A model learns one of them. Its adapters then learn another.

    python examples/lokr/llama.py [--steps 50] [--device cpu|cuda] [--picture out/lokr_llama.png]
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from common import Loss, Run, draw, fine_tune, options, train
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

FIRST, SECOND = "argparse.py", "statistics.py"
MODEL = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BATCH, LENGTH, RATE, ADAPTER_RATE = 8, 128, 2e-3, 1e-2


def read(name: str, device: torch.device) -> Loss:
    """The loss of a model on random places in a file of Python's library."""
    data = (Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes()
    text = torch.tensor(list(data), dtype=torch.long, device=device)

    def loss(model: Any, number: int, is_reversed: bool) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator).tolist()
        batch = torch.stack([text[s : s + LENGTH] for s in starts])
        batch = batch.flip(0) if is_reversed else batch
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    return loss


def main() -> None:
    """Train the model, fine-tune it four times, print, draw."""
    given = options(__doc__, "llama", 50)
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**MODEL)).to(given.device)
    train(Run("the model", base), read(FIRST, given.device), 2 * given.steps, RATE)
    draw(given.picture, fine_tune(base, LAYERS, [], read(SECOND, given.device), given.steps, ADAPTER_RATE))


if __name__ == "__main__":
    main()
