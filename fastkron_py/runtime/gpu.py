"""GPUs: one record for each architecture, of its features and its figures; and CPUs that differ in their fastest products. Plain Python.

They stand nowhere else. `runtime.device.gpu_of` finds the record of a torch device. A new architecture is one more record here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final


@dataclass(frozen=True)
class GPU:
    """Features and figures of a GPU, by which kernels and launches are chosen.

    Rates are those that well-tuned kernels reach, not the data sheet's. They are those of one GPU of the architecture. Its smaller
    GPUs have less of both rates and bandwidth, in about the same ratio, and choices depend on that ratio.
    """

    name: str  # of the architecture
    capability: tuple[int, int] | None  # (major, minor) of CUDA's compute capability; None for a GPU that is not NVIDIA's
    multiprocessors: int  # programs that run at a time, one on each
    shared_memory: int  # bytes that one program can have: CUDA's "opt-in" maximum of a thread block
    bandwidth: float  # of the memory, in bytes a second
    link_bandwidth: float  # to the other GPUs of a host, in bytes a second each way, by the data sheet: NVLink's, else PCI Express's
    half_rate: float  # of tensor cores on float16 and bfloat16, in floating-point operations a second
    tf32_rate: float  # of tensor cores on TF32
    float64_rate: float  # of tensor cores on float64
    float32_rate: float  # of products in float32 without tensor cores
    instruction_rate: float  # instructions a second of one multiprocessor, those of all its lanes counted
    rates: str = "hopper"  # the file of `kron.rates` with what its kernels reach of these figures
    is_measured: bool = False  # whether kernels were timed on it; else its rates and bandwidth are estimated from its data sheet
    has_wgmma: bool = False  # a warpgroup's tensor cores multiply operands in shared memory, as kernels in Gluon need
    has_shared_operands: bool = False  # tensor cores read operands from shared memory; else from registers, which then hold fewer sums
    has_float64_cores: bool = False  # tensor cores multiply float64, for which other multiplications keep far more in registers
    has_descriptors: bool = False  # a copy engine takes tensor descriptors
    has_overlap: bool = False  # a launch can begin before the end of the one ahead ("programmatic dependent launch")
    # functions are approximated in one of PTX's instructions each, with errors of some units in the last place
    has_approximations: bool = False
    has_staged_sums: bool = False  # sums that are taken apart pass through shared memory, all of a tile at once

    @property
    def modelled_multiprocessors(self) -> int:
        """Those that models of time count with: the interpreter has few programs, but takes the launches of a Hopper GPU."""
        return self.multiprocessors if self.name != "interpreter" else HOPPER.multiprocessors

    def __hash__(self) -> int:
        """Return a hash of two features that tell most GPUs apart: problems, which are keys of caches, hash theirs in every look-up."""
        return hash((self.name, self.multiprocessors))

    def rate(self, itemsize: int) -> float:
        """Operations a second of tensor cores on operands of this many bytes."""
        return self.half_rate if itemsize == 2 else self.tf32_rate if itemsize == 4 else self.float64_rate


HOPPER: Final = GPU(
    name="Hopper",
    capability=(9, 0),
    multiprocessors=132,
    shared_memory=232_448,
    bandwidth=3.0e12,
    link_bandwidth=4.5e11,
    half_rate=7e14,
    tf32_rate=3.5e14,
    float64_rate=4.667e13,
    float32_rate=4.6e13,
    instruction_rate=128 * 1.7e9,
    is_measured=True,
    has_wgmma=True,
    has_shared_operands=True,
    has_float64_cores=True,
    has_descriptors=True,
    has_overlap=True,
    has_approximations=True,
)
"""Measured on an H100 SXM."""


@dataclass(frozen=True)
class _DataSheet:
    """A GPU's data sheet.

    Bytes a second of memory, and each way to other GPUs; operations a second (dense, sums in float32); lanes of a multiprocessor, its
    clock rate.
    """

    bandwidth: float
    link: float
    half: float
    tf32: float
    float64: float
    float32: float
    lanes: int
    clock: float


_H100: Final = _DataSheet(
    bandwidth=3.35e12, link=4.5e11, half=9.894e14, tf32=4.947e14, float64=6.69e13, float32=6.69e13, lanes=128, clock=1.98e9
)


def _estimated(name: str, capability: tuple[int, int], multiprocessors: int, shared_memory: int, sheet: _DataSheet) -> GPU:
    """The record of a GPU that was not measured: the same share of its data sheet as measured of the H100's."""
    return GPU(
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        shared_memory=shared_memory,
        bandwidth=sheet.bandwidth * HOPPER.bandwidth / _H100.bandwidth,
        link_bandwidth=sheet.link,
        half_rate=sheet.half * HOPPER.half_rate / _H100.half,
        tf32_rate=sheet.tf32 * HOPPER.tf32_rate / _H100.tf32,
        float64_rate=sheet.float64 * HOPPER.float64_rate / _H100.float64,
        float32_rate=sheet.float32 * HOPPER.float32_rate / _H100.float32,
        instruction_rate=sheet.lanes * sheet.clock * HOPPER.instruction_rate / (_H100.lanes * _H100.clock),
        has_shared_operands=capability[0] == 10,
        has_float64_cores=capability in ((8, 0), (10, 0)),
        has_descriptors=capability[0] > 8,
        has_approximations=True,
    )


AMPERE: Final = _estimated("Ampere", (8, 0), 108, 166_912, _DataSheet(2.039e12, 3e11, 3.12e14, 1.56e14, 1.95e13, 1.95e13, 64, 1.41e9))
"""An A100 SXM with 80 GB."""
AMPERE_RTX: Final = _estimated(
    "Ampere RTX", (8, 6), 82, 101_376, _DataSheet(9.36e11, 3.2e10, 7.12e13, 3.56e13, 5.56e11, 3.56e13, 128, 1.695e9)
)
"""A GeForce RTX 3090."""
ADA: Final = _estimated("Ada", (8, 9), 128, 101_376, _DataSheet(1.008e12, 3.2e10, 1.652e14, 8.26e13, 1.29e12, 8.26e13, 128, 2.52e9))
"""A GeForce RTX 4090."""
BLACKWELL: Final = _estimated("Blackwell", (10, 0), 148, 232_448, _DataSheet(8e12, 9e11, 2.25e15, 1.125e15, 3.7e13, 7.5e13, 128, 1.965e9))
"""A B200."""
BLACKWELL_RTX: Final = _estimated(
    "Blackwell RTX", (12, 0), 170, 101_376, _DataSheet(1.792e12, 6.4e10, 2.095e14, 1.048e14, 1.637e12, 1.048e14, 128, 2.407e9)
)
"""A GeForce RTX 5090."""
_NVIDIA: Final = (AMPERE, AMPERE_RTX, ADA, HOPPER, BLACKWELL, BLACKWELL_RTX)
_BEFORE_AMPERE: Final = replace(AMPERE, name="before Ampere", shared_memory=65_536, has_float64_cores=False)

INTERPRETER: Final = replace(
    HOPPER, name="interpreter", capability=None, multiprocessors=2, has_wgmma=False, has_overlap=False, has_approximations=False
)
"""Triton's interpreter on a CPU, which takes the launches of a Hopper GPU but for kernels in Gluon."""

AMD: Final = replace(
    HOPPER,
    name="AMD",
    capability=None,
    multiprocessors=304,
    shared_memory=65_536,
    is_measured=False,
    has_wgmma=False,
    has_shared_operands=False,
    has_descriptors=False,
    has_overlap=False,
    has_approximations=False,
    has_staged_sums=True,
)
"""As compiled for an MI300X (gfx942). No kernel was run there: rates are Hopper's."""


def nvidia(major: int, minor: int) -> GPU:
    """The record of NVIDIA's GPUs of this compute capability; of an unknown one, that of the newest before it."""
    older = [gpu for gpu in _NVIDIA if gpu.capability is not None and gpu.capability <= (major, minor)]
    return max(older, key=lambda gpu: gpu.capability or (0, 0), default=replace(_BEFORE_AMPERE, capability=(major, minor)))


NAMED: Final = {
    "A100": AMPERE,
    "H100": HOPPER,
    "H200": HOPPER,
    "B200": BLACKWELL,
    "RTX 3090": AMPERE_RTX,
    "RTX 4090": ADA,
    "RTX 5090": BLACKWELL_RTX,
    "MI300X": AMD,
}
"""The records by the names of GPUs, for plans of GPUs that are not there."""


# Consecutive elements that a load or store should at least touch: one 32-byte sector.
SECTOR_BYTES: Final = 32
VECTOR_BYTES: Final = 16  # that a thread loads or stores at once
WRITE_BYTES: Final = 64  # that memory writes at once; less is read, changed and written


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is not below size (size >= 1)."""
    return 1 << (size - 1).bit_length()


_ZEN5: Final = 26  # family of Zen 5, or later
_ZEN4: Final = 25  # of Zen 3, too, which has no AVX-512


@lru_cache(maxsize=1)
def zen() -> int:
    """AMD's generation, 4 or 5 (or later); 0 for other CPUs, and elsewhere than on Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            fields = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    except OSError:
        return 0
    about = {name.strip(): value.strip() for name, _, value in fields}
    family = about.get("cpu family", "")
    if about.get("vendor_id") != "AuthenticAMD" or not family.isdecimal():
        return 0
    if int(family) >= _ZEN5:
        return 5
    return 4 if int(family) == _ZEN4 and "avx512f" in about.get("flags", "").split() else 0
