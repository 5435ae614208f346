"""GPUs: one record for each architecture, of its features and its figures. They stand nowhere else.

`runtime.device.gpu_of` finds the record of a torch device. A new architecture is one more record here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class GPU:
    """Features and figures of a GPU, by which kernels and launches are chosen.

    Rates are those that well-tuned kernels reach, not the data sheet's.

    Attributes:
        name: of the architecture.
        major: of its CUDA compute capability; None for a GPU that is not NVIDIA's.
        multiprocessors: programs that run at a time, one on each.
        shared_memory: bytes that one program can have.
        bandwidth: of the memory, in bytes a second.
        half_rate: of tensor cores on float16 and bfloat16, in floating-point operations a second.
        tf32_rate: of tensor cores on TF32.
        float64_rate: of tensor cores on float64.
        float32_rate: of products in float32 without tensor cores.
        instruction_rate: instructions a second of one multiprocessor, those of all its lanes counted.
        is_measured: whether kernels were timed on it; else figures are another GPU's.
        has_wgmma: tensor cores multiply what lies in shared memory for a warpgroup, as kernels in Gluon want it.
        has_descriptors: a copy engine takes tensor descriptors.
        has_overlap: a launch can begin before the end of the one ahead ("programmatic dependent launch").
        has_approximations: functions are approximated in one of PTX's instructions each, with errors of some units in the last place.
    """

    name: str
    major: int | None
    multiprocessors: int
    shared_memory: int
    bandwidth: float
    half_rate: float
    tf32_rate: float
    float64_rate: float
    float32_rate: float
    instruction_rate: float
    is_measured: bool = False
    has_wgmma: bool = False
    has_descriptors: bool = False
    has_overlap: bool = False
    has_approximations: bool = False

    def rate(self, itemsize: int) -> float:
        """Operations a second of tensor cores on operands of this many bytes."""
        return {2: self.half_rate, 4: self.tf32_rate, 8: self.float64_rate}[itemsize]


HOPPER: Final = GPU(
    name="Hopper",
    major=9,
    multiprocessors=132,
    shared_memory=232_448,
    bandwidth=3.0e12,
    half_rate=7e14,
    tf32_rate=3.5e14,
    float64_rate=4.667e13,
    float32_rate=4.6e13,
    instruction_rate=128 * 1.7e9,
    is_measured=True,
    has_wgmma=True,
    has_descriptors=True,
    has_overlap=True,
    has_approximations=True,
)
"""Measured on an H100 SXM."""

# GPUs that were not measured: their figures are hoped to be in proportion.
_AMPERE: Final = replace(HOPPER, name="Ampere, Ada", major=8, is_measured=False, has_wgmma=False, has_descriptors=False, has_overlap=False)
_BLACKWELL: Final = replace(_AMPERE, name="Blackwell", major=10, has_descriptors=True)
_BLACKWELL_RTX: Final = replace(_BLACKWELL, name="Blackwell RTX", major=12)
_NVIDIA: Final = (HOPPER, _AMPERE, _BLACKWELL, _BLACKWELL_RTX)

OTHER: Final = replace(_AMPERE, name="other", major=None, has_approximations=False)
"""Of another vendor."""

INTERPRETER: Final = replace(OTHER, name="interpreter", multiprocessors=2, is_measured=True, has_descriptors=True)
"""Triton's interpreter on a CPU, which takes the launches of a Hopper GPU but for kernels in Gluon."""


def nvidia(major: int) -> GPU:
    """The record of NVIDIA's GPUs of this compute capability's major number; of an unknown one, that of the newest before it."""
    older = [gpu for gpu in _NVIDIA if gpu.major is not None and gpu.major <= major]
    return max(older, key=lambda gpu: gpu.major or 0, default=replace(_AMPERE, name="before Ampere", major=major))
