"""Each kernel's first choice compiles for every architecture but 8.9, within its shared memory, and spills no more than for sm_90.

That is the launch with the largest tiles of each kind: a kernel with one set of dtypes, device functions and parts. Launches that differ in
tiles, widths and masks alone are left out: what stands in the way of a kernel on another architecture is its products, its functions and
the memory of its largest tiles. Plans for them are compared by tests/kron/plan and tests/kan; for sm_90 the other tests here compile most,
and `python tests/compiled_for_gpus.py` compiles everything.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_for_gpus import BASELINES, TESTED, Compiled, Kernels, compiled_for_gpus
from compiled_for_h100 import LIMIT, TRITON_VERSION

from fastkron_py.runtime.gpu import nvidia

# One worker: what is compiled serves all tests here.
pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_for_gpus")]

ARCHITECTURES = pytest.mark.parametrize("capability", TESTED)
A_FEW = 80  # bytes of a thread
NOTHING = Compiled(0, 0, 0)  # of a kernel that sm_90 has no launch of in this problem


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[tuple[str, ...], Kernels]:
    return compiled_for_gpus(triton_cache)


def test_every_kernel_was_compiled(kernels: dict[tuple[str, ...], Kernels]) -> None:
    names = {capability: {kernel for _, kernel in kernels[capability,]} for capability in TESTED}
    assert len({problem for problem, _ in kernels["8.0",]}) > 25
    assert len(names["8.0"]) > 20
    assert all(names[capability] >= names["8.0"] for capability in TESTED if capability != "9.0")
    assert all("_gemm_kernel" in names[capability] for capability in TESTED if capability not in ("8.0", "9.0"))
    assert names["9.0"] >= {"_hadamard_fwd_kernel", "_rotate_rows_kernel", "_rotate_segments_kernel", "_indexed_lokr_kernel"}
    assert all(kernels.values())  # of a baseline, the kernels that spill where they are compared: there are some


@ARCHITECTURES
def test_shared_memory_suffices(kernels: dict[tuple[str, ...], Kernels], capability: str) -> None:
    major, minor = map(int, capability.split("."))
    limit = nvidia(major, minor).shared_memory
    assert {name: found.shared for name, found in kernels[capability,].items() if found.shared > limit} == {}


@pytest.mark.parametrize("capability", [capability for capability in TESTED if capability != "9.0"])
def test_no_more_is_spilled_than_on_hopper(kernels: dict[tuple[str, ...], Kernels], capability: str) -> None:
    """But for a few values."""
    is_3_7 = TRITON_VERSION == (3, 7)
    if is_3_7 and capability == "10.0":
        pytest.skip("Triton 3.7 multiplies float64 without tensor cores for 10.0, and spills 2 to 7 KB")
    hopper = kernels[BASELINES[capability]]
    spilled = {name: (found.spilled, hopper.get(name, NOTHING).spilled) for name, found in kernels[capability,].items()}
    assert {name: pair for name, pair in spilled.items() if pair[0] > pair[1] + A_FEW} == {}
