"""Launchers of the polynomial KAN kernels for Hopper GPUs."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from fastkron_py.kan import config_hopper as tuning
from fastkron_py.kan.config import GROUP, Sizes
from fastkron_py.kan.config_hopper import Pipelined
from fastkron_py.kan.hopper import kernels
from fastkron_py.kan.kernels.operands import _sum_segments_kernel
from fastkron_py.kan.problem import ALIGNED, Boxes, Problem, Product, Stored, stored
from fastkron_py.runtime.launch import LaunchConfig, Launcher

_SUM_ROWS: Final = 32
_DOWN: Final = 1 << 16  # rows of tiles in a group: all of them, which is the order in which the second kernel finds their shares


def takes(problem: Problem, backward: bool) -> bool:
    """Whether these kernels can do a layer's products on its device, and are better than plain Triton's."""
    if not problem.layer.found.any_dialect or not kernels.has_pipelined(problem.device, problem.dtype):
        return False
    # Float32 is prepared, with rows that the copy engine takes.
    copies = problem.dtype == torch.float32 or (problem.stride_x % 8 == 0 and problem.stride_g % 8 == 0)
    return copies and tuning.takes(problem.sizes(), backward)


def _sizes(problem: Problem) -> Sizes:
    """The sizes that the closed form chooses by."""
    return problem.sizes()._replace(terms=max(1, problem.layer.terms - problem.layer.first))


def _precision(problem: Problem) -> str:
    if problem.dtype != torch.float32:
        return "half"
    return "split" if problem.is_split else "cut"


def _constants(problem: Problem, choice: Pipelined, derivative: bool) -> dict[str, Any]:
    """The arguments that all three kernels take."""
    start, step, value = problem.layer.prologue(derivative)
    return {
        "rows": problem.rows,
        "num_in": problem.num_in,
        "num_out": problem.num_out,
        "stride_xm": problem.stride_x,
        "TERMS": problem.layer.terms,
        "FIRST": problem.layer.first,
        "PARAMS": problem.layer.constants,
        "START": start,
        "STEP": step,
        "VALUE": value,
        "NORM": problem.layer.normalizer.device_functions(True)[0],
        "BLOCK_N": choice.block_n,
        "BLOCK_K": choice.block_k,
        "STAGES": choice.stages,
        "FLUSH": choice.flush,
        "PRECISION": _precision(problem),
        "ALIGN_IN": math.gcd(problem.num_in, problem.stride_x, ALIGNED),
        "num_warps": 4 if choice.registers else 8,
    }


def _product(problem: Problem, kernel: Any, choice: Pipelined, arguments: dict[str, Any], result: Stored, boxes: Boxes | None) -> Product:
    launcher = Launcher([LaunchConfig(kernel, (choice.programs,), arguments)])
    transposed = problem.dtype == torch.float32
    rounds = transposed and not problem.is_split
    return Product(launcher, problem.layer.first, transposed, problem.is_split, rounds, (result,), True, boxes)


def _boxes(shape: list[int], columns: int, dtype: torch.dtype) -> Boxes:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, str(dtype).removeprefix("torch.")))
    return Boxes(shape, columns, layout)


def forward(problem: Problem) -> Product:
    """The launch of y, on (x, C, its low halves, table, bias)."""
    choice = tuning.forward(_sizes(problem))
    kernel, _, _ = kernels.pipelined_kernels()
    arguments = {
        **_constants(problem, choice, False),
        "blocks_per_split": choice.blocks,
        "items": choice.items,
        "HAS_BIAS": problem.has_bias or problem.layer.first == 1,
        "BLOCK_M": tuning.BLOCK_M,
        "GROUP": GROUP,
        "REGISTERS": choice.registers,
        "ALIGN_OUT": math.gcd(problem.num_out, ALIGNED),
    }
    result = stored(choice.splits, (problem.rows, problem.num_out))
    boxes = _boxes([choice.block_n, choice.block_k], problem.num_in, problem.dtype)
    return _product(problem, kernel, choice, arguments, result, boxes)


def input_gradient(problem: Problem) -> Product | None:
    """The launch of dx, on (dy, its low halves, x, C, its low halves, table), where this kernel is best."""
    choice = tuning.input_gradient(_sizes(problem))
    if choice is None:
        return None
    _, kernel, _ = kernels.pipelined_kernels()
    units = -(-problem.num_out // choice.block_k) * -(-_sizes(problem).terms // choice.degrees)
    tiles = -(-problem.rows // tuning.BLOCK_M) * -(-problem.num_in // choice.block_n)
    segments = tuning.segments_of(tiles, units, choice.items)
    arguments = {
        **_constants(problem, choice, True),
        "parts": choice.items,
        "SLOPE": problem.layer.normalizer.device_functions(True)[1],
        "DEGREES": choice.degrees,
        "GROUP": GROUP if segments == 1 else _DOWN,
        "REGISTERS": choice.registers,
    }
    result = Stored()
    if segments > 1:
        shape = (1, problem.rows, problem.num_in)
        result = _segments(shape, 0, 1, choice, units, segments)
    boxes = _boxes([choice.block_n, choice.block_k], problem.num_out, problem.dtype)
    product = _product(problem, kernel, choice, arguments, result, boxes)
    return product._replace(boxes_of_dy=_boxes([tuning.BLOCK_M, choice.block_k], problem.num_out, problem.dtype))


def coefficient_gradient(problem: Problem) -> Product:
    """The launch of dC, on (dy, its low halves, x, table)."""
    sizes = _sizes(problem)
    choice = tuning.coefficient_gradient(sizes)
    _, _, kernel = kernels.pipelined_kernels()
    transposed = problem.dtype == torch.float32
    blocks = -(-problem.rows // choice.block_k)
    arguments = {
        **_constants(problem, choice, False),
        "blocks": blocks,
        "parts": choice.items,
        "DEGREES": choice.degrees,
        "REGISTERS": choice.registers,
    }
    box = [tuning.BLOCK_M, choice.block_k] if transposed else [choice.block_k, tuning.BLOCK_M]
    boxes = _boxes(box, problem.rows if transposed else problem.num_out, problem.dtype)
    tiles = -(-problem.num_out // tuning.BLOCK_M) * -(-problem.num_in // choice.block_n) * -(-sizes.terms // choice.degrees)
    segments = tuning.segments_of(tiles, blocks, choice.items)
    result = Stored()
    if segments > 1:
        shape = (problem.layer.terms, problem.num_out, problem.num_in)
        result = _segments(shape, problem.layer.first, choice.degrees, choice, blocks, segments)
    return _product(problem, kernel, choice, arguments, result, boxes)


def _segments(shape: tuple[int, int, int], first: int, degrees: int, choice: Pipelined, units: int, segments: int) -> Stored:
    """Partial sums of a result [terms, rows, columns], from term first on; a second kernel adds those of each tile."""
    terms, rows, columns = shape
    arguments = {
        "num_in": columns,
        "num_out": rows,
        "blocks": units,
        "programs": choice.items,
        "segments": segments,
        "TERMS": terms,
        "FIRST": first,
        "DEGREES": degrees,
        "BLOCK_M": tuning.BLOCK_M,
        "BLOCK_N": choice.block_n,
        "ROWS": _SUM_ROWS,
        "num_warps": 4,
    }
    programs = -(-columns // choice.block_n) * -(-rows // _SUM_ROWS) * (terms - first)
    launcher = Launcher([LaunchConfig(_sum_segments_kernel, (programs,), arguments)])
    return Stored((segments, *shape), launcher)
