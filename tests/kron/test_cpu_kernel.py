"""The CPU kernel, which numba compiles, against float64: any sizes, units, threads, strides, dtypes; and where it does not serve."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from canonical_cases import LAYOUTS, by_factors, expected_gradients

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron.cpu import compiled, fused, plan
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.skipif(not compiled.is_installed(), reason="numba is not installed")
LIMITS = {torch.float32: 4e-7, torch.float64: 1e-15, torch.float16: 3e-4, torch.bfloat16: 2e-3}  # of a result's norm

# (B, L, R, factor shapes)
PROBLEMS = {
    "one element": (1, 1, 1, [(1, 1)]),
    "widths of 1": (1, 3, 1, [(1, 3), (4, 1), (1, 1), (2, 5)]),
    "primes": (1, 11, 1, [(3, 5), (7, 2), (5, 7)]),
    "primes, many rows": (1, 103, 1, [(13, 19), (17, 11)]),
    "one row": (1, 1, 1, [(16, 16)] * 3),
    "narrow": (1, 9, 1, [(2, 2)] * 10),
    "eights": (1, 70, 1, [(8, 8)] * 3),
    "one element first": (1, 9, 1, [(1, 1), (3, 1), (2, 5), (1, 1), (4, 3)]),
    "one element last": (1, 9, 1, [(4, 5), (3, 1)]),
    "widening": (1, 5, 1, [(3, 40), (2, 33)]),
    "narrowing last": (1, 6, 1, [(2, 16), (16, 2), (4, 8)]),
    "a row beyond the cache": (1, 2, 1, [(50, 40), (60, 50), (30, 40)]),
    "columns": (1, 1, 37, [(4, 5), (6, 3), (2, 2)]),
    "many columns": (1, 1, 301, [(14, 15), (16, 13)]),
    "columns and rows": (1, 4, 19, [(4, 5), (6, 3)]),
    "groups": (5, 7, 1, [(4, 5), (6, 3), (8, 8)]),
    "groups of columns": (4, 1, 18, [(4, 5), (6, 3)]),
    "large last": (1, 5, 1, [(3, 5), (190, 180)]),
    "large between, columns": (1, 1, 3, [(3, 5), (190, 180), (2, 3)]),
    "vectors that lie apart": (1, 6, 1, [(60, 66), (100, 148)]),
    "groups with large": (2, 3, 1, [(190, 180), (5, 3)]),
}


@pytest.fixture(params=["units as they are", "small units", "stages of one step"])
def units(request, monkeypatch):
    """Sizes that make small problems take the branches of large ones; plans are of the test alone."""
    if request.param != "units as they are":
        limits = plan.LIMITS._replace(unit_bytes=256, gradient_bytes=256, least_columns=7, far_columns=9, thread_work=1)
        if request.param == "stages of one step":
            limits = limits._replace(buffer_bytes=1, row_bytes=1)
        monkeypatch.setattr(plan, "LIMITS", limits)
    for cached in (plan.plan, fused.fused):
        cached.cache_clear()
    yield request.param
    monkeypatch.undo()
    for cached in (plan.plan, fused.fused):
        cached.cache_clear()


@pytest.fixture(params=[1, 2], ids="threads={}".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make(name, dtype):
    torch.manual_seed(len(name))
    groups, length, columns, shapes = PROBLEMS[name]
    x = torch.randn(groups, length, math.prod(p for p, _ in shapes), columns, dtype=torch.float64).to(dtype)
    return x, [(torch.randn(groups, p, q, dtype=torch.float64) / math.sqrt(p)).to(dtype) for p, q in shapes]


def check(x, factors, alpha=1.0):
    y = fused.multiplied(x, factors, alpha)
    truth = alpha * by_factors(x, factors)
    assert y.dtype == x.dtype
    assert y.shape == truth.shape
    assert y.is_contiguous()
    assert (y.double() - truth).norm() <= LIMITS[x.dtype] * truth.norm()
    return y


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_values(dtype, units, threads):
    for name in PROBLEMS:
        x, factors = make(name, dtype)
        if fused.takes(x, factors):
            assert torch.equal(check(x, factors), fused.multiplied(x, factors, 1.0)), name
            check(x, factors, -0.3)
    x, large = torch.empty(1, 5, 600, 1, dtype=dtype, device="meta"), torch.empty(1, 600, 500, dtype=dtype, device="meta")
    assert not fused.takes(x, [large], is_gradient=True)  # by torch's products
    assert not fused.takes(x, [torch.empty(1, 500, 600, dtype=dtype, device="meta").mT])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_rows_of_a_wide_result(dtype, threads):
    """A result beyond the cache is written in groups of rows, the last of which are fewer."""
    x, *factors = (torch.randn(1, *shape, dtype=torch.float64).to(dtype) for shape in [(2, 4, 1), (1, 301), (4, 829)])
    check(x, factors)


def test_factors_of_another_dtype():
    x, factors = make("primes", torch.bfloat16)
    check(x, [factors[0].float(), *factors[1:]])
    assert not fused.takes(x, [factors[0].double(), *factors[1:]])


SPREAD = ("eights", "columns and rows", "groups", "a row beyond the cache", "many columns")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_strides(kind, units):
    for name in (*SPREAD, "large between, columns", "one element last"):
        x, factors = make(name, torch.float32)
        x = LAYOUTS[kind](x)
        check(x, factors)
        check(x, [f.mT.contiguous().mT for f in factors])
        check(x, [f[:1].expand(f.shape) for f in factors], 0.5)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("columns", [33, 65, 513])
def test_a_unit_of_one_column(columns, dtype):
    """The last one of these numbers of columns: its elements lie apart."""
    for shapes in ([(40, 41)], [(20, 21), (30, 31)], [(64, 64)] * 2):
        x = torch.randn(1, 1, math.prod(p for p, _ in shapes), columns).to(dtype)
        check(x, [(torch.randn(1, p, q) / math.sqrt(p)).to(dtype) for p, q in shapes])


def test_few_columns_with_gaps():
    """The first step has the factor's rows as vectors, and reads columns that lie apart."""
    for rows, columns, shapes in ((64, 2, [(16, 64), (33, 5)]), (10, 3, [(33, 100), (3, 16), (64, 8)]), (200, 3, [(64, 16)])):
        x, factors = torch.randn(1, rows, math.prod(p for p, _ in shapes), columns), [torch.randn(1, p, q) for p, q in shapes]
        x = torch.nn.functional.pad(x, (0, 3), value=math.nan)[..., :columns]
        run = fused.fused(fused.Layout.of(x), tuple(map(fused.Layout.of, factors)), False, torch.get_num_threads())
        assert run._plan.stages[0].steps[0].by_rows
        assert not run._copied
        check(x, factors)


def test_a_sum_does_not_depend_on_threads_or_units(units, threads):
    x, factors = make("a row beyond the cache", torch.float32)
    whole = torch.cat([fused.multiplied(x[:, i : i + 1], factors, 1.0) for i in range(2)], 1)
    assert torch.equal(fused.multiplied(x, factors, 1.0), whole)


def test_rows_without_infinities_stay_finite(units):
    x, factors = make("eights", torch.float32)
    x[0, 3, 7] = math.inf
    x[0, 65, 100] = math.nan
    y = fused.multiplied(x, factors, 1.0)
    dense = torch.einsum("blkr,bkn->blnr", x, reference.kron_dense(factors))
    assert torch.equal(y.isnan(), dense.isnan())
    assert torch.equal(y.isinf(), dense.isinf())
    assert int((~y.isfinite()).any(2).sum()) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_round_to_nearest_even(dtype):
    """As torch does: ties, what overflows, subnormals, infinities and NaN; by a factor of 1 nothing else happens."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    one = torch.ones(1, 1, 1)
    y = fused.multiplied(bits.view(1, -1, 1, 1), [one], 1.0).flatten()
    assert torch.equal(y[~bits.isnan()], bits[~bits.isnan()])
    assert torch.equal(y.isnan(), bits.isnan())
    x = bits[bits.isfinite()]
    for factor in (1 + 2.0**-9, 1 + 2.0**-12, 3 * 2.0**-9, 255.0):
        y = fused.multiplied(x.view(1, -1, 1, 1), [one * factor], 1.0).flatten()
        assert torch.equal(y, (x.float() * factor).to(dtype))


def test_public_calls(threads):
    """Right, left, batches of any kind, z, vectors, empty ones."""
    torch.manual_seed(0)
    factors = [torch.randn(6, 5), torch.randn(4, 7)]
    wide = [f.double() for f in factors]
    for shape in ((24,), (1, 24), (30, 24), (3, 5, 24), (0, 24)):
        x = torch.randn(shape)
        z = torch.randn(35)
        assert_close(fastkron_py.kron_matmul(x, factors), reference.kron_matmul(x.double(), wide), steps=2)
        if len(shape) > 1:
            y = fastkron_py.kron_matmul(x, factors, alpha=0.5, beta=2.0, z=z)
            assert_close(y, reference.kron_matmul(x.double(), wide, alpha=0.5, beta=2.0, z=z.double()), steps=2, rms_tol=math.inf)
    x, batch = torch.randn(3, 1, 8, 24), [torch.randn(2, 6, 5), torch.randn(3, 1, 4, 7)]
    truth = reference.kron_matmul(x.double(), [f.double() for f in batch])
    assert_close(fastkron_py.kron_matmul(x, batch), truth, steps=2)
    turned = [f.mT.contiguous() for f in factors]
    assert_close(fastkron_py.kron_matmul_left(turned, x.mT[0, 0]), reference.kron_matmul(x[0, 0].double(), wide).mT, steps=2)
    negative = torch.randn(8, 24, dtype=torch.complex64).conj().imag  # a view whose sign torch has put off
    assert negative.is_neg()
    assert_close(fastkron_py.kron_matmul(negative, factors), reference.kron_matmul(negative.double(), wide), steps=2)


# ---- gradients -------------------------------------------------------------------------------------


def gradients(dy, x, factors, needs=None, alpha=1.0):
    """dx and the factors' gradients: needs says which."""
    need_x, *need_factors = needs or [True] * (1 + len(factors))
    layouts = tuple([fused.Layout.of(f) for f in factors])
    wanted = fused.Wanted(fused.Layout.of(dy), need_x, tuple(need_factors))
    run = fused.fused(fused.Layout.of(x), layouts, False, torch.get_num_threads(), wanted)
    dx, dfs = run.gradients(compiled.kernel(max(4, x.element_size())), dy, x, factors, alpha)
    return [dx, *dfs]


def check_gradients(dy, x, factors, needs=None, alpha=1.0):
    truth = expected_gradients(dy, x, factors, alpha)
    found = gradients(dy, x, factors, needs, alpha)
    for i, (gradient, true, t) in enumerate(zip(found, truth, (x, *factors), strict=True)):
        if needs is not None and not needs[i]:
            assert gradient is None
            continue
        assert (gradient.shape, gradient.dtype) == (true.shape, t.dtype)
        assert (gradient.double() - true).norm() <= 3 * LIMITS[t.dtype] * true.norm()
    return found


def cotangent(x, factors):
    return torch.randn(*x.shape[:2], math.prod([f.shape[2] for f in factors]), x.shape[3]).to(x.dtype)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_gradients(dtype, units, threads):
    """Also bit by bit the same in another call."""
    for name in PROBLEMS:
        x, factors = make(name, dtype)
        if fused.takes(x, factors):
            dy = cotangent(x, factors)
            found = check_gradients(dy, x, factors)
            assert all([torch.equal(a, b) for a, b in zip(found, gradients(dy, x, factors), strict=True)]), name
    check_gradients(dy, x, factors, alpha=-0.3)


def test_gradients_that_are_wanted(units):
    """Each set of them; factors of another dtype than x."""
    for name in ("primes", "narrow", "columns and rows", "a row beyond the cache", "groups"):
        x, factors = make(name, torch.float32)
        dy = cotangent(x, factors)
        for wanted in ([1, *[0] * len(factors)], [0, *[1] * len(factors)], [0, 1], [1, 0, 1], [0, *[0] * (len(factors) - 1), 1]):
            needs = [bool(w) for w in (wanted + [0] * len(factors))[: 1 + len(factors)]]
            check_gradients(dy, x, factors, needs)
    x, factors = make("narrow", torch.bfloat16)
    check_gradients(cotangent(x, factors), x, [factors[0].float(), *factors[1:]])


@pytest.mark.parametrize("kind", ["reversed", "expanded", "every other"])
def test_gradients_of_strides(kind, units):
    for name in SPREAD:
        x, factors = make(name, torch.float32)
        check_gradients(LAYOUTS[kind](cotangent(x, factors)), LAYOUTS[kind](x), [f.mT.contiguous().mT for f in factors])


@pytest.mark.parametrize("gaps", ["x", "dy", "both"])
def test_gradients_of_one_step_with_gaps(gaps):
    """Which takes no buffer but for its operands."""
    for groups, rows, columns, p, q in ((1, 3, 5, 7, 33), (2, 1, 40, 64, 64), (1, 1, 8, 31, 31)):
        x, factors = torch.randn(groups, rows, p, columns), [torch.randn(groups, p, q)]
        dy = cotangent(x, factors)
        x, dy = (torch.nn.functional.pad(t, (0, 3))[..., :columns] if gaps in (name, "both") else t for name, t in (("x", x), ("dy", dy)))
        check_gradients(dy, x, factors)


def test_gradients_of_units_of_one_column():
    for columns in (33, 65):
        x, factors = torch.randn(1, 1, 600, columns), [torch.randn(1, 20, 21), torch.randn(1, 30, 31)]
        check_gradients(cotangent(x, factors), x, factors)


def test_gradients_of_infinities(units):
    """NaN where the dense product's gradients have it."""
    x, factors = make("eights", torch.float32)
    dy = cotangent(x, factors)
    dy[0, 3, 7] = math.inf
    dx, *_ = gradients(dy, x, factors)
    dense = torch.einsum("blnr,bkn->blkr", dy, reference.kron_dense(factors))
    assert torch.equal(dx.isnan(), dense.isnan())
    x[0, 5] = math.nan
    assert all([bool(df.isnan().all()) for df in gradients(dy, x, factors)[1:]])


def test_a_thread_keeps_little_memory(monkeypatch):
    """And what it keeps is not read again."""
    x, factors = make("a row beyond the cache", torch.float32)
    dy = cotangent(x, factors)
    found = gradients(dy, x, factors)
    assert fused._scratch(1).numel() <= fused.KEPT_BYTES
    fused._scratch(1).fill_(255)
    assert all([torch.equal(a, b) for a, b in zip(found, gradients(dy, x, factors), strict=True)])
    monkeypatch.setattr(fused, "KEPT_BYTES", 0)
    kept = fused._scratch(1)
    assert fused._scratch(kept.numel() + 1) is not kept
    assert fused._scratch(1) is kept


def test_gradients_through_it():
    torch.manual_seed(0)
    x, factors = torch.randn(40, 24, dtype=torch.float64, requires_grad=True), [torch.randn(6, 5).double(), torch.randn(4, 7).double()]
    assert torch.autograd.gradcheck(lambda x, *fs: fastkron_py.kron_matmul(x, list(fs)), (x, *[f.requires_grad_() for f in factors]))


def test_threads_of_the_caller_may_run_at_once():
    x, factors = make("eights", torch.float32)
    truth = check(x, factors)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: fused.multiplied(x, factors, 1.0), range(32)):
            assert torch.equal(y, truth)


# ---- plans -----------------------------------------------------------------------------------------


def planned(shapes, rows=1, columns=1, threads=1, groups=1, **more):
    return plan.plan(plan.Sizes(tuple(shapes), groups, rows, columns, 4, threads, **more))


def test_narrow_neighbours_are_multiplied_out():
    assert [m.p for m in planned([(2, 2)] * 10, 20).matrices] == [8, 8, 16]
    assert [m.p for m in planned([(4, 4)] * 5, 1000).matrices] == [4, 16, 16]
    assert [m.p for m in planned([(8, 8)] * 4, 1024).matrices] == [8] * 4
    assert [m.p for m in planned([(1, 1), (30, 30), (1, 1), (40, 40), (1, 1)], 64).matrices] == [30, 40]


def test_few_elements_that_follow_are_no_vectors():
    """The matrix's rows are, where they are wide enough."""
    by_rows = lambda *given, **sizes: [s.by_rows for stage in planned(*given, **sizes).stages for s in stage.steps]  # noqa: E731
    assert by_rows([(141, 141), (2, 2)], 104) == [False, True]
    assert by_rows([(340, 340)], 200, columns=3) == [True]
    assert by_rows([(340, 340)], columns=3) == [True]
    assert by_rows([(340, 340)], columns=3, is_copied=True) == [False]  # for one product
    assert not any(by_rows([(8, 8)] * 4, 1024))
    assert not any(by_rows([(340, 340)], columns=40))


def test_few_rows_are_shared_evenly():
    for rows, threads, stages in [(3, 1, 1), (3, 2, 2), (4, 2, 1), (9, 2, 1), (9, 8, 2)]:
        found = planned([(300, 300), (451, 451)], rows, threads=threads).stages
        assert len(found) == stages
        units = [-(-stage.rows // stage.unit_rows) * -(-stage.columns // stage.unit_columns) for stage in found]
        assert all([threads * -(-n // threads) <= 9 / 8 * n for n in units])


def test_few_rows_have_as_many_units_for_each_thread():
    (stage,) = planned([(340, 340)], columns=1075, threads=2).stages
    assert -(-stage.columns // stage.unit_columns) % 2 == 0


def test_units_of_few_rows_are_even():
    """Rows are not rounded to blocks that leave one thread with more of them."""
    first, _ = planned([(25, 25), (375, 375)], columns=3, threads=2, is_gradient=True, is_copied=True).stages
    assert (first.rows, first.unit_rows) == (25, 13)


def test_stages_are_shared_by_their_cost():
    """Few multiply-adds in narrow vectors take as long as many in whole ones."""
    (narrow,), (wide,) = planned([(2, 2), (3, 3)], 8192, threads=2).stages, planned([(16, 16), (8, 8)], columns=80, threads=2).stages
    assert (narrow.is_shared, wide.is_shared) == (True, False)


def test_stages_hold_their_intermediates_in_cache():
    assert len(planned([(32, 32)] * 3, 128).stages) == 1
    assert [(s.rows, s.columns) for s in planned([(64, 64)] * 4, 2).stages] == [(128, 1), (2, 64**3)]
    assert all(s.buffer * 4 <= plan.LIMITS.buffer_bytes for s in planned([(16, 16)] * 4, columns=64).stages)


def test_few_rows_are_cut_for_threads():
    assert len(planned([(16, 16)] * 4, 1).stages) == 1
    assert len(planned([(16, 16)] * 4, 1, threads=4).stages) > 1
    assert len(planned([(4, 4)] * 2, 1, threads=4).stages) == 1  # too little work


# ---- compiling, threads, processes -------------------------------------------------------------------


def test_torch_serves_while_it_is_compiled(monkeypatch):
    """And results are the kernel's from then on."""
    begun, ready = threading.Event(), compiled.kernel(4)

    def compile_later(itemsize):
        begun.wait(60)
        compiled._found[itemsize] = ready

    monkeypatch.setattr(compiled, "waits", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(compiled, "_found", {})
    monkeypatch.setattr(compiled, "_compile", compile_later)
    assert compiled.kernel(4) is None
    assert compiled.kernel(4) is None
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("fastkron_py compiles")]
    begun.set()
    thread.join(60)
    assert compiled.kernel(4) is ready


def test_deterministic_algorithms_wait_for_it(monkeypatch):
    ready = compiled.kernel(4)
    monkeypatch.setattr(compiled, "waits", False)
    monkeypatch.setattr(compiled, "_found", {})
    monkeypatch.setattr(compiled, "_compile", lambda itemsize: compiled._found.update({itemsize: ready}))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert compiled.kernel(4) is ready


def test_what_fails_to_compile_is_logged_and_torch_serves(monkeypatch, caplog):
    from fastkron_py.kron.cpu import kernels

    monkeypatch.setattr(compiled, "_found", {})
    monkeypatch.setattr(kernels, "compiled", lambda *_: 1 / 0)
    x, factors = torch.randn(8, 24), [torch.randn(6, 5), torch.randn(4, 7)]
    assert_close(fastkron_py.kron_matmul(x, factors), reference.kron_matmul(x.double(), [f.double() for f in factors]), steps=2)
    assert compiled.kernel(4) is None
    assert "cannot be compiled" in caplog.text


PROGRAM = """
import os, torch, fastkron_py
from fastkron_py.kron.cpu import compiled
compiled.waits = True
torch.set_num_threads(2)
x, factors = torch.randn(400, 4096), [torch.randn(16, 16) for _ in range(3)]
y = fastkron_py.kron_matmul(x, factors)
assert compiled.kernel(4) is not None and compiled.threads() == 2
child = os.fork()
if not child:
    assert compiled.threads() == 1
    found = fastkron_py.kron_matmul(x, factors)
    torch.set_num_threads(1)  # of the operations of torch, too
    os._exit(0 if torch.equal(found, y) else 3)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(fastkron_py.kron_matmul(x, factors), y)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_multiplies_in_one_thread():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
