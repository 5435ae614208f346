"""The torch backend against float64, on every branch it can take: chunks, blocks, groups, dtypes, strides.

Tolerances are those of `fastkron_py.testing`: half types accumulate in float32 and are rounded once, so
``steps=1`` however many factors there are; float32 has its 1e-6, float64 its 1e-14. Gradients of factors
are sums over all rows, whose terms cancel, so their scale is the sum of the terms' sizes.
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from canonical_cases import LAYOUTS, by_factors, expected_gradients, problem

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron import operator, torch_backend, torch_steps
from fastkron_py.kron.cpu import compiled
from fastkron_py.kron.cpu.plan import Sizes
from fastkron_py.runtime import torch_internals
from fastkron_py.testing import assert_close

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)

# (B, L, R, factor shapes)
PROBLEMS = {
    "one factor": (1, 5, 1, [(6, 4)]),
    "one element": (1, 1, 1, [(1, 1)]),
    "widths of 1": (1, 3, 1, [(1, 3), (4, 1), (1, 1), (2, 5)]),
    "primes": (1, 11, 1, [(3, 5), (7, 2), (5, 7)]),
    "small neighbours": (1, 9, 1, [(2, 2)] * 9),
    "eights": (1, 70, 1, [(8, 8)] * 3),
    "many rows": (1, 700, 1, [(5, 4), (16, 16)]),
    "wide": (1, 3, 1, [(40, 33), (32, 40)]),
    "narrowing last": (1, 6, 1, [(2, 16), (16, 2), (4, 8)]),
    "left form": (1, 1, 37, [(4, 5), (6, 3), (2, 2)]),
    "left form, rows": (1, 4, 19, [(4, 5), (6, 3)]),
    "left form, few columns": (1, 1, 5, [(4, 5), (6, 3), (2, 2)]),
    "few columns, rows, groups": (3, 4, 7, [(4, 5), (6, 3)]),
    "groups": (5, 7, 1, [(4, 5), (6, 3), (8, 8)]),
    "groups, left form": (4, 1, 18, [(4, 5), (6, 3)]),
    "groups of one row": (30, 1, 1, [(4, 4), (4, 4)]),
    # The wide mode has a narrow tail: the operand is transposed.
    "wide before narrow": (1, 20, 1, [(150, 140), (3, 5)]),
    "wide between, groups": (2, 5, 1, [(2, 3), (150, 140), (3, 2)]),
}


# Three of one case: what a test of them costs is mostly its fixtures.
NAMES = list(zip(*[iter(PROBLEMS)] * 3, strict=True))


@pytest.fixture(autouse=True)
def one_thread():
    """Problems this small only lose by threads, a great deal where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def without_kernel(monkeypatch):
    """As where numba is not installed."""
    monkeypatch.setattr(compiled, "kernel", lambda itemsize: None)


@pytest.fixture(params=["one chunk", "small chunks", "one row a chunk"])
def chunking(request, monkeypatch):
    """Sizes that make small problems take the branches of large ones."""
    if request.param != "one chunk":
        monkeypatch.setattr(torch_backend, "CHUNK_BYTES", 4096 if request.param == "small chunks" else 1)
        monkeypatch.setattr(torch_backend, "LEAST_COLUMNS", 5)
        monkeypatch.setattr(torch_steps, "BLOCK_ROWS", 8)
    return request.param


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def make(name, dtype):
    torch.manual_seed(len(name))
    groups, length, columns, shapes = PROBLEMS[name]
    ps, qs = zip(*shapes, strict=True)
    x, factors = problem(dtype, "cpu", groups, length, ps, qs, columns)
    return x, factors, normal(groups, length, math.prod(qs), columns, dtype=dtype)


def expected(x, factors, alpha=1.0):
    return alpha * by_factors(x, factors)


def magnitude(x, factors, alpha=1.0):
    return expected(x.abs(), [f.abs() for f in factors], abs(alpha))


def check_gradients(dy, x, factors, alpha=1.0, need_x=True, need_factors=None):
    need_factors = need_factors or [True] * len(factors)
    dx, dfs = torch_backend.backward(dy, x, factors, alpha, need_x, need_factors)
    truth = [g.conj() for g in expected_gradients(dy.conj(), x, factors, alpha)]  # the backend does not conjugate, autograd does
    scale = expected_gradients(dy.abs(), x.abs(), [f.abs() for f in factors], abs(alpha))
    for i, (got, wanted, need) in enumerate(zip([dx, *dfs], truth, [need_x, *need_factors], strict=True)):
        assert (got is not None) == need
        if got is not None:
            # Of all rows' terms little may be left: only the error relative to their sizes is bounded.
            assert_close(got, wanted, magnitude=scale[i].abs(), rms_tol=math.inf, name=f"gradient {i}")


@pytest.mark.sampled(ways=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", NAMES, ids=", ".join)
def test_multiply(names, dtype, chunking):
    for name in names:
        x, factors, _ = make(name, dtype)
        y = torch_backend.multiply(x, factors)
        assert y.is_contiguous()
        assert_close(y, expected(x, factors), magnitude=magnitude(x, factors))
        y = torch_backend.multiply(x, factors, 0.25)
        assert_close(y, expected(x, factors, alpha=0.25), magnitude=magnitude(x, factors, alpha=0.25))


@pytest.mark.sampled(ways=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", NAMES, ids=", ".join)
def test_backward(names, dtype, chunking):
    for name in names:
        x, factors, dy = make(name, dtype)
        check_gradients(dy, x, factors, alpha=0.5)


@pytest.mark.parametrize("wanted", [(True, []), (False, [0]), (False, [2]), (True, [1]), (False, [0, 2])], ids=str)
@pytest.mark.parametrize("name", ["primes", "eights", "left form", "groups"])
def test_backward_of_some(name, wanted, chunking):
    x, factors, dy = make(name, torch.float32)
    check_gradients(dy, x, factors, need_x=wanted[0], need_factors=[i in wanted[1] for i in range(len(factors))])


@pytest.mark.parametrize("name", ["eights", "many rows", "left form, rows", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_strides(name, dtype, chunking):
    for lay_out in LAYOUTS.values():
        x, factors, z = make(name, dtype)
        x, z = lay_out(x), lay_out(z)
        factors = [f.mT.contiguous().mT for f in factors]
        assert_close(torch_backend.multiply(x, factors), expected(x, factors), magnitude=magnitude(x, factors))
        check_gradients(z, x, factors)


def test_rows_without_infinities_stay_finite(chunking):
    x, factors, _ = make("eights", torch.float32)
    x[0, 3, 7] = math.inf
    x[0, 65, 100] = math.nan
    y = torch_backend.multiply(x, factors)
    dense = torch.einsum("blkr,bkn->blnr", x, reference.kron_dense(factors))
    assert torch.equal(y.isnan(), dense.isnan())
    assert torch.equal(y.isinf(), dense.isinf())
    assert int((~y.isfinite()).any(2).sum()) == 2


def test_threads_of_the_caller_may_run_at_once():
    x, factors, _ = make("eights", torch.float32)
    truth, scale = expected(x, factors), magnitude(x, factors)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: torch_backend.multiply(x, factors), range(16)):
            assert_close(y, truth, magnitude=scale)


# ---- which steps and chunks -------------------------------------------------------------------


def runs(shapes):
    return [(s.first, s.last) for s in torch_steps.steps_of(tuple(shapes))]


def test_narrow_neighbours_are_multiplied_out():
    assert runs([(16, 16)] * 3) == [(2, 3), (1, 2), (0, 1)]
    assert len(runs([(2, 2)] * 12)) == 3
    assert runs([(1, 1), (30, 40), (1, 1), (50, 60), (1, 1)]) == [(3, 5), (0, 3)]  # a factor of one element costs a pass of its own
    assert runs([(2, 16), (16, 2), (4, 8)])[0] == (0, 2)  # what widens x goes last


@pytest.mark.parametrize("shapes", [[(1, 1)] * 64, [(2, 2)] * 20, [(3, 1), (1, 3)] * 4, [(0, 3), (3, 0)]], ids=len)
def test_steps_take_every_factor_once(shapes):
    assert sorted(i for first, last in runs(shapes) for i in range(first, last)) == list(range(len(shapes)))


@pytest.mark.parametrize("size", [(3, 50, 1), (1, 1, 200), (40, 2, 3), (2, 9, 17)], ids=str)
def test_chunks_cover_everything_once(size, chunking):
    groups, length, columns = size
    x = torch.zeros(groups, length, 32, columns)
    for chunk in torch_backend.chunks(x, 32):
        chunk.of(x).add_(1)
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.parametrize("columns", [1, 3, 64], ids=["right", "few columns", "columns"])
@pytest.mark.parametrize(("rows", "side", "count"), [(1000, 8, 5), (256, 64, 3), (64, 32, 4), (20, 2, 18), (40, 1500, 2)])
def test_chunks_of_other_devices_bound_the_memory(rows, side, count, columns):
    """Up to four buffers of a chunk take no more than x does, but for chunks of 4 MiB and for a single row and column."""
    length, width = (rows, 1) if columns == 1 else (1, rows * columns)
    x = torch.empty(1, length, side**count, width, device="meta")
    most = max([chunk.of(x).numel() for chunk in torch_backend.chunks(x, side**count)])
    assert most <= max(x.numel() // 4, (4 << 20) // x.element_size(), side**count)


def test_memory_stays_within_the_result_and_two_chunks(monkeypatch):
    monkeypatch.setattr(torch_backend, "CHUNK_BYTES", 1 << 16)
    x, factors = torch.randn(1, 2048, 512, 1), [torch.randn(1, 8, 8) for _ in range(3)]
    taken = []
    empty = torch.Tensor.new_empty

    def counted(*args, **options):
        t = empty(*args, **options)
        taken.append(t.numel() * t.itemsize)
        return t

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    torch_backend.multiply(x, factors)
    assert sum(taken) <= x.numel() * 4 + 2 * (1 << 16)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "shapes",
    [
        [(6, 4)],
        [(3, 5), (7, 2), (5, 7)],
        [(4, 4), (1, 3)],
        [(1, 3), (4, 1), (1, 1)],  # which scales a matrix
        [(1, 1), (30, 40), (1, 1)],  # which scale x
        [(3, 1), (1, 1), (2, 5)],  # which scales a matrix
        [(1, 1), (1, 1), (1, 1)],
    ],
    ids=str,
)
def test_small_products_and_their_recorded_gradients(left, shapes):
    """Results are contiguous, gradients are autograd's."""
    rows = 5
    k, n = math.prod(p for p, _ in shapes), math.prod(q for _, q in shapes)
    x, dy = (normal(*((s, rows) if left else (rows, s))) for s in (k, n))
    factors = [normal(q, p) if left else normal(p, q) for p, q in shapes]
    arguments = [t.requires_grad_() for t in (x, *factors)]
    truth = reference.kron_matmul(x, factors, alpha=0.5, beta=2.0, z=dy, left=left)
    gradients = torch.autograd.grad(truth, arguments, dy)
    sizes = Sizes(tuple(shapes), 1, 1 if left else rows, rows if left else 1, 8, 1, True, left)
    y = torch_steps.small_multiply(sizes, tuple(dy.shape), left)(x, factors, dy, 0.5, 2.0)
    assert y.is_contiguous()
    assert_close(y.detach(), truth.detach())
    for got, wanted in zip(torch.autograd.grad(y, arguments, dy), gradients, strict=True):
        assert_close(got, wanted, magnitude=wanted.abs().max().expand_as(wanted))


@pytest.mark.parametrize("left", [False, True])
def test_products_that_the_model_prefers_to_the_kernel(left, monkeypatch):
    """Gradients of both orders are autograd's of torch's products, and repeat bit by bit."""
    monkeypatch.setattr(torch_steps, "is_faster", lambda sizes: True)
    x, *factors = (normal(*(s[::-1] if left else s)).requires_grad_() for s in [(3, 42), (7, 5), (1, 1), (6, 8)])

    def multiply(x, *factors):
        return fastkron_py.kron_matmul_left(factors, x) if left else fastkron_py.kron_matmul(x, factors)

    for _ in range(2):
        y = multiply(x, *factors)
        assert y.grad_fn is not None
        assert "kron_matmul" not in y.grad_fn.name()
        assert_close(y.detach(), reference.kron_matmul(x, factors, left=left).detach())
        assert torch.equal(multiply(x.detach(), *[f.detach() for f in factors]), y)
    assert torch.autograd.gradcheck(multiply, (x, *factors))
    assert torch.autograd.gradgradcheck(multiply, (x, *factors))


def test_the_model_of_the_kernel_and_of_products(monkeypatch):
    """Few large factors are torch's, many small ones the kernel's, as are all on AMD's CPUs, and large x, which autograd would keep."""
    few, many = Sizes(((3, 3), (233, 233)), 1, 1, 44, 8, 2, True, True), Sizes(((8, 8),) * 4, 1, 1024, 1, 4, 2)
    for generation in (0, 4, 5):
        monkeypatch.setattr(torch_steps, "zen", lambda generation=generation: generation)
        assert torch_steps.is_faster(few) is (generation == 0)
        assert not torch_steps.is_faster(many)
        assert not torch_steps.is_faster(few._replace(columns=1 << 14))


@pytest.mark.parametrize("left", [False, True])
def test_batches_of_few_elements_are_one_product(left):
    """torch multiplies those of a batch in a scalar loop; the products' derivatives are none of a batch either."""
    rows = 3 if left else 700
    x, f, g = (normal(*(s[::-1] if left else s)).requires_grad_() for s in [(rows, 40), (10, 7), (4, 3)])
    sizes = Sizes(((10, 7), (4, 3)), 1, 1 if left else rows, rows if left else 1, 8, 1, True, left)
    assert torch_steps.product_terms(sizes).one_by_one == torch_steps.product_terms(sizes).matrix == 0
    y = torch_steps.small_multiply(sizes, (21, rows) if left else (rows, 21), left)(x, [f, g], None, 1.0, 0.0)
    truth = reference.kron_matmul(x, [f, g], left=left)
    assert_close(y.detach(), truth.detach())
    dy = normal(*y.shape)
    for got, wanted in zip(torch.autograd.grad(y, (x, f, g), dy), torch.autograd.grad(truth, (x, f, g), dy), strict=True):
        assert_close(got, wanted, magnitude=wanted.abs().max().expand_as(wanted))


def test_products_with_a_large_factor_are_not_cut():
    """Each chunk would read the factor again."""
    assert torch_steps.is_small([(1153, 1153), (2, 2)], 900)
    assert not torch_steps.is_small([(1153, 1153), (2, 2)], 9000)
    assert not torch_steps.is_small([(48, 48), (48, 48)], 900)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_infinities_beside_factors_of_one_element(rows, scale):
    """They spread as in the dense product, whether x or the other factor is scaled."""
    x, f, one = normal(rows, 3), normal(3, 4), torch.full((1, 1), scale, dtype=torch.float64)
    x[0, 0], f[1, 2] = math.inf, 0.0
    for factors in ([one, f], [f, one, one]):
        truth = x @ reference.kron_dense(factors)
        assert torch.equal(fastkron_py.kron_matmul(x, factors).isnan(), truth.isnan())
        assert torch.equal(fastkron_py.kron_matmul_left([g.mT for g in factors], x.mT).isnan(), truth.isnan().mT)


def test_wide_factors_of_bfloat16_where_the_cpu_multiplies_it(monkeypatch):
    """Each step's result is rounded then; else they are multiplied in float32."""
    x, factors = torch.randn(1, 40, 128 * 128, 1).bfloat16(), [(torch.randn(1, 128, 128) / 11).bfloat16() for _ in range(2)]
    for has in (False, True):
        monkeypatch.setattr(torch_internals, "multiplies_bfloat16", lambda has=has: has)
        assert torch_backend._prepared(x, factors)[1][0].dtype == (torch.bfloat16 if has else torch.float32)
        assert torch_backend._prepared(x, [f[:, :8, :8] for f in factors])[1][0].dtype == torch.float32
        assert_close(torch_backend.multiply(x, factors), expected(x, factors), steps=2, magnitude=magnitude(x, factors))


def test_float32_factors_beside_bfloat16_where_the_cpu_multiplies_it(monkeypatch):
    """One product of torch has operands of one dtype: these are multiplied in float32."""
    monkeypatch.setattr(torch_internals, "multiplies_bfloat16", lambda: True)
    x = torch.randn(5, 8).bfloat16()
    for shapes, wide in itertools.product(([(8, 6)], [(8, 6), (1, 1)], [(1, 1), (8, 6)]), ([0], [1], [0, 1])):
        factors = [torch.randn(shape).to(torch.float32 if i in wide else torch.bfloat16) for i, shape in enumerate(shapes)]
        truth = x.double() @ reference.kron_dense([f.double() for f in factors])
        given = [[f.mT.contiguous() for f in factors], x.mT]
        assert_close(operator.kron_matmul(x, factors, None, 1.0, 0.0, None, "torch", False), truth, steps=2)
        assert_close(operator.kron_matmul(given[1], given[0], None, 1.0, 0.0, None, "torch", True), truth.mT, steps=2)
