"""`KroneckerProduct` against the dense product in float64 or complex128, forward and backward.

In double precision both sides err by rounding only: a few hundred units in the last place of 2.2e-16, times
the condition of the (well-conditioned) factors, so 1e-10 relative is wide for rounding and narrow for mistakes.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from kronecker_cases import SQUARE, hermitian, near, random_factors

from fastkron_py import KroneckerProduct
from fastkron_py.reference import kron_dense

RECTANGULAR = [((3, 2),), ((2, 3), (4, 1)), ((2, 3), (3, 2)), ((5, 2), (2, 5), (1, 1)), ((2, 2, 3), (6, 4))]


def test_scaling(dtype, device):
    factors = random_factors([(3, 2), (2, 3)], dtype, device)
    k, dense = KroneckerProduct(factors), kron_dense(factors)
    tensor = torch.tensor(1.7, dtype=torch.float64)
    for scaled, expected in [
        (2 * k, 2 * dense),
        (k * -0.5, -0.5 * dense),
        (k / 4, dense / 4),
        (-k, -dense),
        (tensor * k, 1.7 * dense),
        (k * tensor, 1.7 * dense),
        (torch.mul(tensor, k), 1.7 * dense),
        (k / tensor, dense / 1.7),
        (3 * k / 2 * 5, 7.5 * dense),
    ]:
        assert isinstance(scaled, KroneckerProduct)
        near(scaled.to_dense(), expected)
    if dtype.is_complex:
        near((2j * k).to_dense(), 2j * dense)


def test_products_of_operators(dtype, device):
    a = KroneckerProduct(random_factors([(3, 2), (2, 4, 3)], dtype, device))
    b = KroneckerProduct(random_factors([(2, 5), (3, 1)], dtype, device))
    product = a @ b
    assert isinstance(product, KroneckerProduct)
    assert product.shape == (2, 12, 5)
    near(product.to_dense(), a.to_dense() @ b.to_dense())
    near(a.kron(b).to_dense(), kron_dense([a.to_dense(), b.to_dense()]))
    near(torch.kron(b, b).to_dense(), torch.kron(b.to_dense(), b.to_dense()))
    s = KroneckerProduct(random_factors([(2, 2), (3, 3)], dtype, device))
    for n in (0, 1, 3, -2):
        near(s.matrix_power(np.int64(n)).to_dense(), torch.linalg.matrix_power(s.to_dense(), n))


def test_diagonals_and_traces(dtype, device):
    """The trace also of square products of rectangular factors."""
    squares = [((2, 3), (3, 2)), ((5, 2), (2, 5), (1, 1)), ((2, 2, 6), (6, 2)), ((4, 2), (2, 1), (1, 4))]
    for shapes in SQUARE + RECTANGULAR + squares:
        k = KroneckerProduct(random_factors(shapes, dtype, device))
        diagonal = k.to_dense().diagonal(dim1=-2, dim2=-1)
        near(k.diagonal(), diagonal)
        if shapes in SQUARE + squares:
            near(k.trace(), diagonal.sum(-1))
            near(torch.trace(k), diagonal.sum(-1))


def test_determinants(dtype, device):
    for shapes in [*SQUARE, ((0, 0), (3, 3)), ((0, 0), (0, 0), (2, 2))]:
        factors = random_factors(shapes, dtype, device)
        k, dense = KroneckerProduct(factors), kron_dense(factors)
        sign, log = torch.linalg.slogdet(dense)
        near(k.slogdet().sign, sign)
        near(k.slogdet().logabsdet, log)
        near(torch.linalg.slogdet(k)[1], log)
        near(k.logdet(), torch.logdet(dense))
        near(torch.logdet(k), torch.logdet(dense))
        near(k.det(), torch.linalg.det(dense))


def test_signs_of_determinants(device):
    """det(A (x) B) = det(A)**q * det(B)**p: an odd power keeps a sign, an even one drops it."""
    plus = torch.eye(3, dtype=torch.float64, device=device)
    minus = torch.diag(torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64, device=device))
    even = torch.eye(2, dtype=torch.float64, device=device)
    odd = KroneckerProduct([minus, plus])
    assert odd.slogdet().sign == -1
    assert odd.logdet().isnan()
    assert torch.logdet(odd.to_dense()).isnan()
    assert odd.det() == -1
    assert KroneckerProduct([minus, even]).slogdet().sign == 1
    assert KroneckerProduct([minus, even]).logdet() == 0
    assert KroneckerProduct([minus, minus]).slogdet().sign == 1
    singular = KroneckerProduct([torch.zeros_like(plus), even])
    assert singular.slogdet() == (0, -math.inf)
    assert singular.logdet() == -math.inf
    assert singular.det() == 0
    # A weight that float32 cannot hold: 3**15 is odd, its float32 neighbours are even.
    assert KroneckerProduct([minus.float()] + [plus.float()] * 15).slogdet().sign == -1


def test_determinants_of_huge_products_are_finite(device):
    """10 factors of 8 x 8 with det 1e-4 each: det K = 1e-4 ** (10 * 8**9), whose log is -1.236e10."""
    for dtype in [torch.float32, torch.float64, torch.complex64]:
        f = torch.eye(8, dtype=dtype, device=device)
        f[0, 0] = 1e-4
        k = KroneckerProduct([f] * 10)
        expected = 10 * 8.0**9 * math.log(1e-4)
        assert abs(k.logdet().real.item() / expected - 1) < 1e-5
        assert k.slogdet().sign == 1
        assert k.det() == 0
        assert abs(KroneckerProduct([f] * 10).inverse().logdet().real.item() / -expected - 1) < 1e-5


def test_phases_of_large_products(device):
    """A phase to the power 2**19, by whole numbers where it is a square root of unity, and by a Gaussian integer's exact power."""
    for dtype in [torch.complex64, torch.complex128]:
        turned = torch.diag(torch.tensor([1, -1], dtype=dtype, device=device))
        assert KroneckerProduct([turned] * 20).slogdet().sign == 1
        assert KroneckerProduct([turned] * 20).logdet() == 0
        assert KroneckerProduct([turned] * 20).det() == 1
        assert KroneckerProduct([torch.diag(torch.tensor([1, 1j], dtype=dtype, device=device))] * 2).slogdet().sign == 1
        f = torch.diag(torch.tensor([1, 2 + 1j], dtype=dtype, device=device))
        real, imaginary = 1, 0  # of (2 + i) ** (14 * 2**13), by squaring
        for bit in f"{14 * 2**13:b}":
            real, imaginary = real * real - imaginary * imaginary, 2 * real * imaginary
            if bit == "1":
                real, imaginary = 2 * real - imaginary, real + 2 * imaginary
        shift = max(real.bit_length(), imaginary.bit_length()) - 60
        angle = math.atan2(imaginary >> shift, real >> shift)
        expected = complex(math.cos(angle), math.sin(angle))
        found = KroneckerProduct([f] * 14).slogdet().sign
        assert abs(found.item() - expected) < (1e-6 if dtype == torch.complex64 else 1e-9)


def test_determinants_between_powers_that_overflow(device):
    """det(A)**w and det(B)**w are 1e1200 and 1e-1200; their product is 1."""
    large, small = (s * torch.eye(20, dtype=torch.float64, device=device) for s in (1e3, 1e-3))
    near(KroneckerProduct([large, small]).det(), torch.ones((), dtype=torch.float64, device=device))
    assert KroneckerProduct([large, large]).det() == math.inf
    assert KroneckerProduct([small, small]).det() == 0
    assert KroneckerProduct([-1e13 * torch.eye(3, device=device), torch.eye(1, device=device)]).det() == -math.inf


def test_products_beyond_64_bits(device):
    """A plain tuple has room for the shape where torch.Size has not."""
    k = KroneckerProduct([2 * torch.eye(8, device=device)] * 64)
    assert k.shape == (8**64, 8**64)
    assert k.norm(2) == 2.0**64
    assert (k / 2).trace() == k.trace() / 2
    with pytest.raises(ValueError, match="max_elements: expected at least 39402006196394479212279040"):
        k.to_dense()


def test_solve_does_not_take_a_matrix_for_a_batch_of_vectors(device):
    """torch.linalg.solve reads b [P, P] as P vectors where A is a batch of P: the operator must not."""
    factors = [torch.randn(3, 3, 3, dtype=torch.float64, device=device) + 6 * torch.eye(3, device=device)]
    b = torch.randn(3, 3, dtype=torch.float64, device=device)
    near(KroneckerProduct(factors).solve(b), torch.stack([torch.linalg.solve(f, b) for f in factors[0]]))


def test_cholesky_and_eigh(dtype, device):
    for shapes in SQUARE:
        factors = hermitian(random_factors(shapes, dtype, device, dominant=False))
        k, dense = KroneckerProduct(factors), kron_dense(factors)
        lower = k.cholesky()
        near(lower.to_dense(), torch.linalg.cholesky(dense))
        near((lower @ lower.mH).to_dense(), dense)
        values, vectors = k.eigh()
        assert values.dtype == torch.float64
        assert isinstance(vectors, KroneckerProduct)
        v = vectors.to_dense()
        near(v @ (values[..., :, None] * v.mH), dense)
        near((vectors.mH @ vectors).to_dense(), torch.eye(v.shape[-1], dtype=dtype, device=device).expand_as(v))
        near(values.sort().values, torch.linalg.eigvalsh(dense))
        near(k.eigvalsh(), values)


def test_norms(dtype, device):
    for shapes, order in itertools.product([((3, 3), (2, 2)), ((2, 3), (5, 2)), ((2, 3, 1), (1, 4))], ["fro", "nuc", 1, 2, math.inf]):
        k = KroneckerProduct(random_factors(shapes, dtype, device))
        near(k.norm(order), torch.linalg.matrix_norm(k.to_dense(), order))


# ---- conversion, copies, limits ----------------------------------------------------------------------------------------


def test_nothing_of_the_products_size_is_built():
    """2**40 x 2**40: anything but work per factor would not fit anywhere."""
    k = KroneckerProduct([torch.eye(16, dtype=torch.float64) * 2] * 10)
    assert k.shape == (2**40, 2**40)
    assert abs(k.logdet() / (2**40 * math.log(2) * 10) - 1) < 1e-12
    assert k.trace() == 32.0**10
    assert (k @ k).factors[0][0, 0] == 4
    assert k.inverse().factors[3][0, 0] == 0.5
    assert k.cholesky().factors[3][0, 0] == 2**0.5
    assert k.norm("nuc") == 32.0**10


def test_functions_that_an_operator_does_not_have_are_refused():
    k = KroneckerProduct([torch.eye(2)] * 2)
    for function in (
        lambda: torch.ones(4, 4) + k,
        lambda: torch.exp(k),
        lambda: torch.ones(4) / k,
        lambda: torch.linalg.solve(torch.ones(4, 4), k),
        lambda: k + torch.ones(4, 4),
    ):
        with pytest.raises(TypeError):
            function()
    with pytest.raises(TypeError, match="object is not iterable"):
        iter(k)


# ---- extremes --------------------------------------------------------------------------------------------------------------------------


def test_numbers_beyond_the_dtype_on_the_way(device):
    """Powers of determinants, sizes of identities and parts of products that are larger than any number of the dtype."""
    for dtype in [torch.float32, torch.float64, torch.complex64]:
        eye, a = torch.eye(64, dtype=dtype, device=device), torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=dtype, device=device)
        k = KroneckerProduct([eye] * 23)
        assert k.slogdet() == (1, 0)
        assert k.logdet() == 0
        assert k.det() == 1
        assert KroneckerProduct([torch.zeros_like(eye), *[eye] * 22]).slogdet().logabsdet == -torch.inf
        assert complex(KroneckerProduct([2**40, 2**40, a]).logdet()).real == pytest.approx(2.0**80 * math.log(5), rel=1e-6)
        wide = KroneckerProduct([2**40, 2**40, a])
        for order, expected in {"fro": 2.0**40 * 15**0.5, "nuc": 2.0**80 * 5, 1: 4.0, torch.inf: 4.0, 2: (5 + 5**0.5) / 2}.items():
            assert float(wide.norm(order)) == pytest.approx(expected, rel=1e-6)
        assert complex(wide.trace()) == 5 * 2**80
        assert KroneckerProduct([2**2000, torch.zeros_like(a)]).trace() == 0
        assert KroneckerProduct([2**2000, torch.zeros_like(a)]).norm("nuc") == 0
        huge, tiny = 1e30 * torch.eye(2, dtype=dtype, device=device), 1e-30 * torch.eye(2, dtype=dtype, device=device)
        assert complex(KroneckerProduct([huge, huge, tiny]).trace()).real == pytest.approx(8e30, rel=1e-6)
        assert float(KroneckerProduct([tiny, tiny, huge]).norm("nuc")) == pytest.approx(8e-30, rel=1e-6)
        assert complex(wide.add_diagonal(0.5).logdet()).real == pytest.approx(2.0**80 * math.log(2.5 * 3.5 - 1), rel=1e-6)


def test_diagonals_that_no_memory_holds_are_refused(device):
    k = KroneckerProduct([torch.eye(4, device=device)] * 30)
    with pytest.raises(ValueError, match="max_elements: expected at least 1152921504606846976 to build a vector"):
        k.diagonal()
    with pytest.raises(ValueError, match="factors: expected a product of at most 68719476736 rows"):
        k.diagonal(max_elements=None)
    with pytest.raises(ValueError, match="factors: expected a product of at most"):
        k.eigvalsh()
    with pytest.raises(ValueError, match="max_elements: expected at least 16"):
        KroneckerProduct([torch.eye(4, device=device)] * 2).diagonal(max_elements=15)
    assert KroneckerProduct([torch.eye(4, device=device)] * 2).diagonal(max_elements=16).sum() == 16


def test_norms_and_diagonals_by_torch(device):
    k = KroneckerProduct([torch.rand(2, 2, device=device, dtype=torch.float64), torch.rand(3, 3, device=device, dtype=torch.float64)])
    dense = k.to_dense()
    near(torch.linalg.norm(k), torch.linalg.norm(dense))
    near(torch.linalg.matrix_norm(k), torch.linalg.matrix_norm(dense))
    for order in ("nuc", 2, 1, torch.inf):
        near(torch.linalg.norm(k, order), torch.linalg.norm(dense, order))
        near(torch.linalg.matrix_norm(k, ord=order), torch.linalg.matrix_norm(dense, ord=order))
    near(torch.diagonal(k), dense.diagonal())
    batch = KroneckerProduct([torch.rand(2, 3, 3, device=device), torch.eye(2, device=device)])
    assert torch.equal(torch.linalg.diagonal(batch), batch.diagonal())
    assert torch.equal(torch.diagonal(batch, dim1=-2, dim2=-1), batch.diagonal())
    assert torch.equal(torch.diagonal(k.add_diagonal(1.0)), k.add_diagonal(1.0).diagonal())
    for wrong in (lambda: torch.diagonal(batch), lambda: torch.diagonal(k, 1)):
        with pytest.raises(ValueError, match="offset, dim1, dim2: expected 0 and the last two dimensions"):
            wrong()
    with pytest.raises(TypeError):
        torch.linalg.norm(k.add_diagonal(1.0))
