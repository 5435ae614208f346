"""NaN and infinities in tensors are no malformed input: they come out where the dense product has them."""

import itertools

import torch

import fastkron_py
from fastkron_py import kron_matmul, kron_matmul_left
from fastkron_py.reference import kron_dense
from fastkron_py.testing import assert_close


def dense(x, factors, left):
    k = kron_dense([f.double() for f in factors])
    return k @ x.double() if left else x.double() @ k


def test_specials_in_x_come_out_as_in_the_dense_product():
    """One NaN or infinity in x reaches its row (column) of the result and no other element, with the dense sign."""
    for special, at, left in itertools.product([float("nan"), float("inf"), -float("inf")], [(0, 0), (2, 7), (3, 23)], [False, True]):
        factors = [torch.randn(2, 3), torch.randn(3, 3), torch.randn(4, 2)]
        x = torch.randn(4, 24)
        x[at] = special
        if left:
            x, factors = x.T, [f.T for f in factors]
        with fastkron_py.backend("torch"):
            y = kron_matmul_left(factors, x) if left else kron_matmul(x, factors)
        expected = dense(x, factors, left)
        assert expected.isfinite().any()
        assert not expected.isfinite().all()
        assert_close(y, expected, rms_tol=1e-5, max_tol=1e-5)


def test_several_infinities_in_x_come_out_as_in_the_dense_product():
    """Infinities of both signs meet: the result is NaN where they cancel, in any order of summation."""
    factors = [torch.randn(2, 3), torch.randn(3, 3), torch.randn(4, 2)]
    x = torch.randn(50, 24)
    x[torch.rand(50, 24) < 0.05] = float("inf")
    x[torch.rand(50, 24) < 0.02] = -float("inf")
    factors[1][1, 2] = 0  # and 0 * inf
    expected = dense(x, factors, False)
    assert expected.isnan().any()
    assert expected.isinf().any()
    with fastkron_py.backend("torch"):
        assert_close(kron_matmul(x, factors), expected, rms_tol=1e-5, max_tol=1e-5)


def test_specials_in_a_factor_reach_the_elements_they_reach_in_the_dense_product():
    """The same elements stop being finite, and an infinite one has the dense sign. Where infinities of both signs
    meet in the dense sum (NaN), the sum over the other factors may come first and leave an infinity."""
    for special, i in itertools.product([float("nan"), float("inf"), -float("inf")], [0, 1, 2]):
        factors = [torch.randn(2, 3), torch.randn(3, 3), torch.randn(4, 2)]
        factors[i][1, 1] = special
        x = torch.randn(20, 24)
        expected = dense(x, factors, False)
        with fastkron_py.backend("torch"):
            y = kron_matmul(x, factors)
        assert torch.equal(y.isfinite(), expected.isfinite())
        assert not y.isfinite().all()
        assert y.isfinite().any()
        infinite = expected.isinf()
        assert torch.equal(y[infinite].double(), expected[infinite])
        if special != special:
            assert torch.equal(y.isnan(), expected.isnan())
        x = x.abs()  # with positive operands no infinities cancel, and all agrees
        factors = [f.abs() for f in factors]
        with fastkron_py.backend("torch"):
            assert_close(kron_matmul(x, factors), dense(x, factors, False), rms_tol=1e-5, max_tol=1e-5)


def test_z_is_not_read_where_beta_is_0():
    """As in BLAS: a buffer of any content may be given."""
    x, factors = torch.randn(5, 6), [torch.randn(2, 3), torch.randn(3, 2)]
    z = torch.full((5, 6), float("nan"), requires_grad=True)
    y = kron_matmul(x, factors, beta=0, z=z)
    assert torch.equal(y, kron_matmul(x, factors))
    assert not y.requires_grad
    assert kron_matmul(x, factors, beta=torch.tensor(0.0), z=z).isnan().all()  # a tensor's value is not looked at
