"""Products of float32 by oneDNN on a CPU: taken wherever they may be, whatever the model says, and compared with float64."""

from __future__ import annotations

import io
import math

import pytest
import torch

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron import multiply, torch_backend
from fastkron_py.kron.cpu import compiled
from fastkron_py.runtime import gpu, torch_internals
from fastkron_py.testing import assert_close
from fastkron_py.tiling import cpu_costs, torch_products
from fastkron_py.tiling.cpu_costs import takes_onednn
from fastkron_py.tiling.torch_products import by_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


@pytest.fixture(autouse=True)
def without_kernel(monkeypatch):
    """As where numba is not installed: torch multiplies."""
    monkeypatch.setattr(compiled, "kernel", lambda itemsize: None)


@pytest.fixture
def taken(monkeypatch):
    """Take oneDNN for every product that it may do, and note their shapes; where this CPU has none of it, torch's own product."""
    shapes = []

    def product(a, b):
        assert all(t.is_contiguous() or t.mT.is_contiguous() for t in (a, b))
        assert not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
        shapes.append((*a.shape, b.shape[1]))
        return a @ b

    found = torch_internals.onednn_product() or product

    def noted(a, b):
        product(a, b)
        return found(a, b)

    monkeypatch.setattr(torch_internals, "onednn_product", lambda: noted)
    monkeypatch.setattr(torch_products, "takes_onednn", lambda p, q, n, is_last: p * q * n > 0)
    return shapes


PROBLEMS = {
    "rows": (40, ((5, 7), (6, 4)), False),
    "columns": (40, ((5, 7), (6, 4)), True),
    "one row": (1, ((30, 20), (10, 8)), False),
    "one wide factor": (300, ((150, 140),), False),
    "one wide factor, columns": (300, ((150, 140),), True),
    "narrow factors": (200, ((2, 3),) * 5, False),
}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients(name, dtype, small, taken, monkeypatch):
    rows, shapes, left = PROBLEMS[name]
    if not small:
        monkeypatch.setattr(fastkron_py.kron.torch_steps, "is_small", lambda shapes, elements: False)
        monkeypatch.setattr(fastkron_py.kron.torch_steps, "is_faster", lambda sizes: False)
    torch.manual_seed(len(name))
    factors = [(torch.randn(p, q, dtype=torch.float64) / math.sqrt(p)).to(dtype).requires_grad_() for p, q in shapes]
    k, n = (math.prod(s[i] for s in shapes) for i in (0, 1))
    x = torch.randn(rows, k, dtype=torch.float64).to(dtype).requires_grad_()
    z = torch.randn(rows, n, dtype=torch.float64).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, *factors)]
    truth = reference.kron_matmul(wide[0], wide[1:])
    for alpha, added in ((1.0, False), (0.5, True)):
        addend = z if added else None
        if left:
            turned = [f.mT for f in factors]
            y = fastkron_py.kron_matmul_left(turned, x.mT, alpha=alpha, beta=float(added), z=None if addend is None else addend.mT).mT
        else:
            y = fastkron_py.kron_matmul(x, factors, alpha=alpha, beta=float(added), z=addend)
        assert_close(y.detach(), alpha * truth.detach() + (z.double() if added else 0.0), steps=len(shapes))
        g = torch.randn(rows, n, dtype=torch.float64).to(dtype)
        found = torch.autograd.grad(y, [x, *factors], g)
        wanted = torch.autograd.grad(alpha * truth, wide, g.double(), retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            # Of all rows' terms little may be left: only the largest error is bounded.
            assert_close(a, b, steps=len(shapes) + 2, magnitude=b.abs().max().expand_as(b), rms_tol=math.inf)
    if dtype == torch.float32 and not small:
        assert taken


def test_operands_with_gaps_are_blas_s(taken):
    """oneDNN has reference loops for them, which take a hundred times as long."""
    gaps, dense = torch.randn(20, 30)[:, :10], torch.randn(10, 8)
    assert by_onednn(gaps, dense, True) is None
    assert by_onednn(dense, gaps.mT[:8], True) is None
    found = by_onednn(gaps.contiguous(), dense, True)
    assert found is not None
    assert_close(found, gaps.double() @ dense.double())
    x = torch.randn(20, 30)[:, :12]
    factors = [torch.randn(3, 4), torch.randn(4, 5)]
    assert_close(fastkron_py.kron_matmul(x, factors), reference.kron_matmul(x.double(), [f.double() for f in factors]), steps=2)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of torch.backends.mkldnn.flags
def test_what_it_is_not_for(taken):
    a, b = torch.randn(20, 10), torch.randn(10, 8)
    assert by_onednn(a.double(), b.double(), True) is None
    assert by_onednn(a.requires_grad_(), b, True) is None  # autograd would not see it
    with torch.no_grad():
        assert by_onednn(a, b, True) is not None
    with torch.backends.mkldnn.flags(enabled=False):
        assert by_onednn(a.detach(), b, True) is None
    assert taken


def test_long_sums_round_as_float32_does(taken):
    """Gradients sum over all rows: in blocks, whose sums are added up."""
    torch.manual_seed(0)
    x, f = torch.randn(50_000, 40), torch.randn(40, 30).requires_grad_()
    g = torch.randn(50_000, 30)
    _, (found,) = torch_backend.backward(g[None, ..., None], x[None, ..., None], [f.detach()[None]], 1.0, False, [True])
    assert_close(found[0], x.double().T @ g.double(), magnitude=x.double().abs().T @ g.double().abs())
    assert taken


def test_one_factor_in_the_precision_that_is_asked_for(monkeypatch):
    """Whatever torch's setting for the process is."""
    asked, products = [], multiply.torch_products

    def noted(x, precision):
        asked.append(precision)
        return products(x, precision)

    monkeypatch.setattr(multiply, "torch_products", noted)
    for left in (False, True):
        x, f = torch.randn(8, 8), torch.randn(8, 8)
        y = fastkron_py.kron_matmul_left([f], x, precision="highest") if left else fastkron_py.kron_matmul(x, [f], precision="highest")
        assert_close(y, f.double() @ x.double() if left else x.double() @ f.double())
    assert asked == ["highest"] * 2


def test_the_model():
    """Wide products of many rows, and no small ones, whose calls take longer; nor sums that would round more."""
    assert takes_onednn(300, 300, 1353, True)
    assert takes_onednn(300, 300, 1353, False)
    assert not takes_onednn(16, 16, 16, True)
    assert not takes_onednn(1_000_000, 16, 1000, True)
    assert not takes_onednn(300, 0, 1353, True)


def test_the_model_of_zen_4(monkeypatch):
    """Large products whose results are small; plans do not count on them."""
    monkeypatch.setattr(torch_internals, "onednn_product", lambda: torch.mm)
    for generation, small, fresh in ((5, True, True), (4, False, False)):
        monkeypatch.setattr(cpu_costs, "zen", lambda generation=generation: generation)
        monkeypatch.setattr(torch_products, "zen", lambda generation=generation: generation)
        takes = cpu_costs.takes_onednn.__wrapped__
        assert takes(451, 451, 900, True)
        assert takes(300, 300, 600, True) is small
        assert takes(300, 300, 3000, True) is fresh
        assert torch_products.has_onednn(torch.empty(0)) is (generation == 5)


def test_a_product_that_fails_is_not_taken(monkeypatch):
    """Whatever torch's private name does in another version: BLAS takes its place."""
    monkeypatch.setattr(torch_internals, "zen", lambda: 5)
    for broken in (lambda *given: given[0], lambda *given: 1 / 0):
        monkeypatch.setattr(torch_internals, "_onednn_linear", lambda broken=broken: broken)
        torch_internals.onednn_product.cache_clear()
        assert torch_internals.onednn_product() is None
    monkeypatch.setattr(torch_internals, "_onednn_linear", lambda: torch.ops.mkldnn.no_such_name)
    torch_internals.onednn_product.cache_clear()
    assert torch_internals.onednn_product() is None
    monkeypatch.undo()
    torch_internals.onednn_product.cache_clear()
    a, b = torch.randn(30, 20), torch.randn(20, 10)
    product = torch_internals.onednn_product()
    if product is not None:
        assert_close(product(a, b), a.double() @ b.double())


def test_the_cpu_is_told_apart(monkeypatch):
    for text, wanted in [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n\nprocessor\t: 1\n", 5),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t: avx2 avx512f\n", 4),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t: avx2\n", 0),  # Zen 3
        ("vendor_id\t: GenuineIntel\ncpu family\t: 26\n", 0),
        ("CPU implementer\t: 0x41\n", 0),
        ("", 0),
    ]:
        monkeypatch.setattr("builtins.open", lambda *_, text=text, **__: io.StringIO(text))
        assert gpu.zen.__wrapped__() == wanted
