"""The polynomial KAN kernels compile for sm_90, within an H100's shared memory and, where products are large, its registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled_for_h100 import LIMIT, SHARED_MEMORY, compiled

# One worker: what is compiled serves all tests here.
pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_poly_kan_for_h100")]


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> list[dict[str, Any]]:
    """One record for each kernel."""
    return compiled("compile_poly_kan_for_h100.py", triton_cache)


PLAIN = {"_poly_kan_fwd_kernel", "_poly_kan_gradients_kernel"}
PIPELINED = {"_poly_kan_pipelined_fwd_kernel", "_poly_kan_pipelined_dx_kernel", "_poly_kan_pipelined_dcoef_kernel"}
THREE_PASSES = {"large", "large, of odd sizes", "large, five degrees", "large, two degrees"}
BY_TWOS = {"large, five degrees", "large, two degrees"}


def test_every_kernel_was_compiled(kernels: list[dict[str, Any]]) -> None:
    names = {k["kernel"] for k in kernels}
    assert names == PLAIN | PIPELINED | {
        "_low_halves_kernel",
        "_transpose_kernel",
        "_spread_sums_kernel",
        "_gemm_kernel",
        "_sum_partials_kernel",
        "_sum_segments_kernel",
    }
    for problem in {k["problem"] for k in kernels}:
        is_pipelined = problem.startswith("large") and "plain" not in problem
        wanted = PIPELINED if is_pipelined else PLAIN
        if is_pipelined and problem not in THREE_PASSES:  # nine splines would leave nearly half of the main loop's tiles empty
            dx = "_poly_kan_gradients_kernel" if problem == "large bspline" else "_gemm_kernel"
            wanted = wanted - {"_poly_kan_pipelined_dx_kernel"} | {dx}
        assert {k["kernel"] for k in kernels if k["problem"] == problem} & (PLAIN | PIPELINED | {"_gemm_kernel"}) == wanted


def test_shared_memory_suffices(kernels: list[dict[str, Any]]) -> None:
    """Of the preferred configuration: on an H100 nothing should fall back."""
    assert [k for k in kernels if k["shared"] > SHARED_MEMORY] == []


def test_large_products_hardly_spill(kernels: list[dict[str, Any]]) -> None:
    """Plain dx keeps five tiles in registers and puts some of a degree's state on the stack between two products; the others hardly any."""
    large = [k for k in kernels if k["problem"].startswith("large") and "odd" not in k["problem"]]
    assert [k for k in large if k["kernel"] == "_poly_kan_fwd_kernel" and k["stack"] > 0] == []
    # Derivatives of 64 inputs beside the sums of two degrees: x and dx wait on the stack.
    assert [k for k in large if k["problem"] in BY_TWOS and k["stack"] > 200] == []
    large = [k for k in large if k["problem"] not in BY_TWOS]
    quick = [k for k in large if "table" not in k["problem"]]
    assert [k for k in quick if k["kernel"] == "_poly_kan_pipelined_dcoef_kernel" and k["stack"] > 0] == []
    # Eight splines of sixteen numbers, once for a tile. Of Fourier's four tiles, 20 numbers by the assembler that comes with Triton 3.9.
    assert [k for k in quick if k["stack"] > (400 if k["kernel"] in PLAIN else 80) and k["problem"] != "large bspline"] == []
    # A table's places and both ends of its lines: 34 numbers in the forward product, by the same assembler; by Triton 3.6's none.
    assert [k for k in large if k["stack"] > (400 if k["kernel"] in PLAIN else 136) and k["problem"] != "large bspline"] == []


def test_copies_wait_for_stores(kernels: list[dict[str, Any]]) -> None:
    """A buffer's barrier, which says that it is full, waits for the copy's bytes: so it is enough that a copy begins after all stores."""
    made = [k for k in kernels if k["kernel"] in ("_poly_kan_pipelined_fwd_kernel", "_poly_kan_pipelined_dcoef_kernel")]
    assert [k for k in made if k["copies"] == 0 or not k["ordered"]] == []
    assert [k for k in made if k["ordered without barriers"]] == []  # the check can fail


def test_products_are_not_serialised(kernels: list[dict[str, Any]]) -> None:
    """By ptxas, which waits for each product where it cannot see that registers are left alone: it says so."""
    pipelined = [k for k in kernels if k["kernel"] in PIPELINED | {"_gemm_kernel"}]
    assert [k for k in pipelined if k["serialised"]] == []
    assert any(k["serialised"] for k in kernels)  # the check can fail: plain Triton's are
