"""Layer normalisation with a rational function compiles for sm_90: registers for the programs that `tuning` counts on, no spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled_for_h100 import LIMIT, compiled

# One worker: what is compiled serves all tests here.
pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_for_h100")]


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """One record for each problem and kernel."""
    lines = compiled("compile_layer_norm_rational_for_h100.py", triton_cache)
    return {(k["problem"], k["kernel"]): k for k in lines}


@pytest.mark.parametrize("problem", ["tiny", "small", "base", "base of version A"])
def test_the_kat_s_launches(problem: str, kernels: dict[tuple[str, str], dict[str, Any]]) -> None:
    for name, warps in (("fwd", 24), ("bwd", 8)):
        kernel = kernels[problem, f"_layer_norm_rational_{name}_kernel"]
        assert kernel["stack"] == 0
        assert kernel["reg"] * 32 * warps <= 65536
        assert kernel["shared"] * (warps // kernel["num_warps"]) < 200 << 10


def test_float64_compiles(kernels: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert ("float64", "_layer_norm_rational_bwd_kernel") in kernels
    assert {kernel for _, kernel in kernels} == {
        "_layer_norm_rational_fwd_kernel",
        "_layer_norm_rational_bwd_kernel",
        "_columns_kernel",
        "_rational_coefficients_kernel",
    }
