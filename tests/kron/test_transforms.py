"""torch.vmap and torch.func over the Kronecker verbs, against loops and against the definition in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shapes_list import assert_near, call
from torch import Tensor
from torch.func import hessian, vmap

from fastkron_py import kron_matmul, reference

B = 3  # size of the mapped dimension
DOUBLE = torch.float64

# in_dims of (x [3, 4], f1 [2, 3], f2 [2, 2], z [3, 6]) and of their left forms; None: not mapped.
IN_DIMS: dict[str, tuple[int | None, ...]] = {
    "all": (0, 0, 0, 0),
    "x": (0, None, None, None),
    "x_middle": (1, None, None, None),
    "x_last": (-1, None, None, None),
    "factors": (None, 0, 0, None),
    "one_factor": (None, None, 1, None),
    "last_factor_last": (None, None, -1, None),
    "z": (None, None, None, 0),
    "z_last": (None, None, None, 2),
    "x_and_factor": (2, 1, None, None),
    "factor_and_z": (None, 0, None, 1),
    "x_and_z": (0, None, None, 0),
    "mixed": (1, 0, 2, 1),
}


def shapes(left: bool) -> list[tuple[int, ...]]:
    """Of x, f1, f2 and z."""
    return [(4, 3), (3, 2), (2, 2), (6, 3)] if left else [(3, 4), (2, 3), (2, 2), (3, 6)]


def draw(shape: tuple[int, ...], dim: int | None, device: torch.device, *more: int) -> Tensor:
    """A random tensor with a mapped dimension of size B at dim, and further leading dimensions."""
    if dim is None:
        return torch.randn((*more, *shape), dtype=DOUBLE, device=device)
    return torch.randn((B, *more, *shape), dtype=DOUBLE, device=device).movedim(0, dim)


def affine(left: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A function of (x, f1, f2, z), by the library and by the definition."""

    def of(multiply: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        return lambda x, f1, f2, z: multiply(x, [f1, f2], alpha=0.5, beta=2.0, z=z, **options)

    return of(call(left)), of(reference.kron_matmul, left=left)


def looped(function: Callable[..., Any], in_dims: tuple[int | None, ...], arguments: list[Tensor]) -> Tensor:
    """What vmap means."""
    return torch.stack([function(*(t if d is None else t.select(d, i) for t, d in zip(arguments, in_dims, strict=True))) for i in range(B)])


@pytest.mark.parametrize("dims", IN_DIMS)
def test_vmap(dims: str, backend_name: str, device: torch.device) -> None:
    for batch, left in itertools.product([(), (2,)], (False, True)):
        in_dims = IN_DIMS[dims]
        arguments = [draw(shape, d, device, *batch) for shape, d in zip(shapes(left), in_dims, strict=True)]
        function, _ = affine(left)
        assert_near(vmap(function, in_dims)(*arguments), looped(function, in_dims, arguments))
        assert_near(vmap(function, in_dims, out_dims=-1)(*arguments), looped(function, in_dims, arguments).movedim(0, -1))


def test_vmap_with_broadcast_z(backend_name: str, device: torch.device) -> None:
    for z_shape, z_dims in itertools.product([(), (1,), (6,), (3, 1), (1, 6)], [0, None]):
        x, f1, f2 = (draw(shape, d, device) for shape, d in zip(shapes(False)[:3], (0, None, 0), strict=True))
        z = draw(z_shape, z_dims, device)
        in_dims = (0, None, 0, z_dims)

        def function(x: Tensor, f1: Tensor, f2: Tensor, z: Tensor) -> Tensor:
            return kron_matmul(x, [f1, f2], beta=2.0, z=z)

        assert_near(vmap(function, in_dims)(x, f1, f2, z), looped(function, in_dims, [x, f1, f2, z]))


def test_vmap_nested(backend_name: str, device: torch.device) -> None:
    for left in (False, True):
        x_shape, f1_shape, f2_shape, _ = shapes(left)
        x = torch.randn(B, 2, *x_shape, dtype=DOUBLE, device=device)
        f1 = torch.randn(2, *f1_shape, dtype=DOUBLE, device=device)
        f2 = torch.randn(B, *f2_shape, dtype=DOUBLE, device=device)
        multiply = call(left)
        got = vmap(vmap(multiply, (0, [0, None])), (0, [None, 0]))(x, [f1, f2])
        want = torch.stack([torch.stack([multiply(x[i, j], [f1[j], f2[i]]) for j in range(2)]) for i in range(B)])
        assert_near(got, want)


# ---- torch.func ----------------------------------------------------------------------------------


def tensors(device: torch.device, left: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, f1, f2, z = (torch.randn(shape, dtype=DOUBLE, device=device) for shape in shapes(left))
    return x, f1, f2, z


def losses(left: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A function of (x, f1, f2, z) that is not multilinear, by the library and by the definition."""
    ours, definition = affine(left)
    return lambda *a: ours(*a).sin().sum(), lambda *a: definition(*a).sin().sum()


def assert_all_near(got: Any, want: Any, scale: float = 10.0) -> None:
    got, want = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-14 * scale, atol=1e-13 * scale)


def test_hessian(backend_name: str, device: torch.device) -> None:
    """hessian is jacfwd over jacrev: forward mode through the derivative."""
    for left in (False, True):
        ours, definition = losses(left)
        arguments = tensors(device, left)
        assert_all_near(hessian(ours, (0, 1))(*arguments), hessian(definition, (0, 1))(*arguments), scale=100)
