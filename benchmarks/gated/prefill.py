"""Tokens that a KV cache gains where a chunked prefill keeps no projections: arithmetic on models' sizes, nothing is measured.

Usage: python -m benchmarks.gated.prefill [--chunk 512] [--picture docs/images/prefill_tokens.png]

"Towards Fused Kernels for Gated MLP": with a sequence of S tokens, width D and hidden size U, an eager gated MLP holds 3 S U elements
at most (up, gate, the gated result), one whose product is gated before it is stored S U. An engine that serves chunks of S tokens
holds that for one layer at a time, so each deployment saves 2 S U elements. A token's keys and values take 2 L H elements, for L layers
and H = heads x their size; H = D where every query has a head of its own, which the source's text assumes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 512
BYTES = 2  # bfloat16
EAGER, IN_PLACE, FUSED = 3, 2, 1  # tensors [S, U] that are held at most


@dataclass(frozen=True)
class Model:
    """Sizes in a model's published configuration."""

    name: str
    layers: int
    width: int
    hidden: int
    kv_heads: int
    head_size: int

    def saved_bytes(self, chunk: int = CHUNK, before: int = EAGER) -> int:
        """Of activations, in a chunk of this number of tokens."""
        return (before - FUSED) * chunk * self.hidden * BYTES

    def token_bytes(self, grouped: bool = True) -> int:
        """Of a token's keys and values in all layers; not grouped: as wide as the model."""
        return 2 * self.layers * (self.kv_heads * self.head_size if grouped else self.width) * BYTES

    def tokens(self, chunk: int = CHUNK, before: int = EAGER, grouped: bool = True) -> float:
        """That fit into the memory that is saved."""
        return self.saved_bytes(chunk, before) / self.token_bytes(grouped)

    def layer_share(self) -> float:
        """Activations of a decoder layer beside those of before, attention with them: (5 D + U) / (5 D + 3 U)."""
        return (5 * self.width + FUSED * self.hidden) / (5 * self.width + EAGER * self.hidden)


MODELS = (
    Model("Llama 3.2 1B", 16, 2048, 8192, 8, 64),
    Model("Llama 3.2 3B", 28, 3072, 8192, 8, 128),
    Model("Llama 3.1 8B", 32, 4096, 14336, 8, 128),
    Model("Llama 3.1 70B", 80, 8192, 28672, 8, 128),
    Model("Llama 3.1 405B", 126, 16384, 53248, 8, 128),
    Model("Mistral 7B", 32, 4096, 14336, 8, 128),
    Model("Mistral Nemo 12B", 40, 5120, 14336, 8, 128),
    Model("Qwen2.5 7B", 28, 3584, 18944, 4, 128),
    Model("Qwen2.5 14B", 48, 5120, 13824, 8, 128),
    Model("Qwen2.5 32B", 64, 5120, 27648, 8, 128),
    Model("Qwen2.5 72B", 80, 8192, 29568, 8, 128),
    Model("Qwen3 8B", 36, 4096, 12288, 8, 128),
    Model("Gemma 7B", 28, 3072, 24576, 16, 256),
    Model("Gemma 2 2B", 26, 2304, 9216, 4, 256),
    Model("Gemma 2 9B", 42, 3584, 14336, 8, 256),
    Model("Gemma 2 27B", 46, 4608, 36864, 16, 128),
)


def table(chunk: int = CHUNK) -> str:
    """In Markdown."""
    lines = [
        "| model | U / D | MiB saved | KiB a token | tokens gained | beside gating in place | KV as wide as the model | activations |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for m in MODELS:
        cells = (
            m.name,
            f"{m.hidden / m.width:.1f}",
            f"{m.saved_bytes(chunk) / 2**20:.0f}",
            f"{m.token_bytes() / 2**10:.0f}",
            f"{m.tokens(chunk):.0f}",
            f"{m.tokens(chunk, IN_PLACE):.0f}",
            f"{m.tokens(chunk, grouped=False):.0f}",
            f"{m.layer_share():.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path, chunk: int = CHUNK) -> None:
    """Bars of tokens gained, with the models' own heads and with keys and values as wide as the model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 5.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    places = range(len(MODELS))
    for shift, grouped, colour, label in (
        (-0.2, True, "#5b93c7", "keys and values as the model has them"),
        (0.2, False, "#c3daf0", "as wide as the model"),
    ):
        found = [m.tokens(chunk, grouped=grouped) for m in MODELS]
        bars = axes.barh([i + shift for i in places], found, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{t:.0f}" for t in found], padding=2, fontsize=7, color="#1f2933")
    axes.set_yticks(places, [m.name for m in MODELS], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens that the KV cache gains, chunks of {chunk} (computed, not measured)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    """Print the table, and draw it where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gated.prefill", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens in a chunk")
    parser.add_argument("--picture", type=Path, help="a file to draw into")
    given = parser.parse_args()
    if given.chunk < 1:
        parser.error(f"--chunk: expected at least 1; got {given.chunk}")
    print(table(given.chunk))
    if given.picture:
        draw(given.picture, given.chunk)


if __name__ == "__main__":
    main()
