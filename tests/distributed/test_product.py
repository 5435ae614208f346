"""The distributed `KroneckerProduct` against the dense matrix in float64."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
from products import block, dense, derive, grid_for, matrices, placed, random, with_identities
from rank_pool import RankPool
from torch.distributed.tensor import DTensor, Shard

from fastkron_py.distributed import KroneckerProduct
from fastkron_py.distributed.replicated import total
from fastkron_py.kron.operators.algebra import kron_range

SIZES = (3, 2, 3)  # iterations of a solve grow with their product
N = math.prod(SIZES)


def spd_factors(with_identity: bool = False) -> list:
    """Symmetric, positive definite, with eigenvalues from about 0.1 to 3; the second one an integer, for an identity."""
    roots = [random(p, p, seed=i) for i, p in enumerate(SIZES)]
    found = [r @ r.mT / len(r) + 0.1 * torch.eye(len(r), dtype=torch.float64) for r in roots]
    return [found[0], SIZES[1], found[2]] if with_identity else found


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
        "(K @ K.T) @ x": ((K @ K.T) @ block(torch.eye(15, dtype=torch.float64), grid), whole @ whole.T),
    }
    for name, (own, expected) in results.items():
        assert torch.equal(gathered(grid, own, expected.shape), expected), name
    assert (K.shape, K.T.shape) == ((15, 8), (8, 15))
    assert (K.dtype, K.device, K.ndim, K.grid) == (torch.float64, grid.device, 2, grid)
    assert "15, 8" in repr(K)
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
    factors = spd_factors(with_identity)
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
    return (exact.convergence.iterations, plain.convergence.iterations, A.convergence.iterations, A.convergence.residual)


@pytest.mark.parametrize("with_identity", [False, True])
def test_solutions(ranks: RankPool, grid_shape: tuple[int, int], with_identity: bool) -> None:
    found = [f for f in ranks.run(solutions, grid_shape, with_identity) if f is not None]
    assert len(set(found)) == 1  # all ranks stop together and report the same
    exact, plain, masked, residual = found[0]
    assert exact == 1
    assert 2 < masked <= plain <= 2 * N
    assert residual <= 1e-12


def gradients(shape, second, reduction, with_identity):
    """Of a loss with solves and a logdet; first, or second by way of the first's squared norm.

    With means, ranks' losses and gradients of blocks count by their mean, and a block's gradient is that of all ranks' losses.
    """
    if (grid := grid_for(shape)) is None:
        return None
    weight = 1 if reduction == "sum" else 1 / grid.world_size
    b, c = random(N, 3, seed=1), random(N, 3, seed=4)
    mask, eye = random(N, seed=2) > -0.8, torch.eye(N, dtype=torch.float64)
    where = grid.block(b.shape)
    given = spd_factors(with_identity)

    def leaves(device):
        return [t.to(device).requires_grad_() for t in (*matrices(given), torch.tensor(0.3, dtype=torch.float64))]

    def symmetric(leaves):
        """The factors, of matrices that are not symmetric in their derivatives."""
        sizes = [f if isinstance(f, int) else f.shape for f in given]
        return with_identities(sizes, [0.5 * (f + f.mT) for f in leaves[:-1]]), leaves[-1]

    own, mine = leaves(grid.device), block(b, grid).clone().requires_grad_()
    factors, shift = symmetric(own)
    K = KroneckerProduct(factors, grid=grid, reduction=reduction)
    A = K.add_diagonal(shift)
    masked = A.solve(block(c, grid), mask=mask[where[0]].to(grid.device), tolerance=1e-13)
    loss = (mine * A.solve(mine)).sum() + (block(c, grid) * masked).sin().sum()
    log = KroneckerProduct(factors, grid=grid).add_diagonal(shift).logdet()
    found = derive(loss, log, own, mine, lambda v: total([v], grid.group, grid.device, reduction)[0], second)

    whole, b = leaves("cpu"), b.requires_grad_()
    factors, shift = symmetric(whole)
    a, x = dense(factors) + shift * eye, torch.zeros_like(c)
    x[mask] = torch.linalg.solve(a[mask][:, mask], c[mask])
    loss = (b * torch.linalg.solve(a, b)).sum() + (c * x).sin().sum()
    expected = derive(loss, a.logdet(), whole, b, lambda v: weight * v, second, 1 / weight)
    for got, want in zip(found, (*expected[:-1], expected[-1][where]), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-7, atol=1e-9)
        assert not want.numel() or not torch.allclose(got.cpu(), want * (1 + 1e-5), rtol=1e-7)  # the tolerance can fail
    return True


@pytest.mark.parametrize(("second", "reduction", "with_identity"), [(False, "sum", True), (True, "sum", False), (True, "mean", False)])
def test_gradients(ranks: RankPool, grid_shape: tuple[int, int], second: bool, reduction: str, with_identity: bool) -> None:
    assert set(ranks.run(gradients, grid_shape, second, reduction, with_identity)) <= {True, None}
