"""Launches of the kernel for whole rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.plan.steps import Step
from fastkron_py.kron.plan.whole_row import layouts, sizes_of, whole_row_config
from fastkron_py.runtime.gpu import GPU
from fastkron_py.runtime.launch import LaunchConfig


def whole_row_launch(steps: Sequence[Step], common: dict[str, Any], batches: int, gpu: GPU) -> LaunchConfig:
    """The launch configuration of three or four steps on one row at a time; common as every kernel of a multiply has it."""
    config, sizes = whole_row_config(steps), sizes_of(steps)
    programs = min(common["num_slices"], math.ceil(gpu.multiprocessors * config.programs_per_sm / batches))
    ends = [s.stop - steps[0].start for s in steps[:-1]]
    arguments = common | {
        "programs": programs,
        "STOPS": (ends[0], *ends[-2:]),  # without B its factors are none
        "SIZES": sizes,
        "MATRICES": config.matrices,
        "RING": config.ring,
        "LAYOUTS": tuple(layouts(sizes, config)),
        "WARPS": config.num_warps,
        "num_warps": config.num_warps,
    }
    return LaunchConfig(kernels.whole_row_kernel(), (batches * programs,), arguments)
