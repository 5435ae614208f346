"""A small vision transformer fine-tuned with LoKr by PEFT, by PEFT with fastkron_py, and with LoRA.

The images are scikit-learn's 1,797 digits of 8 x 8 pixels. A model learns to read them. Its adapters then learn to read them rotated by
a quarter.

    python examples/lokr/digits.py [--steps 60] [--device cpu|cuda] [--picture out/lokr_digits.png]
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from common import Loss, Run, draw, fine_tune, options, train
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

timm: Any = importlib.import_module("timm")

MODEL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 256, "depth": 3, "num_heads": 4}
LAYERS = ["qkv", "attn.proj", "fc1", "fc2"]
BATCH, RATE, ADAPTER_RATE, TEST = 64, 3e-4, 2e-3, 360
Digits = tuple[Tensor, Tensor]
"""Images ``[n, 1, 8, 8]`` of mean 0 and deviation 1, and labels ``[n]``."""


def load(device: torch.device) -> tuple[Digits, Digits]:
    """scikit-learn's digits to train on, and a fifth of them held out."""
    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32)[:, None], torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].to(device), labels[order].to(device)
    images = (images - images[TEST:].mean()) / images[TEST:].std()
    return (images[TEST:], labels[TEST:]), (images[:TEST], labels[:TEST])


def rotated(digits: Digits) -> Digits:
    """The images rotated by a quarter."""
    return digits[0].rot90(1, (2, 3)), digits[1]


def reading(digits: Digits) -> Loss:
    """The loss of a model on random ones of these."""

    def loss(model: Any, number: int, is_reversed: bool) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        chosen = torch.randint(len(digits[0]), (BATCH,), generator=generator)
        images, labels = (t[(chosen.flip(0) if is_reversed else chosen).to(t.device)] for t in digits)
        return cross_entropy(model(images), labels)

    return loss


def accuracy(model: Any, digits: Digits) -> float:
    """Share of images that are read rightly."""
    model.eval()
    with torch.no_grad():
        return float((model(digits[0]).argmax(1) == digits[1]).float().mean())


def main() -> None:
    """Train the model, fine-tune it four times, print, draw."""
    given = options(__doc__, "digits", 60)
    train_set, test_set = load(given.device)
    torch.manual_seed(0)
    base = timm.create_model("vit_tiny_patch16_224", **MODEL).to(given.device)
    train(Run("the model", base), reading(train_set), 4 * given.steps, RATE)
    print(f"the model: test accuracy {accuracy(base, test_set):.1%}, rotated {accuracy(base, rotated(test_set)):.1%}")
    runs = fine_tune(base, LAYERS, ["head"], reading(rotated(train_set)), given.steps, ADAPTER_RATE)
    for run in runs:
        print(f"{run.name}: test accuracy of rotated digits {accuracy(run.model, rotated(test_set)):.1%}")
    draw(given.picture, runs)


if __name__ == "__main__":
    main()
