"""``python -m benchmarks.kron.plans``: the plans of six problems on an H100, as docs/how_it_works/plans.md has them. No GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

import fastkron_py


class Example(NamedTuple):
    """A product whose plan is printed, and what it shows."""

    title: str
    x: tuple[int, ...]
    factors: Sequence[tuple[int, int]]
    dtype: torch.dtype
    options: dict[str, Any]


EXAMPLES: Final = (
    Example("Fused steps in registers", (1024, 16**4), [(16, 16)] * 4, torch.float32, {}),
    Example("Double precision", (1024, 64**3), [(64, 64)] * 3, torch.float64, {}),
    Example("Two factors in one launch", (1024, 86 * 128), [(86, 86), (128, 128)], torch.bfloat16, {}),
    Example("Few rows, odd sizes", (9, 519 * 143), [(519, 24), (143, 132)], torch.float32, {}),
    Example("Gates of ten qubits", (1024, 2**10), [(2, 2)] * 10, torch.complex64, {}),
    Example("A backward pass", (1024, 8**4), [(8, 8)] * 4, torch.float32, {"gradients": True}),
)


def printed(example: Example) -> str:
    """The plan's text."""
    tensors = [torch.empty(shape, dtype=example.dtype, device="meta") for shape in (example.x, *example.factors)]
    return str(fastkron_py.kron_plan(tensors[0], tensors[1:], device="H100", **example.options))


def page() -> str:
    """The page's sections."""
    return "\n".join([f"## {example.title}\n\n```\n{printed(example)}\n```\n" for example in EXAMPLES])


if __name__ == "__main__":
    print(page(), end="")
