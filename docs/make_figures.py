"""Draw the pictures of docs/. Usage: python docs/make_figures.py [folder]; the default is docs/images."""

from __future__ import annotations

import math
import sys
import tomllib
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from plan_picture import picture

from fastkron_py.distributed import Plan, Problem
from fastkron_py.kron.families.fragments import Chain, chained_config, chained_layout
from fastkron_py.kron.plan.steps import Step

INK, MUTED, ACCENT = "#1f2933", "#7b8794", "#d64545"
IN_COLOURS = ("#5b93c7", "#8fb6de", "#c3daf0")  # one for each p
OUT_COLOURS = ("#3fae8e", "#a5dcc4")  # one for each q
A, P, Q, C = 2, 3, 2, 4


def canvas(width: float, height: float, right: float, bottom: float) -> tuple[Figure, Any]:
    """A figure with one pair of axes from (0, 0) at the top left to (right, bottom)."""
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_xlim(0, right)
    axes.set_ylim(bottom, 0)
    axes.axis("off")
    return figure, axes


def cell(axes: Any, x: float, y: float, colour: str, text: str = "", marked: bool = False) -> None:
    """One element; a marked one stands out from the others, which are paler."""
    face = to_rgb(colour) if marked else tuple(0.6 + 0.4 * c for c in to_rgb(colour))
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5))
    if marked:
        axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, fill=False, edgecolor=ACCENT, linewidth=2))
    axes.text(x + 0.5, y + 0.53, text, ha="center", va="center", fontsize=8, color=INK, fontweight="bold" if marked else "normal")


def bracket(axes: Any, left: float, right: float, y: float, text: str) -> None:
    """A brace under cells, with a label."""
    axes.plot([left + 0.08, left + 0.08, right - 0.08, right - 0.08], [y, y + 0.22, y + 0.22, y], color=MUTED, linewidth=1)
    axes.text((left + right) / 2, y + 0.65, text, ha="center", va="center", fontsize=8.5, color=MUTED)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    """A thin accent arrow."""
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=ACCENT, linewidth=1.1, connectionstyle=style, alpha=0.8)
    )


def strip(axes: Any, y: float, modes: int, colours: tuple[str, ...], letter: str) -> list[float]:
    """Memory order of [A, modes, C]; marks fiber a = 1, c = 2 and returns where its elements are."""
    marked = []
    for i in range(A * modes * C):
        a, mode, c = i // (modes * C), i // C % modes, i % C
        x = 2 + i
        hit = (a, c) == (1, 2)
        cell(axes, x, y, colours[mode], f"{letter}{mode}", hit)
        if hit:
            marked.append(x + 0.5)
        if c == 0:
            bracket(axes, x, x + C, y + 1.05, f"a={a}, {letter}={mode}")
    return marked


def mode_multiply(path: Path) -> None:
    """One factor in place: [A, P, C] -> [A, Q, C], shown in memory order."""
    figure, axes = canvas(13, 5.4, 27, 11.2)
    axes.text(0, 0.45, "One factor multiplies its own mode, in place", fontsize=14, fontweight="bold", color=INK, va="center")
    axes.text(0, 1.25, "y[a, q, c] = sum over p of  x[a, p, c] · F[p, q]", fontsize=11, color=MUTED, va="center", family="monospace")
    axes.text(0, 2.95, "x", fontsize=13, color=INK, va="center", style="italic")
    axes.text(0.45, 2.97, "[A, P, C]", fontsize=8.5, color=MUTED, va="center")
    axes.text(0, 8.95, "y", fontsize=13, color=INK, va="center", style="italic")
    axes.text(0.45, 8.97, "[A, Q, C]", fontsize=8.5, color=MUTED, va="center")
    inputs = strip(axes, 2.4, P, IN_COLOURS, "p")
    outputs = strip(axes, 8.4, Q, OUT_COLOURS, "q")

    left, top = 13.0, 4.75
    for p in range(P):
        for q in range(Q):
            cell(axes, left + q, top + p, OUT_COLOURS[q], f"{p},{q}")
    axes.add_patch(Rectangle((left - 0.04, top - 0.04), Q + 0.08, P + 0.08, fill=False, edgecolor=INK, linewidth=1.2))
    axes.text(left - 0.4, top + 0.5, "F", fontsize=13, color=INK, va="center", ha="right", style="italic")
    axes.text(left - 0.4, top + 1.2, "[P, Q]", fontsize=8.5, color=MUTED, va="center", ha="right")
    for p, x in enumerate(inputs):
        arrow(axes, (x, 4.4), (left + Q + 0.1, top + p + 0.5), -0.12)
    for q, x in enumerate(outputs):
        arrow(axes, (left + q + 0.5, top + P + 0.1), (x, 8.35))
    lines = (
        "A fiber is the P elements (a, :, c), C apart in memory.",
        "Its Q results take the same place in y, C apart again:",
        "the next factor finds its own mode where it expects it,",
        "and no operand is ever transposed.",
    )
    for i, line in enumerate(lines):
        axes.text(0.1, 5.0 + 0.72 * i, line, fontsize=10, color=INK)
    axes.text(
        2, 10.9, "Three factors of 4 x 4 on 64 columns:   F3 on [16, 4, 1]   then F2 on [4, 4, 4]   then F1 on [1, 4, 16]",
        fontsize=10, color=MUTED,
    )  # fmt: skip
    figure.savefig(path)


ROOMS = {
    "cli": "info, demo, tune, bench",
    "integrations": "GPyTorch, PEFT, LyCORIS, Transformers, timm",
    "distributed": "the same functions over many GPUs",
    "nn": "modules over the functions",
    "functional": "the public functions, by name",
    "adapters": "LoKr over kron",
    "kron": "products, sums",
    "rational": "activations",
    "kan": "polynomial KANs",
    "gated": "gated MLPs",
    "tiling": "device functions that kernels share, the main loop of linear layers",
    "runtime": "arrays, autocast, checks, backends, call cache, programs, launches",
}
WAY = (
    ("kron/api.py", "checks the arguments once"),
    ("runtime/call_cache.py", "seen before: runs its program"),
    ("kron/operator.py", "autograd, vmap, torch.compile; programs"),
    ("kron/planner.py", "which factors share a launch"),
    ("kron/families/", "kernels and their arguments"),
    ("runtime/program.py", "runs the launches, keeps the program"),
)


def box(axes: Any, x: float, y: float, width: float, name: str, words: str, colour: str = "#e4edf5") -> None:
    """A rounded box with a name and what it does, below each other."""
    axes.add_patch(FancyBboxPatch((x, y), width, 0.95, boxstyle="round,pad=0.06", facecolor=colour, edgecolor="#829ab1"))
    axes.text(x + 0.2, y + 0.3, name, fontsize=10, fontweight="bold", color=INK, va="center")
    axes.text(x + 0.2, y + 0.72, words, fontsize=8, color=INK, va="center")


def architecture(path: Path) -> None:
    """Left: who may import whom, from the contract in pyproject.toml. Right: the files that a first call passes."""
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [[name.strip() for name in row.split("|")] for row in settings["contracts"][0]["layers"]]
    figure, axes = canvas(11.5, 6.2, 23.5, 1.35 * len(layers) + 1.1)
    for x, title in ((0.3, "Subpackages: each imports only those below it"), (16.3, "A first call of kron_matmul")):
        axes.text(x, 0.45, title, fontsize=10, color=MUTED, va="center")
    for i, row in enumerate(layers):
        width = 15 / len(row)
        for j, name in enumerate(row):
            box(axes, 0.4 + j * width, 1 + 1.35 * i, width - (0.35 if j + 1 < len(row) else 0), name, ROOMS[name])
    step = 1.35 * (len(layers) - 1) / (len(WAY) - 1)
    for i, (name, words) in enumerate(WAY):
        box(axes, 16.4, 1 + step * i, 6.6, name, words, "#eaf5ef")
        if i + 1 < len(WAY):
            axes.annotate("", (19.7, 0.92 + step * (i + 1)), (19.7, 2.03 + step * i), arrowprops={"arrowstyle": "-|>", "color": MUTED})
    figure.savefig(path)


PLACES = {"lane": "#8fb6de", "register": "#a5dcc4", "warp": "#f2c47e"}


def places_in_operand(labels: list[str], columns: int, warps: int) -> dict[str, str]:
    """Where each index bit of a left operand sits; labels highest first, the last ones are the columns."""
    rows, inner = labels[:-columns][::-1], labels[-columns:][::-1]
    found = {label: "lane" if i < 2 else "register" for i, label in enumerate(inner)}
    for i, label in enumerate(rows):
        found[label] = "lane" if i < 3 else "warp" if 4 <= i < 4 + warps else "register"
    return found


def tile_way(path: Path) -> None:
    """Which index bits of a tile are lanes, registers and warps in each product of a chain of three factors of 8."""
    steps = tuple(Step(i, i + 1, 8, 8) for i in range(3))
    config = chained_config(Chain.of(steps), 4, 1, 1 << 20)
    if config is None:
        raise ValueError("steps must be a chain that the kernel takes")
    plan = chained_layout(steps, config.block_s, config.num_warps, 4, (False, True))
    slices = [f"s{i}" for i in reversed(range(int(math.log2(config.block_s))))]
    state = slices + [f"{'abc'[m]}{i}" for m in range(3) for i in reversed(range(3))]
    home = list(state)
    figure, axes = canvas(9.0, 3.6, 22, 8.6)
    for i, text in enumerate(home):
        axes.text(6.5 + i + 0.4 * (i // 3), 0.5, text, ha="center", fontsize=9, color=INK)
    for row, (step, mode) in enumerate(zip(plan.steps, "cba", strict=True)):
        labels = [state[i] for i in step.order]
        where = places_in_operand(labels, 3, int(math.log2(config.num_warps)))
        y = 1.0 + 1.5 * row
        axes.text(0.3, y + 0.6, f"product {row + 1}: factor {mode.upper()}", fontsize=9.5, color=INK, va="center")
        for i, text in enumerate(home):
            x = 6 + i + 0.4 * (i // 3)
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=PLACES[where[text]], edgecolor="white", linewidth=1.5))
            if text[0] == mode:
                axes.add_patch(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, fill=False, edgecolor=ACCENT, linewidth=1.8))
        state = labels[:-3] + [f"{mode}{i}" for i in reversed(range(3))]
    for i, (text, colour) in enumerate(PLACES.items()):
        axes.add_patch(Rectangle((6 + 3.4 * i, 6.0), 0.7, 0.7, facecolor=colour))
        axes.text(6.9 + 3.4 * i, 6.4, text, fontsize=9, color=INK, va="center")
    axes.add_patch(Rectangle((16.2, 6.0), 0.7, 0.7, fill=False, edgecolor=ACCENT, linewidth=1.8))
    axes.text(17.1, 6.4, "multiplied", fontsize=9, color=INK, va="center")
    text = "s: fiber; a, b, c: modes, c fastest in x. Each column is one bit of an element's index in the tile."
    axes.text(0.3, 7.6, text, fontsize=8.5, color=MUTED)
    figure.savefig(path)


def distributed(folder: Path) -> None:
    """How blocks move between ranks: by stages, where nothing divides evenly, and by whole rows."""
    picture(Plan(Problem(8, (5,) * 3, (5,) * 3), (1, 4), (2, 1), 1), folder / "distributed_stages.png")
    picture(Plan(Problem(8, (64,) * 3, (64,) * 3), (1, 4), (), 1), folder / "distributed_rows.png")


def matrix(axes: Any, left: float, top: float, values: list[list[str]], colours: list[list[str]], name: str = "", size: float = 9) -> None:
    """A matrix of coloured cells with texts, and its name above."""
    for i, row in enumerate(values):
        for j, text in enumerate(row):
            axes.add_patch(Rectangle((left + j, top + i), 1, 1, facecolor=colours[i][j], edgecolor="white", linewidth=1.5))
            axes.text(left + j + 0.5, top + i + 0.53, text, ha="center", va="center", fontsize=size, color=INK)
    axes.text(left + len(values[0]) / 2, top - 0.35, name, ha="center", va="center", fontsize=11, color=INK, style="italic")


def kronecker_product(path: Path) -> None:
    """Every element of A times the whole of B, in numbers."""
    a, b = [[1, 2], [0, 3]], [[1, 4], [5, 2], [3, 0]]
    blocks = [["#c3daf0", "#f7d9b0"], ["#e9edf1", "#bfe6d6"]]
    figure, axes = canvas(8.6, 3.6, 16, 7)
    matrix(axes, 0.2, 2.5, [[str(v) for v in row] for row in a], blocks, "A  2 x 2", 11)
    axes.text(2.85, 3.5, "\u2297", ha="center", va="center", fontsize=15, color=INK)
    matrix(axes, 3.5, 2.0, [[str(v) for v in row] for row in b], [["#eef1f4"] * 2] * 3, "B  3 x 2", 11)
    axes.text(6.15, 3.5, "=", ha="center", va="center", fontsize=15, color=INK)
    values = [[str(a[i // 3][j // 2] * b[i % 3][j % 2]) for j in range(4)] for i in range(6)]
    colours = [[blocks[i // 3][j // 2] for j in range(4)] for i in range(6)]
    matrix(axes, 6.8, 0.9, values, colours, "A \u2297 B  6 x 4", 11)
    lines = ("Each block is", "one element of A", "times all of B.", "", "A and B hold 10", "numbers, the", "product holds 24.")
    for i, line in enumerate(lines):
        axes.text(11.6, 1.5 + 0.72 * i, line, fontsize=10.5, color=MUTED, va="center")
    figure.savefig(path)


def product_by_factors(path: Path) -> None:
    """One row of x as a matrix: each factor multiplies along its own side."""
    figure, axes = canvas(10.5, 2.9, 23, 6.3)
    x_colour, first, second = "#c3daf0", "#f7d9b0", "#bfe6d6"
    matrix(axes, 0.2, 1.6, [[f"$x_{3 * i + j}$" for j in range(3)] for i in range(2)], [[x_colour] * 3] * 2, "x as 2 x 3")
    axes.text(3.7, 2.6, "@", ha="center", va="center", fontsize=12, color=INK)
    matrix(axes, 4.2, 1.1, [[""] * 3] * 3, [[first] * 3] * 3, "$F_2$")
    axes.text(7.7, 2.6, "=", ha="center", va="center", fontsize=12, color=INK)
    matrix(axes, 8.2, 1.6, [[""] * 3] * 2, [[first] * 3] * 2, "rows times $F_2$")
    axes.text(11.9, 2.6, "then", ha="center", va="center", fontsize=10, color=MUTED)
    matrix(axes, 12.8, 1.6, [[""] * 2] * 2, [[second] * 2] * 2, "$F_1^T$")
    axes.text(15.3, 2.6, "@", ha="center", va="center", fontsize=12, color=INK)
    matrix(axes, 15.8, 1.6, [[""] * 3] * 2, [[first] * 3] * 2)
    axes.text(19.3, 2.6, "=", ha="center", va="center", fontsize=12, color=INK)
    matrix(axes, 19.8, 1.6, [[f"$y_{3 * i + j}$" for j in range(3)] for i in range(2)], [[second] * 3] * 2, "y as 2 x 3")
    axes.text(
        0.2, 5.4, "y equals x @ ($F_1$ \u2297 $F_2$): 30 multiplications in place of 36, and no 6 x 6 matrix.", fontsize=10.5, color=MUTED
    )
    figure.savefig(path)


def growth(path: Path) -> None:
    """Numbers in the factors and in the Kronecker product, for 64 x 64 factors."""
    figure, axes = canvas(8.6, 2.9, 16, 5.6)
    axes.text(0.2, 0.4, "float32 memory for N factors of 64 x 64, on a logarithmic scale", fontsize=10.5, color=MUTED, va="center")
    names = ("16 KB", "64 MB", "256 GB", "1 PB")
    for n, name in enumerate(names, 1):
        y = 0.1 + 1.15 * n
        dense, factors = 64.0 ** (2 * n), n * 64.0**2
        for shift, count, colour, text in (
            (0.0, dense, "#9fb3c8", f"Kronecker product: {name}"),
            (0.45, factors, ACCENT, f"factors: {n * 16} KB"),
        ):
            width = 0.75 * (math.log10(count) - 2)
            axes.add_patch(Rectangle((1.6, y + shift), width, 0.36, facecolor=colour))
            axes.text(1.75 + width, y + shift + 0.19, text, fontsize=9, color=INK, va="center")
        axes.text(0.2, y + 0.42, f"N = {n}", fontsize=10, color=INK, va="center")
    figure.savefig(path)


def main(folder: Path) -> None:
    """Draw every figure into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kronecker_product(folder / "kronecker_product.png")
    product_by_factors(folder / "product_by_factors.png")
    growth(folder / "growth.png")
    mode_multiply(folder / "mode_multiply.png")
    architecture(folder / "architecture.png")
    tile_way(folder / "tile_way.png")
    distributed(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
