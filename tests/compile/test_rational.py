"""The rational kernels compile for sm_90, with wide loads, without spills, and with registers for many programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled_for_h100 import LIMIT, TRITON_VERSION, compiled

# One worker: what is compiled serves all tests here.
pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_for_h100")]


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """One record for each problem and kernel."""
    lines = compiled("compile_rational_for_h100.py", triton_cache)
    return {(k["problem"], k["kernel"]): k for k in lines}


def test_every_kernel_was_compiled(kernels: dict[tuple[str, str], dict[str, Any]]) -> None:
    rational = {"_rational_fwd_kernel", "_rational_bwd_kernel", "_rational_coefficients_kernel"}
    normalised = {"_layer_norm_rational_fwd_kernel", "_layer_norm_rational_bwd_kernel", "_columns_kernel"}
    assert {kernel for _, kernel in kernels} == {*rational, *normalised, "_gemm_kernel"}
    assert len({problem for problem, kernel in kernels if kernel in rational}) == 14
    assert len({problem for problem, kernel in kernels if kernel == "_gemm_kernel"}) == 4


@pytest.mark.parametrize("keep", ["kept", "not kept"])
@pytest.mark.parametrize("model", ["KAT-T", "KAT-B"])
def test_two_fused_programs_share_a_multiprocessor(model: str, keep: str, kernels: dict[tuple[str, str], dict[str, Any]]) -> None:
    """So that one multiplies while the other evaluates the function: 256 threads' registers, and shared memory."""
    found = kernels[f"{model}, {keep}", "_gemm_kernel"]
    assert found["reg"] <= 128
    assert found["stack"] <= 16
    assert 2 * (found["shared"] + 1024) <= 233_472


@pytest.mark.parametrize("problem", ["float32", "bfloat16", "float16 of version A"])
def test_the_kat_s_launches(problem: str, kernels: dict[tuple[str, str], dict[str, Any]]) -> None:
    """16-byte loads of x and dy, 16-byte stores, no spills; eight programs of four warps a multiprocessor, ten forward."""
    backward = kernels[problem, "_rational_bwd_kernel"]
    forward = kernels[problem, "_rational_fwd_kernel"]
    assert backward["wide_LDG"] >= 2
    assert min(backward["wide_STG"], forward["wide_LDG"], forward["wide_STG"]) >= 1
    old = TRITON_VERSION == (3, 7)  # whose compiler spills two registers in float32
    assert backward["stack"] <= (8 if old else 0)
    assert forward["stack"] == 0
    assert backward["reg"] <= 64
    assert forward["reg"] <= 48


def test_high_degrees_hardly_spill(kernels: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert kernels["degrees 16", "_rational_bwd_kernel"]["stack"] <= 32


@pytest.mark.parametrize("problem", ["tiny", "small", "base", "base of version A"])
def test_layer_norm(problem: str, kernels: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Registers for the programs that `tuning` counts on, and no spills."""
    for name, warps in (("fwd", 24), ("bwd", 8)):
        kernel = kernels[f"layer norm, {problem}", f"_layer_norm_rational_{name}_kernel"]
        assert kernel["stack"] == 0
        assert kernel["reg"] * 32 * warps <= 65536
        assert kernel["shared"] * (warps // kernel["num_warps"]) < 200 << 10


def test_functions_of_several_instructions_write_over_no_operand(triton_cache: Path) -> None:
    """Also in a loop where the result replaces an operand, whose register a compiler likes to give it."""
    found = compiled("compile_approximations_for_h100.py", triton_cache)
    assert [line["replaced"] for line in found] == ["c", "f", "g", "x"]
    for line in found:
        assert line["moved"] == line["result"], line
        assert line["moved"] not in (line["factor"], line["start"], line["addend"]), line
