"""Points of a grid: taken and put back, against torch's index_select and index_copy, which are exact."""

from __future__ import annotations

import itertools

import pytest
import torch
from sampling import in_full
from torch import Tensor

from fastkron_py.kron.points import Points, gathered, operand_of, points_launch, scattered, take_points

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
# (size before, of the grid, after the points): points are neighbours, or runs of numbers; rows longer and shorter than a program's.
GRIDS = {
    "vector": ((), 3000, ()),
    "rows": ((3,), 1500, ()),
    "short rows": ((70,), 33, ()),
    "one point a row": ((5,), 1, ()),
    "columns": ((), 200, (8,)),
    "odd columns": ((2,), 150, (33,)),
    "wide": ((), 9, (300,)),
    "batches": ((2, 3), 70, (2,)),
}
HELD = {
    "most": lambda size: (torch.arange(size) % 5 != 1).nonzero().squeeze(1),
    "few": lambda size: torch.arange(0, size, 41),
    "in disorder": lambda size: torch.randperm(size)[: (size + 1) // 2],
    "one": lambda size: torch.tensor([size - 1]),
    "all": torch.arange,
}


def expected(x: Tensor, index: Tensor, size: int, spread: bool, dim: int) -> Tensor:
    if not spread:
        return x.index_select(dim, index)
    shape = list(x.shape)
    shape[dim] = size
    return x.new_zeros(shape).index_copy(dim, index, x)


def moved(x: Tensor, points: Points, spread: bool, dim: int) -> Tensor:
    return scattered(x, points, dim) if spread else gathered(x, points, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_values(grid: str, dtype: torch.dtype, backend_name: str, device: torch.device) -> None:
    before, size, after = GRIDS[grid]
    for held, spread in itertools.product(HELD.values(), (False, True)):
        index = held(size).to(device)
        points, dim = Points.of(index, size), -2 if after else -1
        x = torch.randn(*before, index.shape[0] if spread else size, *after, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        x = x.to(device, dtype)
        found = moved(x, points, spread, dim)
        assert found.is_contiguous()
        assert torch.equal(found, expected(x, index, size, spread, dim))


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Tensors of x's numbers, and of some of them, that lie differently in memory."""
    wide = torch.stack([x, x], -1)
    return {
        "transposed": x.mT.contiguous().mT,
        "every second": wide[..., 0],
        "part of rows": torch.cat([x, x], -1)[..., : x.shape[-1]],
        "batches apart": torch.cat([x, x], -2)[..., : x.shape[-2], :],
        "expanded": x[..., :1, :1].expand(x.shape),
        "three runs": x.repeat(1, 2, 2, 2)[:, ::2, ::2, : x.shape[-1]],
        "unaligned": torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view(x.shape),
    }


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128], ids=str)
def test_strides(dtype: torch.dtype, dim: int, backend_name: str, device: torch.device) -> None:
    for x in layouts(torch.randn(2, 4, 6, 40, dtype=dtype, device=device)).values():
        size = x.shape[dim]
        index = torch.randperm(size, device=device)[: size // 2]
        assert torch.equal(gathered(x, Points.of(index, size), dim), x.index_select(dim, index))
        points = Points.of(torch.randperm(size + 5, device=device)[:size], size + 5)
        assert torch.equal(scattered(x, points, dim), expected(x, points.index, size + 5, True, dim))


@pytest.mark.parametrize("columns", [(), (3,)], ids=["neighbours", "runs"])
def test_points_that_are_not_kept_are_not_read(columns: tuple[int, ...], backend_name: str, device: torch.device) -> None:
    x = torch.full((200, *columns), torch.nan, device=device)
    points = Points.of(torch.arange(0, 200, 3, device=device), 200)
    x[::3] = 1.0
    dim = -2 if columns else -1
    assert (gathered(x, points, dim) == 1).all()
    assert torch.equal(scattered(x[::3], points, dim), x.nan_to_num(0.0))


@pytest.mark.parametrize("held", HELD)
def test_tables(held: str) -> None:
    """A byte for each point where most are kept; the control fails."""
    index = HELD[held](5000)
    points = Points.of(index, 5000)
    for (offsets, bases), places in zip((points.tables[:2], points.tables[2:]), (index, None), strict=True):
        found = torch.where(offsets < 0, -1, offsets + bases.repeat_interleave(32)[: offsets.shape[0]])
        if places is None:
            places = torch.full((5000,), -1).index_copy(0, index, torch.arange(index.shape[0]))
        assert torch.equal(found, places)
        assert not torch.equal(found, places.roll(1)) or places.numel() == 1
        assert offsets.dtype == (torch.int16 if held == "in disorder" or (held == "few" and offsets.numel() < 5000) else torch.int8)
    assert torch.equal(points.is_kept.nonzero().squeeze(1), index.sort().values)


def small(device: torch.device) -> tuple[Points, Tensor]:
    return Points.of(torch.tensor([4, 0, 3], device=device), 6), torch.randn(2, 6, 3, dtype=torch.float64, device=device)


def test_gradients(backend_name: str, device: torch.device) -> None:
    points, x = small(device)
    x = x[:1, :, :2].clone().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return scattered(gathered(x, points, -2).mT ** 2, points, -1)

    assert torch.autograd.gradcheck(function, (x,), check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x,), check_fwd_over_rev=True, fast_mode=True)


def test_transforms(backend_name: str, device: torch.device) -> None:
    points, x = small(device)
    wanted = x.index_select(-2, points.index)
    assert torch.equal(torch.vmap(lambda t: gathered(t, points, -2))(x), wanted)
    assert torch.equal(torch.vmap(lambda t: gathered(t, points, -1), in_dims=2, out_dims=2)(x), wanted)
    found, tangent = torch.func.jvp(lambda t: gathered(t, points, -2), (x,), (2 * x,))
    assert torch.equal(found, wanted)
    assert torch.equal(tangent, 2 * wanted)
    jacobian = torch.func.jacrev(lambda t: scattered(t, points, -1))(wanted[0, :, 0])
    assert torch.equal(jacobian, torch.func.jacfwd(lambda t: scattered(t, points, -1))(wanted[0, :, 0]))
    assert torch.equal(jacobian, torch.eye(6, dtype=torch.float64, device=device)[:, points.index])
    z = torch.complex(x, x)
    assert torch.equal(gathered(z.conj(), points, -2), z.conj().resolve_conj().index_select(-2, points.index))


@pytest.mark.parametrize(
    ("backend_name", "spread"),
    [("torch", True), ("triton", False), *in_full([("torch", False), ("triton", True)])],
    indirect=["backend_name"],
)
def test_opcheck(spread: bool, backend_name: str, device: torch.device) -> None:
    points, x = small(device)
    x = (x[:, :3] if spread else x).clone().requires_grad_()
    torch.library.opcheck(take_points.registered, (x, points.index, list(points.tables), spread, -2, backend_name))
    turned = x.detach().mT.contiguous().mT
    torch.library.opcheck(take_points.registered, (turned, points.index, list(points.tables), spread, -2, backend_name))


def test_large_reaches_take_wide_offsets() -> None:
    """Offsets beyond 31 bits, in a kernel's configuration: of an operand without memory."""
    tl = pytest.importorskip("triton.language")

    for shape, strides, dim in [((2**31,), (1,), -1), ((2**25, 64), (64, 1), -2), ((2**16, 2**16), (2**16, 1), -1)]:
        x = operand_of(torch.empty_strided(shape, strides, device="meta"), dim)
        config = points_launch(x, 2**16, torch.float32).configs[0]
        assert config.arguments["INDEX"] == (tl.int64 if shape[-1] != 2**16 else tl.int32)
    x = operand_of(torch.empty(1, 2**30, device="meta"), -2)  # a tile of the result has four of these rows
    assert points_launch(x, 4, torch.float32).configs[0].arguments["INDEX"] == tl.int64


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [-1, -2])
def test_in_a_graph(dim: int) -> None:
    from graphs import graphed

    points = Points.of(torch.randperm(1000, device="cuda")[:600], 1000)
    x = torch.randn(1000, 1000, device="cuda")
    graph, (found,) = graphed(lambda: [scattered(gathered(x, points, dim), points, dim)])
    x.normal_()
    graph.replay()
    assert torch.equal(found, expected(x.index_select(dim, points.index), points.index, 1000, True, dim))


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True], ids=["neighbours", "runs"])
def test_beyond_31_bits(turned: bool) -> None:
    """An operand of more elements than 32-bit offsets reach."""
    size = 2**25 + 77
    index = torch.tensor([size - 1, 5, 2**25 + 3], device="cuda")
    points = Points.of(index, size)
    x = torch.zeros((size, 64) if turned else (64, size), dtype=torch.bfloat16, device="cuda")
    x = x.mT if turned else x
    x[-1, index] = torch.arange(1.0, 4.0, dtype=torch.bfloat16, device="cuda")
    x, dim = (x.mT, -2) if turned else (x, -1)
    found = gathered(x, points, dim)
    assert (found[:, -1] if turned else found[-1]).tolist() == [1, 2, 3]
    assert torch.equal(scattered(found, points, dim), x)
