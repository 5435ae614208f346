"""Draw the files of the library at two commits, side by side. Usage: python docs/draw_house.py [before] [after] [picture].

Every rectangle is a file, as wide as it has lines. Rows are rooms.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import PurePosixPath
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

BEFORE, AFTER, PICTURE = "ebd93be", "HEAD", "docs/images/house.png"
ROOMS = ("fastkron_py", "distributed")
COLOURS = ("#5b93c7", "#3fae8e", "#d6a545", "#9c7bc0", "#d67f6b", "#7b8794")
INK, MUTED = "#1f2933", "#7b8794"
LINES_A_ROW = 4_000  # a longer room goes on in the next row


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def files_of(commit: str) -> dict[str, list[int]]:
    """Lines of each Python file, the longest first, by the room that it stands in."""
    found: dict[str, list[int]] = defaultdict(list)
    # Every line is counted, as from an empty tree.
    empty = git("hash-object", "-t", "tree", "/dev/null").strip()
    for line in git("diff", "--numstat", "--no-renames", empty, commit, "--", *ROOMS).splitlines():
        lines, _, path = line.split("\t")
        if path.endswith(".py"):
            parts = PurePosixPath(path).parts
            found["/".join(parts[:2]) if parts[0] == "fastkron_py" and len(parts) > 2 else parts[0]].append(int(lines))
    return {room: sorted(sizes, reverse=True) for room, sizes in sorted(found.items())}


def draw(axes: Any, files: dict[str, list[int]], title: str, rows: int) -> None:
    """One commit: a row for each room, or more."""
    axes.set_xlim(-1_300, LINES_A_ROW)
    axes.set_ylim(rows + 0.5, -1.2)
    axes.axis("off")
    count, lines = sum(map(len, files.values())), sum(map(sum, files.values()))
    axes.text(-1_300, -0.6, f"{title}: {lines:,} lines in {count} files", fontsize=10, color=INK, fontweight="bold")
    y = 0
    for i, (room, sizes) in enumerate(files.items()):
        axes.text(-30, y + 0.5, room.removeprefix("fastkron_py/"), ha="right", va="center", fontsize=7.5, color=INK)
        axes.text(-1_300, y + 0.5, f"{len(sizes)}", va="center", fontsize=7, color=MUTED)
        x = 0
        for size in sizes:
            if x + size > LINES_A_ROW:
                x, y = 0, y + 1
            axes.add_patch(Rectangle((x, y + 0.12), size, 0.76, facecolor=COLOURS[i % len(COLOURS)], edgecolor="white", linewidth=0.6))
            x += size
        y += 1


def rows_of(files: dict[str, list[int]]) -> int:
    """How many rows the picture has at least, and a few for rooms that break early."""
    return sum(1 + int(1.08 * sum(sizes) / LINES_A_ROW) for sizes in files.values())


def main(before: str = BEFORE, after: str = AFTER, picture: str = PICTURE) -> None:
    both = [files_of(commit) for commit in (before, after)]
    rows = max(map(rows_of, both))
    figure = Figure(figsize=(13, 0.26 * rows + 0.6), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    for i, (files, title) in enumerate(zip(both, ("Cut by layer", "Cut by operator"), strict=True)):
        draw(figure.add_axes((0.01 + 0.5 * i, 0.01, 0.48, 0.98)), files, title, rows)
    figure.savefig(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
