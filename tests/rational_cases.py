"""Problems of the rational function for several test files, and what is right for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from cache_spy import CacheSpy
from torch import Tensor

import fastkron_py
from fastkron_py import reference
from fastkron_py.rational.denominators.registry import denominator_names, find_denominator

VERSIONS = tuple(denominator_names())
WITHOUT_NOISE = tuple(name for name in VERSIONS if not find_denominator(name).is_noisy)
# Of half types, whose last rounding is most of their error: relative to the whole, and to the largest. The interpreter cuts bfloat16 off.
HALF_TOLERANCES: dict[torch.dtype, tuple[float, float]] = {torch.bfloat16: (8e-3, 3e-2), torch.float16: (1e-3, 4e-3)}
UNIT_ROUNDOFF: dict[torch.dtype, float] = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


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

    Where S begins with b_0 they keep away from the narrow peaks of height 10 where it changes its sign, else from poles, if there are.
    """
    of_a, of_b = (groups, groups) if isinstance(groups, int) else groups
    kind = coefficients or (torch.float64 if dtype == torch.float64 else torch.float32)
    x, dy = (torch.randn(*shape, dtype=torch.float64).to(device, dtype) for _ in range(2))
    a = torch.randn(of_a, degrees[0] + 1, dtype=torch.float64)
    denominator = find_denominator(version)
    b = torch.randn(of_b, denominator.count(degrees[1]), dtype=torch.float64)
    a, b = (c / torch.arange(1, c.shape[1] + 1) for c in (a, b))
    if denominator.first == 0:
        b[:, 1:] /= 4 ** torch.arange(1, degrees[1] + 1)
        b[:, 0] = b[:, 0].sign() * (b[:, 0].abs() + 2)
    if denominator.has_poles:
        b = b.abs() * torch.tensor([j % 2 for j in range(degrees[1])])  # even powers, so that Q is 1 at least
    return Problem(x, a.to(device, kind), b.to(device, kind), dy)


def step(function: Callable[..., Tensor], x: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    """[y, dx, da, db], in x's layout."""
    leaves = [t.detach().requires_grad_() for t in (x, a, b)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def served(spy: CacheSpy) -> tuple[int, int]:
    """(forward, backward) calls of the rational function that the cache served since the last time."""
    counts = spy.take()
    return counts.get("rational", 0), counts.get("rational_backward", 0)


def ours(p: Problem, version: str = "B") -> list[Tensor]:
    """By this library."""
    return step(lambda *t: fastkron_py.rational(*t, version=version), *p)


def expected(p: Problem, version: str = "B") -> list[Tensor]:
    """In float64, by autograd of the formula."""
    return step(lambda *t: reference.rational(*t, version=version), *(t.double() for t in p))


def absolute_of(version: str) -> str:
    """Where a denominator has absolute values, by its definition: of "terms", of the "sum", or "none"."""
    found = find_denominator(version)
    assert found.definition is not None
    q = found.definition(torch.tensor([[1.0], [-2.0]], dtype=torch.float64)) - found.constant
    return {3: "terms", 1: "sum", -1: "none"}[round(q.item())]


def error_scales(p: Problem, version: str = "B") -> list[Tensor]:
    """What one unit of roundoff in P, in S and in a term may make of [y, dx, da, db], in float64.

    Horner's rule errs by up to ``2 m u sum_i |a_i x^i|``, however small P itself is: the result is P's for coefficients that
    differ in their last places. Near the zeros of S, Q is small while terms of S are not, and P / Q^2 is large: such elements
    dominate db, and with them the error of S. So a scale has sums of absolute values in place of P, S and their derivatives.
    Where roundoff hides the sign of S, the whole term counts. Errors of different x are independent, and add in squares; those of
    one x are the same, but for what dy makes of them.
    """
    x, a, b, dy = (t.double() for t in p)
    groups = max(len(a), len(b))
    x, dy = (t.reshape(-1, groups, t.shape[-1] // groups) for t in (x, dy))
    a, b = (c.expand(groups, -1)[..., None] for c in (a, b))
    found = find_denominator(version)
    first, constant, absolute = found.first, found.constant, absolute_of(version)
    degree = max(a.shape[1], b.shape[1])
    powers = [x**i for i in range(degree + 1)]

    def polynomial(c: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """(value, derivative)."""
        degrees = range(first, first + c.shape[1])
        zero = torch.zeros_like(x)
        value = sum((c[:, i - first] * powers[i] for i in degrees), zero)
        return value, sum((i * c[:, i - first] * powers[i - 1] for i in degrees if i), zero)

    (pol, slope), (s, ds) = polynomial(a, 0), polynomial(b, first)
    powers = [t.abs() for t in powers]
    (abs_p, abs_slope), (abs_s, abs_ds) = polynomial(a.abs(), 0), polynomial(b.abs(), first)
    if absolute == "terms":
        s, ds = abs_s, abs_ds
    q = constant + (s.abs() if absolute == "sum" else s)
    of_q = (q.abs() + abs_s) / q.abs()  # relative
    of_p = abs_p + pol.abs() * of_q
    of_v = (of_p + pol.abs() * of_q) / q**2  # of P / Q^2
    dx = (abs_slope + slope.abs() * of_q) / q.abs() + of_v * ds.abs() + pol.abs() / q**2 * abs_ds
    if absolute == "sum":
        unit = UNIT_ROUNDOFF[torch.float64 if p.x.dtype == torch.float64 else torch.float32]
        hidden = (s.abs() <= 2 * degree * unit * abs_s) & (abs_s > 0)
        of_v = torch.where(hidden, 2 * (pol / q**2).abs() / unit, of_v)
        dx = torch.where(hidden, 2 * (pol * ds / q**2).abs() / unit, dx)

    cells, cell = torch.unique(x, return_inverse=True)
    cell = cell + len(cells) * torch.arange(groups, device=x.device)[:, None]
    of_cells = torch.zeros(len(cells) * groups, dtype=x.dtype, device=x.device)
    together = of_cells.index_add(0, cell.flatten(), dy.flatten())[cell]
    count = of_cells.index_add(0, cell.flatten(), torch.ones_like(x).flatten())[cell]
    weight = dy.square() + together.square() / count

    def total(terms: list[Tensor], shared: bool) -> Tensor:
        """Of terms by dy: ``[G, count]``."""
        squares = torch.stack([(t.square() * weight).sum((0, 2)) for t in terms], 1)
        return (squares.sum(0, keepdim=True) if shared else squares).sqrt()

    da = total([of_q / q * powers[i] for i in range(a.shape[1])], len(p.a) == 1)
    db = total([of_v * powers[j] for j in range(first, first + b.shape[1])], len(p.b) == 1)
    return [(of_p / q.abs()).reshape(p.x.shape), (dy.abs() * dx).reshape(p.x.shape), da, db]


def assert_right(found: Sequence[Tensor], p: Problem, version: str = "B") -> None:
    """Results and gradients agree with the reference; gradients of float32 coefficients as float32 does, whatever x is.

    float32 and float64 are judged by `error_scales`: ``2 m + 4`` roundings an element at most, m the larger degree, and the
    reference's own in float64; on average, where their signs differ, a third of that is plenty.
    """
    names = ("y", "dx", "da", "db")
    roundings = 2 * max(p.a.shape[1], p.b.shape[1]) + 4
    scales = error_scales(p, version)
    for name, f, e, scale, like in zip(names, found, expected(p, version), scales, (p.dy, p.x, p.a, p.b), strict=True):
        assert f.dtype == like.dtype, name
        if f.dtype in HALF_TOLERANCES:
            rms, most = HALF_TOLERANCES[f.dtype]
            fastkron_py.testing.assert_close(f, e, rms_tol=rms, max_tol=most, name=name)
            continue
        most = roundings * UNIT_ROUNDOFF[f.dtype] * (2 if f.dtype == torch.float64 else 1)
        rms = most / 3 * float(scale.norm()) / max(float(e.norm()), 1e-300)
        fastkron_py.testing.assert_close(f, e, magnitude=scale, rms_tol=rms, max_tol=most, name=name)
