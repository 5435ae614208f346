"""Lazy operators with integers among their factors, against the same with dense identities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kronecker_cases import definite

from fastkron_py import KroneckerProduct, KroneckerSum
from fastkron_py.testing import assert_close

ORDERS = [(2, "a", 3), ("a", 4, "b"), ("a", 2), (2, 3, "a", "b", 1)]


def built(factors: Any) -> list[torch.Tensor]:
    return [torch.eye(f, dtype=torch.float64) if isinstance(f, int) else f for f in factors]


def drawn(order: tuple[Any, ...]) -> tuple[KroneckerProduct, KroneckerProduct]:
    of = {"a": definite(3), "b": definite(2)}
    factors = [of.get(f, f) for f in order]
    return KroneckerProduct(factors), KroneckerProduct(built(factors))


METHODS: dict[str, Callable[[KroneckerProduct, torch.Tensor], Any]] = {
    "to_dense": lambda k, b: k.to_dense(),
    "left": lambda k, b: k @ b,
    "right": lambda k, b: b.mT @ k,
    "vector": lambda k, b: k @ b[:, 0],
    "mT": lambda k, b: k.mT @ b,
    "mH": lambda k, b: k.conj().mH @ b,
    "diagonal": lambda k, b: k.diagonal(),
    "trace": lambda k, b: k.trace(),
    "slogdet": lambda k, b: torch.stack(list(k.slogdet())),
    "logdet": lambda k, b: torch.logdet(k),
    "det": lambda k, b: k.det(),
    "inverse": lambda k, b: k.inverse().to_dense(),
    "solve": lambda k, b: k.solve(b),
    "cholesky": lambda k, b: k.cholesky().to_dense(),
    "eigvalsh": lambda k, b: k.eigvalsh().sort().values,
    "eigh": lambda k, b: k.eigh().eigenvectors @ (k.eigh().eigenvalues[:, None] * (k.eigh().eigenvectors.mH @ b)),
    "matrix_power": lambda k, b: (k.matrix_power(2) @ b, k.matrix_power(-1) @ b)[1],
    "scaled": lambda k, b: (-2 * k / 3).to_dense(),
    "times itself": lambda k, b: (k @ k).to_dense(),
    "kron": lambda k, b: k.kron(KroneckerProduct([2, b[:2, :2]])).to_dense(),
    "norms": lambda k, b: torch.stack([k.norm(order) for order in ("fro", "nuc", 1, 2, float("inf"))]),
    "float": lambda k, b: k.float().double().to_dense(),
    "plus a number": lambda k, b: k.add_diagonal(0.3) @ b,
    "plus a vector": lambda k, b: b.mT @ k.add_diagonal(b[:, 0]),
    "plus diagonals": lambda k, b: k.add_diagonal(KroneckerProduct([2.0 * torch.eye(n).double() for n in sizes(k)])).to_dense(),
    "plus identities": lambda k, b: k.add_diagonal(KroneckerProduct([*sizes(k)[:-1], 2 * torch.eye(sizes(k)[-1]).double()])).to_dense(),
    "its diagonal": lambda k, b: k.add_diagonal(b[:, 0]).diagonal(),
    "its trace": lambda k, b: k.add_diagonal(b[:, 0]).trace(),
    "its transpose": lambda k, b: k.add_diagonal(b[:, 0]).mT @ b,
    "its solve": lambda k, b: k.add_diagonal(0.3).solve(b),
    "its logdet": lambda k, b: k.add_diagonal(0.3).logdet(),
    "its solve by iteration": lambda k, b: k.add_diagonal(b[:, 0].abs()).solve(b, tolerance=1e-15),
    "its eigenvalues": lambda k, b: k.add_diagonal(0.3).eigvalsh().sort().values,
    "its sample": lambda k, b: k.add_diagonal(0.3).sample((2,), generator=torch.Generator().manual_seed(0)),
    "function": lambda k, b: k.apply_function(torch.sqrt) @ b,
}


def sizes(k: KroneckerProduct) -> list[int]:
    return [f if isinstance(f, int) else f.shape[-1] for f in k.factors]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.filterwarnings("ignore:conjugate gradients:RuntimeWarning")  # a tolerance below rounding
def test_products(order: tuple[Any, ...]) -> None:
    for method in METHODS:
        k, dense = drawn(order)
        b = torch.randn(k.shape[-1], 3, dtype=torch.float64)
        steps = 10**4 if "iteration" in method else 100  # solves multiply rounding by the condition number
        if method == "float":
            assert torch.equal(METHODS[method](k, b), METHODS[method](dense, b))
        else:
            assert_close(METHODS[method](k, b), METHODS[method](dense, b), steps=steps)
        with pytest.raises(AssertionError):
            assert_close(METHODS[method](k, b) * 1.001, METHODS[method](dense, b), steps=steps)


def test_identities_stay_identities() -> None:
    k, _ = drawn((2, "a", 3))
    for other in (k.mT, k.conj(), k.inverse(), k.cholesky(), k.eigh().eigenvectors, k.matrix_power(3), 2 * k, k @ k, k.detach(), k.float()):
        assert [other.factors[0], other.factors[2]] == [2, 3]
    assert repr(k) == "KroneckerProduct(I_2 (x) 3x3 (x) I_3, shape=(18, 18), dtype=torch.float64, device=cpu)"
    large = KroneckerProduct([2**20, definite(2), 2**20])  # never built
    assert large.trace() == 2.0**40 * large.factors[1].trace()
    assert_close(large.logdet(), 2.0**40 * large.factors[1].logdet())


def test_solves_take_identities_as_columns() -> None:
    a = definite(2)
    k = KroneckerProduct([2**9, a, 2**9])
    tall = KroneckerProduct([2**18, a])  # whose identity has 2**36 elements
    b = torch.randn(2**19, dtype=torch.float64)
    for operator in (k, tall, k.add_diagonal(0.5), tall.add_diagonal(torch.tensor(0.5).double())):
        assert_close(operator @ operator.solve(b), b, steps=100)
    shifted = tall.add_diagonal(0.5)
    assert_close(shifted.logdet(), 2**18 * torch.logdet(a + 0.5 * torch.eye(2)), steps=100)
    assert shifted.slogdet().sign == 1
    negative = KroneckerProduct([3, -a[:1, :1]]).add_diagonal(0.0)
    assert negative.slogdet().sign == -1
    root = tall.apply_function(torch.sqrt)
    assert_close(root @ (root @ b), tall @ b, steps=100)
    found = shifted.sample(generator=torch.Generator().manual_seed(0)).view(2**18, 2)
    assert ((found.mT @ found) / 2**18 - a - 0.5 * torch.eye(2)).abs().max() < 0.1  # more than 20 standard errors
    empty = KroneckerProduct([0, a])
    assert empty.solve(torch.zeros(0, 3).double()).shape == (0, 3)
    assert empty.add_diagonal(0.5).solve(torch.zeros(0).double()).shape == (0,)


def test_rectangular_factors() -> None:
    g, h = torch.randn(3, 2, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    k = KroneckerProduct([g, 2, h])
    assert_close(k.diagonal(), k.to_dense().diagonal())
    assert_close(k.trace(), k.to_dense().trace())
    left = KroneckerProduct([2, g]) @ KroneckerProduct([torch.ones(2, 2).double(), h])
    assert_close(left.to_dense(), torch.kron(torch.ones(2, 2).double(), g @ h))


@pytest.mark.parametrize("operator", [KroneckerProduct, KroneckerSum])
def test_refusals(operator: Any) -> None:
    for factors, error, text in [
        ([2, 3], ValueError, r"factors: expected at least one matrix.*got identities of sizes \[2, 3\]"),
        ([True, (2, 2)], TypeError, r"factors\[0\]: expected .*got bool"),
        ([(2, 2), -1], ValueError, r"factors\[1\]: expected .*got -1"),
    ]:
        with pytest.raises(error, match=text):
            operator([torch.ones(f) if isinstance(f, tuple) else f for f in factors])


def test_sums() -> None:
    for order, masses in [(("a", 4, "b"), None), ((3, "a"), None), (("a", "b"), ("c", 2)), (("a", "b"), (3, "d")), (("a", 2), (3, "d"))]:
        of = {"a": definite(3), "b": definite(2), "c": definite(3), "d": definite(2)}
        factors, pairs = [of.get(f, f) for f in order], masses and [of.get(m, m) for m in masses]
        s, dense = KroneckerSum(factors, masses=pairs), KroneckerSum(built(factors), masses=pairs and built(pairs))
        b = torch.randn(s.shape[-1], 3, dtype=torch.float64)
        for method in (
            lambda s, b: s @ b,
            lambda s, b: b.mT @ s,
            lambda s, b: s.mT @ b,
            lambda s, b: s.to_dense(),
            lambda s, b: s.diagonal(),
            lambda s, b: s.trace(),
            lambda s, b: s.solve(b),
            lambda s, b: s.logdet(),
            lambda s, b: (-2 * s / 3).to_dense(),
            lambda s, b: s.eigvalsh(),
            lambda s, b: s.add_diagonal(0.5).to_dense(),
            *[lambda s, b: s.expm(-0.1) @ b] * (masses is None),
        ):
            assert_close(method(s, b), method(dense, b), steps=100)
