"""Wide factors: every algorithm for a mode, and for a factor's gradient, and the model that chooses among them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from canonical_cases import backward, dense, expected_gradients, force_gradients, force_products, in_double, multiply, problem

from fastkron_py.kron import planner
from fastkron_py.kron.families import gradient_offers, torch_products, wgmma
from fastkron_py.kron.families.wgmma import gradient_config, multiply_config, ring_stages
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.problem import Mode, contiguous_problem
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import HOPPER, nvidia
from fastkron_py.testing import assert_close

# (batches, rows, P, Q, R); bfloat16's interpreter needs few terms
SHAPES = {
    "first": (1, 3, (130, 3), (129, 2), 1),
    "last": (2, 2, (3, 130), (4, 129), 1),
    "columns": (1, 2, (140,), (3,), 5),
    "between": (3, 2, (5, 131, 2), (4, 7, 3), 1),
    "to one column": (1, 3, (131, 2), (1, 3), 1),
    "two, the second wider": (1, 2, (66, 2, 70), (2, 3, 67), 1),
}
ALGORITHMS = ("matmul", "copying", "looped")
DTYPES = [(torch.float32, torch.complex64), (torch.bfloat16, torch.float64), (torch.complex128,)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_algorithm_is_right(
    dtypes: tuple[torch.dtype, ...], algorithm: str, shape: tuple, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_products(monkeypatch, algorithm)
    force_gradients(monkeypatch, algorithm)
    groups, rows, ps, qs, columns = shape
    for dtype in dtypes:
        torch.manual_seed(0)
        x, factors = problem(dtype, device, groups, rows, ps, qs, columns)
        wanted = dense(x, factors)
        z, dy = (torch.randn_like(wanted).to(dtype) for _ in range(2))
        steps = 4 * len(ps)  # the interpreter truncates to bfloat16, which errs twice as much as rounding
        assert_close(multiply(x, factors), wanted, steps=steps)
        assert_close(multiply(x, factors, alpha=3.0), 3 * wanted, steps=steps)
        assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.0 * in_double(z), steps=steps + 1)
        slopes = expected_gradients(dy, x, factors)
        dx, dfs = backward(dy, x, factors)
        for got, slope in zip([dx, *dfs], slopes, strict=True):
            assert_close(got, slope, steps=steps)
        dx, dfs = backward(dy, x, factors, alpha=-2.0)
        for got, slope in zip([dx, *dfs], slopes, strict=True):
            assert_close(got, -2 * slope, steps=steps)


def mode(batches: int, runs: int, after: int, p: int, q: int, itemsize: int = 4) -> Mode:
    return Mode(batches, runs, after, p, q, itemsize, 3 if itemsize == 4 else 1, HOPPER)


TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def gradient_times(m: Mode) -> dict[str, float]:
    """Modelled seconds of each algorithm for a factor's gradient."""
    group = GroupProblem.of(contiguous_problem([(m.p, m.q)], m.runs, m.after, TYPES[m.itemsize], m.gpu), Group(0, 0, 1, False), (m.q,))
    bids = [bid for made in gradient_offers(group).values() if not isinstance(made, str) for bid in made]
    return {bid.prices.removesuffix("_gradients").replace("tile_factor", "looped"): bid.seconds for bid in bids}


def best_algorithm(m: Mode) -> str:
    """The family of the closed form's launch for a mode, or torch's algorithm."""
    asked = contiguous_problem([(m.p, m.q)], m.runs, m.after, TYPES[m.itemsize], m.gpu)
    (launch,) = planner.plan(asked).launches
    return torch_products.multiply_algorithm(m) if launch.family == "torch_products" else launch.family


def test_the_fastest_measured_algorithm_of_a_gradient_is_chosen() -> None:
    """The algorithms that were the fastest on an H200, by a quarter and more."""
    measured = {
        ("copying", 4): [(145, 5, 305, 1161)],
        ("wgmma", 4): [(972, 1, 2144, 2144)],
        ("matmul", 4): [(1, 395, 2, 1489)],
        ("copying", 2): [(6, 337, 1009, 1009)],
        ("matmul", 2): [(1, 116, 395, 278)],
        ("looped", 2): [(189, 4, 181, 172)],
        ("copying", 8): [(1851, 2, 1436, 1436)],
        ("matmul", 8): [(137, 1, 345, 1211)],
    }
    for (algorithm, itemsize), problems in measured.items():
        for sizes in problems:
            times = gradient_times(mode(1, *sizes, itemsize=itemsize))
            assert min(times, key=times.__getitem__) == algorithm


def test_other_gpus_take_torchs_products_or_plain_triton() -> None:
    for capability in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)]:
        for sizes, itemsize in itertools.product([(1024, 256, 256, 256), (9, 1, 700, 5), (50, 3, 5, 700)], (2, 4, 8)):
            m = replace(mode(1, *sizes, itemsize=itemsize), gpu=nvidia(*capability))
            assert best_algorithm(m) in ("tile", "narrow", "matmul", "copying")
            assert {*gradient_times(m)} <= {*ALGORITHMS}


def test_batches_with_a_tail_are_no_product_of_torch() -> None:
    assert torch_products.multiply_algorithm(mode(3, 1024, 256, 256, 256, 2)) != "matmul"


def test_tiles_cover_the_product() -> None:
    """Splits cover the reduction and none is empty, the ring fits shared memory, and programs the multiprocessors."""
    for itemsize in [2, 4]:
        for runs, after, p, q in itertools.product((1, 40, 5000), (1, 7, 256), (5, 130, 2048), (3, 65, 3000)):
            m = mode(1, runs, after, p, q, itemsize)
            for config, depth in ((multiply_config(m), p), (gradient_config(m), runs * after)):
                steps = -(-depth // 32)
                assert (config.splits - 1) * config.steps < steps <= config.splits * config.steps
                halves = 2 if itemsize == 4 else 1
                for left in {1, halves}:  # copied, or stored as the factor is
                    stages = ring_stages(m, config.block_n, left == 1)
                    assert 2 <= stages <= 6
                    assert stages * (128 * left + config.block_n * halves) * 32 * itemsize <= HOPPER.shared_memory
                assert 1 <= config.programs <= HOPPER.multiprocessors
            assert multiply_config(m).splits == 1


def test_x_is_copied_where_runs_begin_on_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for strides, p, after, copied in [
        ((7, 256, 0, 1, 1), 256, 1, (1, 4)),  # the last mode; of one batch and of nothing after it strides do not matter
        ((7, 260, 0, 1, 1), 256, 1, (1, 4)),
        ((7, 257, 0, 1, 1), 256, 1, None),
        ((0, 255, 0, 1, 1), 255, 1, None),
        ((7, 255 * 64, 0, 64, 1), 255, 64, (4, 1)),
        ((7, 256 * 63, 0, 63, 1), 256, 63, None),
        ((7, 257 * 70, 0, 1, 257), 256, 70, None),
    ]:
        from fastkron_py.kron.families.wgmma import multiply_launch

        monkeypatch.setattr(wgmma, "kernel", object)
        common = {"x_strides": strides, "y_strides": strides, "z_strides": strides, "before": 1, "after": after, "HEAD": False}
        common |= {"TAIL": after > 1, "EPILOGUE": None}
        launch = multiply_launch(mode(1, 100, after, p, 256, 4), common, (0, 256, 1), is_fixed=True)
        assert launch.arguments["IS_COPIED"] is (copied is not None)
        assert copied in (None, launch.arguments["VECTORS"][0])


@pytest.mark.parametrize("shape", [(1, 40, (66,), (70,), 1), (1, 1, (72,), (80,), 30), (1, 14, (3, 66), (2, 72), 1)], ids=str)
@pytest.mark.parametrize("algorithm", ["matmul", "copying"])
def test_long_sums_of_half_types_are_cut(algorithm: str, shape: tuple, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastkron_py.kron import matmul_step
    from fastkron_py.tiling import torch_products

    force_products(monkeypatch, algorithm)
    force_gradients(monkeypatch, algorithm)
    monkeypatch.setattr(torch_products, "LONG", 20)
    monkeypatch.setattr(torch_products, "LONG_ALONG", 20)
    monkeypatch.setattr(torch_products, "_LEAST", 8)
    cuts = []
    monkeypatch.setattr(matmul_step, "write_parts", lambda *given, cut: cuts.append(cut) or torch_products.write_parts(*given, cut))
    groups, rows, ps, qs, columns = shape
    for dtype in (torch.float16, torch.bfloat16):
        cuts.clear()
        torch.manual_seed(0)
        x, factors = problem(dtype, device, groups, rows, ps, qs, columns)
        wanted = dense(x, factors)
        dy = torch.randn_like(wanted).to(dtype)
        assert_close(multiply(x, factors), wanted, steps=8)
        dx, dfs = backward(dy, x, factors, alpha=-2.0)
        for got, slope in zip([dx, *dfs], expected_gradients(dy, x, factors), strict=True):
            assert_close(got, -2 * slope, steps=8)
        assert cuts


def test_float64_takes_wide_factors_in_the_order_of_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """94 x (830, 750) to (274, 256): the first factor narrows more, but its product is slower while the second mode is 750 wide."""
    from fastkron_py.kron import forward

    monkeypatch.setattr(devices, "gpu_of", lambda device: HOPPER)

    def order(dtype: torch.dtype, ps: tuple[int, ...], qs: tuple[int, ...]) -> list[int]:
        x = torch.empty(1, 94, math.prod(ps), 1, dtype=dtype)
        factors = [torch.empty(1, p, q, dtype=dtype) for p, q in zip(ps, qs, strict=True)]
        made = forward.multiply_problem(x, factors, torch.device("cpu"), "highest")
        return [launch.start for launch in planner.plan(made).launches]

    assert order(torch.float64, (830, 750), (274, 256)) == [1, 0]


def test_few_columns_are_not_written_last_where_others_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 5 elements are shorter than a sector: 4 to 97 is not last, though it widens most."""
    from fastkron_py.kron import forward

    monkeypatch.setattr(devices, "gpu_of", lambda device: HOPPER)

    def last(columns: int) -> int:
        ps, qs = (73, 13, 4), (1735, 39, 97)
        x = torch.empty(1, 1, math.prod(ps), columns, dtype=torch.bfloat16)
        factors = [torch.empty(1, p, q, dtype=torch.bfloat16) for p, q in zip(ps, qs, strict=True)]
        made = forward.multiply_problem(x, factors, torch.device("cpu"), "highest")
        return planner.plan(made).launches[-1].start

    assert last(5) != 2
