"""The distributed `KroneckerProduct` against the dense matrix in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, assert_refused
from torch.distributed.tensor import DTensor, Shard

import fastkron_py
from fastkron_py.distributed import KroneckerProduct, ProcessGrid
from fastkron_py.kron.operators.algebra import kron_range

SIZES = (5, 4, 3)
N = math.prod(SIZES)


def spd_factors(seed: int = 0, dtype=torch.float64) -> list[torch.Tensor]:
    """Symmetric, positive definite, with eigenvalues from about 0.1 to 3."""
    generator = torch.Generator().manual_seed(seed)
    roots = [torch.randn(p, p, generator=generator, dtype=torch.float64) for p in SIZES]
    return [(r @ r.mT / len(r) + 0.1 * torch.eye(len(r), dtype=torch.float64)).to(dtype) for r in roots]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(factors) -> torch.Tensor:
    return fastkron_py.KroneckerProduct(list(factors)).to_dense()


def on_grid(shape):
    """The grid, on its members; None on other ranks."""
    count = shape[0] * shape[1]
    return ProcessGrid(shape, ranks=range(count)) if dist.get_rank() < count else None


def cut(grid, whole):
    """This rank's block of a whole matrix."""
    return whole[grid.block(whole.shape)].to(grid.device)


def gathered(grid, block, shape):
    """The whole matrix, from every rank's block."""
    return (
        DTensor.from_local(block.detach(), grid.mesh, [Shard(0), Shard(1)], shape=torch.Size(shape), stride=(shape[1], 1))
        .full_tensor()
        .cpu()
    )


def products(shape):
    grid = on_grid(shape)
    if grid is None:
        return None
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randint(-3, 4, s, generator=generator).double() for s in ((5, 2), (3, 4))]
    K = KroneckerProduct([f.to(grid.device) for f in factors], grid=grid)
    left, right = torch.randint(-3, 4, (8, 6), generator=generator).double(), torch.randint(-3, 4, (6, 15), generator=generator).double()
    whole = dense(factors)
    results = {
        "K @ x": (K @ cut(grid, left), whole @ left),
        "x @ K": (cut(grid, right) @ K, right @ whole),
        "K.T @ x": (K.T @ cut(grid, right.mT), whole.T @ right.T),
        "(2 * -K / 4) @ x": ((2 * -K / 4) @ cut(grid, left), whole @ left / -2),
    }
    placed = DTensor.from_local(cut(grid, left), grid.mesh, [Shard(0), Shard(1)], shape=left.shape, stride=left.stride())
    results["K @ DTensor"] = ((K @ placed).to_local(), whole @ left)
    for name, (block, expected) in results.items():
        assert torch.equal(gathered(grid, block, expected.shape), expected), name
    pair = (K @ K.T) @ cut(grid, torch.eye(15, dtype=torch.float64))
    assert torch.equal(gathered(grid, pair, (15, 15)), whole @ whole.T)
    assert K.shape == (15, 8)
    assert K.T.shape == (8, 15)
    assert (K.dtype, K.device, K.ndim, K.grid) == (torch.float64, grid.device, 2, grid)
    assert "15, 8" in repr(K)
    return True


def test_products(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    assert set(ranks.run(products, grid_shape)) <= {True, None}


def test_part_of_a_kronecker_product_of_vectors() -> None:
    vectors = [random(p, seed=i) for i, p in enumerate((3, 5, 2, 4))]
    whole = vectors[0]
    for v in vectors[1:]:
        whole = torch.kron(whole, v)
    for start, stop in [(0, 120), (0, 0), (7, 8), (13, 87), (119, 120), (40, 80), (120, 120), (0, 1)]:
        torch.testing.assert_close(kron_range(vectors, start, stop), whole[start:stop], rtol=1e-15, atol=0)


def solutions(shape, mask_share):
    grid = on_grid(shape)
    if grid is None:
        return None
    factors = spd_factors()
    K = KroneckerProduct([f.to(grid.device) for f in factors], grid=grid)
    whole, b = dense(factors), random(N, 7, seed=1)
    b[:, 2] = 0  # a column that has converged before it begins
    block, where = cut(grid, b), grid.block(b.shape)
    shifted = whole + 0.3 * torch.eye(N, dtype=torch.float64)
    found = {"direct": (K.solve(block, shift=0.3), torch.linalg.solve(shifted, b))}
    found["by factors"] = (K.solve(block), torch.linalg.solve(whole, b))
    plain = K.conjugate_gradients(block, shift=0.3, preconditioner=False, tolerance=1e-13)
    found["without preconditioner"] = (plain.x, found["direct"][1])
    scaled = K.conjugate_gradients(block, shift=0.3, preconditioner=lambda r: 2 * r, tolerance=1e-13)
    found["with a function"] = (scaled.x, found["direct"][1])
    exact = K.conjugate_gradients(block, shift=torch.tensor(0.3, dtype=torch.float64), tolerance=1e-12)
    found["with the inverse"] = (exact.x, found["direct"][1])
    mask = random(N, seed=2) > mask_share
    masked = K.conjugate_gradients(block, shift=0.3, mask=mask[where[0]].to(grid.device), tolerance=1e-13)
    expected = torch.zeros_like(b)
    expected[mask] = torch.linalg.solve(shifted[mask][:, mask], b[mask])
    found["masked"] = (masked.x, expected)
    placed = DTensor.from_local(block, grid.mesh, [Shard(0), Shard(1)], shape=b.shape, stride=b.stride())
    found["DTensor"] = (K.solve(placed, shift=0.3).to_local(), found["direct"][1])
    for name, (x, y) in found.items():
        torch.testing.assert_close(gathered(grid, x, y.shape), y, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert K.conjugate_gradients(0 * block, shift=0.3)[1:] == (0, 0.0)
    stopped = K.conjugate_gradients(block, shift=0.3, preconditioner=False, max_iter=2)
    assert stopped.iterations == 2
    assert stopped.residual > 1e-6
    torch.testing.assert_close(K.logdet().cpu(), torch.logdet(whole), rtol=1e-12, atol=0)
    torch.testing.assert_close(K.logdet(shift=0.3).cpu(), torch.logdet(shifted), rtol=1e-12, atol=0)
    torch.testing.assert_close(K.trace().cpu(), whole.trace(), rtol=1e-12, atol=0)
    return (exact.iterations, plain.iterations, masked.iterations, masked.residual)


def test_solutions(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    found = [f for f in ranks.run(solutions, grid_shape, -0.5) if f is not None]
    assert len(set(found)) == 1  # all ranks stop together and report the same
    exact, plain, masked, residual = found[0]
    assert exact == 1
    assert 2 < masked < plain <= 2 * N
    assert residual <= 1e-13


def gradients(shape, second, reduction):
    """Of a loss with a solve, a logdet and a product; first, or second by way of the first's squared norm.

    With means, ranks' losses and gradients of blocks count by their mean, and a block's gradient is that of all ranks' losses.
    """
    grid = on_grid(shape)
    if grid is None:
        return None
    weight = 1 if reduction == "sum" else 1 / grid.world_size
    b, c = random(N, 3, seed=1), random(N, 3, seed=4)
    mask = random(N, seed=2) > -0.8
    where = grid.block(b.shape)

    def losses(factors, shift, b_local, c_local, solve, masked, logdet):
        quadratic = (b_local * solve(factors, shift, b_local)).sum() + (c_local * masked(factors, shift, c_local)).sin().sum()
        return quadratic, logdet(factors, shift)

    def derive(losses, factors, shift, b_local, reduce, scale=1.0):
        loss, log = losses
        *first, at_b = torch.autograd.grad(reduce(loss) + log, [*factors, shift, b_local], create_graph=second)
        at_b = at_b * scale
        if not second:
            return *first, at_b
        size = sum((g * g).sum() for g in first) + reduce((at_b**2).sum())
        *again, at_b = torch.autograd.grad(size, [*factors, shift, b_local])
        return *again, at_b * scale

    def leaves(device):
        return [f.to(device).requires_grad_() for f in spd_factors()], torch.tensor(
            0.3, dtype=torch.float64, device=device, requires_grad=True
        )

    from fastkron_py.distributed.replicated import total

    factors, shift = leaves(grid.device)
    b_local = cut(grid, b).requires_grad_()
    one = losses(
        [0.5 * (f + f.mT) for f in factors],
        shift,
        b_local,
        cut(grid, c),
        lambda f, s, v: KroneckerProduct(f, grid=grid, reduction=reduction).solve(v, shift=s),
        lambda f, s, v: (
            KroneckerProduct(f, grid=grid, reduction=reduction)
            .conjugate_gradients(v, shift=s, mask=mask[where[0]].to(grid.device), tolerance=1e-14)
            .x
        ),
        lambda f, s: KroneckerProduct(f, grid=grid).logdet(shift=s),
    )
    mine = derive(one, factors, shift, b_local, lambda v: total([v], grid.group, grid.device, reduction)[0])

    factors, shift = leaves("cpu")
    b_whole = b.clone().requires_grad_()
    eye = torch.eye(N, dtype=torch.float64)

    def masked_dense(f, s, v):
        x = torch.zeros_like(v)
        x[mask] = torch.linalg.solve((dense(f) + s * eye)[mask][:, mask], v[mask])
        return x

    reference = losses(
        [0.5 * (f + f.mT) for f in factors],
        shift,
        b_whole,
        c,
        lambda f, s, v: torch.linalg.solve(dense(f) + s * eye, v),
        masked_dense,
        lambda f, s: torch.logdet(dense(f) + s * eye),
    )
    expected = derive(reference, factors, shift, b_whole, lambda v: weight * v, 1 / weight)
    for got, want in zip(mine[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(mine[-1].cpu(), expected[-1][where], rtol=1e-7, atol=1e-9)
    return True


def test_gradients(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for second, reduction in ((False, "sum"), (True, "sum"), (True, "mean")):
        assert set(ranks.run(gradients, grid_shape, second, reduction)) <= {True, None}


def refused(which, alone):
    """One rank, or all, with a wrong argument."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    wrong = not alone or dist.get_rank() == 1
    factors = [f.to(grid.device) for f in spd_factors()]
    K = KroneckerProduct(factors, grid=grid)
    block = cut(grid, torch.ones(N, 1, dtype=torch.float64))
    if which == "no tensor":
        KroneckerProduct([1.0, *factors] if wrong else factors, grid=grid)
    if which == "batch":
        KroneckerProduct([factors[0][None]] if wrong else factors, grid=grid)
    if which == "device":
        KroneckerProduct([torch.ones(2, 2, device="meta")] if wrong else factors, grid=grid)
    if which == "rows":
        K.solve(block[1:] if wrong else block, shift=0.1)
    if which == "dtype":
        K.solve(block.float() if wrong else block, shift=0.1)
    if which == "shift":
        K.solve(block, shift="0.1" if wrong else 0.1)
    if which == "mask":
        mask = torch.ones(len(block), dtype=torch.int if wrong else torch.bool, device=grid.device)
        K.conjugate_gradients(block, mask=mask)
    if which == "tolerance":
        K.conjugate_gradients(block, tolerance=-1.0 if wrong else 1e-6)
    if which == "max_iter":
        K.conjugate_gradients(block, max_iter=1.5 if wrong else 10)
    if which == "preconditioner":
        K.conjugate_gradients(block, preconditioner="eigh" if wrong else True)
    if which == "mixed dtypes":
        KroneckerProduct([factors[0].float(), *factors[1:]] if wrong else factors, grid=grid)
    if which == "asymmetric":
        KroneckerProduct([factors[0].triu(), *factors[1:]], grid=grid).solve(block, shift=0.1)
    if which == "indefinite":
        KroneckerProduct([-factors[0], *factors[1:]], grid=grid).conjugate_gradients(block, preconditioner=False)


REFUSALS = {
    "no tensor": ("TypeError", "factors[0]: expected a torch tensor; got float"),
    "batch": ("ValueError", "factors: expected matrices without batch dimensions; got shape (1, 5, 5)"),
    "mixed dtypes": ("TypeError", "factors[1]: expected factors[0]'s dtype torch.float32; got torch.float64"),
    "device": ("ValueError", "factors: expected tensors on the grid's device c"),
    "rows": ("ValueError", "b: expected a matrix with "),
    "dtype": ("TypeError", "b: expected the factors' dtype torch.float64; got torch.float32"),
    "shift": ("TypeError", "shift: expected a number or a 0-dimensional floating-point tensor; got str"),
    "mask": ("TypeError", "mask: expected a tensor of bool; got torch.int32"),
    "tolerance": ("ValueError", "tolerance: expected a finite number, 0 or more; got -1.0"),
    "max_iter": ("TypeError", "max_iter: expected an integer; got float"),
    "preconditioner": ("TypeError", "preconditioner: expected True, False or a function; got str"),
}


@pytest.mark.parametrize("alone", [False, True])
def test_every_rank_refuses(ranks: RankPool, alone: bool) -> None:
    for which, (kind, message) in REFUSALS.items():
        assert_refused(ranks.outcomes(refused, which, alone), kind, message, alone)


def test_matrices_that_cannot_be_solved(ranks: RankPool) -> None:
    for which, message in (
        ("asymmetric", "factors[0]: expected a symmetric matrix; got one that differs from its transpose"),
        ("indefinite", "factors, shift: expected a positive definite K + shift I"),
    ):
        assert_refused(ranks.outcomes(refused, which, False), "ValueError", message)
