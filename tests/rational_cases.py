"""Problems of the rational function for several test files, and what is right for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastkron_py
from fastkron_py import reference

VERSIONS = ("A", "B", "C", "D", "N")
# Roundings: of P and S, whose terms cancel in part, and of Q; half types round once more. The interpreter cuts bfloat16 off.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-13, 1e-12),
    torch.float32: (3e-6, 3e-5),
    torch.bfloat16: (8e-3, 3e-2),
    torch.float16: (1e-3, 4e-3),
}


class Problem(NamedTuple):
    """x ``[..., C]``, numerator ``[Ga, m + 1]``, denominator ``[Gb, n]`` and the cotangent ``[..., C]``."""

    x: Tensor
    a: Tensor
    b: Tensor
    dy: Tensor


def problem(
    shape: Sequence[int],
    groups: int | tuple[int, int],
    degrees: tuple[int, int] = (5, 4),
    version: str = "B",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    coefficients: torch.dtype | None = None,
) -> Problem:
    """Standard normal x and cotangents, and coefficients that shrink with their power, so that few terms cancel.

    Those of version C keep away from the narrow peaks of height 10 where S changes its sign, those of version N from poles.
    """
    of_a, of_b = (groups, groups) if isinstance(groups, int) else groups
    kind = coefficients or (torch.float64 if dtype == torch.float64 else torch.float32)
    x, dy = (torch.randn(*shape, dtype=torch.float64).to(device, dtype) for _ in range(2))
    a = torch.randn(of_a, degrees[0] + 1, dtype=torch.float64)
    b = torch.randn(of_b, degrees[1] + (version == "C"), dtype=torch.float64)
    a, b = (c / torch.arange(1, c.shape[1] + 1) for c in (a, b))
    if version == "C":
        b[:, 1:] /= 4 ** torch.arange(1, degrees[1] + 1)
        b[:, 0] = b[:, 0].sign() * (b[:, 0].abs() + 2)
    if version == "N":
        b = b.abs() * torch.tensor([j % 2 for j in range(degrees[1])])  # even powers, so that Q is 1 at least
    return Problem(x, a.to(device, kind), b.to(device, kind), dy)


def step(function: Callable[..., Tensor], x: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    """[y, dx, da, db], in x's layout."""
    leaves = [t.detach().requires_grad_() for t in (x, a, b)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def ours(p: Problem, version: str = "B") -> list[Tensor]:
    """By this library."""
    return step(lambda *t: fastkron_py.rational(*t, version=version), *p)


def expected(p: Problem, version: str = "B") -> list[Tensor]:
    """In float64, by autograd of the formula."""
    formula = "B" if version == "D" else version
    return step(lambda *t: reference.rational(*t, version=formula), *(t.double() for t in p))


def assert_right(found: Sequence[Tensor], p: Problem, version: str = "B", **options: Any) -> None:
    """Results and gradients agree with the reference; gradients of coefficients, which are sums, as float32 does."""
    names = ("y", "dx", "da", "db")
    for name, f, e, like in zip(names, found, expected(p, version), (p.dy, p.x, p.a, p.b), strict=True):
        assert f.dtype == like.dtype, name
        tight = p.a.dtype if name in ("da", "db") else f.dtype
        rms, most = TOLERANCES[tight]
        fastkron_py.testing.assert_close(f, e, rms_tol=rms, max_tol=most, name=name, **options)
