"""Launch configurations of the kernel for wide factors on Hopper GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.kernels.sliced_multiply import epilogue_plain
from fastkron_py.kron.plan.wide import BLOCK_K, BLOCK_M, FLUSH, Mode, WideConfig, gradient_config, multiply_config
from fastkron_py.runtime.launch import LaunchConfig

_GROUP: Final = 8  # rows of tiles that are in flight together
_REGISTERS: Final = (160, 96, 96)  # of a thread that holds sums; of those that bring operands
_VECTOR: Final = 16  # bytes that a thread loads at once
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
    along_x = common["x_strides"][3]
    return _launch(
        mode,
        config,
        (mode.slices, mode.q, mode.p),
        {
            "left_strides": common["x_strides"],
            "right_strides": (batch, 0, 0, along_q, 0),
            "k_strides": (along_x, along_p),
            "z_strides": common["z_strides"],
            "out_strides": common["y_strides"],
            "IS_SLICES": (True, False, False, False),
            "ALONG_ROWS": (along_x != 1, along_p != 1),
            "VECTORS": (_vector(along_x, common["x_strides"][:3], mode.itemsize), _vector(along_p, (batch, along_q), mode.itemsize)),
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
    launch = _launch(
        mode,
        config,
        (mode.p, mode.q, mode.slices),
        {
            "left_strides": operands[0],
            "right_strides": operands[1],
            "z_strides": _UNUSED,
            "out_strides": (size, mode.batches * size, 0, mode.q, 1),  # (B, splits, -, P, Q)
            "IS_SLICES": (False, True, False, True),
            "ALONG_ROWS": (mode.after == 1, mode.after == 1),
            "k_strides": along,
            "STRIDES": along,
            "VECTORS": tuple(_vector(s[fastest], (*s[:fastest], *s[fastest + 1 :], runs), mode.itemsize) for s in operands),
            "EPILOGUE": epilogue_plain,
            "alpha": 0,
            "beta": 0,
        },
        addresses,
    )
    return launch, config.splits


def _vector(along: int, others: Sequence[int], itemsize: int) -> int:
    """Neighbours along k that are one run at a multiple of their number, where k and all else have these strides."""
    return math.gcd(_VECTOR // itemsize, *others) if along == 1 else 1


def _launch(
    mode: Mode, config: WideConfig, sizes: tuple[int, int, int], arguments: dict[str, Any], slices: Mapping[str, Any]
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
        "STAGES": config.stages,
        "FLUSH": FLUSH if three else 0,
        "PRECISION": "half" if mode.itemsize == 2 else "split" if three else "cut",
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }
    return LaunchConfig(kernels.wide_kernel(), (config.programs,), arguments)
