"""Transforms and products with small factors in registers: which thread has which element, and on NumPy the kernels' addresses and sums.

tests/gpu has both on a GPU.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_on_numpy import launch

import fastkron_py
from fastkron_py.kron.families import butterfly
from fastkron_py.kron.families.butterfly import (
    LANES,
    SIZES,
    Phase,
    Transform,
    small_factors,
    takes_small_factors,
    takes_transform,
    transform,
)
from fastkron_py.kron.hadamard import hadamard_launch
from fastkron_py.kron.hadamard_orders import padded_matrix
from fastkron_py.kron.kernels.epilogues import AXPBY, PLAIN, SCALE, TIMES, StoreEpilogue
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.reference import kron_matmul
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.runtime.program import bits as pattern
from fastkron_py.testing import assert_close

SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16

# ---- the Hadamard transform


def transformed(x: torch.Tensor, m: int, bits: int, scale: float, transposed: bool = False) -> torch.Tensor:
    """By the kernel; its operands' memory is NaN where the launch does not write."""
    (matrix,) = padded_matrix(m)
    if matrix is not None and transposed:
        matrix = matrix.mT
    ((kernel, grid, arguments),) = hadamard_launch(x, matrix, m, bits).configs
    y = torch.empty(x.shape, dtype=x.dtype)
    names = [name for name in kernel.arg_names[3:] if name != "scale"]
    given = {"scale": pattern(scale), **{name: arguments[name] for name in names}}
    launch(kernel, grid[0], [x, x.clone() if matrix is None else matrix, y], given)
    return y


def by_factors(x: torch.Tensor, scale: float) -> torch.Tensor:
    """By factors, in float64."""
    return fastkron_py.hadamard(x.double(), scale=scale)


@pytest.mark.parametrize("bits", [0, 1, 3, 6, 10, 11, 13, 14])
def test_powers_of_two(bits: int) -> None:
    for dtype, rows in itertools.product([SINGLE, DOUBLE, HALF], [1, 5]):
        torch.manual_seed(0)
        x = torch.randn(rows, 1 << bits).to(dtype)
        y = transformed(x, 1, bits, 0.7)
        assert_close(y, by_factors(x, 0.7), steps=2)
        if bits:
            with pytest.raises(AssertionError):  # a control
                assert_close(y, by_factors(x.flip(-1), 0.7), steps=2)


@pytest.mark.parametrize("m", [12, 20, 28])
def test_other_lengths(m: int) -> None:
    for bits in [2, 5, 8]:
        torch.manual_seed(0)
        x = torch.randn(5, m << bits)
        assert_close(transformed(x, m, bits, 0.7), by_factors(x, 0.7), steps=3)
        back = torch.zeros(x.shape, dtype=DOUBLE, requires_grad=True)
        (gradient,) = torch.autograd.grad(fastkron_py.hadamard(back, scale=0.7), back, x.double())
        assert_close(transformed(x, m, bits, 0.7, transposed=True), gradient, steps=3)


def test_rows_with_gaps() -> None:
    for m, bits in ((1, 6), (1, 11), (12, 5)):
        n = m << bits
        wide = torch.randn(6, n + 3)
        assert_close(transformed(wide[:, 3:], m, bits, 1.0), by_factors(wide[:, 3:], 1.0), steps=3)


VECTOR_BYTES = 16
CASES = [
    (m, bits, itemsize)
    for m in (1, 12, 20, 28)
    for itemsize in (2, 4, 8)
    for bits in range(16)
    if takes_transform(m, bits, itemsize, HOPPER.shared_memory)
]


def _all_phases(found: Transform) -> tuple[Phase, ...]:
    return (found.loaded, *found.phases)


def test_phases_of_transforms() -> None:
    for m, bits, itemsize in CASES:
        found = transform(m, bits, itemsize)
        assert found.row == 1 << bits + found.order_bits
        assert found.row <= 1 << found.tile
        for phase in _all_phases(found):
            assert sorted([*phase.registers, *phase.lanes, *phase.warps]) == list(range(found.tile))
            assert len(phase.lanes) == LANES
            assert 1 << len(phase.warps) == found.num_warps
            assert set(phase.modes) <= set(phase.registers)
        # Each bit of a row's length once.
        assert sorted([bit for phase in found.phases for bit in phase.modes]) == list(range(bits))
        if m == 1:
            assert found.loaded == found.phases[0]
            assert found.order == ()
        else:
            assert sorted(found.order) == list(range(found.tile))


def test_loads_and_stores_are_whole_sectors() -> None:
    """A thread has 16 bytes side by side, and a warp whole sectors of memory."""
    for m, bits, itemsize in CASES:
        found = transform(m, bits, itemsize)
        vector = (VECTOR_BYTES // itemsize).bit_length() - 1
        near = min(bits, vector)
        for phase in (found.loaded, found.phases[-1]):
            assert set(range(near)) <= set(phase.registers)
            if bits > near:
                assert near in phase.lanes


@pytest.mark.parametrize("bits", [8, 9, 10])
@pytest.mark.parametrize("m", [12, 28])
def test_a_matrix_has_its_operands_bits(m: int, bits: int) -> None:
    """Bits of registers and lanes as mma.m16n8k16 has them: (k0, k3), (k1, k2, n0, n1, n2), and of sums (n0, m3), (n1, n2, m0, m1, m2)."""
    found = transform(m, bits, 4)
    dimensions = [found.tile - 1 - d for d in found.order]
    k, n = dimensions[: found.order_bits][::-1], dimensions[found.order_bits :][::-1]
    assert found.loaded.lanes == (k[1], k[2], n[0], n[1], n[2])
    assert {k[0], k[3]} <= set(found.loaded.registers)
    summed = found.phases[0]
    assert summed.lanes == (n[1], n[2], k[0], k[1], k[2])
    assert {n[0], k[3]} <= set(summed.registers)
    warps = len(summed.warps)
    assert tuple(n[3 : 3 + warps]) == summed.warps == found.loaded.warps


def test_transforms_that_are_not_taken() -> None:
    assert not takes_transform(butterfly.OF.widest + 4, 6, 4, HOPPER.shared_memory)
    assert not takes_transform(12, 6, 2, HOPPER.shared_memory)
    assert not takes_transform(12, 1, 4, HOPPER.shared_memory)  # no 16 bytes side by side
    assert all(not takes_transform(1, most + 1, itemsize, HOPPER.shared_memory) for itemsize, most in butterfly.OF.most_bits.items())
    assert not takes_transform(1, 14, 8, 100_000)  # shared memory of a smaller GPU
    assert takes_transform(1, 13, 8, 100_000)


# ---- products

SHAPES = [(2, 2), (8, 8), (2, 4, 8), (8, 2, 4), (4, 4, 4, 4), (8, 8, 8), (2,) * 9, (4, 8, 2, 8, 8), (8, 8, 8, 8), (8, 8, 8, 8, 2), (4,) * 6]


def multiplied(x: torch.Tensor, factors: list[torch.Tensor], z: torch.Tensor, epilogue: StoreEpilogue) -> torch.Tensor:
    """``[B, L, P]`` by the kernel; alpha is 0.5 and beta 2."""
    batches, rows, _ = x.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    common: dict[str, Any] = {
        "x_strides": (*x.stride()[:2], 0, 1, 0),
        "y_strides": (*y.stride()[:2], 0, 1, 0),
        "z_strides": (*z.stride()[:2], 0, z.stride(2), 0),
        "factor_strides": tuple([f.stride() for f in factors]),
        "num_slices": rows,
        "before": 1,
        "after": 1,
        "SHAPES": tuple([tuple(f.shape[1:]) for f in factors]),
        "HEAD": False,
        "TAIL": False,
        "EPILOGUE": epilogue.function(x.dtype),
    }
    steps = [Step(i, i + 1, f.shape[1], f.shape[2]) for i, f in enumerate(factors)]
    sizes = {"shape": (batches, rows, 1, 1), "num_slices": rows, "itemsize": x.element_size()}
    problem = SimpleNamespace(launch=Launch(tuple(steps)), common=common, factor_strides=common["factor_strides"], **sizes)
    ((kernel, grid, arguments),) = butterfly.launch_configs(problem)  # type: ignore[arg-type]
    given = arguments | {"alpha": pattern(0.5), "beta": pattern(2.0)}
    launch(kernel, grid[0], [x, tuple(factors), z, y], given)
    return y


def problem(shapes: tuple[int, ...], dtype: torch.dtype, batches: int = 1, rows: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(batches, rows, torch.Size(shapes).numel(), dtype=dtype)
    return x, [torch.randn(batches, p, p, dtype=dtype) / p**0.5 for p in shapes]


def expected(x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """In float64."""
    return kron_matmul(x.double(), [f.double() for f in factors])


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_products(shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, factors = problem(shapes, dtype)
    y = multiplied(x, factors, x, PLAIN)
    assert_close(y, expected(x, factors), steps=2 * len(shapes))
    with pytest.raises(AssertionError):  # a control: a factor transposed
        assert_close(y, expected(x, [*factors[:-1], factors[-1].mT]), steps=2 * len(shapes))


def test_batches_views_and_epilogues() -> None:
    x, factors = problem((4, 8, 4), SINGLE, batches=2, rows=35)
    wide = torch.randn(2, 35, 256)
    wide[..., 5:133] = x
    z = torch.randn(2, 35, 128)
    factors[1] = factors[1].mT
    wanted = expected(x, factors)
    assert_close(multiplied(wide[..., 5:133], factors, z, AXPBY), 0.5 * wanted + 2 * z.double(), steps=8)
    assert_close(multiplied(x, factors, z, SCALE), 0.5 * wanted, steps=8)
    row = z[:, :1].expand_as(z)
    assert_close(multiplied(x, factors, row, TIMES), wanted * row.double(), steps=8)


@pytest.mark.parametrize("itemsize", [4, 8])
def test_phases_of_products(itemsize: int) -> None:
    """Of all products of two to seven such factors: every bit of an index in one place in each phase, every factor multiplied once."""
    vector, count = {4: 2, 8: 1}[itemsize], 0
    for ps in itertools.chain.from_iterable(itertools.product(SIZES, repeat=n) for n in range(2, 8)):
        if not takes_small_factors(ps, ps, itemsize):
            continue
        found, count = small_factors(ps, itemsize), count + 1
        for phase in found.phases:
            assert sorted([*phase.registers, *phase.lanes, *phase.warps]) == list(range(found.tile)), ps
            assert len(phase.lanes) == LANES, ps
            assert 1 << len(phase.warps) == found.num_warps, ps
            for group in phase.modes:
                assert set(range(group.low, group.low + group.width)) <= set(phase.registers), ps
                assert 1 << group.width == ps[group.factor], ps
        assert sorted([group.factor for phase in found.phases for group in phase.modes]) == list(range(len(ps))), ps
        for phase in (found.phases[0], found.phases[-1]):  # 16 bytes of a thread, and whole sectors of a warp
            assert set(range(vector)) <= set(phase.registers), ps
            assert phase.lanes[0] <= vector + 1, ps
    assert count > 1000
