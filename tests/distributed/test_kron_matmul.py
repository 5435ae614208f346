"""Products over real ranks against the product of one process: bit for bit on whole numbers, within rounding on random ones."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import (
    IDENTITIES,
    PROBLEMS,
    block,
    bytes_between,
    bytes_sent,
    counted_bytes,
    grid_for,
    make,
    matrices,
    multiply,
    place,
    placed,
    planned,
    single,
    staged,
    whole_numbers,
    with_identities,
)
from rank_pool import RankPool
from slots_in_files import FilesIn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastkron_py import reference
from fastkron_py.distributed import CollectiveError, Plan, Problem, ProcessGrid, kron_matmul, plan
from fastkron_py.distributed.replicated import total
from fastkron_py.testing import assert_close

# ---- forward -----------------------------------------------------------------------------------


PARTS = pytest.mark.parametrize("part", range(3))  # of the problems; `make test` runs each part on some grids


def products(shape, left, part):
    if (grid := grid_for(shape)) is None:
        return
    for name, (m, sizes, stages) in list(PROBLEMS.items())[part::3]:
        x, factors, _ = make(m, sizes, left=left)
        expected = block(single(x, factors, left), grid)
        local, own = block(x, grid), placed(factors, grid)
        stages = stages[::-1] if left and stages else stages
        for how in (None, *[planned(m, sizes, shape, kind, chunks, left) for kind in (stages, "rows") for chunks in (1, 3)]):
            found = multiply(local, own, left, grid=grid, plan=how)
            assert torch.equal(found, expected), f"{name}, {how}"
            assert found.is_contiguous()


@PARTS
def test_products_equal_those_of_one_process(ranks: RankPool, grid_shape: tuple[int, int], part: int) -> None:
    for left in (False, True):
        ranks.run(products, grid_shape, left, part)


def half_and_single(shape):
    if (grid := grid_for(shape)) is None:
        return
    m, sizes = 12, ((6, 6), (4, 8), (5, 5))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128):
        x, factors, z = make(m, sizes, dtype, random=True)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        expected = 0.5 * reference.kron_matmul(x.to(wide), [f.to(wide) for f in factors]) - 2 * z.to(wide)
        for stages in ((1, 1, 1), (2, 1), "rows"):
            how = planned(m, sizes, shape, stages, 2, False, dtype)
            found = kron_matmul(
                block(x, grid), [f.to(grid.device) for f in factors], grid=grid, alpha=0.5, beta=-2.0, z=block(z, grid), plan=how
            )
            assert_close(found, block(expected, grid), steps=5)
            wrong = block(expected, grid).roll(1, 0)
            with pytest.raises(AssertionError, match="is not close"):  # a row out of place is seen
                assert_close(found, wrong, steps=5)


def test_random_numbers_of_every_dtype(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    ranks.run(half_and_single, grid_shape)


def other_layouts():
    """Blocks that are not contiguous, and that are part of something larger; under no_grad and inference mode, in chunks."""
    grid = ProcessGrid((1, dist.get_world_size()))
    m, sizes = 6, ((4, 4), (6, 5), (4, 2))
    x, factors, _ = make(m, sizes)
    expected = block(single(x, factors), grid)
    local = block(x, grid)
    turned = local.T.contiguous().T
    padded = torch.full((m, local.shape[1] + 3), math.nan, dtype=x.dtype, device=grid.device)[:, : local.shape[1]].copy_(local)
    strided = torch.full((2 * m, local.shape[1]), math.nan, dtype=x.dtype, device=grid.device)[::2].copy_(local)
    placed = [f.to(grid.device).T.contiguous().T for f in factors]
    for x_block in (turned, padded, strided):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            for stages, chunks in (((1, 2), 1), ((1, 2), 2), ((2, 1), 9), ("rows", 1), ("rows", 2)):
                how = planned(m, sizes, grid.shape, stages, chunks, False)
                with mode():
                    assert torch.equal(kron_matmul(x_block, placed, grid=grid, plan=how), expected)


def test_blocks_of_any_layout(ranks: RankPool) -> None:
    ranks.run(other_layouts)


# ---- gradients ---------------------------------------------------------------------------------


def gradients(shape, left, part):
    """First and second order of x, factors, z, alpha and beta, bit for bit: all are whole numbers or halves."""
    if (grid := grid_for(shape)) is None:
        return
    problems = [
        (6, ((4, 4), (3, 3), (2, 4)), (1, 1, 1)),
        (3, ((5, 2), (3, 4)), (1, 1)),
        (5, ((2, 2),) * 4, (2, 2)),
        (1, ((7, 7),), "rows"),
        (6, ((4, 4), (3, 3), (2, 4)), "rows"),
        (9, ((5, 2), (3, 4)), "rows"),
    ]
    shown = [IDENTITIES[name] for name in ("identities before and after", "slices that blocks cut", "an identity alone")]
    problems += [(m, sizes, how) for m, sizes, stages in shown for how in (stages, "rows")]
    for m, sizes, stages in problems[part::3]:
        how = planned(m, sizes, grid.shape, stages, 2, left)
        x, factors, z = make(m, sizes, left=left)
        scalars = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)]
        whole = [t.clone().requires_grad_() for t in (x, z, *matrices(factors), *scalars)]
        mine = [t.clone().requires_grad_() for t in (block(x, grid), block(z, grid))]
        mine += [t.to(grid.device).clone().requires_grad_() for t in (*matrices(factors), *scalars)]

        def product(tensors, call, left=left, sizes=sizes, **options):
            x, z, *rest = tensors
            return call(x, with_identities(sizes, rest[:-2]), left, alpha=rest[-2], beta=rest[-1], z=z, **options)

        def own(tensors):
            """What this rank has of x-like and z-like tensors, and all of the others."""
            return [block(tensors[0], grid), block(tensors[1], grid), *[t.to(grid.device) for t in tensors[2:]]]

        g = torch.Generator().manual_seed(1)
        y, expected_y = product(mine, multiply, grid=grid, plan=how), product(whole, single)
        weights = whole_numbers(g, *expected_y.shape)
        expected = torch.autograd.grad((expected_y * weights).sum(), whole, create_graph=True)
        once = torch.autograd.grad((y * block(weights, grid)).sum(), mine, retain_graph=True)
        for a, b in zip(once, own(expected), strict=True):
            assert torch.equal(a, b)
        found = torch.autograd.grad((y * block(weights, grid)).sum(), mine, create_graph=True)
        for a, b in zip(found, own(expected), strict=True):
            assert torch.equal(a, b)
        directions = [whole_numbers(g, *t.shape) for t in expected]
        h = sum((a * v).sum() for a, v in zip(found, own(directions), strict=True))
        expected_h = sum((a * v).sum() for a, v in zip(expected, directions, strict=True))
        for a, b in zip(torch.autograd.grad(h, mine), own(torch.autograd.grad(expected_h, whole)), strict=True):
            assert torch.equal(a, b)


@PARTS
def test_gradients_of_first_and_second_order(ranks: RankPool, grid_shape: tuple[int, int], part: int) -> None:
    for left in (False, True):
        ranks.run(gradients, grid_shape, left, part)


def one_sum():
    """The factors' gradients take one all-reduce, of one buffer; a gradient of x alone takes none."""
    grid = ProcessGrid((1, dist.get_world_size()))
    x, factors, _ = make(4, ((4, 4),) * 3)
    how = planned(4, ((4, 4),) * 3, grid.shape, (1, 1, 1), 1, False)
    for needs, sums in (([0], 0), ([1, 2, 3], 1), ([2], 1), ([0, 1, 3], 1)):
        tensors = [
            t.requires_grad_(i in needs) for i, t in enumerate([block(x, grid).clone(), *[f.to(grid.device).clone() for f in factors]])
        ]
        y = kron_matmul(tensors[0], tensors[1:], grid=grid, plan=how)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
            y.sum().backward()
        assert [t.grad is not None for t in tensors] == [i in needs for i in range(4)]
        assert counted.call_count == sums
        if sums:
            assert counted.call_args.args[0].numel() == sum(tensors[i].numel() for i in needs if i)


def test_factors_gradients_are_summed_once(ranks: RankPool) -> None:
    ranks.run(one_sum)


def half_sums():
    """A large number of one rank, another one for each element, and ones of the others, which half types would lose one by one."""
    grid = ProcessGrid()
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        part = torch.ones(grid.world_size, dtype=dtype, device=grid.device)
        part[grid.rank] = large
        (found,) = total([part], grid.group, grid.device, "sum")
        assert torch.equal(found.cpu(), torch.full((grid.world_size,), large + grid.world_size - 1).to(dtype))


def test_gradients_of_half_types_are_summed_in_float32(ranks: RankPool) -> None:
    ranks.run(half_sums)


# ---- DTensor -----------------------------------------------------------------------------------


def dtensors(shape, left):
    if (grid := grid_for(shape)) is None:
        return
    placements = [Shard(0), Shard(1)]
    m, sizes = 7, ((3, 4), (5, 5), (2, 3))
    x, factors, z = make(m, sizes, left=left)
    leaf = DTensor.from_local(block(x, grid), grid.mesh, placements, run_check=False, shape=x.shape, stride=x.stride()).requires_grad_()
    added = DTensor.from_local(block(z, grid), grid.mesh, placements, run_check=False, shape=z.shape, stride=z.stride())
    placed = [f.to(grid.device).requires_grad_() for f in factors]
    placed[1] = DTensor.from_local(placed[1].detach(), grid.mesh, [Replicate()] * 2, run_check=False).requires_grad_()
    y = multiply(leaf, placed, left, beta=1.0, z=added)
    whole = [t.requires_grad_() for t in (x, *factors)]
    expected = single(whole[0], whole[1:], left, beta=1.0, z=z)
    assert tuple(y.placements) == tuple(placements)
    assert y.device_mesh == grid.mesh
    assert y.shape == expected.shape
    assert torch.equal(y.to_local(), block(expected, grid))
    assert torch.equal(y.full_tensor().cpu(), expected)
    y.to_local().sum().backward()
    expected.sum().backward()
    assert torch.equal(leaf.grad.full_tensor().cpu(), whole[0].grad)
    for f, e in zip(placed, whole[1:], strict=True):
        gradient = f.grad.to_local() if isinstance(f.grad, DTensor) else f.grad
        assert torch.equal(gradient.cpu(), e.grad)


def test_dtensors_in_and_out(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for left in (False, True):
        ranks.run(dtensors, grid_shape, left)


# ---- what is sent ------------------------------------------------------------------------------


def sent(shape, left, part):
    if (grid := grid_for(shape)) is None:
        return
    for m, sizes, stages in list(PROBLEMS.values())[part::3]:
        for kind, chunks in ((stages, 1), (stages, 2), ("rows", 1), ("rows", 2)):
            how = planned(m, sizes, shape, kind, chunks, left, torch.float32)
            x, factors, _ = make(m, sizes, torch.float32, left=left)
            counts: list[Counter] = []
            with counted_bytes(counts):
                multiply(block(x, grid), placed(factors, grid), left, grid=grid, plan=how)
            total = sum(counts, Counter())
            line, position = place(how, grid.rank)
            legs = [leg for chunk in how.legs(line) for leg in chunk if leg.rows and not leg.exchange.idle]
            assert len(counts) == len(legs)
            for peer in range(grid.world_size):
                if peer != grid.rank:
                    assert total[peer] == sum(bytes_between(how, i, grid.rank, peer) for i in range(len(how.legs(line))))
            found = [sum(v for r, v in c.items() if r != grid.rank) for c in counts]
            assert sum(found) == sum(bytes_sent(how, i, grid.rank) for i in range(len(how.legs(line))))
            assert sorted(found) == sorted(4 * leg.sent(position) for leg in legs)
            everything = torch.tensor([sum(v for r, v in total.items() if r != grid.rank)], device=grid.device)
            dist.all_reduce(everything, group=grid.group)
            assert int(everything) == how.bytes_total


@PARTS
def test_the_plans_bytes_are_sent(ranks: RankPool, grid_shape: tuple[int, int], part: int) -> None:
    for left in (False, True):
        ranks.run(sent, grid_shape, left, part)


# ---- direct stores -----------------------------------------------------------------------------


def direct_stores(shape, left, folder, smaller, part):
    if (grid := grid_for(shape)) is None:
        return None
    files = FilesIn(folder, smaller)
    for m, sizes, stages in list(PROBLEMS.values())[3 * part :: 6]:
        for kind, chunks in ((stages, 6), ("rows", 5), ("rows", 13)):
            how = planned(m, sizes, shape, kind, chunks, left, transport="peer memory")
            x, factors, _ = make(m, sizes, left=left)
            tensors = [t.requires_grad_() for t in (block(x, grid).clone(), *[f.clone() for f in matrices(factors)])]
            whole = [t.clone().requires_grad_() for t in (x, *matrices(factors))]
            own = with_identities(sizes, tensors[1:])
            expected = single(whole[0], with_identities(sizes, whole[1:]), left)
            expected.square().sum().backward()
            with mock.patch("fastkron_py.distributed.api.open_slots", files):
                with torch.no_grad():
                    assert torch.equal(multiply(tensors[0], own, left, grid=grid, plan=how), block(expected, grid))
                y = multiply(tensors[0], own, left, grid=grid, plan=how)
                assert torch.equal(y, block(expected, grid))
                y.square().sum().backward()
            assert torch.equal(tensors[0].grad, block(whole[0].grad, grid))
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(tensors[1:], whole[1:], strict=True))
            assert not any(any(d._taken) for d in files.made)
    return sum(d.stored for d in files.made), sum(d.refused for d in files.made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs that reach each other's memory, on CPUs")
@pytest.mark.parametrize("smaller", [1, 2])
@pytest.mark.parametrize(("shape", "left"), [((1, 4), False), ((2, 2), True)])
@pytest.mark.parametrize("part", range(2))
def test_direct_stores(own_ranks: RankPool, part: int, shape: tuple[int, int], left: bool, smaller: int, tmp_path: Path) -> None:
    """The same results through slots, and where they are too small and the all-to-all steps in."""
    for stored, refused in own_ranks.run(direct_stores, shape, left, str(tmp_path), smaller, part):
        assert (stored > 5) == (smaller == 1)
        assert (refused > 0) == (smaller > 1)


def direct_uneven(folder):
    """Nine of eleven rows in one row group, whose chunks are larger than slots for six rows' chunks."""
    grid, files = ProcessGrid((2, 2)), FilesIn(folder)
    x, factors, _ = make(11, ((4, 3), (3, 5)))
    rows = slice(0, 9) if grid.row == 0 else slice(9, 11)
    columns = grid.block((1, 12))[1]
    how = planned(11, ((4, 3), (3, 5)), grid.shape, "rows", 2, False, transport="peer memory")
    with mock.patch("fastkron_py.distributed.api.open_slots", files):
        y = kron_matmul(x[rows, columns].contiguous(), factors, grid=grid, plan=how)
    assert torch.equal(y, single(x, factors)[rows, grid.block((1, 15))[1]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs that reach each other's memory, on CPUs")
def test_direct_stores_of_uneven_rows(own_ranks: RankPool, tmp_path: Path) -> None:
    own_ranks.run(direct_uneven, str(tmp_path))


def direct_gradients(dtype, folder):
    """Of x alone, of some factors alone, of an expanded gradient, twice from one graph, and of numbers in float64 rounded once."""
    grid = ProcessGrid((1, dist.get_world_size()))
    files = FilesIn(folder)
    m, sizes = 5, ((4, 3), (3, 5), (2, 3))
    how = staged(Problem(m, (4, 3, 2), (3, 5, 3), dtype, gradients=True), grid.shape, "rows", 3, "peer memory")
    x, factors, _ = make(m, sizes, dtype, random=True)
    wide = [t.double().requires_grad_() for t in (x, *factors)]
    expected_y = reference.kron_matmul(wide[0], wide[1:], alpha=-0.5)
    expected = torch.autograd.grad(expected_y, wide, torch.full_like(expected_y, 0.75))
    with mock.patch("fastkron_py.distributed.api.open_slots", files):
        for needs in ((True, False, False, False), (False, True, True, True), (False, False, True, False), (True, False, True, False)):
            own = [block(x, grid).clone(), *[f.clone() for f in factors]]
            wanted = [t.requires_grad_() for t, need in zip(own, needs, strict=True) if need]
            y = kron_matmul(own[0], own[1:], grid=grid, plan=how, alpha=-0.5)
            truth = block(expected_y.detach(), grid)
            assert_close(y.detach(), truth, steps=4, magnitude=expected_y.detach().abs().amax().expand_as(truth))
            for again in (True, False):
                found = iter(torch.autograd.grad(y, wanted, y.new_tensor(0.75).expand(y.shape), retain_graph=again))
                for i, (need, whole) in enumerate(zip(needs, expected, strict=True)):
                    if need:
                        part, most = block(whole, grid) if i == 0 else whole, whole.abs().amax()
                        # A rank's block of dx may cancel.
                        assert_close(next(found), part, steps=4, magnitude=most.expand_as(part), rms_tol=math.inf)
        alpha = torch.tensor(-0.5, dtype=dtype, requires_grad=True)
        y = kron_matmul(own[0].detach(), [f.detach() for f in own[1:]], grid=grid, plan=how, alpha=alpha)
        (found_alpha,) = torch.autograd.grad(y, alpha, y.detach())
        assert_close(y.detach(), truth, steps=4, magnitude=expected_y.detach().abs().amax().expand_as(truth))
        torch.testing.assert_close(found_alpha.double(), -2 * expected_y.detach().square().sum(), rtol=0.02, atol=0.0)
        assert not any(any(d._taken) for d in files.made)
        assert sum(d.stored for d in files.made) > 0
        assert sum(d.refused for d in files.made) == 0
        y = kron_matmul(own[0], own[1:], grid=grid, plan=how)
        with torch.no_grad():
            own[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs that reach each other's memory, on CPUs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_are_needed_by_way_of_slots(own_ranks: RankPool, dtype: torch.dtype, tmp_path: Path) -> None:
    own_ranks.run(direct_gradients, dtype, str(tmp_path))


def direct_without_gpus():
    grid = ProcessGrid((1, dist.get_world_size()))
    x, factors, _ = make(6, ((4, 4),) * 2)
    how = plan(Problem(6, (4, 4), (4, 4), torch.float64), grid.shape, transport="peer memory")
    found = kron_matmul(block(x, grid), [f.to(grid.device) for f in factors], grid=grid, plan=how)
    assert torch.equal(found, block(single(x, factors), grid))


def test_direct_stores_are_left_out_where_they_cannot_be(ranks: RankPool) -> None:
    ranks.run(direct_without_gpus)


def in_a_graph():
    grid = ProcessGrid((1, dist.get_world_size()))
    if grid.device.type != "cuda":
        return
    x, factors, _ = make(16, ((8, 8),) * 3, torch.float32, random=True)
    own, local = [f.to(grid.device).requires_grad_() for f in factors], block(x, grid).requires_grad_()
    for stages in ("rows", (1, 2)):
        how = staged(Problem(16, (8,) * 3, (8,) * 3, gradients=True), grid.shape, stages, 2, "peer memory")

        def step(how: Plan = how) -> list[torch.Tensor]:
            y = kron_matmul(local, own, grid=grid, plan=how)
            return [y.detach(), *torch.autograd.grad(y, (local, *own), y.detach())]

        expected = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events of other streams
            found = step()
        for _ in range(3):
            for t in found:
                t.fill_(torch.nan)
            graph.replay()
            between = step()  # by the same slots
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(between, expected, strict=True))


@pytest.mark.gpu
def test_a_graph_goes_through_peer_memory(ranks: RankPool) -> None:
    ranks.run(in_a_graph)


# ---- failures ---------------------------------------------------------------------


def broken_exchange():
    grid = ProcessGrid((1, dist.get_world_size()))
    x, factors, _ = make(4, ((4, 4),) * 3)
    how = planned(4, ((4, 4),) * 3, grid.shape, (1, 1, 1), 2, False)
    calls = []
    plain = dist.all_to_all_single

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("Connection closed by peer [10.0.0.7]:1234")
        return plain(*args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", fail), pytest.raises(CollectiveError) as caught:
        kron_matmul(block(x, grid), [f.to(grid.device) for f in factors], grid=grid, plan=how)
    return str(caught.value), caught.value.stage


def test_a_failed_exchange_names_its_stage(own_ranks: RankPool) -> None:
    for message, stage in own_ranks.run(broken_exchange):
        assert stage == f"kron_matmul: stage 2 of 3, chunk 2 of 2: exchange of {2 * 16 * 3 / 4 * 8 / 1e6:.3g} MB with ranks 0-3"
        assert "Connection closed by peer" in message


def autocast_and_scalars():
    grid = ProcessGrid((1, dist.get_world_size()))
    x, factors, z = make(4, ((4, 4),) * 2, torch.float32)
    x, z, factors = block(x, grid), block(z, grid), [f.to(grid.device) for f in factors]
    with torch.autocast(grid.device.type, torch.bfloat16):
        y = kron_matmul(x, factors, grid=grid)
        inside = kron_matmul(x, factors, grid=grid, beta=1.0, z=z)
    assert y.dtype == inside.dtype == torch.bfloat16
    expected = kron_matmul(x, factors, grid=grid)
    assert torch.equal(y.float(), expected)  # small whole numbers
    unread = kron_matmul(x, factors, grid=grid, z=torch.full_like(z, math.nan))
    assert torch.equal(unread, expected)  # beta is 0: z is not read


def test_autocast_and_an_unread_z(ranks: RankPool) -> None:
    ranks.run(autocast_and_scalars)
