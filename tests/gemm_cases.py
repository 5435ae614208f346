"""The launches of `add_gemm` alone, as tests run them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.gemm_config import GemmTile
from fastkron_py.tiling.gemm_launch import Gemm, add_gemm


def gemm_program(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    call: Gemm,
    out: Tensor,
    *,
    b2: Tensor | None = None,
    tensors: Any = (),
    tile: GemmTile | None = None,
    **options: Any,
) -> Program:
    """Of these tensors but for those that are None, one after the other: a, b, bias, out, b2, tensors; the program writes to out."""
    build = Builder([a, b, bias, out, b2, *tensors])
    a, b, bias, out, b2, *rest = build.inputs
    choose = None if tile is None else lambda sizes: tile
    add_gemm(build, a, b, bias, call, out, b2=b2, tensors=tuple(rest), choose=choose, **options)
    return build.program([])


def gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, call: Gemm, out: Tensor, *, b2: Tensor | None = None, tensors: Any = (), **options: Any
) -> None:
    """Build the program and run it."""
    program = gemm_program(a, b, bias, call, out, b2=b2, tensors=tensors, **options)
    given = [t for t in (a, b, bias, out, b2, *tensors) if t is not None]
    assert program.takes(given)
    assert program(given) == []


def gemm_columns(program: Program) -> list[int]:
    """The columns of each launch of the main loop in a program."""
    launchers = [step.run for step in program._steps if isinstance(step.run, Launcher)]
    arguments = [launcher.configs[0].arguments for launcher in launchers]
    return [a["N"] for a in arguments if "PAIRS" in a]
