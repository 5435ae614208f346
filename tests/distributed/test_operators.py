"""Distributed operators against dense matrices in float64: products, sums, and products with a diagonal added."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from products import block, counted_bytes, dense, derive, grid_for, placed, random
from rank_pool import RankPool
from sampling import in_full
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import fastkron_py
from fastkron_py.distributed import KroneckerProduct, KroneckerSum, ProcessGrid
from fastkron_py.distributed.replicated import total
from fastkron_py.kron.operators.algebra import kron_range

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


def dense_sum(factors, masses=()) -> torch.Tensor:
    """The sum of the terms, by torch.kron."""
    own, units = [as_matrix(f) for f in factors], [as_matrix(m) for m in masses or SIZES]
    terms = [[*units[:i], f, *units[i + 1 :]] for i, f in enumerate(own)]
    return sum(reduce(torch.kron, [f.to(own[0].dtype) for f in term]) for term in terms)


# ---- products and solves --------------------------------------------------------------------------


def gathered(grid, own, shape):
    """The whole matrix, from every rank's block."""
    found = DTensor.from_local(own.detach(), grid.mesh, [Shard(0), Shard(1)], shape=torch.Size(shape), stride=(shape[1], 1))
    return found.full_tensor().cpu()


def products(shape):
    if (grid := grid_for(shape)) is None:
        return None
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randint(-3, 4, s, generator=generator).double() for s in ((5, 2), (3, 4))]
    K = KroneckerProduct(placed(factors, grid), grid=grid)
    left, right = torch.randint(-3, 4, (8, 6), generator=generator).double(), torch.randint(-3, 4, (6, 15), generator=generator).double()
    whole = dense(factors)
    shards = DTensor.from_local(block(left, grid), grid.mesh, [Shard(0), Shard(1)], shape=left.shape, stride=left.stride())
    results = {
        "K @ x": (K @ block(left, grid), whole @ left),
        "x @ K": (block(right, grid) @ K, right @ whole),
        "K.T @ x": (K.T @ block(right.mT, grid), whole.T @ right.T),
        "(2 * -K / 4) @ x": ((2 * -K / 4) @ block(left, grid), whole @ left / -2),
        "K @ DTensor": ((K @ shards).to_local(), whole @ left),
        "torch.matmul": (torch.matmul(K, block(left, grid)), whole @ left),
        "(K @ K.T) @ x": ((K @ K.T) @ block(torch.eye(15, dtype=torch.float64), grid), whole @ whole.T),
    }
    for name, (own, expected) in results.items():
        assert torch.equal(gathered(grid, own, expected.shape), expected), name
    assert (K.shape, K.T.shape) == ((15, 8), (8, 15))
    assert (K.dtype, K.device, K.ndim, K.grid) == (torch.float64, grid.device, 2, grid)
    assert "15, 8" in repr(K)
    for refused in (lambda: K[0], lambda: K + K, lambda: K - K, lambda: torch.diagonal(K)):  # of whole matrices
        with pytest.raises(TypeError):
            refused()
    assert "4x4 (x) I_2" in repr(KroneckerProduct([torch.eye(4, device=grid.device), 2], grid=grid))
    return True


def test_products(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    assert set(ranks.run(products, grid_shape)) <= {True, None}


def test_part_of_a_kronecker_product_of_vectors() -> None:
    vectors = [random(p, seed=i) for i, p in enumerate((3, 5, 2, 4))]
    whole = reduce(torch.kron, vectors)
    for start, stop in [(0, 120), (0, 0), (7, 8), (13, 87), (119, 120), (40, 80), (120, 120), (0, 1)]:
        torch.testing.assert_close(kron_range(vectors, start, stop), whole[start:stop], rtol=1e-15, atol=0)


def solutions(shape, with_identity):
    if (grid := grid_for(shape)) is None:
        return None
    factors, _ = factors_of("identities" if with_identity else "symmetric")
    K = KroneckerProduct(placed(factors, grid), grid=grid)
    whole, b = dense(factors), random(N, 7, seed=1)
    b[:, 2] = 0  # a column that has converged before it begins
    own, where = block(b, grid), grid.block(b.shape)
    shards = DTensor.from_local(own, grid.mesh, [Shard(0), Shard(1)], shape=b.shape, stride=b.stride())
    shifted = whole + 0.3 * torch.eye(N, dtype=torch.float64)
    mask = random(N, seed=2) > -0.5
    A, plain, function = (K.add_diagonal(0.3) for _ in range(3))
    exact = K.add_diagonal(torch.tensor(0.3, dtype=torch.float64, device=grid.device))
    given, everywhere = mask[where[0]].to(grid.device), torch.ones_like(mask[where[0]]).to(grid.device)
    expected = torch.zeros_like(b)
    expected[mask] = torch.linalg.solve(shifted[mask][:, mask], b[mask])
    direct, unshifted = torch.linalg.solve(shifted, b), torch.linalg.solve(whole, b)
    found = {
        "direct": (A.solve(own), direct),
        "added": (A @ block(direct, grid), b),
        "by factors": (K.solve(own), unshifted),
        "inverse": (K.inverse() @ own, unshifted),
        "without preconditioner": (plain.solve(own, mask=everywhere, preconditioner=False, tolerance=1e-12), direct),
        "with a function": (function.solve(own, mask=everywhere, preconditioner=lambda r: 2 * r, tolerance=1e-12), direct),
        "with the inverse": (exact.solve(own, mask=everywhere, tolerance=1e-12), direct),
        "masked": (A.solve(own, mask=given, tolerance=1e-12), expected),
        "DTensor": (A.solve(shards).to_local(), direct),
    }
    for name, (x, y) in found.items():
        torch.testing.assert_close(gathered(grid, x, y.shape), y, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    stopped = K.add_diagonal(0.3)
    stopped.solve(0 * own, mask=everywhere)
    assert stopped.convergence[:2] == (0, 0.0)
    with pytest.warns(RuntimeWarning, match="after 2 iterations, above the tolerance 1e-10"):
        stopped.solve(own, mask=everywhere, preconditioner=False, max_iterations=2)
    assert stopped.convergence.iterations == 2
    assert not stopped.convergence.converged
    for x, y in ((K.logdet(), whole.logdet()), (A.logdet(), shifted.logdet()), (K.trace(), whole.trace()), (A.trace(), shifted.trace())):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-12, atol=0)
    torch.testing.assert_close(A.to_dense().cpu(), shifted, rtol=1e-12, atol=1e-12)
    values, vectors = K.eigh()
    assert torch.equal(values, K.eigvalsh())
    torch.testing.assert_close(gathered(grid, vectors @ (values[:, None] * (vectors.mH @ own)), b.shape), whole @ b, rtol=1e-9, atol=1e-9)
    assert torch.equal(A.eigvalsh(), A.eigh().eigenvalues)
    torch.testing.assert_close(A.eigvalsh(), values + 0.3, rtol=1e-12, atol=1e-12)
    with pytest.raises(AttributeError, match=r"a KroneckerProduct over a grid has no masked \(operator.local.masked works on whole"):
        K.masked(rows=given)
    for refused in (lambda: K + A, lambda: K - K, lambda: K[0], K.aslinearoperator):
        with pytest.raises(TypeError, match=r"a KroneckerProduct over a grid has no elements, sums .*operator.local has them, of whole"):
            refused()
    return (exact.convergence.iterations, plain.convergence.iterations, A.convergence.iterations, A.convergence.residual)


@pytest.mark.parametrize("with_identity", [False, True])
def test_solutions(ranks: RankPool, grid_shape: tuple[int, int], with_identity: bool) -> None:
    found = [f for f in ranks.run(solutions, grid_shape, with_identity) if f is not None]
    assert len(set(found)) == 1  # all ranks stop together and report the same
    exact, plain, masked, residual = found[0]
    assert exact == 1
    assert 2 < min(masked, plain) <= max(masked, plain) <= 2 * N
    assert with_identity or masked <= plain  # an identity leaves few eigenvalues, which take few steps without a preconditioner
    assert residual <= 1e-12


def operator(shape, kind):
    """Every method, forwards."""
    if (grid := grid_for(shape)) is None:
        return None
    factors, masses = factors_of(kind)
    S = KroneckerSum(placed(factors, grid), masses=placed(masses, grid) or None, grid=grid)
    s = dense_sum(factors, masses)
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
    for A, matrix in (
        (KroneckerSum(factors, grid=grid), dense_sum(whole)),
        (K, dense(whole)),
        (K.add_diagonal(s), dense(whole) + 0.4 * torch.eye(N, dtype=torch.float64)),
    ):
        share = 1 / grid.shape[1]  # each rank of a row has the same eigenvalues
        found = torch.autograd.grad((A.eigvalsh() ** 2).sum() * share, factors, retain_graph=True)
        expected = torch.autograd.grad((matrix**2).sum(), whole)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.cpu() + a.mT.cpu(), b + b.mT, rtol=1e-8, atol=1e-8)
    (at_s,) = torch.autograd.grad((K.add_diagonal(s).eigvalsh() ** 2).sum() / grid.shape[1], s)
    expected_s = 2 * (dense(whole).trace() + 0.4 * N)
    torch.testing.assert_close(at_s.cpu(), expected_s.detach(), rtol=1e-9, atol=1e-9)


def test_gradients_of_eigenvalues(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    ranks.run(eigenvalues_gradient, grid_shape)


def size(x: torch.Tensor) -> torch.Tensor:
    return (x * x.conj()).real.sum()


def gradients(shape, name, kind, second, reduction):
    """Of a loss with solves, a product, a logdet and an exponential; first, or second by way of the first's squared norm.

    With means, ranks' losses and gradients of blocks count by their mean, and a block's gradient is that of all ranks' losses.
    """
    if (grid := grid_for(shape)) is None:
        return None
    weight = 1 if reduction == "sum" else 1 / grid.world_size
    given, masses = factors_of(kind)
    arrays, masked = [*given, *masses], name == "shift" and kind in ("symmetric", "identities")
    dtype = arrays[0].dtype
    b, mask = random(N, 3, seed=1, dtype=dtype), random(N, seed=2) > -0.8

    def operands(device):
        """Leaves: matrices and s; and factors, masses and s of them. Where halves of symmetric ones are read, leaves are not symmetric."""
        leaves = [t.to(device).requires_grad_() for t in (*[f for f in arrays if not isinstance(f, int)], torch.tensor(0.3, dtype=dtype))]
        left_over = iter([0.5 * (t + t.mT) for t in leaves[:-1]] if masses or masked else leaves)
        both = [f if isinstance(f, int) else next(left_over) for f in arrays]
        used = leaves if name == "shift" else leaves[:-1]
        return used, both[: len(given)], both[len(given) :], leaves[-1]

    leaves, fs, ms, s = operands(grid.device)
    mine = block(b, grid).clone().requires_grad_()
    if name == "shift":
        A = KroneckerProduct(fs, grid=grid, reduction=reduction).add_diagonal(s)
    else:
        A = KroneckerSum(fs, masses=ms or None, grid=grid, reduction=reduction)
    loss = size(A.solve(mine)) + (A @ mine).real.sin().sum()
    if masked:
        loss = loss + A.solve(mine, mask=mask[grid.block(b.shape)[0]].to(grid.device), tolerance=1e-13).sin().sum()
    elif name == "sum" and not ms:
        loss = loss + size(A.expm_multiply(mine, -0.1))
    log = A.slogdet().logabsdet
    found = derive(loss, log, leaves, mine, lambda v: total([v], grid.group, grid.device, reduction)[0], second)

    leaves, fs, ms, s = operands("cpu")
    b = b.requires_grad_()
    a = dense(fs).to(dtype) + s * torch.eye(N, dtype=dtype) if name == "shift" else dense_sum(fs, ms)
    loss = size(torch.linalg.solve(a, b)) + (a @ b).real.sin().sum()
    if masked:
        loss = loss + torch.linalg.solve(a[mask][:, mask], b[mask]).sin().sum()
    elif name == "sum" and not ms:
        loss = loss + size(torch.linalg.matrix_exp(-0.1 * a) @ b)
    expected = derive(loss, torch.linalg.slogdet(a).logabsdet, leaves, b, lambda v: weight * v, second, 1 / weight)
    for got, want in zip(found, [*expected[:-1], block(expected[-1], grid)], strict=True):
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-7, atol=1e-8)
        assert not want.numel() or not torch.allclose(got.cpu(), want.cpu() * (1 + 1e-5), rtol=1e-7, atol=1e-8)  # the tolerance can fail
    return True


SUMS = [("symmetric", True), ("ring", True), ("masses", False), ("general", False), ("identities", True), ("transport", False)]
MORE = [(kind, True) for kind in ("symmetric", "masses", "general", "identities", "ring")]
SHIFTS = [("symmetric", True), ("identities", False), ("general", False), ("complex general", False), ("defective", False)]


@pytest.mark.parametrize(
    ("name", "kinds", "reduction"),
    [
        ("sum", SUMS[::2], "sum"),
        ("sum", SUMS[1::2], "mean"),
        ("shift", SHIFTS, "sum"),
        ("shift", SHIFTS[:1], "mean"),
        *in_full([("sum", MORE[::2], "sum"), ("sum", MORE[1::2], "mean")]),
    ],
)
def test_gradients(ranks: RankPool, grid_shape: tuple[int, int], name: str, kinds: list[tuple[str, bool]], reduction: str) -> None:
    for kind, second in kinds:
        assert set(ranks.run(gradients, grid_shape, name, kind, second, reduction)) <= {True, None}, kind


# ---- corners of solves: autocast, negative eigenvalues, numbers that are none ----------------------------


def positive(dtype=torch.float64, sign: float = 1.0) -> list[torch.Tensor]:
    """Positive definite, of condition below 10; the first one with another sign."""
    roots = [random(p, p, seed=p).to(dtype) for p in SIZES]
    found = [r @ r.mT / len(r) + torch.eye(len(r), dtype=dtype) for r in roots]
    return [sign * found[0], *found[1:]]


def under_autocast(shape):
    """The largest relative error of solves in float32 and of their gradients, with autocast on in both passes."""
    grid = ProcessGrid(shape)
    factors, b = positive(torch.float32), random(N, 3, seed=1, dtype=torch.float32)
    own, mine = [f.to(grid.device).requires_grad_() for f in factors], block(b, grid).requires_grad_()
    K = KroneckerProduct(own, grid=grid)
    A, everywhere = K.add_diagonal(0.5), torch.ones(len(mine), dtype=torch.bool, device=grid.device)
    whole = [f.double().requires_grad_() for f in factors]
    shifted = dense(whole) + 0.5 * torch.eye(N, dtype=torch.float64)
    worst = 0.0
    with torch.autocast(grid.device.type, torch.bfloat16):
        calls = {
            "solve": (lambda: K.solve(mine), dense(whole)),
            "shift": (lambda: A.solve(mine), shifted),
            "iterative": (lambda: A.solve(mine, mask=everywhere, preconditioner=False, tolerance=1e-6), shifted),
            "preconditioned": (lambda: A.solve(mine, mask=everywhere, tolerance=1e-6), shifted),
        }
        for name, (call, a) in calls.items():
            x = call()
            # The derivatives of torch.linalg.inv are torch's, whose products are in bfloat16 where autocast is on in the backward pass.
            with torch.autocast(grid.device.type, torch.bfloat16, enabled=name != "solve"):
                got = torch.autograd.grad((x * x).sum(), own)
            with torch.autocast(grid.device.type, enabled=False):
                y = torch.linalg.solve(a, b.double())
                wanted = torch.autograd.grad((y * y).sum(), whole, retain_graph=True)
                pairs = [(x.detach(), block(y.detach(), grid)), *zip(got, wanted, strict=True)]
                assert all(p.dtype == torch.float32 for p, _ in pairs), name
                errors = [float((p.cpu() - q.cpu()).norm() / q.norm()) for p, q in pairs if p.numel()]
                worst = max(worst, *errors)
        log = float(A.logdet().detach())
    return max(worst, abs(log / float(shifted.logdet().detach()) - 1))


@pytest.mark.parametrize("by_rows", [True, False])
def test_autocast(ranks: RankPool, by_rows: bool) -> None:
    shape = (ranks.world_size, 1) if by_rows else (1, ranks.world_size)
    assert max(ranks.run(under_autocast, shape)) < 1e-4


def signs(times):
    """Log determinants of ``K + shift I`` with negative eigenvalues: an even or an odd number of them, with identities too."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    found = []
    for factors, shift in [
        ([-f for f in positive()], 0.1),
        (positive(sign=-1.0), 0.0),
        ([torch.diag(torch.tensor([-2.0, 1.0, 3.0])).double()], 0.5),
        ([torch.diag(torch.tensor([-2.0, -1.0, 3.0])).double()], 0.5),
    ]:
        whole = dense([*factors, times])
        shifted = whole + shift * torch.eye(len(whole), dtype=torch.float64)
        given = placed(factors, grid)
        K = KroneckerProduct([*given[:1], times, *given[1:]] if times > 1 else given, grid=grid)
        found.append((float(K.add_diagonal(shift).logdet()), float(torch.logdet(shifted))))
    return found


@pytest.mark.parametrize("times", [1, 2, 3])
def test_signs_of_determinants(ranks: RankPool, times: int) -> None:
    for pairs in ranks.run(signs, times):
        assert any(math.isfinite(wanted) for _, wanted in pairs)
        assert times == 2 or any(math.isnan(wanted) for _, wanted in pairs)
        for got, wanted in pairs:
            assert got == pytest.approx(wanted, rel=1e-12, nan_ok=True)


def missing():
    """A right-hand side with NaN where the mask leaves equations out."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    mask, b = random(N, seed=2) > -0.5, random(N, 2, seed=1)
    b[~mask] = math.nan
    rows, own = grid.block(b.shape)[0], block(b, grid).requires_grad_()
    A = KroneckerProduct(placed(positive(), grid), grid=grid).add_diagonal(0.0)
    x = A.solve(own, mask=mask[rows].to(grid.device), tolerance=1e-12)
    expected = torch.zeros_like(b)
    expected[mask] = torch.linalg.solve(dense(positive())[mask][:, mask], b[mask])
    torch.testing.assert_close(x.detach(), block(expected, grid), rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(x.sum(), own)
    assert gradient.isfinite().all()
    assert not gradient[~mask[rows].to(grid.device)].any()


def test_missing_numbers(ranks: RankPool) -> None:
    ranks.run(missing)


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
