"""`kron_matmul`, `kron_matmul_left`, `gemkm` and `gekmm` against the definition in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from sampling import in_full
from shapes_list import (
    BATCHES,
    CASES,
    COMPLEX,
    EMPTY,
    ODD,
    REAL,
    TOLERANCES,
    Case,
    assert_near,
    assert_same,
    call,
    expected,
    ids,
    on_backends,
    power,
    problem,
    relative_error,
)
from torch import Tensor

from fastkron_py import backend, gekmm, gemkm, kron_matmul, reference

# One case for each kind of path: one factor, fused equal ones, unequal, rectangular, wide, batched.
FEW = [
    power(13, 3, 3, 1),
    power(3, 8, 8, 3),
    power(17, 16, 16, 2),
    power(3, 2, 2, 10),
    power(3, 50, 50, 2),
    Case(16, ((2, 3), (5, 2), (6, 4))),
    Case(5, ((1, 3), (11, 1), (1, 2), (4, 5))),
    Case(3, ((4, 3), (2, 5)), (2, 1), (3,)),
]
SIDES = pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
# NumPy, which interprets the kernels, warns where an infinity makes a NaN; what counts is where the NaN comes out.
NONFINITE = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.sampled(ways=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *in_full([(torch.float16,), (torch.float64,)])], ids=ids)
@on_backends(CASES)
def test_random(case: Case, dtype: torch.dtype, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for left in (False, True):
        x, factors = problem(case, dtype, device, generator, left=left)
        y = call(left)(x, factors)
        assert y.dtype == dtype
        assert y.device.type == device.type
        assert y.is_contiguous()
        assert_near(y, expected(x, factors, left=left))


@pytest.mark.parametrize("dtype", REAL, ids=ids)
@on_backends([*FEW, *BATCHES, *ODD], limit=10_000)
def test_integers_are_exact(case: Case, dtype: torch.dtype, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for left in (False, True):
        x, factors = problem(case, dtype, device, generator, left=left, integers=True)
        assert_same(call(left)(x, factors), expected(x, factors, left=left).to(dtype))


@pytest.mark.parametrize("dtype", COMPLEX, ids=ids)
@on_backends([*FEW, *BATCHES], limit=10_000)
def test_complex(case: Case, dtype: torch.dtype, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for left in (False, True):
        x, factors = problem(case, dtype, device, generator, left=left)
        z = torch.randn(1, dtype=dtype, device=device)
        assert_near(call(left)(x, factors), expected(x, factors, left=left))
        scalars = {"alpha": 0.5 - 2j, "beta": 1j, "z": z}
        assert_near(call(left)(x, factors, **scalars), expected(x, factors, left=left, **scalars))
        conjugate = call(left)(x.conj(), [f.conj() for f in factors])
        assert_near(conjugate, expected(x, factors, left=left).conj())


@SIDES
def test_empty(left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """No rows, no batches, or factors without rows (a sum over nothing: beta * z) or columns."""
    for case, z_shape in itertools.product(EMPTY, [None, "full", (1,), (1, 1)]):
        x, factors = problem(case, torch.float32, device, generator, left=left)
        shape = tuple(call(left)(x, factors).shape)
        assert shape == tuple(expected(x, factors, left=left).shape)
        if z_shape is None:
            assert_same(call(left)(x, factors), torch.zeros(shape, device=device))
            continue
        z = torch.randn(shape if z_shape == "full" else z_shape, device=device)
        y = call(left)(x, factors, alpha=3.0, beta=0.5, z=z)
        assert_same(y, (0.5 * z).expand(shape))
        assert y.data_ptr() != z.data_ptr() or y.numel() == 0


# ---- alpha, beta, z ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FEW, ids=ids)
@SIDES
def test_scalars(case: Case, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, factors = problem(case, torch.float32, device, generator, left=left)
    z = torch.randn(expected(x, factors, left=left).shape, device=device)
    kept = z.clone()
    for alpha, beta in [(1.0, 1.0), (-2.5, 0.0), (0.5, -3.0), (0.0, 2.0), (3, 1)]:
        y = call(left)(x, factors, alpha=alpha, beta=beta, z=z)
        assert_near(y, expected(x, factors, left=left, alpha=alpha, beta=beta, z=z))
        assert_same(z, kept)


# How z is made from the result's shape [3, 2, 5, 24].
Z_FORMS: dict[str, Callable[..., Tensor]] = {
    "one": lambda shape, **o: torch.randn(1, **o),
    "zero_dim": lambda shape, **o: torch.randn((), **o),
    "row": lambda shape, **o: torch.randn(shape[-1], **o),
    "row_matrix": lambda shape, **o: torch.randn(1, shape[-1], **o),
    "column": lambda shape, **o: torch.randn(shape[-2], 1, **o),
    "batch": lambda shape, **o: torch.randn(shape[0], 1, 1, 1, **o),
    "inner_batch": lambda shape, **o: torch.randn(shape[1], *shape[2:], **o),
    "full": lambda shape, **o: torch.randn(shape, **o),
    "transposed": lambda shape, **o: torch.randn(*shape[:-2], shape[-1], shape[-2], **o).mT,
    "strided": lambda shape, **o: torch.randn(*shape[:-1], 2 * shape[-1], **o)[..., ::2],
    "expanded": lambda shape, **o: torch.randn(shape[-2], 1, **o).expand(shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=ids)
@SIDES
def test_z_broadcasts(dtype: torch.dtype, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, factors = problem(Case(5, ((2, 3), (5, 2), (6, 4)), (3, 1), (2,)), dtype, device, generator, left=left)
    shape = call(left)(x, factors).shape
    for make in Z_FORMS.values():
        z = make(shape, device=device, dtype=dtype)
        assert_near(call(left)(x, factors, alpha=0.5, beta=2.0, z=z), expected(x, factors, left=left, alpha=0.5, beta=2.0, z=z))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["plain", "z"])
def test_alpha_zero_of_batches(adds: bool, dtype: torch.dtype, backend_name: str, device: torch.device) -> None:
    """What lies in the memory of the result is not read."""
    x, z = torch.ones(33, 136, dtype=dtype, device=device), torch.ones(6, 33, 12, dtype=dtype, device=device)
    factors = [torch.ones(8, 4, dtype=dtype, device=device), torch.ones(6, 17, 3, dtype=dtype, device=device)]
    y = kron_matmul(x, factors, alpha=0.0, z=z, beta=0.5) if adds else kron_matmul(x, factors, alpha=0.0)
    assert torch.equal(y, z / 2 if adds else torch.zeros_like(z))


@pytest.mark.parametrize("case", FEW, ids=ids)
def test_fastkron_call_forms(case: Case, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for left in (False, True):
        x, factors = problem(case, torch.float32, device, generator, left=left)
        plain = call(left)(x, factors)
        y = torch.randn_like(plain)
        full = call(left)(x, factors, alpha=2.0, beta=0.5, z=y)
        assert_same(gekmm(factors, x) if left else gemkm(x, factors), plain)
        assert_same(gekmm(factors, x, 2.0, 0.5, y) if left else gemkm(x, factors, 2.0, 0.5, y), full)
        assert_same(gekmm(tuple(factors), x, alpha=3.0) if left else gemkm(x, tuple(factors), alpha=3.0), call(left)(x, factors, alpha=3.0))


# ---- layouts -------------------------------------------------------------------------------------

# Other strides for the same numbers.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "strided_columns": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "strided_rows": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -2).flatten(-3, -2)[..., ::2, :],
    "offset": lambda t: torch.cat([torch.full_like(t[..., :1], math.nan), t], -1)[..., 1:],
    "permuted_batch": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "both_batches_last": lambda t: t.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "negated_view": lambda t: torch._neg_view(t.neg()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@SIDES
def test_layouts(layout: str, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, factors = problem(Case(5, ((2, 3), (5, 2), (6, 4)), (2, 3), (2, 3)), torch.float32, device, generator, left=left)
    wanted = expected(x, factors, left=left)
    changed = LAYOUTS[layout](x), [LAYOUTS[layout](f) for f in factors]
    for given in (changed, (x, changed[1]), (changed[0], factors)):
        assert_near(call(left)(*given), wanted)


def test_arguments_are_kept(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Nothing is written into an argument, and the result shares memory with none (not even for 1 x 1 factors)."""
    for case in (power(3, 1, 1, 1), power(3, 1, 1, 3), power(3, 4, 4, 2)):
        x, factors = problem(case, torch.float32, device, generator)
        z = torch.randn(3, x.shape[-1], device=device)
        before = [t.clone() for t in (x, *factors, z)]
        y = kron_matmul(x, factors, beta=1.0, z=z)
        pointers = {t.untyped_storage().data_ptr() for t in (x, *factors, z)}
        assert y.untyped_storage().data_ptr() not in pointers
        assert kron_matmul(x, factors).untyped_storage().data_ptr() not in pointers
        for t, kept in zip((x, *factors, z), before, strict=True):
            assert_same(t, kept)


# ---- NaN, Inf, range -----------------------------------------------------------------------------


@NONFINITE
@pytest.mark.parametrize("dtype", REAL, ids=ids)
@SIDES
def test_nonfinite(dtype: torch.dtype, left: bool, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """NaN and Inf come out where the dense product has them: not in rows beside, not in padding, not lost in a 0 * x.

    Entries are powers of two and one of a kind of sign, so that no Inf meets an opposite one and no zero.
    """
    for value, where in itertools.product((math.nan, math.inf, -math.inf), ("x", "first", "last", "z")):
        x, factors = problem(Case(5, ((4, 3), (3, 5))), dtype, device, generator, left=left)
        z = torch.ones((15, 5) if left else (5, 15), dtype=dtype, device=device)
        x.fill_(0.5)
        for f in factors:
            f.fill_(2.0)
        place = {"x": x, "first": factors[0], "last": factors[1], "z": z}[where]
        place[1, 2] = value
        y = call(left)(x, factors, beta=1.0, z=z)
        dense = reference.kron_dense([f.double() for f in factors])
        wanted = (dense @ x.double() if left else x.double() @ dense) + z.double()
        assert 0 < int(wanted.isfinite().sum()) < wanted.numel() or where == "first"
        assert_same(y, wanted.to(dtype))


@NONFINITE
def test_zero_times_infinity(backend_name: str, device: torch.device) -> None:
    """A zero in a factor does not hide an Inf or NaN of x, as it would if zeros were skipped."""
    x = torch.ones(2, 6, device=device)
    x[0, 3] = math.inf
    factors = [torch.zeros(2, 2, device=device), torch.zeros(3, 2, device=device)]
    y = kron_matmul(x, factors)
    assert y[0].isnan().all()
    assert (y[1] == 0).all()


@NONFINITE
def test_infinities_that_meet(device: torch.device) -> None:
    """NaN where infinities of x cancel or meet a zero, in any order of summation."""
    factors = [torch.randn(p, q, device=device) for p, q in ((2, 3), (3, 3), (4, 2))]
    x = torch.randn(50, 24, device=device)
    x[torch.rand(50, 24) < 0.05] = math.inf
    x[torch.rand(50, 24) < 0.02] = -math.inf
    factors[1][1, 2] = 0
    wanted = x.double() @ reference.kron_dense([f.double() for f in factors])
    assert wanted.isnan().any()
    assert wanted.isinf().any()
    with backend("torch"):
        assert_near(kron_matmul(x, factors), wanted)


@NONFINITE
def test_infinities_of_a_factor(device: torch.device) -> None:
    """The elements of the dense product that are not finite, with its signs; where infinities of both signs meet, one may be left."""
    for special, i in itertools.product([math.nan, math.inf, -math.inf], [0, 1, 2]):
        factors = [torch.randn(p, q, device=device) for p, q in ((2, 3), (3, 3), (4, 2))]
        factors[i][1, 1] = special
        x = torch.randn(20, 24, device=device)
        wanted = x.double() @ reference.kron_dense([f.double() for f in factors])
        with backend("torch"):
            y = kron_matmul(x, factors)
        assert 0 < int(wanted.isfinite().sum()) < wanted.numel()
        assert torch.equal(y.isfinite(), wanted.isfinite())
        assert torch.equal(y[wanted.isinf()].double(), wanted[wanted.isinf()])


# ---- precision and repeatability -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=ids)
def test_half_types_accumulate_in_float32(dtype: torch.dtype, backend_name: str, device: torch.device) -> None:
    """A sum whose running value needs more bits than the type has: 1 added 2^12 times, where float16 sticks at 2^11."""
    x = torch.ones(2, 4096, dtype=dtype, device=device)
    factor = torch.ones(4096, 2, dtype=dtype, device=device)
    assert_same(kron_matmul(x, [factor]), torch.full((2, 2), 4096.0, dtype=dtype, device=device))


@pytest.mark.parametrize("precision", [None, "highest", "high", "medium"])
def test_precision(precision: str | None, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, factors = problem(power(17, 16, 16, 2), torch.float32, device, generator)
    y = kron_matmul(x, factors, precision=precision)
    # TF32 keeps 11 bits of each operand: errors like those of float16 inputs.
    limit = TOLERANCES[torch.float32] if precision in (None, "highest") else TOLERANCES[torch.float16]
    assert relative_error(y, expected(x, factors)) <= limit


@on_backends(FEW, factors=8)
def test_same_bits_twice(case: Case, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for dtype in REAL:
        x, factors = problem(case, dtype, device, generator)
        x.requires_grad_()
        [f.requires_grad_() for f in factors]
        runs = []
        for _ in range(2):
            y = kron_matmul(x, factors)
            runs.append([y, *torch.autograd.grad(y.square().sum(), [x, *factors])])
        for first, second in zip(*runs, strict=True):
            assert_same(first, second)


# ---- the comparison can fail ---------------------------------------------------------------------


def test_z_is_not_read_where_beta_is_0():
    """As in BLAS: a buffer of any content may be given."""
    x, factors = torch.randn(5, 6), [torch.randn(2, 3), torch.randn(3, 2)]
    z = torch.full((5, 6), float("nan"), requires_grad=True)
    y = kron_matmul(x, factors, beta=0, z=z)
    assert torch.equal(y, kron_matmul(x, factors))
    assert not y.requires_grad
    assert kron_matmul(x, factors, beta=torch.tensor(0.0), z=z).isnan().all()  # a tensor's value is not looked at
