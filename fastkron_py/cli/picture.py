"""The demo's results as one PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastkron_py.cli.demo import KEEP, SIGMA, Array, Cost, Demo
from fastkron_py.cli.display import bytes_text, device_name, seconds_text
from fastkron_py.runtime.errors import value_error

INK: Final = "#1f2933"
MUTED: Final = "#7b8794"
COLOURS: Final = {"dense": "#cbd2d9", "loop": "#9fb3c8", "fastkron_py": "#d64545"}
LABELS: Final = {"dense": "dense matrix", "loop": "matmul + transpose", "fastkron_py": "fastkron_py"}


def picture_file(path: Path) -> Path:
    """The file that a picture goes to: the path, or demo.png in it where it is a folder or has no suffix.

    Raises:
        ValueError: Matplotlib writes no files with this suffix.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if path.is_dir() or not path.suffix:
        return path / "demo.png"
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise value_error("out", f"a folder or a file that ends with one of .{', .'.join(sorted(known))}", path)
    return path


def draw(demo: Demo, path: Path) -> None:
    """Write original, blur, compression, both spectra and the costs to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height, width, _ = demo.image.shape
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.02, wspace=0.03)
    figure = Figure(figsize=(13.2, 0.8 + 8.8 * height / width + 0.6), dpi=120, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    dense = bytes_text(4 * (height * width) ** 2)
    headline = f"Kronecker products on a photograph of {height} × {width} pixels. The dense matrix would take {dense}."
    figure.suptitle(headline, x=0.01, ha="left", fontsize=14, color=INK, fontweight="bold")
    axes = figure.subplots(2, 3)
    sides = rf"_{{{height}}} \otimes {{}}", rf"_{{{width}}}"
    _show(axes[0, 0], demo.image, "Original", f"{height} × {width}")
    _show(axes[0, 1], demo.blurred, "Gaussian blur", rf"$B{sides[0]}B{sides[1]}$, $\sigma$ = {SIGMA:g}")
    _show(axes[0, 2], demo.compressed, f"{KEEP:.0%} of the coefficients", rf"$D^T{sides[0]}D^T{sides[1]}$")
    _show(axes[1, 0], demo.dct, "DCT coefficients", rf"$D{sides[0]}D{sides[1]}$", height / width)
    bits = sum(n.bit_length() - 1 for n in demo.walsh.shape)
    _show(axes[1, 1], demo.walsh, "Walsh-Hadamard coefficients", rf"{bits} factors $H_2$", height / width)
    _costs(axes[1, 2], demo, height / width)
    figure.savefig(path)


def _show(axes: Any, picture: Array, title: str, subtitle: str, shape: float | None = None) -> None:
    """A picture ``[H, W, 3]``, or a spectrum ``[H, W]`` in decibels in a box of the given shape."""
    if picture.ndim == 3:
        axes.imshow(np.clip(picture, 0, 1), interpolation="lanczos")
    else:
        decibels = 20 * np.log10(np.maximum(picture, picture.max() * 1e-8))
        low, high = np.percentile(decibels, [2, 99.8])
        axes.imshow(decibels, cmap="magma", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_box_aspect(shape)
    _title(axes, title, subtitle)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def _title(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold", pad=7)
    axes.set_title(subtitle, loc="right", fontsize=10, color=MUTED, pad=7)


def _costs(axes: Any, demo: Demo, shape: float) -> None:
    """Bars of time and memory, one panel each, on logarithmic scales."""
    device = "CPU" if demo.device.type == "cpu" else device_name(demo.device)
    _title(axes, "Cost of the blur", f"float32, {device}")
    axes.set_box_aspect(shape)
    axes.axis("off")
    panels = [axes.inset_axes((left, 0, 0.46, 1)) for left in (0.0, 0.54)]
    _bars(panels[0], "Time", demo.costs, [c.seconds for c in demo.costs], seconds_text)
    _bars(panels[1], "Memory", demo.costs, [float(c.memory_bytes) for c in demo.costs], bytes_text)


def _bars(axes: Any, title: str, costs: Sequence[Cost], values: Sequence[float | None], text: Callable[[float], str]) -> None:
    known = [v for v in values if v is not None]
    low, high = min(known) / 3, max(known)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.15)
    y, problem = -0.2, ""
    for cost, value in zip(costs, values, strict=True):
        if problem != cost.problem:
            problem = cost.problem
            axes.text(low, y, f"{title}, {problem.replace('x', '×')} pixels", fontsize=8.5, color=MUTED, va="bottom", fontweight="bold")
            y += 0.75
        ran = cost.seconds is not None
        shown = "not built" if value is None else text(value) + ("" if ran else ", not built")
        axes.text(low, y - 0.28, f"{LABELS[cost.method]}: {shown}", fontsize=8, color=INK, va="bottom")
        if value is not None:
            style = {"color": COLOURS[cost.method]} if ran else {"color": "white", "edgecolor": "#9aa5b1", "hatch": "////", "lw": 0.8}
            axes.barh(y, value - low, left=low, height=0.42, **style)
        y += 1.15
    axes.set_ylim(y - 0.6, -0.6)
    axes.axis("off")
