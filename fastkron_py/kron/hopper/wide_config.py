"""Launch configurations of the kernel for wide factors on Hopper GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.kernels.sliced_multiply import epilogue_plain
from fastkron_py.kron.plan.mode import BLOCK_K, Mode
from fastkron_py.kron.plan.wide import BLOCK_M, WideConfig, gradient_config, multiply_config, ring_stages
from fastkron_py.runtime.launch import LaunchConfig

_GROUP: Final = 8  # rows of tiles that are in flight together
# Of a thread that holds sums, and of those that bring the left and the right operand, or copy the left one.
_REGISTERS: Final = (160, 96, 96)
_REGISTERS_COPYING: Final = (184, 40, 104)
_VECTOR: Final = 16  # bytes that a thread loads at once
# Steps between two additions to the float32 sum: tensor cores, which cut sums off, may add up 64 terms by themselves.
_FLUSH: Final = 2
_UNUSED: Final = (0, 0, 0, 0, 0)


def multiply_launch(mode: Mode, common: Mapping[str, Any], factor_strides: tuple[int, int, int], is_fixed: bool) -> LaunchConfig:
    """The launch of a multiply, on (x, (factor,), z, y), alpha and beta.

    Args:
        mode: the multiply.
        common: arguments of every kernel of a multiply: see `launches.launch_configs`.
        factor_strides: (B, P, Q).
        is_fixed: whether strides are a matter of the factors alone, so that the kernel may be compiled for them.
    """
    _, config = multiply_config(mode)
    batch, along_p, along_q = factor_strides
    strides = _in_use(mode, common["x_strides"], common)
    along_x, along_after = strides[3:]
    along_rows = _vector(along_after, (*strides[:4], mode.after), mode.itemsize)
    along_k = _vector(along_x, (*strides[:3], along_after), mode.itemsize)
    copied = (along_rows, 1) if along_rows > 1 else (1, math.gcd(along_k, mode.p))
    is_copied = _may_copy(mode, max(copied))
    return _launch(
        mode,
        config,
        (mode.slices, mode.q, mode.p),
        is_copied,
        {
            "left_strides": common["x_strides"],
            "right_strides": (batch, 0, 0, along_q, 0),
            "k_strides": (along_x, along_p),
            "z_strides": common["z_strides"],
            "out_strides": common["y_strides"],
            "IS_SLICES": (True, False, False, False),
            "ALONG_ROWS": (along_x != 1, along_p != 1),
            "VECTORS": (
                copied if is_copied else (1, along_k),
                (1, _vector(along_p, (batch, along_q), mode.itemsize)),
            ),
            "STRIDES": (along_x if is_fixed or along_x == 1 else -1, along_p),
            "EPILOGUE": common["EPILOGUE"],
        },
        common,
    )


def gradient_launch(mode: Mode, addresses: Mapping[str, Any]) -> tuple[LaunchConfig, int]:
    """The launch of a factor's gradient, on (u, (g,), partial sums twice), and the number of splits.

    Args:
        mode: the multiply that is differentiated.
        addresses: `GradientProblem.addresses`.
    """
    _, config = gradient_config(mode)
    size = mode.p * mode.q
    fastest = 4 if addresses["TAIL"] else 2 if addresses["HEAD"] else 1
    operands = (addresses["u_strides"], addresses["g_strides"])
    along = (operands[0][fastest], operands[1][fastest])
    runs = mode.after if mode.after % BLOCK_K == 0 else 1  # of slices, along which k goes
    used = [_in_use(mode, s, addresses) for s in operands]
    vectors = [_vector(s[fastest], (*s[:fastest], *s[fastest + 1 :], runs), mode.itemsize) for s in used]
    launch = _launch(
        mode,
        config,
        (mode.p, mode.q, mode.slices),
        addresses["TAIL"] and _may_copy(mode, vectors[0]),
        {
            "left_strides": operands[0],
            "right_strides": operands[1],
            "z_strides": _UNUSED,
            "out_strides": (size, mode.batches * size, 0, mode.q, 1),  # (B, splits, -, P, Q)
            "IS_SLICES": (False, True, False, True),
            "ALONG_ROWS": (mode.after == 1, mode.after == 1),
            "k_strides": along,
            "STRIDES": along,
            "VECTORS": tuple((1, v) for v in vectors),
            "EPILOGUE": epilogue_plain,
            "alpha": 0,
            "beta": 0,
        },
        addresses,
    )
    return launch, config.splits


def _in_use(mode: Mode, strides: Sequence[int], slices: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Strides (B, L, before, mode, after), but 0 where there is one index: its stride, whatever it is, says nothing of alignment."""
    batch, row, before, along, after = strides
    return (batch if mode.batches > 1 else 0, row, before if slices["HEAD"] else 0, along, after if slices["TAIL"] else 0)


def _vector(along: int, others: Sequence[int], itemsize: int) -> int:
    """Neighbours that are one run at a multiple of their number, where they and all else have these strides."""
    return math.gcd(_VECTOR // itemsize, *others) if along == 1 else 1


def _may_copy(mode: Mode, run: int) -> bool:
    """Whether the left operand may be copied as it lies: in three passes, where neighbours are runs of 16 bytes."""
    return mode.passes == 3 and run * mode.itemsize == _VECTOR


def _launch(
    mode: Mode,
    config: WideConfig,
    sizes: tuple[int, int, int],
    is_copied: bool,
    arguments: dict[str, Any],
    slices: Mapping[str, Any],
) -> LaunchConfig:
    height, width, depth = sizes
    head, tail = slices["HEAD"], slices["TAIL"]
    fastest = slices["after"] if tail else slices["before"]
    three = mode.passes == 3
    arguments |= {
        "before": slices["before"],
        "after": slices["after"],
        "height": height,
        "width": width,
        "depth": depth,
        "steps_per_split": config.steps,
        "batches": mode.batches,
        "items": config.items,
        "WHERE": (head, tail, fastest % BLOCK_M == 0),
        "WHERE_K": (head, tail, fastest % BLOCK_K == 0),
        "EVEN": depth % BLOCK_K == 0,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": config.block_n,
        "BLOCK_K": BLOCK_K,
        "GROUP": _GROUP,
        "STAGES": ring_stages(mode, config.block_n, is_copied),
        "FLUSH": _FLUSH if three else 0,
        "PRECISION": "half" if mode.itemsize == 2 else "split" if three else "cut",
        "IS_COPIED": is_copied,
        "REGISTERS": _REGISTERS_COPYING if is_copied else _REGISTERS,
        "num_warps": 4,
    }
    return LaunchConfig(kernels.wide_kernel(), (config.programs,), arguments)
