"""Plans that are printed and forced: what `kron_plan` says is what a program launches, and `families` changes both."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import fastkron_py
from benchmarks.kron import plans
from benchmarks.kron.programs import pretending
from fastkron_py import KroneckerProduct, families, kron_matmul, kron_plan
from fastkron_py.kron import gradients, operator, quantize
from fastkron_py.kron.canonical import canonical
from fastkron_py.kron.families import BY_NAME
from fastkron_py.runtime.gpu import NAMED
from fastkron_py.testing import assert_close

KERNELS = {
    "_sliced_multiply_fwd_kernel": "tile",
    "_fused_multiply_fwd_kernel": "tile",
    "_narrow_multiply_fwd_kernel": "narrow",
    "_chained_multiply_fwd_kernel": "fragments",
    "_row_pair_fwd_kernel": "slice_pair",
    "_whole_row_fwd_kernel": "whole_row",
    "_small_factors_fwd_kernel": "small_factors",
    "_wide_product_kernel": "wgmma",
}
PROBLEMS = {  # rows, factors, dtype, GPU, families
    "fused": (1024, [(64, 64)] * 2, torch.float32, "H100"),
    "in place": (4096, [(64, 64)] * 2, torch.bfloat16, "H200"),
    "rows": (4096, [(32, 32)] * 3, torch.float16, "H100"),
    "small": (1024, [(2, 2)] * 10, torch.float32, "H100"),
    "large": (8192, [(500, 500)], torch.float32, "H100"),
    "by torch": (4096, [(3000, 24)], torch.bfloat16, "A100"),
    "plain": (1024, [(64, 64)] * 2, torch.float32, "A100"),
    "mixed": (64, [(500, 400), (30, 20)], torch.float64, "A100"),
    "narrow": (100000, [(3, 2)], torch.float32, "RTX 4090"),
}


def launched(x: torch.Tensor, factors: list[torch.Tensor], gpu: str, rounds: bool = False) -> list[str]:
    """The families of a program's launches on a GPU; none for torch's calls."""
    with pretending(NAMED[gpu]):
        if rounds:
            made = quantize.program([x, *factors], (1 / 127, 1.0, 1, 1, 0, "int8", "float32", "", 0.0, "highest", "triton"))
        else:
            made = operator.forward([x, *factors, None], (1.0, 0.0, None, "triton", False))
    names = [step.run.configs[0].kernel.__name__ for step in made._steps if hasattr(step.run, "configs")]
    return [KERNELS[name] for name in names if name in KERNELS]


BACKWARD_KERNELS = {
    "_narrow_multiply_bwd_kernel": "narrow",
    "_chained_step_bwd_kernel": "fragments",
    "_chained_pair_bwd_kernel": "fragments",
    "_fused_multiply_bwd_kernel": "tile",
    "_factor_gradient_kernel": "tile",
    "_wide_product_kernel": "wgmma",
}
BACKWARD = {  # rows, factors, dtype, GPU, families
    "pair and step": (1024, [(32, 32)] * 3, torch.float32, "H100", ["fragments", "fragments"]),
    "plain": (1024, [(32, 32)] * 3, torch.float32, "A100", ["tile", "tile", "tile"]),
    "narrow": (100000, [(3, 2)], torch.float32, "RTX 4090", ["narrow"]),
    "large": (972, [(2144, 2144)], torch.float32, "H100", ["wgmma"]),
    "large, plain": (189, [(181, 172), (4, 4)], torch.bfloat16, "H100", ["tile", "tile"]),
    "saved": (64, [(300, 300)] * 2, torch.float32, "A100", ["torch_products", "torch_products"]),
}


@pytest.mark.parametrize("problem", BACKWARD)
def test_the_plan_of_gradients_is_what_a_program_launches(problem: str) -> None:
    rows, shapes, dtype, gpu, wanted = BACKWARD[problem]
    x, factors = operands(rows, shapes, dtype)
    plan = kron_plan(x, factors, device=gpu, gradients=True)
    assert [launch.family for launch in plan.launches] == wanted
    dy = torch.empty(rows, math.prod([q for _, q in shapes]), dtype=dtype)
    with pretending(NAMED[gpu]):
        cut = gradients.cut_of(canonical(x, factors, False), x.device)
        between = None if cut is None else torch.empty(cut.first.result_shape, dtype=dtype)
        made = operator.gradients([dy, x, *factors, between], (True, [True] * len(factors), 1.0, None, "triton", False))
    launches = [step.run.configs[0] for step in made._steps if hasattr(step.run, "configs")]
    names = [c.kernel.__name__ for c in launches if not c.arguments.get("IS_SLICES", (False,))[0]]  # else the same kernel multiplies
    assert [BACKWARD_KERNELS[n] for n in names if n in BACKWARD_KERNELS] == [name for name in wanted if name != "torch_products"]
    assert sum([launch.share for launch in plan.launches]) == pytest.approx(1)
    assert sorted([i for launch in plan.launches for i in range(launch.start, launch.stop)]) == list(range(len(shapes)))
    assert str(plan).startswith("backward pass of x [")


def operands(rows: int, shapes: list[tuple[int, int]], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.empty(rows, math.prod([p for p, _ in shapes]), dtype=dtype), [torch.empty(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_plan_is_what_a_program_launches(problem: str) -> None:
    rows, shapes, dtype, gpu = PROBLEMS[problem]
    x, factors = operands(rows, shapes, dtype)
    plan = kron_plan(x, factors, device=gpu)
    assert launched(x, factors, gpu) == [launch.family for launch in plan.launches if launch.family != "torch_products"]
    assert kron_plan(x.shape, shapes, device=gpu, dtype=dtype) == plan
    assert sum([launch.share for launch in plan.launches]) == pytest.approx(1)
    assert sorted([i for launch in plan.launches for i in range(launch.start, launch.stop)]) == list(range(len(shapes)))
    for launch in plan.launches:
        assert {launch.family, *launch.others} <= {*BY_NAME}


def test_prints_launches_offers_and_what_was_in_the_way() -> None:
    text = str(kron_plan((1024, 4096), [(64, 64)] * 2, device="H100"))
    assert "64 x 64, float32, H100; modes stay in place" in text
    assert re.search(r"fragments +100%  tile \d\.\d\dx", text)
    assert "slice_pair takes half precision on a Hopper GPU" in text
    assert str(kron_plan((4096, 64), [(64, 64)] * 2, device="H100", left=True)).startswith("x [4096, 64] on the right of 64 x 64")


@pytest.mark.parametrize("name", ["tile", "fragments", "wgmma", "torch_products"])
def test_a_forced_family_alone_multiplies(name: str) -> None:
    x, factors = operands(64, [(128, 128)] * 3, torch.float32)
    plain = launched(x, factors, "H100")
    with families(name):
        assert {launch.family for launch in kron_plan(x, factors, device="H100").launches} == {name}
        assert {*launched(x, factors, "H100")} == ({name} - {"torch_products"})
    assert launched(x, factors, "H100") == plain


@pytest.mark.parametrize("name", ["tile", "torch_products"])
def test_forced_products_are_right_and_are_not_kept_for_others(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 12 * 18, device=device, requires_grad=True)
    factors = [torch.randn(12, 17, device=device), torch.randn(18, 16, device=device)]
    wanted = x.double() @ KroneckerProduct([f.double() for f in factors]).to_dense()
    with fastkron_py.backend("triton"):
        plain = kron_matmul(x, factors)
        with families(name):
            for _ in range(2):
                y = kron_matmul(x, factors)
                assert_close(y, wanted, steps=2)
            y.sum().backward()
        assert torch.equal(kron_matmul(x, factors), plain)
    assert x.grad is not None


def test_rows_are_rounded_by_the_forced_family() -> None:
    x, factors = operands(4096, [(64, 64)] * 2, torch.bfloat16)
    assert launched(x, factors, "H100", rounds=True) == ["slice_pair"]
    with families("slice_pair"):
        assert launched(x, factors, "H100", rounds=True) == ["slice_pair"]
    with families("fragments"):
        assert launched(x, factors, "H100", rounds=True) == ["fragments"]


def test_refusals_say_why() -> None:
    x, factors = operands(64, [(16, 16)] * 3, torch.float32)
    with families("wgmma"), pytest.raises(ValueError, match="wgmma takes one factor that is wider than 64"):
        kron_plan(x, factors, device="H100")
    with (
        families("slice_pair", "fragments"),
        pytest.raises(ValueError, match=r"fragments takes a .*; slice_pair takes half precision"),
    ):
        kron_plan(x, factors, device="A100")
    with pytest.raises(ValueError, match=r"names: expected some of .*, narrow, .*; got 'tiles'"), families("tiles"):
        pass
    with pytest.raises(ValueError, match="device: expected a GPU, or one of A100"):
        kron_plan(x, factors, device="V100")
    with pytest.raises(ValueError, match="x: expected"):
        kron_plan((0, 16), [(16, 16)], device="H100")
    with pytest.raises(TypeError, match="dtype"):
        kron_plan(x, factors, device="H100", dtype=torch.float64)


def test_the_page_of_plans() -> None:
    page = (Path(__file__).parents[3] / "docs/how_it_works/plans.md").read_text()
    assert page.endswith(plans.page()), "python -m benchmarks.kron.plans prints the page's sections"
