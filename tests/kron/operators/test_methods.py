"""Methods of lazy operators against those of the dense matrix in float64 or complex128: values, derivatives, arrays, copies.

In double precision both sides err by rounding only, times the condition of the (well-conditioned) matrices: 1e-10 relative is wide for
rounding and narrow for mistakes. Conjugate gradients are asked for residuals of 1e-13.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kronecker_cases import dense_sum, near
from torch import Tensor

from fastkron_py import KroneckerProduct, KroneckerSum
from fastkron_py.reference import kron_dense

EXACT = {"tolerance": 1e-13}
MASK = torch.tensor([True, True, False, True, False, True])
INDEX = MASK.nonzero()[:, 0]
PAIRS = torch.tensor([1, 0, 1])


class Operator(NamedTuple):
    """An operator of tensors.

    Attributes:
        shapes: of the tensors.
        make: the operator.
        dense: its matrix.
        traits: "square"; "product" or "sum"; "regular" has solves and determinants; "spectrum" has real eigenvalues.
        real: how many of the last tensors are real ones.
    """

    shapes: Sequence[tuple[int, ...]]
    make: Callable[..., Any]
    dense: Callable[..., Tensor]
    traits: str
    real: int = 0


def general(f: Tensor) -> Tensor:
    """A matrix with a strong diagonal, not symmetric."""
    return f + 3 * f.shape[-1] * _eye(f)


def definite(f: Tensor) -> Tensor:
    """A Hermitian positive definite matrix."""
    return f @ f.mH + _eye(f)


def positive(s: Tensor, f: Tensor) -> Tensor:
    """Elements of a diagonal, of f's dtype."""
    return (s.abs() + 0.5).to(f.dtype)


def _eye(f: Tensor, n: int | None = None) -> Tensor:
    return torch.eye(n or f.shape[-1], dtype=f.dtype, device=f.device)


def product(*shapes: tuple[int, ...], of: Callable[[Tensor], Tensor] = general, traits: str = "square product regular") -> Operator:
    return Operator(shapes, lambda *fs: KroneckerProduct([of(f) for f in fs]), lambda *fs: kron_dense([of(f) for f in fs]), traits)


def summed(
    *shapes: tuple[int, ...], of: Callable[[Tensor], Tensor] = general, masses: Callable[[Tensor], Tensor] | None = None
) -> Operator:
    """Of factors, and as many masses of their sizes."""

    def split(given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        return [of(f) for f in given[: len(shapes)]], [masses(m) for m in given[len(shapes) :]] if masses else None

    def make(*given: Tensor) -> KroneckerSum:
        factors, own = split(given)
        return KroneckerSum(factors, masses=own)

    traits = "square sum regular" + " spectrum" * (of is definite and masses is None)
    sizes = [s[-2:] for s in shapes] if masses else []
    return Operator([*shapes, *sizes], make, lambda *given: dense_sum(*split(given)), traits)


def shifted(diagonal: Callable[..., Any], *shapes: tuple[int, ...], has_spectrum: bool = False) -> Operator:
    """A definite product [6, 6] plus what a function makes of real tensors and f."""

    def made(f: Tensor, g: Tensor, *s: Tensor) -> Any:
        return KroneckerProduct([definite(f), definite(g)]).add_diagonal(diagonal(f, *s))

    def dense(f: Tensor, g: Tensor, *s: Tensor) -> Tensor:
        d = diagonal(f, *s)
        if isinstance(d, KroneckerProduct):
            d = [m.diagonal() for m in d.factors]
        d = kron_dense([v[:, None] for v in d])[:, 0] if isinstance(d, list) else torch.as_tensor(d, dtype=f.dtype)
        return kron_dense([definite(f), definite(g)]) + torch.diag_embed(d.expand(*d.shape[:-1], 6))

    return Operator([(2, 2), (2, 3, 3), *shapes], made, dense, "square regular shifted" + " spectrum" * has_spectrum, len(shapes))


def several(of: Callable[[Tensor], Tensor], count: int, *more: tuple[int, ...]) -> Operator:
    """A number of products [6, 6], or two less half the other, or two plus the diagonal that a last tensor makes."""
    shapes = [(2, 2), (2, 3, 3), *[(2, 2), (3, 3)] * (count - 1), *more]

    def made(*given: Tensor) -> Any:
        a, *rest = [KroneckerProduct([of(f), of(g)]) for f, g in zip(given[: 2 * count : 2], given[1 : 2 * count : 2], strict=True)]
        found = a - rest[0] / 2 if count == 2 and not more else sum(rest, start=a)
        return found.add_diagonal(positive(given[-1], given[0])) if more else found

    def dense(*given: Tensor) -> Tensor:
        a, *rest = [kron_dense([of(f), of(g)]) for f, g in zip(given[: 2 * count : 2], given[1 : 2 * count : 2], strict=True)]
        found = a - rest[0] / 2 if count == 2 and not more else sum(rest, start=a)
        return found + torch.diag(positive(given[-1], given[0])) if more else found

    return Operator(shapes, made, dense, "square regular terms", len(more))


def _own(f: Tensor, s: Tensor) -> Tensor:
    return positive(s, f)


OPERATORS = {
    "one factor": product((3, 3)),
    "product": product((2, 2), (2, 3, 3)),
    "three factors": product((1, 1), (4, 4), (3, 3)),
    "batches": product((2, 1, 2, 2), (3, 2, 2), (1, 1)),
    "definite product": product((3, 3), (2, 2, 2), of=definite, traits="square product regular definite spectrum"),
    "rectangular": product((3, 2), (2, 2, 4), of=lambda f: f, traits="product"),
    "identities": Operator(
        [(3, 3), (2, 2)],
        lambda f, g: KroneckerProduct([2, general(f), 3, general(g), 1]),
        lambda f, g: kron_dense([_eye(f, 2), general(f), _eye(f, 3), general(g)]),
        "square product regular",
    ),
    "sum": summed((2, 2), (2, 3, 3)),
    "definite sum": summed((2, 2), (2, 2, 2), of=definite),
    "sum with masses": summed((2, 2), (2, 3, 3), of=definite, masses=definite),
    "sum with skew masses": summed((2, 2), (3, 3), masses=lambda m: m / 4 + 2 * _eye(m)),
    "sum with identities": Operator(
        [(3, 3), (2, 2)],
        lambda f, g: KroneckerSum([general(f), 4, general(g)]),
        lambda f, g: dense_sum([general(f), _eye(f, 4), general(g)]),
        "square sum regular",
    ),
    "plus a number": shifted(lambda f: 0.7, has_spectrum=True),
    "plus a tensor": shifted(_own, (), has_spectrum=True),
    "plus one for each matrix": shifted(_own, (2, 1), has_spectrum=True),
    "plus vectors for each factor": shifted(lambda f, s, t: [positive(s, f), positive(t, f)], (2,), (3,)),
    "plus an operator": shifted(lambda f, s, t: KroneckerProduct([torch.diag(positive(s, f)), torch.diag(positive(t, f))]), (2,), (3,)),
    "plus a vector": shifted(_own, (6,)),
    "plus vectors": shifted(_own, (2, 6)),
    "pencil": several(definite, 2),
    "general pencil": several(general, 2),
    "three definite products": several(definite, 3),
    "three general products": several(general, 3),
    "products plus a vector": several(definite, 2, (6,)),
    "masked": Operator(
        [(2, 2), (3, 3)],
        lambda f, g: KroneckerProduct([definite(f), definite(g)]).masked(rows=INDEX, columns=INDEX),
        lambda f, g: kron_dense([definite(f), definite(g)])[INDEX][:, INDEX],
        "square regular masked shifted",
    ),
    "masked, plus a vector": Operator(
        [(2, 2), (3, 3), (4,)],
        lambda f, g, s: KroneckerProduct([definite(f), definite(g)]).masked(rows=INDEX, columns=INDEX).add_diagonal(positive(s, f)),
        lambda f, g, s: kron_dense([definite(f), definite(g)])[INDEX][:, INDEX] + torch.diag(positive(s, f)),
        "square regular masked shifted",
        1,
    ),
}


class Method(NamedTuple):
    """Of an operator or a dense matrix A, x that fits its columns and y that fits its rows; both are matrices of three columns."""

    lazy: Callable[[Any, Tensor, Tensor], Any]
    dense: Callable[[Tensor, Tensor, Tensor], Any]
    needs: str = ""


def _function(d: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    values, vectors = torch.linalg.eigh(d)
    return vectors @ (function(values).to(d.dtype)[..., None] * vectors.mH)


def _solved(a: Any, b: Tensor) -> Any:
    return a.solve(b) if isinstance(a, KroneckerProduct | KroneckerSum) else a.solve(b, **EXACT)


METHODS = {
    "A @ x": Method(lambda a, x, y: a @ x, lambda d, x, y: d @ x),
    "matmul(A, vector)": Method(lambda a, x, y: torch.matmul(a, x[:, 0]), lambda d, x, y: d @ x[:, 0]),
    "y @ A": Method(lambda a, x, y: y.mT @ a, lambda d, x, y: y.mT @ d),
    "matmul(vector, A)": Method(lambda a, x, y: torch.matmul(y[:, 0], a), lambda d, x, y: y[:, 0] @ d),
    "mT": Method(lambda a, x, y: a.mT @ y, lambda d, x, y: d.mT @ y),
    "mH": Method(lambda a, x, y: a.mH.to_dense(), lambda d, x, y: d.mH),
    "to_dense": Method(lambda a, x, y: a.to_dense(), lambda d, x, y: d),
    "diagonal": Method(lambda a, x, y: a.diagonal(), lambda d, x, y: d.diagonal(dim1=-2, dim2=-1)),
    "conj": Method(lambda a, x, y: a.conj().to_dense(), lambda d, x, y: d.conj().resolve_conj(), "product"),
    "scaled": Method(lambda a, x, y: (-2 * a / 3).to_dense(), lambda d, x, y: -2 * d / 3),
    "scaled by a tensor": Method(lambda a, x, y: (x[0, 0].real * a) @ x, lambda d, x, y: x[0, 0].real * d @ x),
    "negative": Method(lambda a, x, y: (-a).to_dense(), lambda d, x, y: -d),
    "plus itself": Method(lambda a, x, y: torch.add(a, 2 * a) @ x, lambda d, x, y: 3 * d @ x),
    "A @ A": Method(lambda a, x, y: (a @ a.mT).to_dense(), lambda d, x, y: d @ d.mT, "product"),
    "an element": Method(lambda a, x, y: a[..., 1, -1], lambda d, x, y: d[..., 1, -1]),
    "pairs": Method(lambda a, x, y: a[..., PAIRS, [0, 1, 1]], lambda d, x, y: d[..., PAIRS, [0, 1, 1]]),
    "a row": Method(lambda a, x, y: a[..., 1, :], lambda d, x, y: d[..., 1, :]),
    "rows": Method(lambda a, x, y: a[..., PAIRS, 1:], lambda d, x, y: d[..., PAIRS, 1:]),
    "norm": Method(lambda a, x, y: a.norm(), lambda d, x, y: torch.linalg.matrix_norm(d), "product"),
    "trace": Method(lambda a, x, y: a.trace(), lambda d, x, y: d.diagonal(dim1=-2, dim2=-1).sum(-1), "regular"),
    "logabsdet": Method(lambda a, x, y: a.slogdet().logabsdet, lambda d, x, y: torch.linalg.slogdet(d).logabsdet, "regular"),
    "logdet": Method(lambda a, x, y: torch.logdet(a), lambda d, x, y: torch.logdet(d), "regular"),
    "det": Method(lambda a, x, y: a.det(), lambda d, x, y: torch.linalg.det(d), "product regular"),
    "solve": Method(lambda a, x, y: _solved(a, x), lambda d, x, y: torch.linalg.solve(d, x.expand(*d.shape[:-2], *x.shape)), "regular"),
    "solve a vector": Method(lambda a, x, y: _solved(a, x[:, 0]), lambda d, x, y: (torch.linalg.inv(d) @ x)[..., 0], "regular"),
    "inverse quadratic form": Method(
        lambda a, x, y: a.inv_quad_logdet(x, **EXACT)[0],
        lambda d, x, y: (x.conj() * (torch.linalg.inv(d) @ x)).sum((-2, -1)).real,
        "shifted",
    ),
    "inverse": Method(lambda a, x, y: a.inverse() @ x, lambda d, x, y: torch.linalg.inv(d) @ x, "product regular"),
    "power": Method(lambda a, x, y: a.matrix_power(-2) @ x, lambda d, x, y: torch.linalg.matrix_power(d, -2) @ x, "product regular"),
    "cholesky": Method(lambda a, x, y: a.cholesky().to_dense(), lambda d, x, y: torch.linalg.cholesky(d), "definite"),
    "eigvalsh": Method(lambda a, x, y: a.eigvalsh().sort().values, lambda d, x, y: torch.linalg.eigvalsh(d), "spectrum"),
    "shifted": Method(lambda a, x, y: a.add_diagonal(0.7) @ x, lambda d, x, y: d @ x + 0.7 * x, "square product"),
    "square root": Method(lambda a, x, y: a.apply_function(torch.sqrt) @ x, lambda d, x, y: _function(d, torch.sqrt) @ x, "definite"),
    "exponential": Method(lambda a, x, y: a.expm(0.1) @ x, lambda d, x, y: torch.linalg.matrix_exp(0.1 * d) @ x, "spectrum sum"),
}
FIRST_ORDER = ("square root",)  # derivatives by factors


def methods_of(operator: Operator) -> dict[str, Method]:
    has = operator.traits.split()
    return {name: m for name, m in METHODS.items() if all(any(t in has for t in need.split("|")) for need in m.needs.split())}


def drawn(operator: Operator, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[list[Tensor], Tensor, Tensor]:
    """Tensors of an operator, and x and y."""
    count = len(operator.shapes) - operator.real
    tensors = [
        torch.randn(s, dtype=dtype if i < count else torch.float64, device=device) / max(1, s[-1] if s else 1) ** 0.5
        for i, s in enumerate(operator.shapes)
    ]
    rows, columns = operator.dense(*tensors).shape[-2:]
    return tensors, *(torch.randn(n, 3, dtype=dtype, device=device) for n in (columns, rows))


@pytest.mark.parametrize("name", OPERATORS)
def test_values(name: str, dtype: torch.dtype) -> None:
    operator = OPERATORS[name]
    tensors, x, y = drawn(operator, dtype)
    a, dense = operator.make(*tensors), operator.dense(*tensors)
    assert a.shape == tuple(dense.shape)
    for lazy, of_dense, _ in methods_of(operator).values():
        expected = of_dense(dense, x, y)
        near(lazy(a, x, y), expected)
        if expected.abs().max() > 0:
            with pytest.raises(AssertionError):  # the control
                near(lazy(a, x, y) * 1.001, expected)
    x, y = (torch.randn(2, *[1] * (dense.ndim - 2), *t.shape, dtype=dtype) for t in (x, y))  # batches of right sides
    near(a @ x, dense @ x)
    near(y.mT @ a, y.mT @ dense)
    if "solve" in methods_of(operator):
        near(_solved(a, x), torch.linalg.inv(dense) @ x)


@pytest.mark.filterwarnings(
    "ignore:GMRES:RuntimeWarning", "ignore:conjugate gradients:RuntimeWarning"
)  # residuals of differences, near rounding
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    """With respect to x and all tensors, of random projections of all methods' results."""
    operator = OPERATORS[name]
    tensors, x, _ = drawn(operator, dtype)
    chosen = {n: m for n, m in methods_of(operator).items() if n not in ("logdet", "mH", "to_dense", "negative")}

    def results(names: Iterable[str], x: Tensor, *tensors: Tensor) -> dict[str, Tensor]:
        a = operator.make(*tensors)
        y = x if x.shape[0] == a.shape[-2] else torch.ones(a.shape[-2], 3, dtype=x.dtype)
        return {n: chosen[n].lazy(a, x, y) for n in names}

    sizes = {n: r.abs().max() or 1 for n, r in results(chosen, x, *tensors).items()}  # of an inverse and a determinant: many decades

    def function(names: Sequence[str], *given: Tensor) -> Tensor:
        found = results(names, *given).items()
        return torch.cat([torch.view_as_real((r / sizes[n]).to(torch.complex128)).flatten() for n, r in found])

    given = (x.requires_grad_(), *[t.requires_grad_() for t in tensors])
    assert torch.autograd.gradcheck(lambda *t: function([*chosen], *t), given, fast_mode=True)
    second = [n for n in chosen if n not in FIRST_ORDER]
    assert torch.autograd.gradgradcheck(lambda *t: function(second, *t), given, fast_mode=True, check_undefined_grad=False)


@pytest.mark.parametrize(
    "name", ["product", "definite product", "identities", "sum", "sum with masses", "plus a number", "plus a vector", "masked", "pencil"]
)
def test_arrays(name: str) -> None:
    operator = OPERATORS[name]
    tensors, x, y = drawn(operator, torch.float64)
    a, dense = operator.make(*tensors), operator.dense(*tensors)
    arrays = _of_arrays(a)
    for method in ("A @ x", "y @ A", "to_dense", "solve", "logdet", "norm"):
        if method in methods_of(operator):
            lazy = (lambda a, x, y: a.logdet()) if method == "logdet" else METHODS[method].lazy
            found = lazy(arrays, x.numpy(), y.numpy())
            assert isinstance(found, np.ndarray | np.float64)
            near(torch.as_tensor(found), METHODS[method].dense(dense, x, y))


def _of_arrays(a: Any) -> Any:
    """The same operator of NumPy's arrays."""
    if hasattr(a, "terms"):
        return sum(map(_of_arrays, a.terms))
    factors = [f if isinstance(f, int) else f.numpy() for f in a.factors]
    if isinstance(a, KroneckerSum):
        return KroneckerSum(factors, masses=a.masses and [m.numpy() for m in a.masses])
    product = KroneckerProduct(factors)
    if isinstance(a, KroneckerProduct):
        return product
    if hasattr(a, "rows"):
        return product.masked(rows=INDEX.numpy(), columns=INDEX.numpy())
    diagonal = a.diagonal() - KroneckerProduct(a.factors).diagonal()
    return product.add_diagonal(0.7 if torch.allclose(diagonal, torch.full_like(diagonal, 0.7)) else diagonal[0].numpy())


@pytest.mark.parametrize("name", OPERATORS)
def test_conversions_and_copies(name: str) -> None:
    operator = OPERATORS[name]
    tensors, x, _ = drawn(operator, torch.float64)
    a = operator.make(*tensors)
    assert a.float().dtype == torch.float32
    assert (a.to("meta") @ x.to("meta")).is_meta
    assert not a.requires_grad
    for other in (copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a)), a.clone(), a.detach(), a.to("cpu")):
        assert other is not a or other is a.to("cpu")
        assert torch.equal(other.to_dense(), a.to_dense())
    assert repr(a).endswith(f"shape={tuple(a.shape)}, dtype=torch.float64, device=cpu)")


@pytest.mark.parametrize("name", ["definite sum", "plus a tensor", "plus a vector"])
def test_autocast_leaves_what_is_solved_alone(name: str, device: torch.device) -> None:
    """Products are rounded to bfloat16, as `kron_matmul` does; solves, determinants and their gradients are not."""
    operator = OPERATORS[name]
    tensors, x, _ = drawn(operator, torch.float64, device)
    tensors, x = [t.float().requires_grad_() for t in tensors], x.float()

    a = operator.make(*tensors)

    def everything() -> list[Tensor]:
        value = a.solve(x).sum() + a.logdet().sum()
        return [value, *torch.autograd.grad(value, [f for f in a.factors if f.requires_grad], retain_graph=True)]

    plain = everything()
    with torch.autocast(device.type, torch.bfloat16):
        assert (a @ x).dtype == torch.bfloat16
        under = everything()
    for got, want in zip(under, plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives_of_determinants_in_every_direction(dtype: torch.dtype) -> None:
    """Of Hermitian matrices with Hermitian masses too: the phase's, and second ones, are not those among Hermitian matrices alone."""

    def definite(n: int) -> Tensor:
        f = torch.randn(n, n, dtype=dtype)
        return (f @ f.mH / n + torch.eye(n)).requires_grad_()

    a, b, c, d = definite(2), definite(3), definite(2), definite(3)
    diagonals = [(torch.rand(n, dtype=torch.float64) + 0.5).to(dtype).requires_grad_() for n in (2, 3)]
    cases: list[tuple[Any, Tensor, list[Tensor]]] = [
        (KroneckerSum([a, b], masses=[c, d]), kron_dense([a, d]) + kron_dense([c, b]), [a, b, c, d]),
        (KroneckerProduct([a, b]) + KroneckerProduct([c, d]), kron_dense([a, b]) + kron_dense([c, d]), [a, b, c, d]),
        (KroneckerProduct([a, b]).add_diagonal(diagonals), kron_dense([a, b]) + kron_dense([s.diag() for s in diagonals]), [a, *diagonals]),
    ]
    for operator, dense, leaves in cases:
        found, sought = operator.slogdet(), torch.linalg.slogdet(dense)
        cotangents = [torch.randn((), dtype=t.dtype) for t in sought]
        directions = [torch.randn_like(t) for t in leaves]
        first = [torch.autograd.grad(pair[1], leaves, cotangents[1], create_graph=True) for pair in (found, sought)]
        second = [torch.autograd.grad(g, leaves, directions, retain_graph=True) for g in first]
        pairs = [first, second]
        if dtype.is_complex:
            pairs += [[torch.autograd.grad(pair[0], leaves, cotangents[0], retain_graph=True) for pair in (found, sought)]]
        for mine, theirs in pairs:
            for got, want in zip(mine, theirs, strict=True):
                near(got, want)


def test_autocast_leaves_linear_algebra_of_a_product_alone(device: torch.device) -> None:
    """As torch's `lstsq` and `det`; a determinant of a singular factor took a product, and raised an error."""
    regular, tall = torch.randn(3, 3, device=device), torch.randn(4, 2, device=device)
    singular = torch.ones(3, 3, device=device)
    b, square = torch.randn(12, 5, device=device), torch.randn(9, 5, device=device)

    def everything() -> list[Tensor]:
        k, s = KroneckerProduct([regular, tall]), KroneckerProduct([singular, regular])
        return [k.lstsq(b), k.pinv().to_dense(), s.solve(square, rcond=1e-4), s.det(), (s.matrix_power(2)).to_dense()]

    plain = everything()
    with torch.autocast(device.type, torch.bfloat16):
        under = everything()
    for got, want in zip(under, plain, strict=True):
        assert torch.equal(got, want)
