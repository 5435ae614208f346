"""The launches of a multiply in canonical form: every kind of launch, address and epilogue, on data poisoned beforehand."""

from __future__ import annotations

import itertools

import pytest
import torch
from canonical_cases import CASES, DTYPES, dense, multiply, multiply_program, problem, rounding_steps

import fastkron_py
from fastkron_py.kron import planner
from fastkron_py.kron.families import tile
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.testing import assert_close


def has_calls(program):
    """Whether a program calls torch, which only copies do."""
    return any(step.results is not None for step in program._steps)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_multiply(device, case):
    for dtype in DTYPES:
        x, factors = problem(dtype, device, *case)
        y = multiply(x, factors)
        assert y.is_contiguous()
        assert_close(y, dense(x, factors), steps=rounding_steps(dtype, len(factors)))


@pytest.mark.parametrize("columns", [1, 4])
def test_the_last_launch_reads_z_in_place(device, columns):
    for kind, alpha in itertools.product(["full", "row", "column", "scalar", "transposed"], [1.0, 0.1]):
        x, factors = problem(torch.float64, device, 1, 3, (4, 5), (5, 4), columns)
        shapes = {"full": (1, 3, 20, columns), "row": (1, 1, 20, columns), "column": (1, 3, 1, 1), "scalar": (1, 1, 1, 1)}
        if kind == "transposed":
            z = torch.randn(1, columns, 20, 3, dtype=torch.float64, device=device).permute(0, 3, 2, 1)
        else:
            z = torch.randn(shapes[kind], dtype=torch.float64, device=device).expand(1, 3, 20, columns)
        assert has_calls(multiply_program(x, factors, z)) == (kind == "transposed" and columns > 1)
        y = multiply(x, factors, z, alpha, -0.7)
        # 0.1 and -0.7 are no float32 numbers: a scalar passed as one would err by 1e-9.
        assert_close(y, alpha * dense(x, factors) - 0.7 * z, steps=2)


def test_rows_with_a_stride_are_read_in_place(device):
    wide = torch.randn(6, 40, dtype=torch.float64, device=device)
    x = wide[::2, :30][None, :, :, None]
    factors = [torch.randn(1, p, q, dtype=torch.float64, device=device) for p, q in ((2, 3), (5, 2), (3, 4))]
    assert not has_calls(multiply_program(x, factors))
    assert_close(multiply(x, factors), dense(x, factors), steps=3)
    row = wide[:1, :30].expand(4, 30)[None, :, :, None]
    assert not has_calls(multiply_program(row, factors))
    assert_close(multiply(row, factors), dense(row, factors), steps=3)


def test_plans_in_other_orders_agree(device, monkeypatch):
    """In place in any order, turned from the last: the same numbers."""
    ps = (4, 5, 3)
    x, factors = problem(torch.float64, device, 1, 6, ps, ps, 1)
    steps = [Launch((Step(i, i + 1, p, p),)) for i, p in enumerate(ps)]
    expected = dense(x, factors)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]):
        launches = [steps[i] for i in order]
        transposed = planner.transposes(launches, 3, 1)
        made = planner.Plan(launches, planner.places(launches, ps, 1, transposed), transposed)
        monkeypatch.setattr(planner, "plan", lambda *_, made=made: made)
        assert len(multiply_program(x, factors)._steps) == 3
        assert_close(multiply(x, factors), expected, steps=3)


def test_too_little_shared_memory_takes_the_next_configuration(device, monkeypatch):
    """As on a smaller GPU: the first configuration does not fit, the next one is taken and remembered."""
    from triton.runtime.errors import OutOfResources

    tried = []

    class TooLarge:
        def __init__(self, kernel):
            self.arg_names = kernel.arg_names

        def run(self, **arguments):
            tried.append(arguments["BLOCK_S"])
            raise OutOfResources(300_000, 100_000, "shared memory")

    def changed(case):
        first, *others = real(case)
        return [first._replace(kernel=TooLarge(first.kernel)), *others]

    real = tile.launch_configs
    monkeypatch.setattr(tile, "launch_configs", changed)
    x, factors = problem(torch.float64, device, 1, 40, (12,), (12,), 1)
    program = multiply_program(x, factors)
    for _ in range(2):
        assert_close(program([x, *factors])[0], dense(x, factors))
    assert len(tried) == 1

    monkeypatch.setattr(tile, "launch_configs", lambda case: changed(case)[:1])
    with pytest.raises(OutOfResources):
        multiply(x, factors)


def test_float16_chain_does_not_overflow_between_its_factors(device):
    """200 * 200 * 300 is beyond float16, the result is not: nothing on chip may be held in float16."""
    with fastkron_py.backend("triton"):
        x = torch.full((1, 4), 200.0, dtype=torch.float16, device=device)
        large = torch.full((2, 2), 300.0, dtype=torch.float16, device=device)
        small = torch.full((2, 2), 2.0**-14, dtype=torch.float16, device=device)
        y = fastkron_py.kron_matmul(x, [small, large])
    expected = 200.0 * 4 * 300 * 2.0**-14
    assert_close(y, torch.full((1, 4), expected, dtype=torch.float64, device=device), steps=2)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_lower_precision_is_asked_for_by_name(device, precision):
    """TF32 where it is allowed: still within ten bits; and float64 takes no notice."""
    x, factors = problem(torch.float32, device, 1, 20, (16, 16), (16, 16), 1)
    y = multiply(x, factors, precision=precision)
    expected = dense(x, factors)
    assert (y.double() - expected).norm() <= 1e-3 * expected.norm()
    from fastkron_py.tiling.products import arithmetic

    compiled = torch.cuda.is_available()
    assert arithmetic(torch.float32, precision, True).precision == ("tf32" if compiled else "ieee")
    assert arithmetic(torch.float32, "highest", True).precision == ("tf32x3" if compiled else "ieee")
    assert arithmetic(torch.float64, precision, True).precision == "ieee"


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of the interpreter
def test_an_infinity_of_a_factor_stays_out_of_the_padding(device):
    """Digits of 11 and 13 in tiles of 16: 0 times the infinity is NaN there, which the next factor's step would sum up."""
    for n in range(2):
        x = torch.rand(1, 3, 143, 1, dtype=torch.float64, device=device) + 0.5
        factors = [torch.rand(1, p, p, dtype=torch.float64, device=device) for p in (11, 13)]
        factors[n][0, 3, 5] = torch.inf
        y, wanted = (t.view(3, 11, 13).movedim(1 + n, 0) for t in (multiply(x, factors), dense(x, [f.clamp(max=2.0) for f in factors])))
        others = torch.arange(len(y), device=device) != 5
        assert (y[5] == torch.inf).all()
        assert_close(y[others], wanted[others], steps=4)
