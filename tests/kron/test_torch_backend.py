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

from fastkron_py import reference
from fastkron_py.kron import torch_backend, torch_steps
from fastkron_py.kron.plan import torch_plan
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
def not_small(monkeypatch):
    """The shortcut for small problems is one case of `chunking`; all else here is about the general way."""
    monkeypatch.setattr(torch_backend, "is_small", lambda problem: False)


@pytest.fixture(params=["as it is", "one chunk", "small chunks", "one row a chunk"])
def chunking(request, monkeypatch, not_small):
    """Sizes that make small problems take the branches of large ones."""
    if request.param == "as it is":
        monkeypatch.setattr(torch_backend, "is_small", torch_steps.is_small)
    elif request.param != "one chunk":
        small = request.param == "small chunks"
        monkeypatch.setattr(torch_backend, "CHUNK_BYTES_CPU", 4096 if small else 1)
        monkeypatch.setattr(torch_backend, "GROUP_ELEMENTS", 300 if small else 0)
        monkeypatch.setattr(torch_steps, "BLOCK_ROWS", 8)
    return request.param


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def make(name, dtype):
    torch.manual_seed(len(name))
    groups, length, columns, shapes = PROBLEMS[name]
    x = normal(groups, length, math.prod(p for p, _ in shapes), columns, dtype=dtype)
    factors = [(normal(groups, p, q) / math.sqrt(p)).to(dtype) for p, q in shapes]
    n = math.prod(q for _, q in shapes)
    return x, factors, normal(groups, length, n, columns, dtype=dtype)


def wide(t):
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def expected(x, factors, z=None, alpha=1.0, beta=0.0):
    """The reference in canonical form: R becomes one more batch dimension."""
    y = reference.kron_matmul(wide(x).movedim(3, 2), [wide(f)[:, None] for f in factors], alpha=alpha)
    y = y.movedim(2, 3)
    return y if z is None else y + beta * wide(z)


def magnitude(x, factors, z=None, alpha=1.0, beta=0.0):
    return expected(x.abs(), [f.abs() for f in factors], None if z is None else z.abs(), abs(alpha), abs(beta))


def expected_gradients(dy, x, factors, alpha):
    x, *factors = (wide(t).clone().requires_grad_() for t in (x, *factors))
    gradients = torch.autograd.grad(expected(x, factors, alpha=alpha), [x, *factors], wide(dy).conj())
    return [g.conj() for g in gradients]  # the backend does not conjugate, autograd does


def check_gradients(dy, x, factors, alpha=1.0, need_x=True, need_factors=None):
    need_factors = need_factors or [True] * len(factors)
    dx, dfs = torch_backend.backward(dy, x, factors, alpha, need_x, need_factors)
    truth = expected_gradients(dy, x, factors, alpha)
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
        x, factors, z = make(name, dtype)
        y = torch_backend.multiply(x, factors, None, 1.0, 0.0)
        assert y.is_contiguous()
        assert_close(y, expected(x, factors), magnitude=magnitude(x, factors))
        y = torch_backend.multiply(x, factors, z, -1.5, 0.5)
        assert_close(y, expected(x, factors, z, -1.5, 0.5), magnitude=magnitude(x, factors, z, 1.5, 0.5))
        y = torch_backend.multiply(x, factors, None, 0.25, 0.0)
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


def strided(t, kind):
    """The same values (or, expanded, the first row's) in another layout."""
    if kind == "transposed":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "expanded":
        return t[:, :1].expand(t.shape)
    if kind == "every other":
        return t.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, ::2, ::2]
    return t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


@pytest.mark.parametrize("name", ["eights", "many rows", "left form, rows", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_strides(name, dtype, chunking):
    for kind in ("transposed", "expanded", "every other", "reversed"):
        x, factors, z = make(name, dtype)
        x, z = strided(x, kind), strided(z, kind)
        factors = [f.mT.contiguous().mT for f in factors]
        y = torch_backend.multiply(x, factors, z, 1.0, 2.0)
        assert_close(y, expected(x, factors, z, 1.0, 2.0), magnitude=magnitude(x, factors, z, 1.0, 2.0))
        check_gradients(z, x, factors)


def test_rows_without_infinities_stay_finite(chunking):
    x, factors, _ = make("eights", torch.float32)
    x[0, 3, 7] = math.inf
    x[0, 65, 100] = math.nan
    y = torch_backend.multiply(x, factors, None, 1.0, 0.0)
    dense = torch.einsum("blkr,bkn->blnr", x, reference.kron_dense(factors))
    assert torch.equal(y.isnan(), dense.isnan())
    assert torch.equal(y.isinf(), dense.isinf())
    assert int((~y.isfinite()).any(2).sum()) == 2


def test_threads_of_the_caller_may_run_at_once():
    x, factors, _ = make("eights", torch.float32)
    truth, scale = expected(x, factors), magnitude(x, factors)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: torch_backend.multiply(x, factors, None, 1.0, 0.0), range(16)):
            assert_close(y, truth, magnitude=scale)


# ---- which steps and chunks -------------------------------------------------------------------


def planned(shapes, rows=1024, columns=1, **options):
    return torch_plan.plan(torch_plan.Problem(tuple(shapes), rows, columns, **options))


def runs(shapes, rows=1024, columns=1, **options):
    return [(s.first, s.last) for s in planned(shapes, rows, columns, **options).steps]


def test_plan_multiplies_out_what_is_too_narrow_and_nothing_else():
    assert runs([(16, 16)] * 3) == [(2, 3), (1, 2), (0, 1)]
    assert runs([(128, 128)] * 2) == [(1, 2), (0, 1)]
    assert len(runs([(2, 2)] * 12)) <= 6
    assert len(runs([(2, 2)] * 12, rows=1, backward=True)) <= 8
    assert sorted(runs([(8, 8)] * 2, rows=1, columns=64)) == [(0, 1), (1, 2)]  # the left form has width enough
    for backward in (False, True):  # a factor of one element costs a pass of its own
        assert all(last - first > 1 for first, last in runs([(1, 1), (30, 40), (1, 1), (1, 1), (50, 60), (1, 1)], backward=backward))


def test_plan_rotates_where_products_in_place_are_narrow():
    """Factors of 2 with many rows; not one wide factor, nor wide ones, nor factors of groups, nor where gradients are computed."""
    found = planned(((2, 2),) * 8)
    assert found.rotates
    assert [s.last for s in found.steps[1:]] == [s.first for s in found.steps[:-1]]  # from the last to the first
    assert [s.size_in for s in found.steps] == [256] * len(found.steps)
    assert not planned(((2, 2),) * 8, backward=True).rotates
    assert not planned(((2, 2),) * 8, groups=3).rotates
    for shapes in (((700, 300),), ((128, 128), (128, 128))):
        assert not planned(shapes, 256).rotates


def test_plan_copies_where_a_wide_mode_has_a_narrow_tail():
    assert torch_plan.is_moved(1000, 64, 64, 3, 4)
    assert torch_plan.sums_copies(1000, 64, 64, 3, 4)
    assert not torch_plan.is_moved(1000, 64, 64, 64, 4)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shapes", [[(1, 1)] * 64, [(2, 2)] * 20, [(3, 1), (1, 3)] * 4], ids=len)
def test_plan_takes_every_factor_once(shapes, backward):
    taken = sorted(i for first, last in runs(shapes, backward=backward) for i in range(first, last))
    assert taken == list(range(len(shapes)))


@pytest.mark.parametrize("size", [(3, 50, 1), (1, 1, 200), (40, 2, 3), (2, 9, 17)], ids=str)
def test_chunks_cover_everything_once(size, chunking):
    groups, length, columns = size
    x = torch.zeros(groups, length, 32, columns)
    chosen = planned(((4, 4), (8, 8)), length, columns)
    for chunk in torch_backend.chunks(x, chosen, x.dtype):
        chunk.of(x).add_(1)
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.parametrize("columns", [1, 3, 64], ids=["right", "few columns", "columns"])
@pytest.mark.parametrize(("rows", "side", "count"), [(1000, 8, 5), (256, 64, 3), (64, 32, 4), (20, 2, 18), (40, 1500, 2)])
def test_chunks_of_other_devices_bound_the_memory(rows, side, count, columns):
    """Up to four buffers of a chunk take no more than x does, but for chunks of 4 MiB and for a single row and column."""
    length, width = (rows, 1) if columns == 1 else (1, rows * columns)
    x = torch.empty(1, length, side**count, width, device="meta")
    factors = [torch.empty(1, side, side, device="meta")] * count
    chosen = torch_plan.plan(torch_backend._problem(x, factors))
    most = max([chunk.of(x).numel() for chunk in torch_backend.chunks(x, chosen, x.dtype)])
    assert most <= max(x.numel() // 4, (4 << 20) // x.element_size(), side**count)


def test_memory_stays_within_the_result_and_two_chunks(monkeypatch):
    monkeypatch.setattr(torch_backend, "CHUNK_BYTES_CPU", 1 << 16)
    x, factors = torch.randn(1, 2048, 512, 1), [torch.randn(1, 8, 8) for _ in range(3)]
    taken = []
    empty = torch.Tensor.new_empty

    def counted(*args, **options):
        t = empty(*args, **options)
        taken.append(t.numel() * t.itemsize)
        return t

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    torch_backend.multiply(x, factors, None, 1.0, 0.0)
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
        [(1, 1), (1, 1), (1, 1)],
    ],
    ids=str,
)
def test_small_products_and_their_recorded_gradients(left, shapes, monkeypatch):
    """By modes in place, moved and rotating; results are contiguous, gradients are autograd's."""
    rows = 5
    k, n = math.prod(p for p, _ in shapes), math.prod(q for _, q in shapes)
    x, dy = (normal(*((s, rows) if left else (rows, s))) for s in (k, n))
    factors = [normal(q, p) if left else normal(p, q) for p, q in shapes]
    arguments = [t.requires_grad_() for t in (x, *factors)]
    truth = reference.kron_matmul(x, factors, alpha=0.5, beta=2.0, z=dy, left=left)
    gradients = torch.autograd.grad(truth, arguments, dy)
    columns = rows if left else 1
    problem = torch_plan.Problem(tuple(shapes), rows // columns, columns)
    alone = [torch_plan._Run(i, i + 1, p, q) for i, (p, q) in enumerate(shapes)]
    for runs, way in itertools.product((alone, torch_plan._without_units(tuple(shapes))), ("in place", "moved", "rotating")):
        rotates = way == "rotating"
        monkeypatch.setattr(torch_steps, "is_moved", lambda *_, way=way: way == "moved")
        monkeypatch.setattr(torch_steps, "plan", lambda problem, runs=runs, rotates=rotates: torch_plan._planned(problem, runs, rotates))
        small = torch_steps.Small(problem, tuple(dy.shape), dy.dtype, left)
        y = torch_steps.small_multiply.__wrapped__(small)(x, factors, dy, 0.5, 2.0)
        assert y.is_contiguous()
        assert_close(y.detach(), truth.detach())
        for got, wanted in zip(torch.autograd.grad(y, arguments, dy), gradients, strict=True):
            assert_close(got, wanted, magnitude=wanted.abs().max().expand_as(wanted))


@pytest.mark.parametrize("way", ["in place", "moved", "rotating"])
def test_every_way(way, chunking, monkeypatch):
    """Ways that the plan would not choose here give the same."""
    monkeypatch.setattr(torch_backend, "is_small", lambda problem: False)
    for name in ("is_moved", "sums_copies"):
        monkeypatch.setattr(torch_steps, name, lambda *_: way == "moved")
    chosen = torch_plan._planned
    monkeypatch.setattr(
        torch_backend,
        "plan",
        lambda problem: chosen(problem, torch_plan._without_units(problem.shapes), way == "rotating" and not problem.backward),
    )
    for name, dtype in itertools.product(
        ("widths of 1", "primes", "wide before narrow", "left form, rows"), (torch.float32, torch.complex64)
    ):
        x, factors, z = make(name, dtype)
        y = torch_backend.multiply(x, factors, z, 0.25, 2.0)
        assert_close(y, expected(x, factors, z, 0.25, 2.0), magnitude=magnitude(x, factors, z, 0.25, 2.0))
        y = torch_backend.multiply(x, factors, None, -1.5, 0.0)
        assert_close(y, expected(x, factors, alpha=-1.5), magnitude=magnitude(x, factors, alpha=1.5))
        check_gradients(z, x, factors, alpha=0.5)


def test_bfloat16_is_multiplied_as_it_is_where_that_takes_less_time(monkeypatch):
    """Not without instructions for it, nor in small problems, nor float16; a result is rounded once for each product."""
    x, factors, dy = (normal(*s, dtype=torch.bfloat16) for s in ((1, 64, 4096, 1), (1, 64, 64), (1, 64, 4096, 1)))
    factors = [factors / 8] * 2
    for has in (False, True):
        monkeypatch.setattr(torch_internals, "multiplies_bfloat16", lambda has=has: has)
        assert torch_backend._plan_for(x, factors)[1] == (torch.bfloat16 if has else torch.float32)
        assert torch_backend._plan_for(x.half(), factors)[1] == torch.float32
        assert torch_backend._plan_for(x[:, :1, :16], [f[:, :4, :4] for f in factors])[1] == torch.float32
        y = torch_backend.multiply(x, factors, None, 1.0, 0.0)
        assert_close(y, expected(x, factors), magnitude=magnitude(x, factors), steps=2)
        dx, _ = torch_backend.backward(dy, x, factors, 1.0, True, [True, True])
        assert_close(dx, expected_gradients(dy, x, factors, 1.0)[0], steps=2, name="dx")
