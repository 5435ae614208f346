"""``python -m benchmarks.calls``: how many of the library's own functions a first and a cached call of each verb go through.

Counted are calls of functions of the package (no comprehensions), the files that they stand in, and the moves from one file to another.
Inside Triton, which compiles or interprets kernels, nothing is counted. On a machine without a GPU kernels are interpreted.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import fastkron_py

PACKAGE = str(Path(fastkron_py.__file__).parent) + os.sep


class Count(NamedTuple):
    """What a call went through."""

    calls: int
    files: int
    moves: int
    names: list[str]


def counted(call: Callable[[], Any]) -> Count:
    """Make the call, and count."""
    names: list[str] = []
    files: list[str] = []
    stack: list[str] = []
    inside_triton = 0
    moves = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal inside_triton, moves
        path = frame.f_code.co_filename
        if f"{os.sep}triton{os.sep}" in path:
            inside_triton += (event == "call") - (event == "return")
        is_function = frame.f_code.co_flags & inspect.CO_NEWLOCALS and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # no class, no module
        if inside_triton or not is_function or not path.startswith(PACKAGE) or frame.f_code.co_name.startswith("<"):
            return
        if event == "call":
            moves += bool(stack) and stack[-1] != path
            names.append(
                f"{path.removeprefix(PACKAGE)}:{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"
            )
            files.append(path)
            stack.append(path)
        elif event == "return" and stack:
            left = stack.pop()
            moves += bool(stack) and stack[-1] != left

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Count(len(names), len(set(files)), moves, names)


def verbs(device: torch.device, rows: int = 16) -> dict[str, Callable[[], Any]]:
    """A call of each verb, on a small problem of this many rows."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    x, factors = draw(rows, 64), [draw(8, 8), draw(8, 8)]
    numerator, denominator, coefficients, weight = draw(2, 6), draw(2, 4), draw(4, 32, 64), draw(2, 32, 64)
    return {
        "kron_matmul": lambda: fastkron_py.kron_matmul(x, factors),
        "rational": lambda: fastkron_py.rational(x, numerator, denominator),
        "poly_kan": lambda: fastkron_py.poly_kan(x, coefficients),
        "gated_linear": lambda: fastkron_py.gated_linear(x, weight, layout="stacked"),
    }


def main() -> None:
    """Print the table; with names of verbs, also the functions that their calls go through."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'':14}{'first call':>24}{'cached call':>24}\n{'':14}" + f"{'calls':>8}{'files':>8}{'moves':>8}" * 2)
    with fastkron_py.backend("triton"):
        for other in verbs(device, 24).values():  # modules are loaded
            other()
        for name, call in verbs(device).items():
            first = counted(call)
            call()
            again = counted(call)
            print(f"{name:14}" + "".join(f"{n:8}" for n in (*first[:3], *again[:3])))
            if name in sys.argv[1:]:
                print("  first: " + " ".join(first.names) + "\n  cached: " + " ".join(again.names))


if __name__ == "__main__":
    main()
