"""The distributed `KroneckerSum` against the dense matrix in float64."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from products import block, counted_bytes, derive, grid_for, placed, random
from rank_pool import RankPool
from sampling import in_full
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import fastkron_py
from fastkron_py.distributed import KroneckerProduct, KroneckerSum, ProcessGrid
from fastkron_py.distributed.replicated import total

SIZES = (4, 5, 3)
N = math.prod(SIZES)
# Solves and exponentials of matrices of condition below 100 in float64: some hundred roundings of 1e-16.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def factors_of(kind: str) -> tuple[list, list]:
    """Factors and masses: of distinct or double eigenvalues, not symmetric, complex, indefinite, with masses, and with identities."""
    if kind == "ring":  # second differences on a ring have pairs of equal eigenvalues
        return [2.1 * torch.eye(p).double() - torch.eye(p).roll(1, 0).double() - torch.eye(p).roll(-1, 0).double() for p in SIZES], []
    if kind == "defective":
        return [2 * torch.eye(p).double() + torch.diag(torch.ones(p - 1).double(), 1) for p in SIZES], []
    if kind == "transport":  # eigenvectors of condition 2e12 in all
        lower = [torch.diag(torch.ones(p - 1).double(), -1) for p in SIZES]
        return [torch.eye(len(f)).double() - f - f.mT / 3000 for f in lower], []
    roots = [random(p, p, seed=p) for p in SIZES]
    symmetric = [r @ r.mT / len(r) + 0.2 * torch.eye(len(r), dtype=torch.float64) for r in roots]
    if kind == "symmetric":
        return symmetric, []
    if kind == "indefinite":
        return [symmetric[0] - 3.07 * torch.eye(SIZES[0], dtype=torch.float64), *symmetric[1:]], []
    if kind == "general":
        return [r / 4 + 2 * torch.eye(len(r), dtype=torch.float64) for r in roots], []
    if kind == "complex":
        return [s + 0.3j * (r - r.mT) for s, r in zip(symmetric, roots, strict=True)], []
    if kind == "complex general":
        return [torch.complex(r / 4, r.mT / 5) + (2 + 0.5j) * torch.eye(len(r), dtype=torch.float64) for r in roots], []
    if kind == "identities":
        return [symmetric[0], SIZES[1], symmetric[2]], []
    neighbours = [torch.eye(p, dtype=torch.float64).roll(1, 0) for p in SIZES]
    masses = [1.5 * torch.eye(len(r), dtype=torch.float64) + 0.2 * (r + r.mT) for r in neighbours]
    return symmetric, [masses[0], SIZES[1], masses[2]]


KINDS = ("symmetric", "masses", "general", "complex", "complex general", "indefinite", "identities", "ring", "defective", "transport")


def as_matrix(f) -> torch.Tensor:
    return torch.eye(f, dtype=torch.float64) if isinstance(f, int) else f


def dense(factors, masses=()) -> torch.Tensor:
    """The sum of the terms, by torch.kron."""
    own, units = [as_matrix(f) for f in factors], [as_matrix(m) for m in masses or SIZES]
    terms = [[*units[:i], f, *units[i + 1 :]] for i, f in enumerate(own)]
    return sum(reduce(torch.kron, [f.to(own[0].dtype) for f in term]) for term in terms)


def operator(shape, kind):
    """Every method, forwards."""
    if (grid := grid_for(shape)) is None:
        return None
    factors, masses = factors_of(kind)
    S = KroneckerSum(placed(factors, grid), masses=placed(masses, grid) or None, grid=grid)
    s = dense(factors, masses)
    dtype = s.dtype
    b, c = random(N, 7, seed=1, dtype=dtype), random(6, N, seed=2, dtype=dtype)
    own, right = block(b, grid), block(c, grid)
    shift = fastkron_py.KroneckerProduct([as_matrix(u).to(dtype) for u in masses]).to_dense() if masses else torch.eye(N, dtype=dtype)
    shards = DTensor.from_local(own, grid.mesh, [Shard(0), Shard(1)], shape=b.shape, stride=b.stride())
    wanted = {
        "S @ x": (S @ own, s @ b),
        "x @ S": (right @ S, c @ s),
        "S.mH @ x": (S.mH @ own, s.mH @ b),
        "S @ DTensor": ((S @ shards).to_local(), s @ b),
        "(2 * -S / 4) @ x": ((2 * -S / 4) @ own, s @ b / -2),
        "solve": (S.solve(own), torch.linalg.solve(s, b)),
        "solve, DTensor": (S.solve(shards).to_local(), torch.linalg.solve(s, b)),
        "solve of a shift": (S.add_diagonal(0.7).solve(own), torch.linalg.solve(s + 0.7 * shift, b)),
    }
    if not masses:
        wanted["expm_multiply"] = S.expm_multiply(own, -0.1), torch.linalg.matrix_exp(-0.1 * s) @ b
        assert isinstance(S.expm(0.1), KroneckerProduct)
    for name, (x, y) in wanted.items():
        expected = block(y, grid)
        torch.testing.assert_close(x, expected, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        if expected.numel():
            with pytest.raises(AssertionError):  # the tolerance can fail
                torch.testing.assert_close(x, expected * (1 + 1e-9), **CLOSE)
    sign, log = torch.linalg.slogdet(s)
    found = S.slogdet()
    torch.testing.assert_close(found.logabsdet.cpu(), log, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.sign.cpu(), sign, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(S.trace().cpu(), s.trace(), rtol=1e-12, atol=0)
    if not dtype.is_complex:
        torch.testing.assert_close(S.logdet().cpu(), s.logdet(), rtol=1e-12, atol=0, equal_nan=True)
    assert (S.shape, S.dtype, S.device, S.ndim, S.grid) == ((N, N), dtype, grid.device, 2, grid)
    assert (S.masses is None) == (not masses)
    assert "(+)" in repr(S)
    return float(sign.real)


@pytest.mark.parametrize("part", range(3))
def test_methods(ranks: RankPool, grid_shape: tuple[int, int], part: int) -> None:
    for kind in KINDS[part::3]:
        found = {sign for sign in ranks.run(operator, grid_shape, kind) if sign is not None}
        assert len(found) == 1, kind
        assert kind != "indefinite" or found == {-1}


def eigenpairs(shape, kind):
    """``S = M V diag(values) V.mH M``, of a mass M."""
    if (grid := grid_for(shape)) is None:
        return
    factors, masses = factors_of(kind)
    S = KroneckerSum(placed(factors, grid), masses=placed(masses, grid) or None, grid=grid)
    values, V = S.eigh()
    assert torch.equal(values, S.eigvalsh())
    b = block(random(N, 5, seed=3, dtype=S.dtype), grid)
    M = KroneckerProduct(placed(masses, grid), grid=grid) if masses else None
    x = V.mH @ (b if M is None else M @ b)
    y = V @ (values[:, None] * x)
    torch.testing.assert_close(y if M is None else M @ y, S @ b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["symmetric", "masses", "complex", "identities"])
def test_eigenpairs(ranks: RankPool, grid_shape: tuple[int, int], kind: str) -> None:
    ranks.run(eigenpairs, grid_shape, kind)


def eigenvalues_gradient(shape):
    """The sum of squares of all eigenvalues is that of the matrix's elements: its gradients, by blocks of eigenvalues on each rank."""
    if (grid := grid_for(shape)) is None:
        return
    factors = [f.requires_grad_() for f in placed(factors_of("symmetric")[0], grid)]
    s = torch.tensor(0.4, dtype=torch.float64, device=grid.device, requires_grad=True)
    K = KroneckerProduct(factors, grid=grid)
    whole = [f.detach().cpu().clone().requires_grad_() for f in factors]
    for A, matrix, leaves in (
        (KroneckerSum(factors, grid=grid), dense(whole), [*factors]),
        (K.add_diagonal(s), reduce(torch.kron, whole) + 0.4 * torch.eye(N, dtype=torch.float64), [*factors]),
    ):
        share = 1 / grid.shape[1]  # each rank of a row has the same eigenvalues
        found = torch.autograd.grad((A.eigvalsh() ** 2).sum() * share, leaves, retain_graph=True)
        expected = torch.autograd.grad((matrix**2).sum(), whole)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.cpu() + a.mT.cpu(), b + b.mT, rtol=1e-8, atol=1e-8)
    (at_s,) = torch.autograd.grad((K.add_diagonal(s).eigvalsh() ** 2).sum() / grid.shape[1], s)
    expected_s = 2 * (reduce(torch.kron, whole).trace() + 0.4 * N)
    torch.testing.assert_close(at_s.cpu(), expected_s.detach(), rtol=1e-9, atol=1e-9)


def test_gradients_of_eigenvalues(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    ranks.run(eigenvalues_gradient, grid_shape)


def gradients(shape, kind, second, reduction):
    """Of a loss with a solve, a product, a logdet and an exponential; first, or second by way of the first's squared norm.

    With means, ranks' losses and gradients of blocks count by their mean, and a block's gradient is that of all ranks' losses.
    """
    if (grid := grid_for(shape)) is None:
        return None
    weight = 1 if reduction == "sum" else 1 / grid.world_size
    b = random(N, 3, seed=1)
    given, masses = factors_of(kind)
    place = [i for i, f in enumerate([*given, *masses]) if not isinstance(f, int)]

    def arrays(tensors):
        """Factors and masses of these tensors and the integers. Masses are symmetric, so that half of each is read: leaves are not."""
        left_over = iter([0.5 * (t + t.mT) for t in tensors] if masses else tensors)
        both = [next(left_over) if i in place else f for i, f in enumerate([*given, *masses])]
        return both[: len(given)], both[len(given) :]

    def leaves_on(device):
        return [f.to(device).requires_grad_() for f in [*given, *masses] if not isinstance(f, int)]

    leaves, b_local = leaves_on(grid.device), block(b, grid).clone().requires_grad_()
    fs, ms = arrays(leaves)
    S = KroneckerSum(fs, masses=ms or None, grid=grid, reduction=reduction)
    loss = (S.solve(b_local) ** 2).sum() + (S @ b_local).sin().sum()
    loss = loss if ms else loss + (S.expm_multiply(b_local, -0.1) ** 2).sum()
    mine = derive(loss, S.logdet(), leaves, b_local, lambda v: total([v], grid.group, grid.device, reduction)[0], second)

    leaves, b_whole = leaves_on("cpu"), b.clone().requires_grad_()
    fs, ms = arrays(leaves)
    s = dense(fs, ms)
    loss = (torch.linalg.solve(s, b_whole) ** 2).sum() + (s @ b_whole).sin().sum()
    loss = loss if ms else loss + ((torch.linalg.matrix_exp(-0.1 * s) @ b_whole) ** 2).sum()
    expected = derive(loss, s.logdet(), leaves, b_whole, lambda v: weight * v, second, 1 / weight)
    for got, want in zip(mine[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-8, atol=1e-8)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(got.cpu(), want * (1 + 1e-5), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(mine[-1].cpu(), block(expected[-1], grid).cpu(), rtol=1e-8, atol=1e-8)
    return True


FEW = [("symmetric", True), ("ring", True), ("masses", False), ("general", False), ("identities", True), ("transport", False)]
MORE = [(kind, True) for kind in ("symmetric", "masses", "general", "identities", "ring")]


@pytest.mark.parametrize(
    ("kinds", "reduction"), [(FEW[::2], "sum"), (FEW[1::2], "mean"), *in_full([(MORE[::2], "sum"), (MORE[1::2], "mean")])]
)
def test_gradients(ranks: RankPool, grid_shape: tuple[int, int], kinds: list[tuple[str, bool]], reduction: str) -> None:
    for kind, second in kinds:
        assert set(ranks.run(gradients, grid_shape, kind, second, reduction)) <= {True, None}, kind


# ---- what ranks hold and send ---------------------------------------------------------------------


def sent():
    """Exchanges of a product of three terms; the last two act inside this rank's slices."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    n = grid.world_size
    factors = [torch.eye(2 * n, dtype=torch.float64) + 1, *[torch.ones(3, 3, dtype=torch.float64)] * 2]
    S, counts = KroneckerSum(placed(factors, grid), grid=grid), []
    x = random(S.shape[0], 4, seed=0)
    with counted_bytes(counts):
        y = S @ block(x, grid)
    torch.testing.assert_close(y, block(fastkron_py.KroneckerSum(factors) @ x, grid), **CLOSE)
    return len(counts)


def test_only_the_first_term_is_exchanged(ranks: RankPool) -> None:
    assert set(ranks.run(sent)) == {2}


class Largest(TorchDispatchMode):
    """The most elements of float64 in the memory of any result of torch's operations."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, list | tuple) else [found]:
            self.elements = max(self.elements, t.nbytes // 8 if isinstance(t, torch.Tensor) else 0)
        return found


def held():
    """The most elements that a tensor of a determinant and its first derivative has on a rank, and the number of eigenvalues."""
    grid = ProcessGrid()
    factors = [torch.diag(torch.arange(1.0, 41, dtype=torch.float64, device=grid.device)).requires_grad_() for _ in range(3)]
    S = KroneckerSum(factors, grid=grid)
    with Largest() as largest:
        S.logdet().backward()
    return largest.elements, S.shape[0]


def test_no_rank_makes_all_eigenvalues(ranks: RankPool) -> None:
    for most, n in ranks.run(held):
        assert n / ranks.world_size <= most <= 1.2 * n / ranks.world_size
