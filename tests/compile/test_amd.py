"""Kernels in plain Triton compile for AMD's GPUs, within their shared memory and registers. None was run there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from compiled_for_h100 import LIMIT, compiled

from fastkron_py.runtime.gpu import AMD

# One worker: what is compiled serves all tests here.
pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_for_amd")]

ARCHITECTURES = ("gfx942", "gfx1201")
OF_BFLOAT16 = {
    "_columns_kernel",
    "_copy_matrices_kernel",
    "_factor_gradient_kernel",
    "_fused_multiply_bwd_kernel",
    "_fused_multiply_fwd_kernel",
    "_gate_gradients_kernel",
    "_gemm_kernel",
    "_indexed_lokr_kernel",
    "_layer_norm_rational_bwd_kernel",
    "_layer_norm_rational_fwd_kernel",
    "_poly_kan_fwd_kernel",
    "_poly_kan_gradients_kernel",
    "_rational_bwd_kernel",
    "_rational_coefficients_kernel",
    "_rational_fwd_kernel",
    "_rotate_rows_kernel",
    "_rotate_segments_kernel",
    "_sliced_multiply_fwd_kernel",
    "_sort_rows_kernel",
    "_sum_partials_kernel",
}
OF_OTHERS = {
    "_narrow_multiply_fwd_kernel",
    "_split_gradient_kernel",
    "_spread_sums_kernel",
    "_take_points_kernel",
    "_take_runs_kernel",
    "_transpose_kernel",
}


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[str, list[dict[str, Any]]]:
    """One record for each kernel, by architecture."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: compiled("compile_for_amd.py", triton_cache, name), ARCHITECTURES)
        return dict(zip(ARCHITECTURES, found, strict=True))


def test_every_plain_kernel_was_compiled(kernels: dict[str, list[dict[str, Any]]]) -> None:
    """Those in Gluon are not asked for: their layouts are of 32 lanes, their instructions NVIDIA's."""
    assert {k["kernel"] for k in kernels["gfx1201"]} == OF_BFLOAT16
    assert {k["kernel"] for k in kernels["gfx942"]} == OF_BFLOAT16 | OF_OTHERS


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shared_memory_suffices(kernels: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert [k for k in kernels[name] if k["shared"] > AMD.shared_memory] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_spills(kernels: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert [k for k in kernels[name] if k["stack"] > 0] == []
