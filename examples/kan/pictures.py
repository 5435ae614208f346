"""What the KAN examples draw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from common import Result

from fastkron_py.nn import PolyKANLinear

LINES = ({"color": "C0"}, {"color": "0.3", "linestyle": "--"}, {"color": "C1"}, {"color": "C1", "linestyle": ":"})


def pyplot() -> Any:
    """Matplotlib's, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as loaded

    return loaded


def draw_curves(axes: Sequence[Any], results: Sequence[Result], validation: str) -> None:
    """Loss over the epochs and validation over the time, a line for each seed."""
    for result, line in zip(results, LINES, strict=True):
        for i, run in enumerate(result.runs):
            label = result.name if i == 0 else None
            if result.epochs == results[0].epochs:
                axes[0].plot(run.losses, **line, linewidth=1)
            axes[1].plot(list(accumulate(run.seconds)), run.validation, **line, linewidth=1, label=label)
    axes[0].set(xlabel="epoch", title="loss in training", yscale="log")
    axes[1].set(xlabel="seconds of training", title=f"{validation}, validation", yscale="log")
    axes[1].legend(frameon=False, fontsize=7)


def save(figure: Any, path: Path) -> None:
    """Write a picture, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)
    print(f"wrote {path}")


def draw_edges(path: Path, layer: PolyKANLinear, outputs: Sequence[int], names: dict[int, str], span: tuple[float, float]) -> None:
    """Learned functions of the inputs that have names, from `PolyKANLinear.plot`."""
    figure = layer.plot(outputs, list(names), span)
    for i, axis in enumerate(figure.get_axes()):
        row, column = divmod(i, len(names))
        axis.set_title(list(names.values())[column] if row == 0 else "", fontsize=8)
        axis.set_ylabel(f"to node {outputs[row]}" if column == 0 else "", fontsize=8)
        axis.tick_params(labelsize=7)
    save(figure, path)
