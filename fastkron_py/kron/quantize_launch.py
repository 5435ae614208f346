"""Launches that store rows as small numbers: two steps whose slices are rows, and a pass over rows of any length."""

from __future__ import annotations

from typing import Final

import torch

from fastkron_py.kron.canonical import Canonical
from fastkron_py.kron.epilogues import TO_FLOAT8, TO_INTEGERS
from fastkron_py.kron.families import slice_pair
from fastkron_py.kron.forward import multiply_problem
from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.kernels.quantize import _quantize_rows_kernel
from fastkron_py.kron.launches import LaunchProblem, Rows, launch_configs
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import families_in_force, is_interpreting
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.launch import LaunchConfig, Launcher

_WIDEST: Final = 2048  # elements of a row that a program takes at a time
_FLOAT8: Final = (8, 9)  # compute capability


def _converts_to(kind: str, device: torch.device) -> bool:
    """Whether Triton has the conversion to a format; its interpreter loses carries of float8's."""
    if kind != "float8_e4m3fn":
        return True
    return not is_interpreting() and (devices.gpu_of(device).capability or (0, 0)) >= _FLOAT8


def quantizing_launch(problem: Canonical, precision: str, kind: str, device: torch.device) -> Launcher | None:
    """The launch that multiplies and rounds; None where no launch has whole rows on chip.

    Args:
        problem: the multiply, of one matrix of each factor and no columns.
        precision: of float32 products.
        kind: of the values.
        device: of all tensors.
    """
    x, factors = problem.x, problem.factors
    ps, qs = ([f.shape[i] for f in factors] for i in (1, 2))
    asked = families_in_force.get()
    if (asked and slice_pair.name not in asked) or not kernels.half_of(device, x.dtype) or not _converts_to(kind, device):
        return None
    # A byte has two columns of int4, of one row of a slice.
    pairs = [pair for pair in slice_pair.slice_pairs(ps, qs, 0, len(factors)) if kind != "int4" or pair[1].q % 2 == 0]
    if not pairs:
        return None
    launch = Launch(min(pairs, key=lambda pair: slice_pair.slice_pair_cost(pair, 1.0)), slice_pair.name)
    whole = multiply_problem(x, factors, device, precision)
    rows, width = x.shape[1], launch.q // (2 if kind == "int4" else 1)
    made = LaunchProblem(
        launch,
        x.dtype,
        precision,
        TO_FLOAT8 if kind == "float8_e4m3fn" else TO_INTEGERS,
        (1, rows, 1, 1),
        False,
        1,
        True,
        whole.x,
        Rows(0, width, 1),
        Rows(0, 1, 1),
        tuple([(f.shape[1], f.shape[2]) for f in factors]),
        tuple([(0, f.stride(1), f.stride(2)) for f in factors]),
        device,
    )
    return Launcher(launch_configs(made))


def rounding_launch(rows: int, n: int, kind: str, device: torch.device) -> Launcher | None:
    """The launch that rounds rows of n elements; None where Triton does not know the format on this GPU.

    Args:
        rows: of the product.
        n: its columns.
        kind: of the values.
        device: of all tensors.
    """
    if not _converts_to(kind, device):
        return None
    block = min(_WIDEST, max(32, next_power_of_two(n)))
    arguments = {"N": n, "BLOCK": block, "num_warps": 4 if block <= _WIDEST // 2 else 8}
    return Launcher([LaunchConfig(_quantize_rows_kernel, (rows,), arguments)])
