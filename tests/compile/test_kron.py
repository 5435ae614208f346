"""Every kind of kernel compiles for sm_90, within an H100's shared memory and, where it matters, its registers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compiled_for_h100 import LIMIT, SHARED_MEMORY, compiled

# One worker: what is compiled serves all tests here.
pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_for_h100")]

LARGE_TILES = ("16^5", "8^7")
ROW_PAIRS = (
    *("bfloat16 128^2", "float16 64^2", "bfloat16 172, 64", "float16 172, 60", "bfloat16 70 to 140, 100"),
    *("bfloat16 32, 64", "float16 100, 12", "bfloat16 86, 128", "bfloat16 256, 36"),
)
ROW_TRIPLES = ("bfloat16 128, 2, 128", "float16 128, 4, 64", "bfloat16 64, 4, 64", "float16 100, 2, 100", "bfloat16 64, 8, 64")
WHOLE_ROWS = (
    *("bfloat16 16^4", "float16 16^4", "bfloat16 32^3", "float16 32, 16, 16 to 16, 32, 16"),
    "bfloat16 16, 16, 16 to 32, 32, 32",
)
FULL_REGISTERS = ("bfloat16 32, 8, 64", "bfloat16 64, 32, 32")  # those of eight warps
COMMON_PAIRS = ("bfloat16 128^2", "float16 64^2", "bfloat16 86, 128")  # whose formats do not spill
FORMATS = ("as int8", "as float8_e4m3fn", "as int4")
# What is compiled of a problem beside its product. Everything of one problem of each kind; of the others what a test here looks at.
SINGLE = ("with z", "times z", "in TF32", "backward")
HALF = ("with z", "times z", *FORMATS, "backward")
VARIANTS = {
    **dict.fromkeys(("16^4", "16^5", "odd"), SINGLE),
    **dict.fromkeys(("left", "batched", "left, batched"), ("with z", "backward")),
    **dict.fromkeys(WHOLE_ROWS, ("with z", "times z")),
    **dict.fromkeys(ROW_PAIRS, ("with z", "as int8")),
    **dict.fromkeys(COMMON_PAIRS, ("with z", *FORMATS)),
    **dict.fromkeys(ROW_TRIPLES, ("with z",)),
    **dict.fromkeys(("bfloat16 16^4", "bfloat16 64, 32, 32", "bfloat16 128^2", "float16 172, 60", "bfloat16 128, 2, 128"), HALF),
    # Backward by narrow kernels, and of matrices that are not square.
    "bfloat16 64, 4, 64": ("with z", "backward"),
    "float16 32, 16, 16 to 16, 32, 16": ("with z", "times z", "backward"),
}


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> list[dict[str, Any]]:
    """One record for each kernel."""
    return compiled("compile_for_h100.py", triton_cache, json.dumps(VARIANTS))


def test_every_kernel_was_compiled(kernels: list[dict[str, Any]]) -> None:
    names = {k["kernel"] for k in kernels}
    assert names == {
        "_narrow_multiply_fwd_kernel",
        "_row_pair_fwd_kernel",
        "_whole_row_fwd_kernel",
        "_small_factors_fwd_kernel",
        "_quantize_rows_kernel",
        "_take_points_kernel",
        "_take_runs_kernel",
        "_copy_matrices_kernel",
        "_narrow_multiply_bwd_kernel",
        "_sliced_multiply_fwd_kernel",
        "_fused_multiply_fwd_kernel",
        "_chained_multiply_fwd_kernel",
        "_fused_multiply_bwd_kernel",
        "_chained_step_bwd_kernel",
        "_chained_pair_bwd_kernel",
        "_factor_gradient_kernel",
        "_wide_product_kernel",
        "_sum_partials_kernel",
        "_split_gradient_kernel",
    }
    assert {k["what"] for k in kernels} == {"multiply", "points", *SINGLE, *HALF}


def test_shared_memory_suffices(kernels: list[dict[str, Any]]) -> None:
    """Of the preferred configuration: on an H100 nothing should fall back."""
    too_large = [k for k in kernels if k["shared"] > SHARED_MEMORY]
    assert not too_large


def test_row_pairs_round_as_they_store(kernels: list[dict[str, Any]]) -> None:
    """In every format, and without spills but where the plain store spills too."""
    for problem in ROW_PAIRS:
        found = {k["what"] for k in kernels if k["kernel"] == "_row_pair_fwd_kernel" and k["problem"] == problem}
        assert found >= set(FORMATS if problem in COMMON_PAIRS else FORMATS[:1])
    common = [k for k in kernels if k["problem"] in COMMON_PAIRS and k["what"].startswith("as ")]
    assert [k for k in common if k["stack"] > 0] == []


def test_row_pairs_are_compiled_with_z(kernels: list[dict[str, Any]]) -> None:
    """z takes shared memory too, which the choice of stages counts."""
    found = {k["problem"] for k in kernels if k["kernel"] == "_row_pair_fwd_kernel" and k["what"] == "with z"}
    assert found >= {*ROW_PAIRS, *ROW_TRIPLES}


def test_row_triples_hardly_spill(kernels: list[dict[str, Any]]) -> None:
    """All sums of a slice are in registers. With Triton 3.6 only padded tiles put a few values on the stack, with 3.9 others too."""
    found = [k for k in kernels if k["kernel"] == "_row_pair_fwd_kernel" and k["problem"] in ROW_TRIPLES and k["what"] == "multiply"]
    assert len(found) == len(ROW_TRIPLES)
    assert [k for k in found if k["stack"] > 64] == []


def test_whole_rows_do_not_spill(kernels: list[dict[str, Any]]) -> None:
    """Plain, with z, and times z; also where a multiprocessor holds two programs."""
    found = [k for k in kernels if k["kernel"] == "_whole_row_fwd_kernel" and k["problem"] in WHOLE_ROWS]
    assert {(k["problem"], k["what"]) for k in found} >= {(p, what) for p in WHOLE_ROWS for what in ("multiply", "with z", "times z")}
    assert [k for k in found if k["stack"] > 0] == []
    found = [k for k in kernels if k["kernel"] == "_whole_row_fwd_kernel" and k["problem"] in FULL_REGISTERS and k["what"] == "multiply"]
    assert len(found) == len(FULL_REGISTERS)
    assert [k for k in found if k["stack"] > 160] == []


def test_copies_do_not_spill(kernels: list[dict[str, Any]]) -> None:
    found = [k for k in kernels if k["kernel"] == "_copy_matrices_kernel"]
    assert {k["problem"] for k in found} == {"bfloat16 131, 7"}
    assert [k for k in found if k["stack"] > 0] == []


def test_points_leave_room_for_other_programs(kernels: list[dict[str, Any]]) -> None:
    """Loads are hidden by others: a multiprocessor has registers for twelve programs of 128 threads at least."""
    found = [k for k in kernels if k["what"] == "points"]
    assert len(found) == 10
    assert [k for k in found if k["stack"] > 0 or k["reg"] > 40] == []


def test_common_problems_do_not_spill(kernels: list[dict[str, Any]]) -> None:
    common = ("16^3, whole rows", "left", "16^4", "32^4", "64^3", "8^5", "bfloat16 16^4", "float16 16^4", "float16 64^2", "float64 32^3")
    found = [k for k in kernels if k["problem"] in common and k["what"] == "multiply"]
    assert len(found) >= len(common)
    assert [k for k in found if k["stack"] > 0] == []


def test_complex_products_do_not_spill(kernels: list[dict[str, Any]]) -> None:
    """An embedded factor stays in shared memory; the gradients of a chain of 8 x 8 (x) 16 x 16 put some values on the stack."""
    found = [k for k in kernels if k["problem"].startswith("complex")]
    assert len({k["problem"] for k in found}) == 7
    assert [k for k in found if k["what"] == "multiply" and k["stack"] > 0] == []
    assert [k for k in found if k["stack"] > 256] == []


def test_tiles_of_half_the_registers_stay_in_registers(kernels: list[dict[str, Any]]) -> None:
    """Also with z, and in TF32: a thread has 128 registers, 64 of them taken by the tile.

    With Triton 3.6 none uses the stack. 3.9 puts a few values there.
    """
    found = [k for k in kernels if k["problem"] in LARGE_TILES and k["what"] != "backward"]
    assert {k["problem"] for k in found} == set(LARGE_TILES)
    assert [k for k in found if k["stack"] > 64] == []


def test_wide_steps_fetch_ahead(kernels: list[dict[str, Any]]) -> None:
    """Both halves of a 128 x 128 factor and a tile of x in shared memory; what Triton 3.6 spills is a few values."""
    found = [k for k in kernels if k["problem"] == "128^2" and k["kernel"] == "_chained_multiply_fwd_kernel" and k["what"] == "multiply"]
    assert found
    assert [k for k in found if k["shared"] < 3 * 2**16 or k["stack"] > 96] == []


def test_products_of_wide_factors_hardly_spill(kernels: list[dict[str, Any]]) -> None:
    """With Triton 3.6 none uses the stack. 3.9 puts a few values there, once a tile."""
    found = [k for k in kernels if k["kernel"] == "_wide_product_kernel"]
    assert {k["what"] for k in found} == {"multiply", "backward"}
    assert [k for k in found if k["stack"] > 64] == []


def test_the_backward_pass_hardly_spills(kernels: list[dict[str, Any]]) -> None:
    """What `is_fused` lets together fits into registers: a few values at most go to the stack, once a tile."""
    names = ("_chained_step_bwd_kernel", "_fused_multiply_bwd_kernel", "_chained_pair_bwd_kernel")
    fused = [k for k in kernels if k["kernel"] in names and k["problem"] in ("16^4", "32^4", "64^3", "8^5")]
    assert {k["problem"] for k in fused} == {"16^4", "32^4", "64^3", "8^5"}
    assert [k for k in fused if k["stack"] > {names[0]: 0, names[1]: 32, names[2]: 16}[k["kernel"]]] == []


def test_products_are_over_before_their_factors_are_overwritten(kernels: list[dict[str, Any]]) -> None:
    """Shared memory of a step's factors is used again, by warps whose neighbours may still be multiplying with them."""
    found = [k for k in kernels if "chained" in k["kernel"]]
    assert len(found) > 10
    assert [k for k in found if k["unguarded"]] == []


def test_slices_are_stored_together_where_the_last_tile_is_cut(kernels: list[dict[str, Any]]) -> None:
    """Eight floats at once: the mask is one for each run of slices, which the compiler must see. One by one took 3.5 times as long."""
    (found,) = [k for k in kernels if k["problem"] == "float16 51, last tile cut" and k["what"] == "multiply"]
    assert found["kernel"] == "_sliced_multiply_fwd_kernel"
    assert found["single"] == 0
